"""How likely given continuations are under an ensemble."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import messages
from ..chat.rendering import ChatRenderer
from ..config import MethodConfig, SweetSpanConfig, check_positive_integer
from ..decoding.prompts import OwnPrompts, Prompts, read_prompts
from ..decoding.step_weights import MixingWeights
from ..decoding.teacher_forcing import ForcedMember, ForcedText
from ..decoding.text_warnings import warn_of_losses
from ..decoding.token_decoder import without_member
from ..errors import ConfigurationError, MemberError
from ..members.member import Member
from ..members.state import padded_left
from ..methods.base import TokenMethod
from ..mixing import fold, log_normalizer
from ..vocabulary.context import MemberContext
from ..vocabulary.token_bytes import NO_TOKEN

_MAX_LOGITS = 2**26
"""Most logits of one member that are held at once."""

_MAX_MIXED = 2**24
"""Most columns that are mixed at once; mixing needs several times that much."""


@dataclass(frozen=True)
class Scores:
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


@dataclass(frozen=True)
class Pair:
    """A prompt and a continuation in the primary's ids, and the continuation's bytes."""

    prompt: list[int]
    continuation: list[int]
    num_bytes: int


def split_texts(tokenizer: PreTrainedTokenizerBase, primary: Member, prompt: str, continuation: str) -> Pair:
    """Encode prompt and continuation as one text and split them, as lm-evaluation-harness does.

    White space at the prompt's end goes to the continuation. The continuation's ids are those of the whole text after
    as many as the prompt has by itself. An empty prompt is what a text starts from.

    Raises:
        ConfigurationError: If the continuation has no token of its own, or there is nothing to start from.
    """
    kept = prompt.rstrip()
    continuation = prompt[len(kept) :] + continuation
    num_bytes = len(continuation.encode("utf-8", "replace"))
    if not kept:
        start, ids = _start_ids(primary), encode_text(tokenizer, primary, continuation, starts=False)
        return Pair(start, ids[len(start) :] if ids[: len(start)] == start else ids, num_bytes)
    prompt_ids = encode_text(tokenizer, primary, kept)
    ids = encode_text(tokenizer, primary, kept + continuation)[len(prompt_ids) :]
    if not ids:
        raise ConfigurationError(
            f"the continuation {continuation!r:.80} has no token of its own for the primary {primary.name!r}: after "
            f"{kept[-40:]!r} it is part of the prompt's last one. Move the boundary to one between words."
        )
    return Pair(prompt_ids, ids, num_bytes)


def encode_text(tokenizer: PreTrainedTokenizerBase, primary: Member, text: str, starts: bool = True) -> list[int]:
    """Encode text with the primary's tokenizer.

    Args:
        tokenizer: The primary's tokenizer.
        primary: The primary.
        text: The text; control tokens that it spells are read as such.
        starts: Whether the primary's BOS rule holds, as it does at the start of a text that does not spell its BOS.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    prefix = primary.encoder.prefix_ids
    return [*prefix, *ids] if starts and ids[: len(prefix)] != prefix else ids


def _start_ids(primary: Member) -> list[int]:
    if not primary.encoder.start_ids:
        raise messages.nothing_to_start_from(primary.name, "a prompt is empty")
    return list(primary.encoder.start_ids)


def read_pairs(
    primary: Member,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[int]],
    continuations: Sequence[str | Sequence[int]],
) -> list[Pair]:
    """Turn prompts and continuations, each pair as texts or as the primary's ids, into ids.

    Raises:
        ConfigurationError: If they do not match, or one is neither.
    """
    for name, values in (("prompts", prompts), ("continuations", continuations)):
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise ConfigurationError(f"`{name}` has to be a list, one entry per continuation, but is {values!r:.80}.")
    if len(prompts) != len(continuations):
        raise messages.wrong_count("continuations", len(continuations), len(prompts), "prompt")
    pairs = []
    for n, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        if isinstance(prompt, str) and isinstance(continuation, str):
            empty = Pair([], [], 0)
            pairs.append(split_texts(tokenizer, primary, prompt, continuation) if continuation else empty)
        elif isinstance(prompt, str) or isinstance(continuation, str):
            raise ConfigurationError(f"prompt and continuation {n} have to be both texts or both ids, but are not.")
        else:
            pairs.append(_pair_of_ids(primary, _as_ids(prompt, n), _as_ids(continuation, n)))
    return pairs


def _as_ids(values: Sequence[int], n: int) -> list[int]:
    ids = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigurationError(
            f"prompt and continuation {n} have to be texts or lists of ids, but hold {ids!r:.80}."
        )
    return ids


def _pair_of_ids(primary: Member, prompt: list[int], continuation: list[int]) -> Pair:
    for i in (*prompt, *continuation):
        if not 0 <= i < primary.vocab_size:
            raise messages.id_outside(f"a text holds id {i}", primary.name, primary.vocab_size)
    write = primary.encoder.token_bytes.write_from_start
    num_bytes = len(write([*prompt, *continuation])) - len(write(prompt))
    return Pair(prompt or _start_ids(primary), continuation, num_bytes)


