"""Scoring: every member reads the candidates of a round and says how likely each is, and one of them is chosen."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ...methods.sweetspan import SpanScore, SweetSpanConfig, choose_span, span_score
from ...recording.spans import SpanCandidate
from ...vocabulary.context import MemberContext
from ...vocabulary.encoding import ByteEncoder
from .propose import Proposal
from .state import Participant, Reading, SpanRow


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


def primary_ids(encoder: ByteEncoder, data: bytes, own: Sequence[int] = ()) -> list[int] | None:
    """The primary's ids that write a span: its tokenizer's, else the first of those that it has written itself.

    Args:
        encoder: The primary's encoder.
        data: The span.
        own: What the primary has written.

    Returns:
        The ids; None if there are none, as where the span ends inside what one of `own` writes.
    """
    ids = encoder.encode(data)
    if ids is not None:
        return ids
    return next((list(own[:n]) for n in range(len(own) + 1) if encoder.token_bytes.write(own[:n]) == data), None)


def read(prefix: MemberContext, index: int, candidate: SpanCandidate, own: Proposal) -> Reading:
    """Let a member read a candidate after its prefix. What it wrote itself, in the same ids, is scored already.

    Args:
        prefix: The member's context; not changed.
        index: The member's number.
        candidate: The candidate.
        own: What the member has proposed.
    """
    context = prefix.copy()
    if index == 0:
        context.ids += primary_ids(context.encoder, candidate.data, own.ids) or []
    else:
        context.write(candidate.data)
    new = context.ids[len(prefix.ids) :]
    reading = Reading(context, new, len(new) + candidate.has_eos)
    if own.ids[: len(new)] == new and len(own.ids) >= reading.num_tokens:
        reading.log_prob = sum(own.log_probs[: len(new)])
        if candidate.has_eos:
            reading.log_prob += own.eos_log_probs[len(new)]
            reading.eos_id = own.best_eos[len(new)]
    elif candidate.has_eos and index in candidate.proposers:
        # Where it is the only candidate, nobody scores it, and this id ends the text.
        reading.eos_id = own.best_eos[-1]
    return reading


def score(
    one: Participant, rows: Sequence[SpanRow], proposals: Sequence[Proposal], offers: Sequence[Sequence[Offer]]
) -> None:
    """Score what a member has not scored yet, in at most one forward pass for all rows and candidates.

    Args:
        one: The member.
        rows: The live rows.
        proposals: For each live row, what the member has proposed.
        offers: For each live row, its candidates.

    Raises:
        MemberError: If the member gives NaN.
    """
    todo = [
        (place, reading)
        for place, of_row in enumerate(offers)
        if len(of_row) > 1 and not one.contexts[place].sits_out
        for reading in (offer.readings[one.index] for offer in of_row)
        if reading.log_prob is None
    ]
    if not todo:
        return
    logits = one.read_beside([(place, reading) for place, reading in todo if reading.num_tokens > 1])
    sums = []
    for place, reading in todo:
        first = proposals[place].first_log_probs
        new = torch.tensor(reading.ids, device=first.device)
        total = first[new[:1]].double().sum()
        best_eos = total.new_tensor(-1.0)
        if reading.fork_row is not None:
            log_probs = one.log_probs(logits[reading.fork_row])
            total = total + log_probs[:-1].gather(-1, new[1:, None]).double().sum()
            if reading.num_tokens > len(new):
                eos_log_probs, best = one.eos_log_probs(log_probs[-1:])
                total, best_eos = total + eos_log_probs.double()[0], best[0].double()
            # NaN anywhere is an error, also where no id is read.
            total = torch.where(log_probs.isnan().any(), torch.nan, total)
        sums.append(torch.stack([total, best_eos]))
    for (place, reading), (log_prob, eos_id) in zip(todo, torch.stack(sums).tolist(), strict=True):
        if math.isnan(log_prob):
            raise one.member.not_finite(rows[place].where)
        reading.log_prob = log_prob
        if eos_id >= 0:
            reading.eos_id = int(eos_id)


def choose(
    offers: Sequence[Offer], members: Collection[int], num_members: int, config: SweetSpanConfig
) -> tuple[int, list[SpanCandidate]]:
    """Choose a row's span by the scores of the members that take part in it.

    Args:
        offers: Its candidates.
        members: Numbers of these members.
        num_members: Number of all members.
        config: The method's options.

    Returns:
        The index of the one that is chosen, and the candidates with their scores; without, if there is only one.
    """
    candidates = [offer.candidate for offer in offers]
    if len(offers) == 1:
        return 0, candidates
    scores = [
        tuple(offer.score(n, config.score) if n in members else None for n in range(num_members)) for offer in offers
    ]
    choice = choose_span(scores, config.filter_ratio, config.score)
    scored = zip(candidates, scores, choice.filtered, strict=True)
    return choice.winner, [dataclasses.replace(item, scores=row, filtered=out) for item, row, out in scored]
