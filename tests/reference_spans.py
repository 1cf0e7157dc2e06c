"""The plain, slow reference for SweetSpan: whole forwards for every token, and a text cut into words as it stands.

It implements section 8 of the semantics, with greedy proposals, on top of `tests.reference` and shares no code with
the library.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import regex
import torch
from torch import Tensor

from tests.reference import REPLACEMENT, AssistantState, Reference, ReferenceMember, State, split_begun

GRAPHEME = regex.compile(r"\X")
SCRIPTS_WITHOUT_SPACES = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar")
STANDS_ALONE = regex.compile("[" + "".join(rf"\p{{Script={name}}}" for name in SCRIPTS_WITHOUT_SPACES) + "]")
TIE = 1e-4
"""Decisions nearer than this may fall the other way by rounding."""
CLOSE = 1e-3
"""How far scores may be apart, relatively."""


# --- Words ----------------------------------------------------------------------------------------------------------


def word_ends(data: bytes) -> list[int]:
    """Where the words end that something follows, in bytes. A begun character at the end is no text yet."""
    _, begun = split_begun(data)
    chars = data[: len(data) - len(begun)].decode(errors="surrogateescape")
    ends, at = [], 0
    for (kind, length), (next_kind, _) in pairwise(_pieces(chars)):
        at += length
        if kind == "alone" or (kind == "run" and next_kind != "run"):
            ends.append(len(_bytes_of(chars[:at])))
    return ends


def _pieces(chars: str) -> list[tuple[str, int]]:
    """White space, graphemes that stand alone and graphemes that form runs, with their lengths."""
    shown = "".join(REPLACEMENT if _is_invalid(char) else char for char in chars)
    pieces = []
    for is_space, stretch in groupby(shown, str.isspace):
        text = "".join(stretch)
        if is_space:
            pieces.append(("space", len(text)))
        else:
            graphemes = GRAPHEME.findall(text)
            pieces += [("alone" if STANDS_ALONE.match(grapheme) else "run", len(grapheme)) for grapheme in graphemes]
    return pieces


def _is_invalid(char: str) -> bool:
    """Whether this stands for a byte that is part of no character."""
    return "\udc80" <= char <= "\udcff"


def _bytes_of(chars: str) -> bytes:
    return chars.encode(errors="surrogateescape")


# --- Scores ---------------------------------------------------------------------------------------------------------


class Decision(NamedTuple):
    winner: int
    filtered: list[tuple[int, ...]]
    """By candidate: the members whose scores were dropped."""
    margin: float
    """How near, relatively, this was to another result."""


def decide(scores: Sequence[Sequence[float | None]], score: str, filter_ratio: float) -> Decision:
    """Choose the candidate of lowest mean score, given every candidate's scores by member."""
    means, filtered, margins = [], [], [math.inf]
    for by_member in scores:
        ranked = sorted((value, index) for index, value in enumerate(by_member) if value is not None)
        dropped = []
        if len(ranked) >= 3:
            (lowest, _), (highest, _) = ranked[0], ranked[-1]
            if score == "bits_per_byte":
                lowest, highest = 2**lowest, 2**highest
            margins.append(_gap(highest, filter_ratio * lowest))
            if highest > filter_ratio * lowest:
                margins += [_gap(ranked[0][0], ranked[1][0]), _gap(ranked[-2][0], ranked[-1][0])]
                dropped = [ranked[0], ranked[-1]]
                ranked = ranked[1:-1]
        filtered.append(tuple(sorted(index for _, index in dropped)))
        means.append(sum(value for value, _ in ranked) / len(ranked) if ranked else math.inf)
    best = sorted(means)
    margins += [_gap(*best[:2])] if len(best) > 1 else []
    return Decision(means.index(best[0]), filtered, min(margins))


def _gap(a: float, b: float) -> float:
    low, high = sorted((a, b))
    if low == high:
        return 0.0
    return (high - low) / abs(low) if low else math.inf


# --- Rounds ---------------------------------------------------------------------------------------------------------


class Proposal(NamedTuple):
    data: bytes
    has_eos: bool
    margin: float
    """The least lead of a chosen id, in log-probability."""


class Candidate(NamedTuple):
    data: bytes
    has_eos: bool
    proposers: tuple[int, ...]


@dataclass
class Round:
    candidates: list[Candidate]
    """Distinct, in the order of their first proposers."""
    scores: list[list[float | None]] | None
    """By candidate and member, None for a member that takes no part; None as a whole with a single candidate."""
    filtered: list[tuple[int, ...]]
    winner: int
    ids: list[int]
    """What the primary writes, neither cut at an end id nor at a length."""
    proposal_margin: float
    choice_margin: float


