"""The text of one answer as its ids arrive: cut at a stop string, without ever showing part of one."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class RowText:
    """Turns ids into text, piece by piece.

    Args:
        tokenizer: The primary's tokenizer.
        stops: Stop strings; the text ends before the first of them.
        keeps_control: Whether to write control tokens, for parsers that need them.

    Attributes:
        ids: The ids so far.
        text: The text returned so far.
        is_stopped: Whether a stop string has been met.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), keeps_control: bool = False):
        self._tokenizer = tokenizer
        self._stops, self._keeps_control = [stop for stop in stops if stop], keeps_control
        self._stream = DecodeStream([], skip_special_tokens=not keeps_control)
        self._held = ""
        self.ids: list[int] = []
        self.text = ""
        self.is_stopped = False

    def take(self, new_id: int) -> str:
        """Take in an id; returns the text that is certain now."""
        self.ids.append(new_id)
        self._held += self._stream.step(self._tokenizer._tokenizer, new_id) or ""
        return self._released(is_end=False)

    def end(self) -> str:
        """End the text; returns the rest, including an incomplete character."""
        whole = self._tokenizer.decode(self.ids, skip_special_tokens=not self._keeps_control)
        sent = self.text + self._held
        if not self.is_stopped and whole.startswith(sent):
            self._held += whole[len(sent) :]
        return self._released(is_end=True)

    def _released(self, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped = True
            count = min(found)
        else:
            count = len(self._held) - (0 if is_end else self._num_held_back())
        piece, self._held = self._held[:count], self._held[count:]
        self.text += piece
        return piece

    def _num_held_back(self) -> int:
        """Length of the longest suffix of the held text that may begin a stop string."""
        lengths = range(min(len(self._held), max(map(len, self._stops), default=0)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
