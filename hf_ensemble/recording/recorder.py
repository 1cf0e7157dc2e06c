"""Records which member decides what in a call: small tensors at every step, read by the host in blocks and at the end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from ..members.member import Member
from ..methods.base import MemberMaps
from ..mixing import merge_duplicates, top_entries
from .decision import Decision, Entry, MemberDecision
from .decisions import Decisions
from .names import Piece, name_of, names_of, pieces_of, prompts_of

_BLOCK = 256
"""Number of steps after which records move to the host, so that a long text needs little memory on the device."""


@dataclass
class _Step:
    """A step with a choice. Which members count is kept on the CPU.

    Attributes:
        number: Number of steps before it.
        weights: Mixing weights, of shape `(batch_size, num_members)`.
        heard: Which member counts in which row, of the same shape.
        closed: Rows that a gate closed; None without a gate.
        queued: Rows that do not choose.
        members: Indices of the recorded members.
        starts: Rows in which a text begins.
        numbers: For each row, the ensemble's probability of the choice; then for each member its own, those of its
            best entries, their ids, and 1 for entries that were chosen. Set after the choice.
    """

    number: int
    weights: Tensor
    heard: Tensor
    closed: Collection[int] | None
    queued: Collection[int]
    members: list[int]
    starts: Collection[int] = ()
    numbers: Any = None


@dataclass
class DecisionRecorder:
    """The records of the steps of one call, and the decisions made from them.

    Attributes:
        members: The members; the first is the primary.
        maps: Index maps of those that may be heard, the primary's first.
        prompt_ids: Of shape `(batch_size, prompt_length)`, a row for each row of the output.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape or with a row for each prompt; None for
            no padding.
        num_entries: Number of best entries kept per member.
        is_wide: Whether union entries are chosen, not the primary's ids.
        reads_first_ids: Whether, of an entry that a member lacks, the method reads the first id that writes it.
        maps_at_start: Index maps where a text begins; None where they are as anywhere.
    """

    members: Sequence[Member]
    maps: Sequence[MemberMaps]
    prompt_ids: Tensor
    prompt_mask: Tensor | None
    num_entries: int
    is_wide: bool = False
    reads_first_ids: bool = False
    maps_at_start: Sequence[MemberMaps] | None = None

    def __post_init__(self) -> None:
        self._prompts = prompts_of(self.members[0], self.prompt_ids, self.prompt_mask)
        # Log-probabilities of the ensemble and of the members that count, kept until the choice is known.
        self._pending: tuple[Tensor, dict[int, Tensor], _Step] | None = None
        self._steps: list[_Step] = []
        self._done: list[Tensor] = []

    @cached_property
    def _keys(self) -> list[Tensor]:
        """What each member's ids count as: union entries, or the primary's ids that begin to write them; -1 for none."""
        return self._keys_of(self.maps)

    @cached_property
    def _keys_at_start(self) -> list[Tensor]:
        return self._keys_of(self.maps_at_start or self.maps)

    def _keys_of(self, of_members: Sequence[MemberMaps]) -> list[Tensor]:
        if self.is_wide:
            return [maps.to_union for maps in of_members]
        first = self.maps[0].first_id
        return [torch.where(maps.to_union < 0, -1, first[maps.to_union]) for maps in of_members]

    def take(
        self,
        logits: Sequence[Tensor | None],
        fused: Tensor,
        weights: Tensor,
        heard: Tensor,
        closed: Collection[int] | None = None,
        queued: Collection[int] = (),
        listing: Collection[int] = (),
        starts: Collection[int] = (),
    ) -> None:
        """Record what is known before the choice.

        Args:
            logits: Each member's logits in float32, of shape `(batch_size, vocab_size)`, or None.
            fused: The ensemble's log-probabilities, of shape `(batch_size, width)`.
            weights: Mixing weights, of shape `(batch_size, num_members)`, on the CPU.
            heard: Which member counts in which row, of the same shape.
            closed: Rows that a gate closed; None without a gate.
            queued: Rows that do not choose.
            listing: Members of which these are log-probabilities, of few ids.
            starts: Rows in which a text begins, where entries of some members have lost a leading space.
        """
        logprobs = {}
        for index, one in enumerate(logits):
            if one is not None and bool(heard[:, index].any()):
                masked = self.maps[index].masked(one)
                logprobs[index] = masked if index in listing else masked.log_softmax(-1)
        step = _Step(len(self._done), weights, heard, closed, queued, list(logprobs), starts)
        self._pending = fused, logprobs, step

    def choose(self, chosen: Tensor, done: Tensor) -> None:
        """Record the choice.

        Args:
            chosen: Chosen ids, the primary's or union ids, of shape `(batch_size,)`.
            done: Rows that have ended, of shape `(batch_size,)`.
        """
        self._done.append(done)
        pending, self._pending = self._pending, None
        if pending is None:
            return
        fused, of_member, step = pending
        chosen = chosen.to(fused.device)[:, None]
        primary = self.maps[0]
        size = len(primary.to_union)
        own = primary.to_union[chosen.clamp_max(size - 1)]
        union = torch.where(chosen < size, own, chosen)
        key = union if self.is_wide else self._keys[0][chosen]
        numbers = [fused.gather(-1, chosen).exp()]
        begins = torch.zeros(len(chosen), 1, dtype=torch.bool)
        begins[list(step.starts)] = True
        for index, logprobs in of_member.items():
            found = self._of_member(logprobs, self.maps[index], self._keys[index], key, union)
            if step.starts and self.maps_at_start is not None:
                maps, keys = self.maps_at_start[index], self._keys_at_start[index]
                found = torch.where(begins.to(found.device), self._of_member(logprobs, maps, keys, key, union), found)
            numbers.append(found)
        # As float32, in which ids are exact.
        step.numbers = torch.cat(numbers, -1)
        self._steps.append(step)
        if len(self._steps) % _BLOCK == 0:
            self._move_to_host()

    def _of_member(self, logprobs: Tensor, maps: MemberMaps, keys: Tensor, key: Tensor, union: Tensor) -> Tensor:
        """What `_Step.numbers` holds of a member, of shape `(batch_size, 1 + 3 * num_entries)`.

        Args:
            logprobs: The member's, of shape `(batch_size, vocab_size)`.
            maps: Its index maps.
            keys: What its ids count as.
            key: What was chosen counts as, of shape `(batch_size, 1)`.
            union: Its union entry, likewise.
        """
        is_chosen = keys == key  # (B, V)
        prob = logprobs.masked_fill(~is_chosen, -torch.inf).exp().sum(-1, keepdim=True)
        if self.reads_first_ids:
            first = maps.first_id[union]
            begun = logprobs.gather(-1, first.clamp_min(0)).exp().masked_fill(first < 0, 0.0)
            prob = torch.where(prob > 0, prob, begun)
        entries = merge_duplicates(logprobs, maps.duplicates)
        best, best_ids = top_entries(entries, min(self.num_entries, entries.shape[-1]))
        return torch.cat([prob.clamp_max(1.0), best.exp(), best_ids, keys[best_ids] == key], -1)

    def _move_to_host(self) -> None:
        """Move the new records to the host, in one transfer."""
        steps = [step for step in self._steps if isinstance(step.numbers, Tensor)]
        if steps:
            there = [step.numbers for step in steps]
            here = torch.cat(there, -1).cpu().split([numbers.shape[-1] for numbers in there], -1)
            for step, numbers in zip(steps, here, strict=True):
                step.numbers = numbers.tolist()

    def decisions(self, sequences: Tensor) -> Decisions:
        """Build the decisions from the records.

        Args:
            sequences: The output of the call, prompts included, of shape `(batch_size, length)`.
        """
        self._move_to_host()
        written = sequences[:, sequences.shape[1] - len(self._done) :].tolist()
        ended = torch.stack(self._done).cpu() if self._done else torch.zeros(0, len(written), dtype=torch.bool)
        # The step in which a row ends still writes in it; later steps do not.
        lengths = (~ended).long().cumprod(0).sum(0).add(1).clamp_max(len(self._done)).tolist()
        rows = []
        for row, length in enumerate(lengths):
            steps = [step for step in self._steps if step.number < length and row not in step.queued]
            starts = [step.number for step in steps]
            pieces = pieces_of(self.members[0], [written[row][a:b] for a, b in pairwise([*starts, length])])
            rows.append(tuple(self._decision(row, *one) for one in zip(steps, pieces, strict=True)))
        return Decisions(tuple(rows), names_of(self.members), self._prompts)

    def _decision(self, row: int, step: _Step, piece: Piece) -> Decision:
        said: list[MemberDecision | None] = [None] * len(self.members)
        numbers = iter(step.numbers[row])
        prob_of_chosen = next(numbers)
        for index in step.members:
            member = (self.members[index].at_text_start if row in step.starts else None) or self.members[index]
            k = min(self.num_entries, len(self.maps[index].mask))
            prob = next(numbers)
            best_probs, best_ids, is_chosen = (list(islice(numbers, k)) for _ in range(3))
            if bool(step.heard[row, index]):
                pairs = zip(best_ids, best_probs, strict=True)
                said[index] = MemberDecision(
                    weight=float(step.weights[row, index]),
                    probability=prob,
                    best=tuple(Entry(name_of(member, int(i)), p) for i, p in pairs if p > 0),
                    agrees=bool(is_chosen[0]),
                    proposes=any(is_chosen),
                )
        shares = {i: (one.weight or 0.0) * (one.probability or 0.0) for i, one in enumerate(said) if one}
        decided_by = max((index for index in shares if shares[index] > 0), key=shares.__getitem__, default=None)
        is_gate_open = None if step.closed is None else row not in step.closed
        return Decision(*piece, min(prob_of_chosen, 1.0), decided_by, is_gate_open, tuple(said))
