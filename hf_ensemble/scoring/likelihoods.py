"""How likely given continuations are under an ensemble."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import messages
from ..chat.rendering import ChatRenderer
from ..config import MethodConfig, check_positive_integer
from ..decoding.prompts import OwnPrompts, Prompts, read_prompts
from ..decoding.step_weights import MixingWeights
from ..decoding.teacher_forcing import ForcedMember, ForcedText, advance_by_blocks
from ..decoding.text_warnings import warn_of_losses
from ..decoding.token_decoder import without_member
from ..errors import MemberError
from ..members.member import Member, padded_left
from ..methods.base import TokenMethod
from ..mixing import fold
from .by_member import check_positions, score_by_member
from .pairs import Pair, own_pairs


@dataclass(frozen=True)
class Likelihoods:
    """How likely each continuation is. All tensors are on the CPU.

    Attributes:
        log_probs: Natural logarithm of its probability after the prompt, in float32, of shape `(N,)`; `-inf` where the
            method gives one of its tokens nothing.
        num_bytes: Number of UTF-8 bytes of what was scored, of shape `(N,)`: the continuation, and white space at the
            end of the prompt.
        bits_per_byte: `-log2` of the probability over `num_bytes`, in float32, of shape `(N,)`; 0 for no text.
        is_greedy: Whether it is what greedy decoding chooses at every step, of shape `(N,)`; an entry of several ids is
            one choice. For spans: whether every member would write it by itself.
    """

    log_probs: Tensor
    num_bytes: Tensor
    bits_per_byte: Tensor
    is_greedy: Tensor


Scores = Likelihoods
"""The former name of `Likelihoods`, which stays."""


@dataclass(frozen=True)
class Batch:
    """Pairs that run together.

    Attributes:
        pairs: Prompts and continuations in the primary's ids, none of them empty.
        numbers: The number of each among all pairs of the call.
        weights: Their mixing weights.
    """

    pairs: list[Pair]
    numbers: list[int]
    weights: MixingWeights

    @property
    def names(self) -> list[str]:
        """What errors call the continuations."""
        return [f"continuation {number}" for number in self.numbers]


Found = list[tuple[float, bool]]
"""For each pair of a batch its log-probability, and whether it is greedy: see `Likelihoods`."""


def score_pairs(
    pairs: Sequence[Pair], weights: MixingWeights, batch_size: int, score: Callable[[Batch], Found]
) -> Likelihoods:
    """Score continuations, batch by batch.

    Args:
        pairs: Prompts and continuations in the primary's ids.
        weights: Mixing weights: one list for all pairs, one for each, or a function of a batch's step and ids.
        batch_size: Number of pairs that run together.
        score: Scores a batch: `score_alone`, `score_by_spans` or `TokenBatch.score`.

    Raises:
        ConfigurationError: If weights were given for another number of pairs, or a text does not fit a member's
            positions.
        MemberError: If a member fails or gives NaN, or nothing is left to choose from.
    """
    check_positive_integer("batch_size", batch_size)
    weights.expand(len(pairs), 1)
    order = [n for n, pair in enumerate(pairs) if pair.continuation]
    if not weights.varies:
        # Rows of the same prompt share its forward pass; rows of like length waste little on padding.
        order.sort(key=lambda n: (-len(pairs[n].prompt), pairs[n].prompt, -len(pairs[n].continuation)))
    log_probs, is_greedy = [0.0] * len(pairs), [True] * len(pairs)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        found = score(Batch([pairs[n] for n in numbers], numbers, weights.of_prompts(numbers)))
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
        MemberError: If it fails, or gives NaN.
    """
    scores = score_by_member([primary], {0: batch.pairs}, batch.names, over_all_ids=True)[0]
    return [(score.log_prob, score.is_greedy) for score in scores]


def score_by_spans(members: Sequence[Member], renderers: Sequence[ChatRenderer], batch: Batch) -> Found:
    """Score a batch by the mean over the members of each one's own log-probability of the continuation.

    Args:
        members: The members; the first is the primary.
        renderers: For each member, how it reads a conversation that a prompt's ids stand for.
        batch: The batch; its weights say only who takes part.

    Raises:
        ConfigurationError: If a text does not fit a member's positions.
        MemberError: If a member fails or gives NaN, or none can write a continuation.
    """
    ids, mask = padded_left([pair.prompt for pair in batch.pairs])
    prompts = read_prompts(members, batch.weights.participants, "append", ids, mask, OwnPrompts(renderers))
    own = own_pairs(members, prompts, batch.pairs)
    if 0 in batch.weights.participants:
        own[0] = batch.pairs
    scores = score_by_member(members, own, batch.names)
    found = []
    for row, name in enumerate(batch.names):
        of_row = [of_member[row] for of_member in scores.values() if of_member[row].num_tokens]
        if not of_row:
            raise MemberError(f"no member can write {name}, so that there is nothing to score.")
        mean = math.fsum(score.log_prob for score in of_row) / len(of_row)
        found.append((mean, all(score.is_greedy for score in of_row)))
    return found