def score_pairs(
    members: Sequence[Member],
    method: TokenMethod | None,
    config: MethodConfig,
    weights: MixingWeights,
    pairs: Sequence[Pair],
    batch_size: int,
    renderers: Sequence[ChatRenderer],
) -> Scores:
    """Score continuations.

    Args:
        members: The members; the first is the primary.
        method: The method, made for these members; None where the primary decides alone, or members by spans.
        config: The method's options.
        weights: Mixing weights: one list for all pairs, one for each, or a function of a batch's step and ids.
        pairs: Prompts and continuations.
        batch_size: Number of pairs that run together.
        renderers: For each member, how it reads a conversation that a prompt's ids stand for.

    Raises:
        ConfigurationError: If a text does not fit a member's positions.
        MemberError: If a member fails, gives NaN, or the method leaves nothing to choose from.
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
        rows, own_weights = [pairs[n] for n in numbers], weights.of_prompts(numbers)
        if method is not None:
            found = _Batch(members, method, config, own_weights, rows, numbers, renderers).score()
        elif isinstance(config, SweetSpanConfig) and not weights.is_only(0):
            found = _score_spans(members, own_weights.participants, rows, numbers, renderers)
        else:
            own = [(pair.prompt, pair.continuation) for pair in rows]
            found = _score_alone(members[0], own, numbers, all_columns=True)
        for n, (log_prob, greedy) in zip(numbers, found, strict=True):
            log_probs[n], is_greedy[n] = log_prob, greedy
    totals = torch.tensor(log_probs, dtype=torch.float64)
    num_bytes = torch.tensor([pair.num_bytes for pair in pairs], dtype=torch.long)
    bits = torch.where(totals == 0, 0.0, -totals / (math.log(2) * num_bytes))
    return Scores(totals.float(), num_bytes, bits.float(), torch.tensor(is_greedy, dtype=torch.bool))


class _Batch:
    """Pairs that are scored together by a token-level method."""

    def __init__(
        self,
        members: Sequence[Member],
        method: TokenMethod,
        config: MethodConfig,
        weights: MixingWeights,
        pairs: Sequence[Pair],
        numbers: Sequence[int],
        renderers: Sequence[ChatRenderer],
    ):
        self._members = members
        self._method = method
        self._method_name = config.name
        self._gate = config.gate_rule
        self._pairs = pairs
        self._numbers = numbers
        self._num_steps = [len(pair.continuation) for pair in pairs]
        ids, mask = padded_left([pair.prompt for pair in pairs])
        self._plans = self._plans_of(weights, ids)  # (1 or num_steps, B, M)
        running = weights.participants | ({0} if method.starts_from_primary else set())
        running |= set() if self._gate is None else {self._gate[0]}
        prompts = read_prompts(members, running, method.resync, ids, mask, OwnPrompts(renderers))
        texts = {index: self._texts_of(index, prompts) for index in sorted(running)}
        if 0 not in running and any(any(text.sits_out) for rows in texts.values() for text in rows.values()):
            # Where nobody else can, the primary goes on.
            texts[0] = self._texts_of(0, prompts, for_all=True)
        _check_positions(members, texts, numbers)
        self._texts = texts
        self._forced = {index: ForcedMember(members[index], rows) for index, rows in texts.items() if rows}

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
        texts = {}
        entry = self._members[0].encoder.token_bytes.write
        contexts = []
        for row in takes_part.nonzero()[:, 0].tolist():
            pair = self._pairs[row]
            if index == 0:
                texts[row] = ForcedText.of_ids(pair.prompt, pair.continuation)
                continue
            context = prompts.contexts[index][prompts.prompt_of_row[row]].copy()
            texts[row] = ForcedText.of_context(context, [entry([i]) for i in pair.continuation[:-1]])
            contexts.append(context)
        warn_of_losses(self._members, {index: contexts}, set())
        return texts

    def score(self) -> list[tuple[float, bool]]:
        """Log-probability of every continuation, and whether it is the greedy one."""
        log_probs = [0.0] * len(self._pairs)
        choices: list[list[int]] = [[] for _ in self._pairs]
        for steps in _advance(list(self._forced.values()), self._num_steps, len(self._method.union)):
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
        texts, forced = self._texts[index], self._forced[index]
        own = [n for n, (row, _) in enumerate(steps) if row in texts]
        if not own:
            return torch.zeros(len(steps), self._members[index].vocab_size, device=self._method.device)
        taken = forced.take([steps[n] for n in own]).to(self._method.device, torch.float32)
        if len(own) == len(steps):
            return taken
        places = torch.tensor(own, device=taken.device)
        return taken.new_zeros(len(steps), taken.shape[-1]).index_copy_(0, places, taken)

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
        raise _not_finite(self._members[index], self._numbers[row], step)

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


def _score_spans(
    members: Sequence[Member],
    participants: Collection[int],
    pairs: Sequence[Pair],
    numbers: Sequence[int],
    renderers: Sequence[ChatRenderer],
) -> list[tuple[float, bool]]:
    """The mean over the members of each one's log-probability of the continuation in its own ids."""
    ids, mask = padded_left([pair.prompt for pair in pairs])
    prompts = read_prompts(members, participants, "append", ids, mask, OwnPrompts(renderers))
    found: list[list[tuple[float, bool]]] = [[] for _ in pairs]
    for index in sorted(participants):
        member, own = members[index], {}
        for row, pair in enumerate(pairs):
            context = (pair.prompt, pair.continuation)
            if index > 0:
                number = prompts.prompt_of_row[row]
                data = members[0].encoder.token_bytes.write_from_start([*pair.prompt, *pair.continuation])
                context = _own_ids(member, prompts.contexts[index][number], prompts.texts[number], data)
            if context[1]:
                own[row] = context
        texts = {index: {row: ForcedText.of_ids(*context) for row, context in own.items()}}
        _check_positions(members, texts, numbers)
        own_numbers = [numbers[row] for row in own]
        scored = _score_alone(member, list(own.values()), own_numbers, all_columns=False) if own else []
        for row, score in zip(own, scored, strict=True):
            found[row].append(score)
    for row, scores in enumerate(found):
        if not scores:
            raise MemberError(f"no member can write continuation {numbers[row]}, so that there is nothing to score.")
    return [
        (math.fsum(score for score, _ in scores) / len(scores), all(greedy for _, greedy in scores))
        for scores in found
    ]


