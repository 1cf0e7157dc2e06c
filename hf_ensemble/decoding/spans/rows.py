"""One row of a call by spans: what was decided, and what is still to be written."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...recording.spans import SpanRound


@dataclass
class SpanRow:
    """What was decided in one row, and what is still to be written.

    Attributes:
        number: Its number.
        begun: Bytes of the character inside which the prompt ends, until a span completes it.
        min_new_tokens: Number of the primary's ids before which its text may not end.
        num_decided: Number of the primary's ids decided so far.
        has_ended: Whether its text has ended.
        decided: Its rounds, each with the primary's ids that it came to.
        queue: Those of them that are not written yet.
    """

    number: int
    begun: bytes
    min_new_tokens: int = 0
    num_decided: int = 0
    has_ended: bool = False
    decided: list[tuple[SpanRound, Sequence[int]]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)

    @property
    def num_missing(self) -> int:
        """How many more of the primary's ids it needs before its text may end."""
        return self.min_new_tokens - self.num_decided

    @property
    def where(self) -> str:
        """The position of the row, for errors: "in row 0, round 1"."""
        return f"in row {self.number}, round {len(self.decided) + 1}"

    def decide(self, one: SpanRound, ids: Sequence[int]) -> None:
        """Queue a round's ids for writing.

        Args:
            one: The round.
            ids: The primary's ids of its winner.
        """
        if one.candidates[one.winner].data:
            self.begun = b""
        self.decided.append((one, ids))
        self.num_decided += len(ids)
        self.queue.extend(ids)

    def written(self) -> list[tuple[SpanRound, Sequence[int]]]:
        """The rounds written so far, each with its written ids."""
        num_left = self.num_decided - len(self.queue)
        written = []
        for one, ids in self.decided:
            if num_left > 0 and ids:
                written.append((one, ids[:num_left]))
            num_left -= len(ids)
        return written
