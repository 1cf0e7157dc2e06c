"""Continuations that are scored by the fused distribution of every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import messages
from ..config import MethodConfig
from ..decoding.prompts import OwnPrompts, Prompts, read_prompts
from ..decoding.step import FusedStep
from ..decoding.step_weights import StepWeights
from ..decoding.teacher_forcing import ForcedMember, ForcedText, advance_by_blocks
from ..decoding.text_warnings import warn_of_losses
from ..members.member import Member
from ..members.state import MemberState, padded_left
from ..methods.base import TokenMethod
from .by_member import check_positions
from .likelihoods import Batch


class TokenBatch:
    """A batch that is scored by the fused distribution of every step.

    Args:
        members: The members; the first is the primary.
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
        method: TokenMethod,
        config: MethodConfig,
        batch: Batch,
    ):
        self._members = members
        self._method = method
        self._method_name = config.name
        self._gate = config.gate_rule
        # Steps come in blocks of many sizes, of which no graphs are kept.
        self._fused_step = FusedStep(members, method, is_wide=True, gate=self._gate, captures=False)
        self._pairs, self._names = batch.pairs, batch.names
        self._steps: Sequence[tuple[int, int]] = []  # the (row, step) pairs that are fused just now
        self._num_steps = [len(pair.continuation) for pair in batch.pairs]
        ids, mask = padded_left([pair.prompt for pair in batch.pairs])
        self._plans = self._plans_of(batch.weights, ids)  # (1 or num_steps, B, M)
        running = batch.weights.participants | ({0} if method.starts_from_primary else set())
        running |= set() if self._gate is None else {self._gate[0]}
        prompts = read_prompts(members, running, method.resync, ids, mask, OwnPrompts(members))
        self._texts = {index: self._texts_of(index, prompts) for index in sorted(running)}
        if 0 not in running and any(any(text.sits_out) for rows in self._texts.values() for text in rows.values()):
            # Where nobody else can, the primary goes on.
            self._texts[0] = self._texts_of(0, prompts, for_all=True)
        check_positions(members, self._texts, self._names)
        self._forced = {index: ForcedMember(members[index], rows) for index, rows in self._texts.items() if rows}

    def _plans_of(self, weights: StepWeights, ids: Tensor) -> Tensor:
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
        warn_of_losses({index: MemberState(self._members[index], list(contexts.values()))}, set())
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
        last = len(self._plans) - 1
        rows, times = zip(*steps, strict=True)
        weights = self._plans[[min(step, last) for step in times], list(rows)]
        self._steps = steps
        fused = self._fused_step.run(self, weights)
        targets = [self._pairs[row].continuation[step] for row, step in steps]
        folded = self._fused_step.folded(fused.logprobs)
        log_probs = folded.gather(-1, torch.tensor(targets, device=folded.device)[:, None])[:, 0]
        best, choices = fused.logprobs.max(-1)
        host = torch.stack([log_probs, choices.float(), (best > -torch.inf).float()]).cpu().double()
        for place, index in fused.is_not_finite.nonzero().tolist():
            raise self._members[index].not_finite(self.where(place))
        for place, is_left in enumerate(host[2].tolist()):
            if not is_left:
                raise messages.nothing_left(self._method_name, self.where(place))
        return host[0].tolist(), host[1].long().tolist()

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

    # What the fused step reads

    def where(self, position: int) -> str:
        """Say which continuation and step a position is."""
        row, step = self._steps[position]
        return f"in {self._names[row]} at step {step + 1}"

    def sitting_out(self) -> dict[int, list[int]]:
        """For each member the positions at which it cannot speak."""
        return {
            index: [n for n, (row, step) in enumerate(self._steps) if row in texts and texts[row].sits_out[step]]
            for index, texts in self._texts.items()
        }

    def read_gate(self, gate: int, positions: Sequence[int]) -> Tensor | None:
        """Give the gate member's logits at all positions."""
        return self._logits(gate)

    def read(self, needed: Tensor) -> list[Tensor | None]:
        """Give the logits of all members that read these texts."""
        return [self._logits(index) for index in range(len(self._members))]

    def _logits(self, index: int) -> Tensor | None:
        forced = self._forced.get(index)
        return None if forced is None else forced.take(self._steps).to(self._method.device)
