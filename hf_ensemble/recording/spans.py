"""The decisions of a call that was decided span by span."""

from itertools import accumulate, pairwise

from torch import Tensor

from ..decoding.spans.decoder import SpanDecoder, SpanRound
from ..methods.sweetspan import SweetSpanConfig
from .decisions import Decision, Decisions, Entry, MemberDecision, texts_of_pieces
from .recorder import Namer, names_of, prompts_of


def decisions_of_rounds(
    decoder: SpanDecoder, config: SweetSpanConfig, prompt_ids: Tensor, prompt_mask: Tensor | None, sequences: Tensor
) -> Decisions:
    """Read the decisions of a call off its rounds.

    Args:
        decoder: What decided them.
        config: The method's options.
        prompt_ids: Of shape `(batch_size, prompt_length)`, a row for each row of the output.
        prompt_mask: As for `DecisionRecorder`.
        sequences: The output of the call, prompts included, of shape `(batch_size, length)`.
    """
    namer = Namer(decoder.members)
    end = namer.name(0, decoder.end_ids[0]) if decoder.end_ids else ""
    written = sequences[:, prompt_ids.shape[1] :].tolist()
    rows = []
    for row, (ids, rounds, length) in enumerate(zip(written, decoder.rounds, decoder.num_written(), strict=True)):
        ends = [min(end, length) for end in accumulate(decoder.num_ids[row], initial=0)]
        spans = [(one, tuple(ids[a:b])) for one, (a, b) in zip(rounds, pairwise(ends), strict=True) if b > a]
        pieces = [namer.primary.write(some) for _, some in spans]
        rows.append(
            tuple(
                _decision_of_round(one, config, some, data, text, namer, end)
                for (one, some), data, text in zip(spans, pieces, texts_of_pieces(pieces), strict=True)
            )
        )
    prompts = prompts_of(decoder.members[0], prompt_ids, prompt_mask)
    return Decisions(tuple(rows), names_of(decoder.members), prompts, is_by_spans=True)


def _decision_of_round(
    one: SpanRound, config: SweetSpanConfig, ids: tuple[int, ...], data: bytes, text: str, namer: Namer, end: str
) -> Decision:
    winner = one.candidates[one.winner]
    said: list[MemberDecision | None] = []
    for index in range(len(one.num_forwards)):
        wrote = index in winner.proposers
        scores = [None if item.scores is None else item.scores[index] for item in one.candidates]
        if winner.scores is None:
            said.append(MemberDecision(None, None, (), True, True) if wrote else None)
            continue
        probs = [None if score is None else _probability(score, config) for score in scores]
        if probs[one.winner] is None:
            said.append(None)
            continue
        offered = [
            Entry(item.text + end * item.has_eos, prob)
            for item, prob in zip(one.candidates, probs, strict=True)
            if prob is not None
        ]
        best = tuple(sorted(offered, key=lambda entry: -entry.probability))
        said.append(MemberDecision(None, probs[one.winner], best, wrote, wrote))
    decided_by = max(winner.proposers, key=lambda index: (item.probability or 0.0) if (item := said[index]) else 0.0)
    return Decision(ids, data, text, namer.control(ids), None, decided_by, None, tuple(said))


def _probability(score: float, config: SweetSpanConfig) -> float:
    """The geometric mean of probabilities, over tokens or bytes, that a member's score says."""
    if config.score == "bits_per_byte":
        return float(2.0**-score)
    return 1.0 / score
