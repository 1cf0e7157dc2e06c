"""One cache a row, for members whose cache cannot be cut."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .cached_rows import CachedRows
from .contexts import ContextIds, WaitingContext
from .member_model import MemberModel

_NUM_SNAPSHOTS = 8


class SeparateRows(CachedRows):
    """One cache a row, for members whose cache cannot be cut: snapshots, or nothing cached at all."""

    def __init__(self, member: MemberModel, num_rows: int, mode: str):
        self.member = member
        self.mode = mode
        self.num_forwards = 0
        self._rows = [_SeparateRow() for _ in range(num_rows)]

    def forward(self, contexts: Sequence[ContextIds], num_last: Sequence[int]) -> Tensor:
        """Bring rows to their contexts; logits of shape `(num_rows, num_logits, vocab_size)` after the last ids of each."""
        self.num_forwards = 0
        logits = [
            self._forward_row(row, context, wanted)
            for row, context, wanted in zip(self._rows, contexts, num_last, strict=True)
        ]
        width = max(num_last)
        return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in logits])

    def _forward_row(self, row: "_SeparateRow", context: ContextIds, num_last: int) -> Tensor:
        num_ids = len(context.ids)
        if isinstance(context, WaitingContext):
            size = 1, num_last, self.member.vocab_size
            return torch.zeros(size, dtype=self.member.model.dtype, device=self.member.device)
        if context.num_kept == num_ids == row.length and row.logits is not None and row.logits.shape[1] >= num_last:
            return row.logits[:, -num_last:]
        if self.mode == "recompute":
            row.logits = self._run(context.ids, 0, None, num_last)
        else:
            row.roll_back(min(context.num_kept, num_ids - num_last))
            if row.cache is None:
                row.cache = DynamicCache(config=self.member.model.config)
            if self.mode == "row_chunks" or row.length == 0:
                ends = [num_ids] if num_last > 1 or row.length > 0 or num_ids == 1 else [num_ids - 1, num_ids]
            else:
                ends = list(range(row.length + 1, num_ids + 1))
            parts = []
            for end in ends:
                parts.append(
                    self._run(context.ids[row.length : end], row.length, row.cache, min(num_last, end - row.length))
                )
                row.length = end
                row.take_snapshot()
            row.logits = torch.cat(parts, dim=1)[:, -num_last:]
        row.length = num_ids
        return row.logits

    def _run(self, ids: list[int], start: int, cache: Cache | None, num_logits: int) -> Tensor:
        device = self.member.device
        positions = torch.arange(start, start + len(ids), device=device)[None]
        self.num_forwards += 1
        return self.member.forward(torch.tensor([ids], device=device), positions, None, cache, num_logits)

    def hold(self) -> None:
        """Keep a snapshot of the rows as they are now."""
        for row in self._rows:
            row.hold()

    def fork(self, rows: Sequence[int]) -> "SeparateRows":
        """Rows of their own that continue from these."""
        twin = copy.copy(self)
        twin._rows = [self._rows[row].fork() for row in rows]
        return twin

    def adopt(self, fork: "SeparateRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork, or, where that is None, stay."""
        self._rows = [own if row is None else fork._rows[row] for own, row in zip(self._rows, rows, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        taken: set[int] = set()
        selected = []
        for row in rows:
            selected.append(self._rows[row].twin() if row in taken else self._rows[row])
            taken.add(row)
        self._rows = selected


class _SeparateRow:
    """A cache, the number of ids in it, and snapshots to roll back to."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.length = 0
        self.logits: Tensor | None = None
        self._snapshots: list[tuple[int, Cache | None]] = []
        self._held: tuple[int, Cache | None] | None = None

    def take_snapshot(self) -> None:
        # States change in place, so a snapshot is a copy.
        held = [snapshot for snapshot in self._snapshots[: -_NUM_SNAPSHOTS + 1] if snapshot is self._held]
        self._snapshots = [
            *held,
            *self._snapshots[-_NUM_SNAPSHOTS + 1 :],
            (self.length, copy.deepcopy(self.cache)),
        ]

    def hold(self) -> None:
        self._held = self._snapshots[-1] if self._snapshots else None

    def twin(self) -> "_SeparateRow":
        twin = self._with_same_snapshots()
        twin.cache = copy.deepcopy(self.cache)
        return twin

    def fork(self) -> "_SeparateRow":
        # The state itself is restored from the last snapshot.
        twin = self._with_same_snapshots()
        twin.cache, twin.logits = None, None
        twin.length = self.length + 1
        return twin

    def _with_same_snapshots(self) -> "_SeparateRow":
        # Snapshots never change, so both may hold the same ones.
        twin = copy.copy(self)
        twin._snapshots = list(self._snapshots)
        return twin

    def roll_back(self, num_kept: int) -> None:
        """Return to the longest state of at most `num_kept` ids; the caller computes the rest again."""
        if self.length <= num_kept:
            return
        self._snapshots = [(n, cache) for n, cache in self._snapshots if n <= num_kept]
        if self._snapshots:
            self.length, snapshot = self._snapshots[-1]
            self.cache = copy.deepcopy(snapshot)
        else:
            self.length, self.cache = 0, None
