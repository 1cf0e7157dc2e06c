"""Records of a call decided span by span, and the decisions made from them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..members.member import Member
from ..methods.sweetspan import SpanScore, perplexity
from .decision import Decision, Entry, MemberDecision
from .decisions import Decisions
from .names import Piece, name_of, names_of, pieces_of, prompts_of


@dataclass(frozen=True)
class SpanCandidate:
    """A span on offer in a round.

    Attributes:
        data: Its bytes.
        has_eos: Whether the text ends with it.
        proposers: Members that wrote it.
        scores: Every member's score, None for a member that takes no part; None as a whole if there was only one
            candidate.
        filtered: Members whose scores did not count.
    """

    data: bytes
    has_eos: bool
    proposers: tuple[int, ...]
    scores: tuple[float | None, ...] | None = None
    filtered: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Its text."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class SpanRound:
    """One round of one row.

    Attributes:
        candidates: The distinct candidates, in the order of the first member that wrote each.
        winner: Index of the written candidate.
        num_forwards: Each member's forward passes in this round, for all rows together.
    """

    candidates: tuple[SpanCandidate, ...]
    winner: int
    num_forwards: tuple[int, ...]


def decisions_of_rounds(
    members: Sequence[Member],
    written: Sequence[Sequence[tuple[SpanRound, Sequence[int]]]],
    end_ids: Sequence[int],
    score: SpanScore,
    prompt_ids: Tensor,
    prompt_mask: Tensor | None,
) -> Decisions:
    """Build the decisions of a call from its rounds.

    Args:
        members: The members; the first is the primary.
        written: For each row, its rounds as far as they were written, each with the primary's ids.
        end_ids: The primary's control tokens that end a text. An end is shown by the name of the first.
        score: The kind of scores.
        prompt_ids: Of shape `(batch_size, prompt_length)`, a row for each row of the output.
        prompt_mask: As for `DecisionRecorder`.
    """
    end = name_of(members[0], end_ids[0]) if end_ids else ""
    rows = []
    for of_row in written:
        pieces = zip(of_row, pieces_of(members[0], [ids for _, ids in of_row]), strict=True)
        rows.append(tuple(_decision_of_round(one, piece, end, score) for (one, _), piece in pieces))
    return Decisions(tuple(rows), names_of(members), prompts_of(members[0], prompt_ids, prompt_mask), is_by_spans=True)


def _decision_of_round(one: SpanRound, piece: Piece, end: str, score: SpanScore) -> Decision:
    said = tuple(_said(one, index, end, score) for index in range(len(one.num_forwards)))
    proposers = one.candidates[one.winner].proposers
    decided_by = max(proposers, key=lambda index: (item.probability or 0.0) if (item := said[index]) else 0.0)
    return Decision(*piece, None, decided_by, None, said)


def _said(one: SpanRound, index: int, end: str, score: SpanScore) -> MemberDecision | None:
    """One member's part in the decision of a round."""
    winner = one.candidates[one.winner]
    wrote = index in winner.proposers
    if winner.scores is None:
        return MemberDecision(None, None, (), True, True) if wrote else None
    if (of_winner := winner.scores[index]) is None:
        return None
    # The geometric mean over tokens, or over bytes.
    offered = [
        Entry(item.text + end * item.has_eos, 1.0 / perplexity(value, score))
        for item in one.candidates
        if item.scores and (value := item.scores[index]) is not None
    ]
    best = tuple(sorted(offered, key=lambda entry: -entry.probability))
    return MemberDecision(None, 1.0 / perplexity(of_winner, score), best, wrote, wrote)
