"""The first id of a row of an encoder-decoder model, which knows what the encoder reads for that row."""

from collections.abc import Sequence
from typing import Any


class SourceStart(int):
    """The id that an encoder-decoder model's text starts with, together with the source of that text.

    It acts as the id of the decoder start, except that two are equal only if their sources are. So a row of ids
    contains everything its logits depend on, and code that compares, cuts, copies or branches rows works unchanged.

    Args:
        start_id: The model's decoder start.
        source: The ids that its encoder reads.
    """

    source: tuple[int, ...]

    def __new__(cls, start_id: int, source: Sequence[int]) -> "SourceStart":
        """Make it; integers are made here."""
        made = super().__new__(cls, start_id)
        made.source = tuple(source)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceStart) and int(self) == int(other) and self.source == other.source

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.source))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return int(self), self.source
