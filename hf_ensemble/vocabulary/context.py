"""One member's view of one row: the ids it reads for the prompt and for the text written since."""

from collections.abc import Sequence
from typing import Literal

from typing_extensions import Self

from .encoding import ByteEncoder, split_begun_character
from .token_bytes import CONTROL

Resync = Literal["append", "retokenize"]

_LONG = 512
"""Number of characters after which a text without a hard boundary is no longer encoded as a whole."""

_OVERLAP = 128
_OVERLAP_IDS = 8
"""Least number of bytes and ids of such a text that are encoded again."""


class MemberContext:
    """The ids of one member for one row, which follow the ensemble's text.

    `append`: the context grows by the encoding of what each step wrote. `retokenize`: everything after the prompt's
    last control token is encoded again as a whole; only the tail after the last hard boundary, or only the end of a
    long tail, has to be encoded for the same ids. While the text ends inside a character, byte tokens for the begun
    character stand at the end; a member without them sits out until the character is complete.

    Args:
        encoder: The member's encoder.
        resync: How the context follows the text.
        prompt: The text of the prompt. It is encoded with the member's own BOS rule, and never as control tokens.

    Attributes:
        ids: The context, changed in place as the text grows.
        sits_out: Whether the member cannot follow the text at the moment.
        is_lossy: Whether the member's view of the text so far has lost something.
    """

    def __init__(self, encoder: ByteEncoder, resync: Resync, prompt: bytes):
        self.encoder = encoder
        self.resync = resync
        self.sits_out = False
        self.is_lossy = False
        text, begun = split_begun_character(prompt)
        self.ids = list(encoder.prefix_ids if text or begun else encoder.start_ids)
        self._num_frozen = len(self.ids)
        self._begun = b""
        self._num_begun = 0
        self._tail = ""
        self._at_start = True
        if resync == "retokenize":
            self._begun, self._tail = begun, text
            self._retokenize()
        else:
            self.ids += self._encode(text, start=True)
            self._append(begun)

    @property
    def loses_space(self) -> bool:
        """Whether the member's entries currently count without their leading space."""
        return False

    @classmethod
    def of_ids(cls, encoder: ByteEncoder, ids: Sequence[int], resync: Resync = "append") -> "MemberContext":
        """Create a context whose prompt is given as the member's own ids, such as a rendered conversation."""
        context = cls(encoder, "append", b"")
        context.ids = list(ids)
        if resync == "retokenize":
            context.resync = resync
            kinds = encoder.token_bytes.kinds
            last_control = max((n for n, i in enumerate(ids) if kinds[i] == CONTROL), default=-1)
            context._num_frozen = last_control + 1
            rest = encoder.token_bytes.write(ids[last_control + 1 :])
            context._tail, context._begun = split_begun_character(rest)
            context._at_start = False
            context._retokenize()
        return context

    def write(self, data: bytes) -> int:
        """Let the context follow the text by the bytes of one entry.

        Returns:
            The number of unchanged leading ids.
        """
        if not data:
            return len(self.ids)
        if self.resync == "append":
            return self._append(data)
        text, self._begun = split_begun_character(self._begun + data)
        self._tail += text
        num_same = self._retokenize_end(text)
        return self._retokenize() if num_same is None else num_same

    def copy(self) -> Self:
        """Return an independent context with the same text (for a beam that branches off)."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.ids = list(self.ids)
        return twin

    def _encode(self, text: str, start: bool) -> list[int]:
        ids = self.encoder.encode_context(text, start)
        written, wanted = self.encoder.token_bytes.write(ids), text.encode("utf-8", "replace")
        # At its start, the tokenizer may add its own space.
        self.is_lossy |= written != wanted and not (start and written == b" " + wanted)
        return ids

    def _append(self, data: bytes) -> int:
        num_same = len(self.ids)
        data = self._begun + data
        self._begun, self.sits_out = b"", False
        ids = self.encoder.encode(data) if data else []
        if ids is None:
            begun = split_begun_character(data)[1]
            if begun and self.encoder.encode(begun) is None:
                self._begun, self.sits_out = begun, True
                data = data[: len(data) - len(begun)]
            ids = self.encoder.encode_context_bytes(data) if data else []
            self.is_lossy |= self.encoder.token_bytes.write(ids) != data
        self.ids += ids
        return num_same

    def _retokenize(self) -> int:
        encoder = self.encoder
        cut = len(self._tail) - 1
        while cut > 0 and not encoder.is_hard_boundary(self._tail, cut):
            cut = self._tail.rfind(" ", 0, cut)
        num_frozen = self._num_frozen
        new: list[int] = []
        if cut > 0:
            new += self._encode(self._tail[:cut], self._at_start)
            self._tail, self._at_start = self._tail[cut:], False
            self._num_frozen += len(new)
        if self._tail:
            new += self._encode(self._tail, self._at_start)
        return self._replace_from(num_frozen, new)

    def _retokenize_end(self, added: str) -> int | None:
        """Encode only the end of a long text after an addition, if that is certain to give the same ids.

        Ids are the encoding of a text by merges if every two neighbours are the encoding of their text. So where two
        encodings have two neighbours in common, one can be continued by the other.
        """
        encoder, entries = self.encoder, self.encoder.token_bytes.entries
        if len(self._tail) <= _LONG or not encoder.merges or encoder.is_hard_boundary(self._tail, len(self._tail) - 1):
            return None
        end = len(self.ids) - self._num_begun
        first, num_bytes = end - _OVERLAP_IDS, 0
        while first > self._num_frozen and (num_bytes < _OVERLAP or not _starts_character(entries[self.ids[first]])):
            first -= 1
            num_bytes += len(entries[self.ids[first]])
        old = self.ids[first:end]
        seen = encoder.token_bytes.write(old).decode("utf-8", "replace")
        if first <= self._num_frozen or not self._tail.endswith(seen + added):
            return None
        new = encoder.encode_context(seen + added)
        if encoder.token_bytes.write(new) != (seen + added).encode("utf-8", "replace"):
            return None
        met = _meet(old, new, entries)
        return None if met is None else self._replace_from(first + met[0], new[met[1] :])

    def _replace_from(self, start: int, new: list[int]) -> int:
        """Replace the context from an id on by the encoding of its text, followed by the begun character."""
        begun = self.encoder.byte_tokens(self._begun)
        self.sits_out = begun is None
        self._num_begun = len(begun or ())
        old, self.ids[start:] = self.ids[start:], new + (begun or [])
        return start + num_common(old, self.ids[start:])


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal leading ids."""
    low, high = 0, min(len(a), len(b))
    # Usually one is a prefix of the other, and comparing is much quicker than copying.
    if (a if len(a) == high else a[:high]) == (b if len(b) == high else b[:high]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _starts_character(data: bytes) -> bool:
    return not data or data[0] & 0xC0 != 0x80


def _meet(old: Sequence[int], new: Sequence[int], entries: Sequence[bytes]) -> tuple[int, int] | None:
    """Where two encodings of texts with the same beginning share two neighbouring ids at the same position."""
    n = m = at_old = at_new = 0
    while n + 1 < len(old) and m + 1 < len(new):
        if at_old == at_new and old[n : n + 2] == new[m : m + 2]:
            return n, m
        if at_old <= at_new:
            at_old += len(entries[old[n]])
            n += 1
        else:
            at_new += len(entries[new[m]])
            m += 1
    return None
