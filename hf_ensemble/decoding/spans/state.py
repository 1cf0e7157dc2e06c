"""What a call by spans keeps of its rows, and what members wrote and read there."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...methods.sweetspan import SpanScore, span_score
from ...recording.spans import SpanCandidate, SpanRound
from ...vocabulary.context import MemberContext
from ...vocabulary.words import Span


@dataclass
class SpanRow:
    """What was decided in one row, and what of it is not written yet.

    Attributes:
        number: Its number.
        begun: Bytes of the character inside which the prompt ends, until a span completes it.
        min_new_tokens: Number of the primary's ids before which its text may not end.
        num_decided: Number of the primary's ids that were decided.
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
        """How many more of the primary's ids it must hold before its text may end."""
        return self.min_new_tokens - self.num_decided

    @property
    def where(self) -> str:
        """Where the row stands, for errors: "in row 0, round 1"."""
        return f"in row {self.number}, round {len(self.decided) + 1}"

    def decide(self, one: SpanRound, ids: Sequence[int]) -> None:
        """Let a round's ids be written.

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
        """The rounds that have been written, each with those of its ids that have."""
        num_left = self.num_decided - len(self.queue)
        written = []
        for one, ids in self.decided:
            if num_left > 0 and ids:
                written.append((one, ids[:num_left]))
            num_left -= len(ids)
        return written


@dataclass
class Proposal:
    """What a member wrote in one row.

    Attributes:
        span: The span.
        ids: The ids that it wrote, up to the one that completed the span.
        log_probs: That of each id.
        eos_log_probs: That of all EOS ids together, in place of each id.
        best_eos: The best EOS id in place of each id.
        first_log_probs: Log-probabilities of the first id, of shape `(vocab_size,)`.
    """

    span: Span
    ids: list[int]
    log_probs: list[float]
    eos_log_probs: list[float]
    best_eos: list[int]
    first_log_probs: Tensor


@dataclass
class Reading:
    """A candidate as one member reads it after its prefix.

    Attributes:
        context: The member's context, candidate included.
        ids: The ids that it reads.
        num_tokens: Their number, EOS included.
        log_prob: Its log-probability, once known.
        eos_id: The best EOS id after it, once known.
        fork_row: Row of the member's fork that has read it, if it took a forward pass.
    """

    context: MemberContext
    ids: list[int]
    num_tokens: int
    log_prob: float | None = None
    eos_id: int | None = None
    fork_row: int | None = None


@dataclass
class Offer:
    """A candidate in one row.

    Attributes:
        candidate: The candidate.
        readings: How the members read it, by their numbers.
    """

    candidate: SpanCandidate
    readings: dict[int, Reading]

    def score(self, member: int, score: SpanScore) -> float:
        """A member's score of the candidate, EOS counted as one byte.

        Args:
            member: The member's number.
            score: Which score.
        """
        reading = self.readings[member]
        assert reading.log_prob is not None
        num_bytes = len(self.candidate.data) + self.candidate.has_eos
        return span_score(reading.log_prob, reading.num_tokens, num_bytes, score)