class TokenBatch:
    """A batch that is scored by the fused distribution of every step.

    Args:
        members: The members; the first is the primary.
        renderers: For each member, how it reads a conversation that a prompt's ids stand for.
        method: The method, made for these members.
        config: The method's options.
        batch: The batch.

    Raises:
        ConfigurationError: If a text does not fit a member's positions.
        MemberError: If a member fails or gives NaN, or the method leaves nothing to choose from.
    """

    def __init__(
        self,
        members: Sequence[Member],
        renderers: Sequence[ChatRenderer],
        method: TokenMethod,
        config: MethodConfig,
        batch: Batch,
    ):
        self._members = members
        self._method = method
        self._method_name = config.name
        self._gate = config.gate_rule
        self._pairs, self._numbers = batch.pairs, batch.numbers
        self._num_steps = [len(pair.continuation) for pair in batch.pairs]
        ids, mask = padded_left([pair.prompt for pair in batch.pairs])
        self._plans = self._plans_of(batch.weights, ids)  # (1 or num_steps, B, M)
        running = batch.weights.participants | ({0} if method.starts_from_primary else set())
        running |= set() if self._gate is None else {self._gate[0]}
        prompts = read_prompts(members, running, method.resync, ids, mask, OwnPrompts(renderers))
        self._texts = {index: self._texts_of(index, prompts) for index in sorted(running)}
        if 0 not in running and any(any(text.sits_out) for rows in self._texts.values() for text in rows.values()):
            # Where nobody else can, the primary goes on.
            self._texts[0] = self._texts_of(0, prompts, for_all=True)
        check_positions(members, self._texts, batch.names)
        self._forced = {index: ForcedMember(members[index], rows) for index, rows in self._texts.items() if rows}

    def _plans_of(self, weights: MixingWeights, ids: Tensor) -> Tensor:
        if not weights.varies:
            return weights.at(0, ids)[None]
        pad = self._members[0].tokenizer.pad_token_id or 0
        plans = []
        for step in range(max(self._num_steps)):
            plans.append(weights.at(step, ids))
            new = [pair.continuation[step] if step < len(pair.continuation) else pad for pair in self._pairs]
            ids = torch.cat([ids, torch.tensor(new)[:, None]], dim=-1)
        return torch.stack(plans)

    def _texts_of(self, index: int, prompts: Prompts, for_all: bool = False) -> dict[int, ForcedText]:
        """What a member reads in the rows in which it takes part."""
        takes_part = (self._plans[..., index] != 0).any(0)
        if for_all or (index == 0 and self._method.starts_from_primary) or (self._gate and self._gate[0] == index):
            takes_part[:] = True
        pairs = {row: self._pairs[row] for row in takes_part.nonzero()[:, 0].tolist()}
        if index == 0:
            return {row: ForcedText.of_ids(pair.prompt, pair.continuation) for row, pair in pairs.items()}
        write = self._members[0].encoder.token_bytes.write
        contexts = {row: prompts.contexts[index][prompts.prompt_of_row[row]].copy() for row in pairs}
        texts = {
            row: ForcedText.of_context(contexts[row], [write([i]) for i in pair.continuation[:-1]])
            for row, pair in pairs.items()
        }
        warn_of_losses(self._members, {index: list(contexts.values())}, set())
        return texts

    def score(self) -> list[tuple[float, bool]]:
        """Log-probability of every continuation, and whether it is the greedy one."""
        log_probs = [0.0] * len(self._pairs)
        choices: list[list[int]] = [[] for _ in self._pairs]
        width = len(self._method.union)
        for steps in advance_by_blocks(list(self._forced.values()), self._num_steps, width):
            for (row, _), log_prob, choice in zip(steps, *self._mix(steps), strict=True):
                log_probs[row] += log_prob
                choices[row].append(choice)
        return [
            (log_prob, self._is_greedy(pair.continuation, chosen))
            for log_prob, pair, chosen in zip(log_probs, self._pairs, choices, strict=True)
        ]

    def _mix(self, steps: Sequence[tuple[int, int]]) -> tuple[list[float], list[int]]:
        """Log-probability of the id at each (row, step), and the entry that is chosen there greedily."""
        method, device = self._method, self._method.device
        logits: list[Tensor | None] = [None] * len(self._members)
        for index in self._forced:
            logits[index] = self._take(index, steps)
        plan = self._plan(steps, logits)
        weights = plan.to(device)
        takes_part = plan != 0
        takes_part[:, 0] |= method.starts_from_primary
        for index, member_logits in enumerate(logits):
            if member_logits is None or not takes_part[:, index].any():
                logits[index] = None
            elif not takes_part[:, index].all():
                # What a member says where it takes no part must not count, not even as NaN.
                logits[index] = member_logits.masked_fill(weights[:, index, None] == 0, 0.0)
        width = self._members[0].vocab_size
        if logits[0] is None:
            logits[0] = torch.zeros(len(steps), width, device=device)
        mixed = method.mix(logits, weights)
        normalizers = torch.where(takes_part.to(device), mixed.normalizers, 0.0)
        fused = mixed.logprobs
        targets = torch.tensor([self._pairs[row].continuation[step] for row, step in steps], device=device)
        folded = fused if fused.shape[-1] == width else fold(fused, method.first_ids_beyond_primary, width)
        log_probs = folded.gather(-1, targets[:, None])[:, 0]
        best, choices = fused.max(-1)
        host = torch.stack([log_probs, choices.float(), (best > -torch.inf).float()]).cpu().double()
        self._check(steps, normalizers.isfinite().cpu(), host[2] > 0)
        return host[0].tolist(), host[1].long().tolist()

    def _take(self, index: int, steps: Sequence[tuple[int, int]]) -> Tensor:
        return self._forced[index].take(steps).to(self._method.device)

    def _plan(self, steps: Sequence[tuple[int, int]], logits: Sequence[Tensor | None]) -> Tensor:
        """The weights at these (row, step) pairs, of shape `(num_pairs, num_members)`, on the CPU."""
        last = len(self._plans) - 1
        rows, times = zip(*steps, strict=True)
        plan = self._plans[[min(step, last) for step in times], list(rows)]
        sitting_out: dict[int, list[int]] = {}
        for index, texts in self._texts.items():
            out = [n for n, (row, step) in enumerate(steps) if row in texts and texts[row].sits_out[step]]
            if out:
                sitting_out[index] = out
                plan = without_member(plan, index, out)
        if self._gate is None:
            return plan
        gate, threshold = self._gate
        gate_logits = logits[gate]
        assert gate_logits is not None
        confidence = self._method.confidence(gate_logits, gate).cpu()
        is_asked = torch.ones(len(steps), dtype=torch.bool)
        is_asked[sitting_out.get(gate, [])] = False
        failed = (is_asked & confidence.isnan()).nonzero()[:, 0].tolist()
        if failed:
            self._raise_not_finite(gate, *steps[failed[0]])
        closed = is_asked & (confidence > threshold)
        return torch.where(closed[:, None], torch.eye(len(self._members))[gate], plan)

    def _check(self, steps: Sequence[tuple[int, int]], is_finite: Tensor, is_left: Tensor) -> None:
        if not bool(is_finite.all()):
            place, index = (~is_finite).nonzero()[0].tolist()
            self._raise_not_finite(index, *steps[place])
        if not bool(is_left.all()):
            row, step = steps[int((~is_left).nonzero()[0, 0])]
            raise messages.nothing_left(self._method_name, f"in continuation {self._numbers[row]} at step {step + 1}")

    def _raise_not_finite(self, index: int, row: int, step: int) -> None:
        raise self._members[index].not_finite(f"in continuation {self._numbers[row]} at step {step + 1}")

    def _is_greedy(self, continuation: Sequence[int], choices: Sequence[int]) -> bool:
        """Whether greedy decoding writes these ids: an entry of several is one choice."""
        width, union = self._members[0].vocab_size, self._method.union
        at = 0
        while at < len(continuation):
            choice = choices[at]
            ids = [choice] if choice < width else union.continuation(choice, 0) or []
            if not ids or list(continuation[at : at + len(ids)]) != ids[: len(continuation) - at]:
                return False
            at += len(ids)
        return True
