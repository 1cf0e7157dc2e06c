"""The progress of a row of a token decoder."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RowProgress:
    """The progress of a row: the entry of several ids that it is writing, and its choices so far.

    Attributes:
        to_write: The ids of the entry that are still to be written.
        written: Its ids that have been written.
        data: The bytes of the whole entry.
        num_decided: Number of choices.
        num_ensembled: Number of choices that no gate made alone.
    """

    to_write: deque[int] = field(default_factory=deque)
    written: list[int] = field(default_factory=list)
    data: bytes = b""
    num_decided: int = 0
    num_ensembled: int = 0
