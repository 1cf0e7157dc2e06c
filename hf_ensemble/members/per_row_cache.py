"""One cache per row, for members whose cache cannot be cut."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .cached_rows import CachedRows
from .member_model import MemberModel

_NUM_SNAPSHOTS = 8


class SeparateRows(CachedRows):
    """One cache per row, for members whose cache cannot be cut: with snapshots, or without any cache."""

    can_be_cut = False

    def __init__(self, member: MemberModel, num_rows: int, mode: str):
        super().__init__(num_rows)
        self.member = member
        self.mode = mode
        self._rows = [_SeparateRow() for _ in range(num_rows)]

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Bring rows to their texts; returns logits of shape `(num_rows, num_logits, vocab_size)` after their last ids."""
        self.num_forwards = 0
        logits = [
            self._forward_row(row, text, wanted)
            for row, (text, wanted) in enumerate(zip(texts, num_last, strict=True))
        ]
        width = max(num_last)
        return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in logits])

    def _forward_row(self, number: int, text: Sequence[int], num_last: int) -> Tensor:
        row, held = self._rows[number], self.cached[number]
        if not num_last:
            return torch.zeros(1, 1, self.member.vocab_size, dtype=self.member.model.dtype, device=self.member.device)
        if held == text and row.logits is not None and row.logits.shape[1] >= num_last:
            return row.logits[:, -num_last:]
        if self.mode == "recompute":
            row.logits = self._run(text, 0, None, num_last)
        else:
            start = row.roll_back(min(self.num_cached(number, text), len(text) - num_last), len(held))
            if row.cache is None:
                row.cache = DynamicCache(config=self.member.model.config)
            if self.mode == "row_chunks" or start == 0:
                ends = [len(text)] if num_last > 1 or start > 0 or len(text) == 1 else [len(text) - 1, len(text)]
            else:
                ends = list(range(start + 1, len(text) + 1))
            parts = []
            for end in ends:
                parts.append(self._run(text[start:end], start, row.cache, min(num_last, end - start)))
                start = end
                row.take_snapshot(end)
            row.logits = torch.cat(parts, dim=1)[:, -num_last:]
        self.cached[number] = list(text)
        return row.logits

    def _run(self, ids: Sequence[int], start: int, cache: Cache | None, num_logits: int) -> Tensor:
        device = self.member.device
        positions = torch.arange(start, start + len(ids), device=device)[None]
        self.num_forwards += 1
        return self.member.forward(torch.tensor([ids], device=device), positions, None, cache, num_logits)

    def hold(self) -> None:
        """Keep a snapshot of the current rows."""
        for row in self._rows:
            row.hold()

    def fork(self, rows: Sequence[int]) -> "SeparateRows":
        """Return independent rows that continue from these."""
        twin = copy.copy(self)
        twin.cached = [list(self.cached[row]) for row in rows]
        twin._rows = [self._rows[row].twin() for row in rows]
        return twin

    def adopt(self, fork: "SeparateRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        for place, row in enumerate(rows):
            if row is not None:
                # If several rows continue from a state, each needs its own copy.
                self._rows[place] = fork._rows[row].twin() if row in rows[:place] else fork._rows[row]
                self.cached[place] = list(fork.cached[row])

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self.cached = [list(self.cached[row]) for row in rows]
        self._rows = [self._rows[row].twin() if row in rows[:n] else self._rows[row] for n, row in enumerate(rows)]


@dataclass
class _SeparateRow:
    """A cache, and snapshots to roll back to. The last snapshot equals the cache."""

    cache: Cache | None = None
    logits: Tensor | None = None
    _snapshots: list[tuple[int, Cache | None]] = field(default_factory=list)  # the number of ids of each
    _held: tuple[int, Cache | None] | None = None

    def take_snapshot(self, num_ids: int) -> None:
        # States change in place, so a snapshot is a copy.
        held = [snapshot for snapshot in self._snapshots[: -_NUM_SNAPSHOTS + 1] if snapshot is self._held]
        self._snapshots = [*held, *self._snapshots[-_NUM_SNAPSHOTS + 1 :], (num_ids, copy.deepcopy(self.cache))]

    def hold(self) -> None:
        self._held = self._snapshots[-1] if self._snapshots else None

    def twin(self) -> "_SeparateRow":
        # The state itself is restored from a snapshot. Snapshots never change, so both may share them.
        return replace(self, cache=None, _snapshots=list(self._snapshots))

    def roll_back(self, num_kept: int, num_ids: int) -> int:
        """Return to the longest state of at most `num_kept` ids.

        Args:
            num_kept: How many ids may stay.
            num_ids: How many are in the cache.

        Returns:
            How many are left; the caller computes the others again.
        """
        if self.cache is not None and num_ids <= num_kept:
            return num_ids
        self._snapshots = [(n, cache) for n, cache in self._snapshots if n <= num_kept]
        num_left, snapshot = self._snapshots[-1] if self._snapshots else (0, None)
        self.cache = copy.deepcopy(snapshot)
        return num_left
