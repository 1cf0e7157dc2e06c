"""Likelihoods of given continuations under an ensemble."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import check_positive_integer
from ..decoding.prompts import OwnPrompts, read_prompts
from ..decoding.step_weights import StepWeights
from ..errors import MemberError
from ..members.member import Member
from ..members.state import padded_left
from .by_member import score_by_member
from .pairs import Pair, own_pairs


@dataclass(frozen=True)
class Likelihoods:
    """The likelihood of each continuation. All tensors are on the CPU.

    Attributes:
        log_probs: Natural logarithm of its probability after the prompt, in float32, of shape `(N,)`; `-inf` if the
            method gives one of its tokens no probability.
        num_bytes: Number of UTF-8 bytes scored, of shape `(N,)`: the continuation, and white space at the end of the
            prompt.
        bits_per_byte: `-log2` of the probability over `num_bytes`, in float32, of shape `(N,)`; 0 for no text.
        is_greedy: Whether greedy decoding chooses it at every step, of shape `(N,)`; an entry of several ids is one
            choice. For spans: whether every member would write it by itself.
    """

    log_probs: Tensor
    num_bytes: Tensor
    bits_per_byte: Tensor
    is_greedy: Tensor


Scores = Likelihoods
"""Older name of `Likelihoods`."""


@dataclass(frozen=True)
class Batch:
    """Pairs that run together.

    Attributes:
        pairs: Prompts and continuations in the primary's ids, none of them empty.
        numbers: The index of each among all pairs of the call.
        weights: Their mixing weights.
        own_prompts: What members read instead of their prompts.
    """

    pairs: list[Pair]
    numbers: list[int]
    weights: StepWeights
    own_prompts: OwnPrompts

    @property
    def names(self) -> list[str]:
        """The names of the continuations in errors."""
        return [f"continuation {number}" for number in self.numbers]


Found = list[tuple[float, bool]]
"""For each pair of a batch, its log-probability, and whether it is greedy; see `Likelihoods`."""


def score_pairs(
    pairs: Sequence[Pair],
    weights: StepWeights,
    own_prompts: OwnPrompts,
    batch_size: int,
    score: Callable[[Batch], Found],
) -> Likelihoods:
    """Score continuations, batch by batch.

    Args:
        pairs: Prompts and continuations in the primary's ids.
        weights: Mixing weights: one list for all pairs, one per pair, or a function of a batch's step and ids.
        own_prompts: What members read instead of the prompts.
        batch_size: Number of pairs that run together.
        score: Scores a batch: `score_alone`, `score_by_spans` or `TokenBatch.score`.

    Raises:
        ConfigurationError: If weights were given for another number of pairs, or a text does not fit a member's
            positions.
        MemberError: If a member fails or returns NaN, or nothing is left to choose from.
    """
    check_positive_integer("batch_size", batch_size)
    weights.expand(len(pairs), 1)
    order = [n for n, pair in enumerate(pairs) if pair.continuation]
    if not weights.varies:
        # Rows with the same prompt share its forward pass; rows of similar length waste little on padding.
        order.sort(key=lambda n: (-len(pairs[n].prompt), pairs[n].prompt, -len(pairs[n].continuation)))
    log_probs, is_greedy = [0.0] * len(pairs), [True] * len(pairs)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        some = [pairs[n] for n in numbers]
        found = score(Batch(some, numbers, weights.of_prompts(numbers), own_prompts.of_rows(numbers)))
        for n, (log_prob, greedy) in zip(numbers, found, strict=True):
            log_probs[n], is_greedy[n] = log_prob, greedy
    totals = torch.tensor(log_probs, dtype=torch.float64)
    num_bytes = torch.tensor([pair.num_bytes for pair in pairs], dtype=torch.long)
    bits = torch.where(totals == 0, 0.0, -totals / (math.log(2) * num_bytes))
    return Likelihoods(totals.float(), num_bytes, bits.float(), torch.tensor(is_greedy, dtype=torch.bool))


def score_alone(primary: Member, batch: Batch) -> Found:
    """Score a batch by the primary alone, as it decodes by itself.

    Args:
        primary: The primary.
        batch: The batch.

    Raises:
        ConfigurationError: If a text does not fit the primary's positions.
        MemberError: If it fails, or returns NaN.
    """
    scores = score_by_member([primary], {0: batch.pairs}, batch.names, over_all_ids=True)[0]
    return [(score.log_prob, score.is_greedy) for score in scores]


def score_by_spans(members: Sequence[Member], batch: Batch) -> Found:
    """Score a batch by the mean of the members' own log-probabilities of the continuation.

    Args:
        members: The members; the first is the primary.
        batch: The batch; its weights only decide which members take part.

    Raises:
        ConfigurationError: If a text does not fit a member's positions.
        MemberError: If a member fails or returns NaN, or no member can write a continuation.
    """
    ids, mask = padded_left([pair.prompt for pair in batch.pairs])
    prompts = read_prompts(members, batch.weights.participants, "append", ids, mask, batch.own_prompts)
    scores = score_by_member(members, own_pairs(members, prompts, batch.pairs), batch.names)
    found = []
    for row, name in enumerate(batch.names):
        of_row = [of_member[row] for of_member in scores.values() if of_member[row].num_tokens]
        if not of_row:
            raise MemberError(f"no member can write {name}, so it has no score.")
        mean = math.fsum(score.log_prob for score in of_row) / len(of_row)
        found.append((mean, all(score.is_greedy for score in of_row)))
    return found
