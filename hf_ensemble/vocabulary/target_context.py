"""What an encoder-decoder member's decoder reads for one row: the start of a text, and what has been written."""

from collections.abc import Sequence

from .context import MemberContext, Resync
from .encoding import ByteEncoder


class TargetContext(MemberContext):
    """The ids of a member that reads no prompt before the written text, only a start.

    A tokenizer that puts a space before the first word does so here too; a space at the beginning of the text is that
    space.

    Args:
        encoder: The member's encoder.
        resync: How the context follows the text.
        start_ids: The ids that start a text.
        is_open: Whether the first word takes no space, because the text continues the row's prompt.
    """

    def __init__(self, encoder: ByteEncoder, resync: Resync, start_ids: Sequence[int], is_open: bool):
        super().__init__(encoder, resync, b"")
        self.ids = list(start_ids)
        self._num_frozen = len(self.ids)
        self._is_open = is_open
        self._is_unwritten = True

    @property
    def loses_space(self) -> bool:
        """Whether nothing is written yet and the first word takes no space, so that entries count without theirs."""
        return self._is_unwritten and self._is_open and self.encoder.inserts_space

    def write(self, data: bytes) -> int:
        """Let the context follow the text; see `MemberContext.write`."""
        if data and self._is_unwritten:
            self._is_unwritten = False
            if self.resync == "append" and self.encoder.inserts_space:
                data = b" " + data.removeprefix(b" ")
        return super().write(data)

    def _encode(self, text: str, start: bool) -> list[int]:
        if start and self.encoder.inserts_space:
            text = " " + text.removeprefix(" ")
            start = False
        return super()._encode(text, start)
