"""How far a row of a token decoder is."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RowProgress:
    """What a row is at: the entry of several ids that it is writing, and its choices so far.

    Attributes:
        to_write: The ids of the entry that are yet to be written.
        written: Those that have been.
        data: What the whole entry writes.
        num_decided: Number of choices.
        num_ensembled: Number of those that were not a gate's alone.
    """

    to_write: deque[int] = field(default_factory=deque)
    written: list[int] = field(default_factory=list)
    data: bytes = b""
    num_decided: int = 0
    num_ensembled: int = 0