class ReferenceSpans:
    """An ensemble of members, the first of which is the primary, that decides span by span.

    Args:
        members: At least one.
        weights: One a member, uniform by default; a member of weight 0 takes no part.
        span_length: Words of a candidate.
        filter_ratio: The ratio of the highest to the lowest score above which both are dropped.
        score: `"perplexity"` or `"bits_per_byte"`.
        max_span_tokens: Tokens of a proposal, `16 * span_length` by default.
    """

    def __init__(
        self,
        members: Sequence[ReferenceMember],
        weights: Sequence[float] | None = None,
        span_length: int = 4,
        filter_ratio: float = 10.0,
        score: str = "perplexity",
        max_span_tokens: int | None = None,
    ):
        if score not in ("perplexity", "bits_per_byte"):
            raise ValueError(f"Unknown score {score!r}.")
        self.texts = Reference(members, method="gac", weights=weights)
        self.members, self.primary, self.weights = self.texts.members, self.texts.primary, self.texts.weights
        self.span_length, self.filter_ratio, self.score = span_length, filter_ratio, score
        self.max_span_tokens = max_span_tokens or 16 * span_length

    def run(
        self, prompt_ids: Sequence[int], num_rounds: int | None, max_new_tokens: int
    ) -> tuple[list[int], list[Round]]:
        """Decode greedily.

        Returns:
            The primary's new ids, the end id included, and the rounds.
        """
        state, ids, rounds = self.texts.prompt_state(prompt_ids), [], []
        while num_rounds is None or len(rounds) < num_rounds:
            rounds.append(self.round(state))
            for i in rounds[-1].ids:
                ids.append(i)
                if i in self.primary.eos_ids or len(ids) == max_new_tokens:
                    return ids, rounds
            state = self._advance(state, rounds[-1].candidates[rounds[-1].winner].data)
        return ids, rounds

    def round(self, state: State) -> Round:
        """Propose, score and choose."""
        contexts = [c if w else None for c, w in zip(self.texts.contexts(state), self.weights, strict=True)]
        proposals = {
            index: self.propose(self.members[index], context)
            for index, context in enumerate(contexts)
            if context is not None
        }
        for index in proposals.keys() - {0}:
            if self.members[index].loses_space(state.assistants[index - 1]):
                data = proposals[index].data
                proposals[index] = proposals[index]._replace(data=data.removeprefix(b" ") or data)
        proposers: dict[tuple[bytes, bool], list[int]] = {}
        for index, proposal in proposals.items():
            if self._can_be_written(proposal):
                proposers.setdefault((proposal.data, proposal.has_eos), []).append(index)
        candidates = [Candidate(*key, tuple(indices)) for key, indices in proposers.items()]
        if not candidates:
            raise ValueError("No member proposed anything that the primary can write.")

        scores, decision = None, Decision(0, [()], math.inf)
        if len(candidates) > 1:
            scores = [self._scores(state, contexts, candidate) for candidate in candidates]
            decision = decide(scores, self.score, self.filter_ratio)
        winner = candidates[decision.winner]
        ids = self.primary.encode(winner.data)
        if winner.has_eos:
            ids = [*ids, self._eos_id([*state.primary_ids, *ids])]
        proposal_margin = min(proposal.margin for proposal in proposals.values())
        return Round(
            candidates, scores, decision.filtered, decision.winner, ids, proposal_margin, choice_margin=decision.margin
        )

    def propose(self, member: ReferenceMember, context: Sequence[int]) -> Proposal:
        """What the member writes after these ids, up to its last complete word, an end or the bound."""
        allowed = torch.tensor(sorted({*member.token_bytes, *member.control_eos}))
        ids, data, margin = list(context), b"", math.inf
        for _ in range(self.max_span_tokens):
            logits = _last_logits(member, ids, 1)[0, allowed]
            best, second = logits.topk(2).values
            margin = min(margin, (best - second).item())
            chosen = allowed[logits == best][0].item()
            if chosen in member.control_eos:
                return Proposal(data, True, margin)
            ids.append(chosen)
            data += member.token_bytes[chosen]
            ends = word_ends(data)
            if len(ends) >= self.span_length:
                return Proposal(data[: ends[self.span_length - 1]], False, margin)
            if chosen in member.eos_ids:
                return Proposal(data, False, margin)
        _, begun = split_begun(data)
        return Proposal(data[: len(data) - len(begun)], False, margin)

    def _can_be_written(self, proposal: Proposal) -> bool:
        if proposal.has_eos:
            return bool(self.primary.control_eos) and self.primary.encode(proposal.data) is not None
        return bool(proposal.data and self.primary.encode(proposal.data))

    def _advance(self, state: State, data: bytes) -> State:
        assistants = [
            _append(member, own, data) for member, own in zip(self.texts.assistants, state.assistants, strict=True)
        ]
        return State([*state.primary_ids, *self.primary.encode(data)], assistants)

    def _scores(self, state: State, contexts: list[list[int] | None], candidate: Candidate) -> list[float | None]:
        grown = self._advance(state, candidate.data)
        after = [grown.primary_ids, *(own.appended for own in grown.assistants)]
        scores: list[float | None] = []
        for member, before, context in zip(self.members, contexts, after, strict=True):
            takes_part = before is not None and (context != before or candidate.has_eos)
            scores.append(self._score(member, before, context, candidate) if takes_part else None)
        return scores

    def _score(self, member: ReferenceMember, before: list[int], after: list[int], candidate: Candidate) -> float:
        span = after[len(before) :]
        logits = _last_logits(member, after, len(span) + 1)
        real = torch.tensor(sorted(i for i in member.vocab.values() if i < member.num_rows))
        logprobs = logits - logits[:, real].logsumexp(-1, keepdim=True)  # (T + 1, V)
        total = sum(logprobs[at, i].item() for at, i in enumerate(span))
        if candidate.has_eos:
            total += logprobs[-1, member.control_eos].logsumexp(-1).item()
        if self.score == "bits_per_byte":
            return -total / math.log(2) / (len(candidate.data) + candidate.has_eos)
        return math.exp(-total / (len(span) + candidate.has_eos))

    def _eos_id(self, context: list[int]) -> int:
        if not self.weights[0]:
            return self.primary.control_eos[0]
        row = _last_logits(self.primary, context, 1)[0].tolist()
        return max(self.primary.control_eos, key=lambda i: row[i])


