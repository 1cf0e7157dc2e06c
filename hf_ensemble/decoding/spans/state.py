"""What a call by spans keeps from round to round: what its rows hold, and how far its members have read."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...members.member import Member
from ...members.state import MemberState
from ...recording.spans import SpanRound
from ...vocabulary.context import MemberContext
from ...vocabulary.token_bytes import TEXT
from ..own_log_probs import OwnLogProbs


@dataclass
class SpanRow:
    """What was decided in one row, and what of it is not written yet.

    Attributes:
        number: Its number.
        begun: Bytes of the character inside which the prompt ends, until a span completes it.
        has_ended: Whether its text has ended.
        decided: Its rounds, each with the primary's ids that it came to.
        queue: Those of them that are not written yet.
    """

    number: int
    begun: bytes
    has_ended: bool = False
    decided: list[tuple[SpanRound, Sequence[int]]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)

    @property
    def num_decided(self) -> int:
        """Number of the primary's ids that were decided."""
        return sum(len(ids) for _, ids in self.decided)

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


class Participant:
    """A member in the rounds of one call.

    Args:
        index: Its number.
        member: The member.
        eos_ids: The ids that end its texts.
        contexts: What it reads of each prompt.
        use_cache: Whether it keeps a cache.

    Attributes:
        contexts: For each live row, what it has read: all that was decided so far.
        state: Its caches. They follow its drafts while it proposes, and then `contexts` again.
        max_length: Number of ids that it has positions for; infinite without a limit.
        log_probs: Turns its logits into log-probabilities over its ids.
    """

    def __init__(
        self, index: int, member: Member, eos_ids: Sequence[int], contexts: Sequence[MemberContext], use_cache: bool
    ):
        self.index = index
        self.member = member
        self.eos_ids = list(eos_ids)
        self.contexts = list(contexts)
        self.state: MemberState[Any] = MemberState(member, contexts, None if use_cache else "recompute")
        self.max_length = math.inf if member.max_positions is None else member.max_positions
        self.log_probs = OwnLogProbs(member)
        control_eos = [i for i in eos_ids if member.is_control(i)]
        may_be_written = member.encoder.token_bytes.kinds == TEXT
        may_be_written[control_eos] = True
        self._is_no_text = torch.as_tensor(~may_be_written, device=member.device)
        self._control_eos = torch.tensor(control_eos, dtype=torch.long, device=member.device)
        self._fork: MemberState[Any] | None = None
        self._num_fork_forwards = 0

    @property
    def num_forwards(self) -> int:
        """Number of forward passes so far."""
        return self.state.num_forwards + self._num_fork_forwards

    def eos_log_probs(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of all EOS ids together, and the best of them (-1 for none), each of shape `(batch_size,)`."""
        if not len(self._control_eos):
            nothing = log_probs[:, 0]
            return torch.full_like(nothing, -torch.inf), torch.full_like(nothing, -1, dtype=torch.long)
        at_eos = log_probs[:, self._control_eos]
        return at_eos.logsumexp(-1), self._control_eos[at_eos.argmax(-1)]

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits of what may be proposed, text and the end of it, of shape `(batch_size, vocab_size)`; a new tensor."""
        return logits.float().masked_fill(self._is_no_text, -torch.inf)

    def read_beside(self, readings: Sequence[tuple[int, Reading]]) -> list[Tensor]:
        """Read candidates in one forward pass, in rows that branch off from those where they were offered.

        Args:
            readings: The candidates, each with the place of its row among the live ones.

        Returns:
            For each candidate the logits after its ids, of shape `(num_ids, vocab_size)`.
        """
        if not readings:
            return []
        places, contexts = zip(*((place, reading.context) for place, reading in readings), strict=True)
        fork = self._fork = self.state.fork(places, contexts)
        logits = fork.logits([max(2, len(reading.ids)) for _, reading in readings])
        self._num_fork_forwards += fork.num_forwards
        for n, (_, reading) in enumerate(readings):
            reading.fork_row = n
        return [logits[n, -len(reading.ids) :] for n, (_, reading) in enumerate(readings)]

    def follow(self, chosen: Sequence[Reading | None]) -> None:
        """Continue every live row after the candidate that was chosen there; None for none."""
        self.contexts = [item.context if item else old for item, old in zip(chosen, self.contexts, strict=True)]
        rows = [item.fork_row if item else None for item in chosen]
        if self._fork is not None and any(row is not None for row in rows):
            self.state.adopt(self._fork, rows)
        self._fork = None
        self.state.contexts = list(self.contexts)

    def keep(self, places: Sequence[int]) -> None:
        """Keep these of the live rows, and drop the others."""
        self.contexts = [self.contexts[place] for place in places]
        self.state.select(places, self.contexts)
