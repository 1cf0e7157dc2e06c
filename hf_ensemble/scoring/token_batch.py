"""Scores continuations by the fused distribution of every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import messages
from ..decoding.call import Call
from ..decoding.prompts import Prompts, read_prompts
from ..decoding.step import FusedStep
from ..decoding.step_weights import StepWeights
from ..decoding.teacher_forcing import ForcedMember, ForcedText, advance_by_blocks
from ..decoding.text_warnings import warn_of_losses
from ..members.state import MemberState, padded_left
from ..methods.base import TokenMethod
from .by_member import check_positions
from .likelihoods import Batch


class TokenBatch:
    """A batch scored by the fused distribution of every step.

    Args:
        call: The call.
        method: The method, made for its members.
        batch: The batch.

    Raises:
        ConfigurationError: If a text does not fit a member's positions.
        MemberError: If a member fails or returns NaN, or the method leaves nothing to choose from.
    """

    def __init__(self, call: Call, method: TokenMethod, batch: Batch):
        self._call = call
        self._members = members = call.members
        self._method = method
        gate = call.config.gate_rule
        # Steps come in blocks of many sizes, for which no graphs are kept.
        self._fused_step = FusedStep(members, method, is_wide=True, gate=gate, captures=False)
        self._pairs, self._names = batch.pairs, batch.names
        self._steps: Sequence[tuple[int, int]] = []  # the (row, step) pairs that are fused just now
        self._num_steps = [len(pair.continuation) for pair in batch.pairs]
        ids, mask = padded_left([pair.prompt for pair in batch.pairs])
        self._plans = self._plans_of(batch.weights, ids)  # (1 or num_steps, B, M)
        always = {0} if method.starts_from_primary else set()
        always |= set() if gate is None else {gate[0]}
        running = batch.weights.participants | always
        prompts = read_prompts(members, running, method.resync, ids, mask, batch.own_prompts)
        self._texts = {index: self._texts_of(index, prompts, index in always) for index in sorted(running)}
        if 0 not in running and any(any(text.sits_out) for rows in self._texts.values() for text in rows.values()):
            # If no other member can, the primary continues.
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

    def _texts_of(self, index: int, prompts: Prompts, for_all: bool) -> dict[int, ForcedText]:
        """What a member reads in its rows."""
        takes_part = for_all | (self._plans[..., index] != 0).any(0)
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
        totals = [0.0] * len(self._pairs)
        chosen: list[list[int]] = [[] for _ in self._pairs]
        last = len(self._plans) - 1
        for steps in advance_by_blocks(list(self._forced.values()), self._num_steps, len(self._method.union)):
            self._steps = steps
            weights = self._plans[[min(step, last) for _, step in steps], [row for row, _ in steps]]
            fused = self._fused_step.run(self, weights)
            targets = [self._pairs[row].continuation[step] for row, step in steps]
            folded = self._fused_step.folded(fused.logprobs)
            log_probs = folded.gather(-1, torch.tensor(targets, device=folded.device)[:, None])[:, 0]
            best, choices = fused.logprobs.max(-1)
            *host, is_left = torch.stack([log_probs, choices.float(), (best > -torch.inf).float()]).tolist()
            for place, index in fused.is_not_finite.nonzero().tolist():
                raise self._members[index].not_finite(self.where(place))
            if 0 in is_left:
                raise messages.nothing_left(self._call.config.name, self.where(is_left.index(0)))
            for (row, _), log_prob, choice in zip(steps, *host, strict=True):
                totals[row] += log_prob
                chosen[row].append(int(choice))
        return [
            (total, self._is_greedy(pair.continuation, of_row))
            for total, pair, of_row in zip(totals, self._pairs, chosen, strict=True)
        ]

    def _is_greedy(self, continuation: Sequence[int], choices: Sequence[int]) -> bool:
        """Whether greedy decoding writes these ids; an entry of several ids is one choice."""
        at = 0
        while at < len(continuation):
            ids, _ = self._fused_step.entry(choices[at])
            if not ids or list(continuation[at : at + len(ids)]) != ids[: len(continuation) - at]:
                return False
            at += len(ids)
        return True

    # What the fused step reads

    def where(self, position: int) -> str:
        """Return the continuation and step of a position."""
        row, step = self._steps[position]
        return f"in {self._names[row]} at step {step + 1}"

    def sitting_out(self) -> dict[int, list[int]]:
        """For each member, the positions at which it sits out."""
        return {
            index: [n for n, (row, step) in enumerate(self._steps) if row in texts and texts[row].sits_out[step]]
            for index, texts in self._texts.items()
        }

    def losing_space(self) -> list[int]:
        """The positions at the beginning of a text, where some members' entries have lost a leading space."""
        texts = [[rows[row] for rows in self._texts.values() if row in rows] for row in range(len(self._pairs))]
        return [n for n, (row, step) in enumerate(self._steps) if any(text.loses_space[step] for text in texts[row])]

    def normalizers(self) -> dict[int, Tensor | None]:
        """None: whole rows are read."""
        return {}

    def read(self, needed: Tensor) -> list[Tensor | None]:
        """Return the logits of the members that are needed somewhere."""
        return [
            self._forced[index].take(self._steps).to(self._method.device)
            if is_needed and index in self._forced
            else None
            for index, is_needed in enumerate(needed.any(0).tolist())
        ]