def _own_ids(member: Member, prompt: MemberContext, text: bytes, whole: bytes) -> tuple[list[int], list[int]]:
    """A member's ids of a prompt, and of the continuation after it.

    Those of the whole text where they begin with the prompt's, else the continuation is encoded by itself.
    """
    alone, joint = (MemberContext(member.encoder, "retokenize", data) for data in (text, whole))
    if not text and whole and prompt.ids == member.encoder.start_ids and not joint.sits_out:
        return list(prompt.ids), joint.ids[len(member.encoder.prefix_ids) :]
    if alone.ids == prompt.ids and joint.ids[: len(alone.ids)] == alone.ids and not (alone.sits_out or joint.sits_out):
        return alone.ids, joint.ids[len(alone.ids) :]
    grown = prompt.copy()
    grown.write(whole[len(text) :])
    return list(prompt.ids), grown.ids[len(prompt.ids) :]


def _score_alone(
    member: Member, rows: Sequence[tuple[list[int], list[int]]], numbers: Sequence[int], all_columns: bool
) -> list[tuple[float, bool]]:
    """One member's log-probabilities of its own ids.

    Args:
        member: The member.
        rows: Its ids of prompts and continuations.
        numbers: Which continuations they are, for errors.
        all_columns: Whether ids without a token count in its softmax, as they do when it decodes alone.
    """
    texts = {row: ForcedText.of_ids(*pair) for row, pair in enumerate(rows)}
    _check_positions([member], {0: texts}, numbers)
    forced = ForcedMember(member, texts)
    no_token = torch.as_tensor(member.encoder.token_bytes.kinds == NO_TOKEN, device=member.device)
    log_probs, is_greedy = [0.0] * len(rows), [True] * len(rows)
    for steps in _advance([forced], [len(continuation) for _, continuation in rows], member.vocab_size):
        logits = forced.take(steps).float()
        if not all_columns:
            logits = logits.masked_fill(no_token, -torch.inf)
        targets = torch.tensor([rows[row][1][step] for row, step in steps], device=logits.device)
        normalizers = log_normalizer(logits)
        own = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        host = torch.stack([own, (logits.argmax(-1) == targets).float(), normalizers]).cpu().double()
        for (row, step), log_prob, greedy, normalizer in zip(steps, *host.tolist(), strict=True):
            if not math.isfinite(normalizer):
                raise _not_finite(member, numbers[row], step)
            log_probs[row] += log_prob
            is_greedy[row] &= bool(greedy)
    return list(zip(log_probs, is_greedy, strict=True))


def _advance(members: Sequence[ForcedMember], num_steps: Sequence[int], width: int) -> Iterator[list[tuple[int, int]]]:
    """Advance members along their texts, and yield the (row, step) pairs that are mixed at once, over `width` columns."""
    longest = max(num_steps)
    size = max(1, _MAX_LOGITS // (len(num_steps) * max(forced.member.vocab_size for forced in members)))
    mixed_size = max(1, _MAX_MIXED // width)
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        for forced in members:
            forced.advance(start, stop)
        steps = [(row, step) for row, count in enumerate(num_steps) for step in range(start, min(stop, count))]
        for n in range(0, len(steps), mixed_size):
            yield steps[n : n + mixed_size]


def _not_finite(member: Member, number: int, step: int) -> MemberError:
    return member.not_finite(f"in continuation {number} at step {step + 1}")


def _check_positions(
    members: Sequence[Member], texts: dict[int, dict[int, ForcedText]], numbers: Sequence[int]
) -> None:
    for index, rows in texts.items():
        limit = members[index].max_positions
        for row, text in rows.items():
            if limit is not None and text.longest > limit:
                what = f"prompt and continuation {numbers[row]} take"
                remedy = "Shorten the prompt, or score the text in parts"
                raise messages.too_long(members[index].name, limit, what, text.longest, remedy)