def _append(member: ReferenceMember, state: AssistantState, data: bytes) -> AssistantState:
    """Let a context grow by a span: exactly if the member can write it, else by what it reads.

    That is its own view of each stretch of text, and U+FFFD for every other byte that it cannot write.
    """
    written, data = data, member.written_after(state, data)
    ids, held = member.encode(data), b""
    if ids is None:
        _, begun = split_begun(data)
        if begun and member.encode(begun) is None:
            held = begun
        ids = []
        for is_invalid, chars in groupby(data[: len(data) - len(held)].decode(errors="surrogateescape"), _is_invalid):
            if is_invalid:
                for char in chars:
                    ids += member.encode(_bytes_of(char)) or member.append_ids(REPLACEMENT)
            else:
                ids += member._seen("".join(chars), member._continue)
    return replace(state, text=state.text + written, appended=[*state.appended, *ids], held=held)


def _last_logits(member: ReferenceMember, context: Sequence[int], count: int) -> Tensor:
    """The logits after the last ids, of shape `(count, vocab_size)` and in float64."""
    return member.last_logits(context, count).double()


# --- Comparing ------------------------------------------------------------------------------------------------------


def compare_rounds(found: Sequence[Any], expected: Sequence[Round]) -> tuple[int, str | None]:
    """Compare the library's rounds of a row, up to the first that rounding may decide.

    Returns:
        The number of rounds that are the same, and what is different in the next if it is no matter of rounding.
    """
    for number, round in enumerate(expected):
        if round.proposal_margin < TIE:
            return number, None
        if number >= len(found):
            return number, f"there are {len(found)} rounds"
        own = found[number]
        candidates = [Candidate(c.data, c.has_eos, tuple(c.proposers)) for c in own.candidates]
        if candidates != round.candidates:
            return number, f"candidates {candidates} are not {round.candidates}"
        scores = [None if c.scores is None else list(c.scores) for c in own.candidates]
        for a, b in zip(scores, round.scores or [None] * len(scores), strict=True):
            if not _are_close(a, b):
                return number, f"scores {scores} are not {round.scores}"
        if round.choice_margin < TIE:
            return number, None
        filtered = [tuple(sorted(c.filtered)) for c in own.candidates]
        if filtered != round.filtered:
            return number, f"the members filtered are {filtered}, not {round.filtered}"
        if own.winner != round.winner:
            return number, f"the winner is {own.winner}, not {round.winner}, by {scores}"
    return len(expected), None


def _are_close(found: list[float | None] | None, expected: list[float | None] | None) -> bool:
    if found is None or expected is None or len(found) != len(expected):
        return found is expected
    return all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-6)
        for a, b in zip(found, expected, strict=True)
    )
