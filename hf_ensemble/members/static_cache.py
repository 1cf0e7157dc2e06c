"""A cache of fixed size, so that a step is one CUDA graph whatever the lengths of the rows.

Every row starts at its first slot: the slot of an id is its position, and what a query sees depends on its position
alone. So rows of any lengths share a step, and rolling back takes no work: what stands in later slots is never seen,
and overwritten when the row grows again.
"""

import copy
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .cached_rows import AHEAD, CachedRows, last_ids, most_new
from .static_buffers import GROWTH, BufferPool, StaticBuffers, widths_of

_GRAIN = 64
"""Capacities are multiples of it. Attention reads all slots, so there are only as many as a call is expected to need.
"""

_MAX_RESERVE = 2048
"""Largest number of slots reserved for future ids."""

_IDS_AT_ONCE = 8192
"""Largest number of ids of all rows in one forward pass; longer prompts are read in several."""


class StaticRows(CachedRows):
    """Rows in static buffers.

    Args:
        pool: The member's buffers.
        num_rows: Number of rows.
        num_expected: Number of ids that each row is expected to grow by.
        mode: `fused` or `static`.
    """

    run_beside = True

    def __init__(self, pool: BufferPool, num_rows: int, num_expected: int, mode: str = "static"):
        super().__init__(num_rows)
        self.mode = mode
        self._pool = pool
        self._num_expected = min(num_expected, _MAX_RESERVE)
        self._buffers: StaticBuffers | None = None
        self._give_back: Any = None

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Start a step for all rows, or several for long prompts."""
        num_cached = self._num_cached_of(texts)
        num_logits = max(num_last)
        widths, num_rows, num_taken = self._passes(most_new(texts, num_cached, num_last), len(texts), num_logits)
        lengths = list(map(len, texts))
        self.reserve(len(texts), max(lengths))
        width = sum(widths)
        rows = [last_ids(text, width) for text in texts]
        rows += [[0] * width] * (num_rows - len(rows))
        starts = [length - width for length in lengths] + [-width] * (num_rows - len(lengths))
        packed = torch.tensor([[*row, start] for row, start in zip(rows, starts, strict=True)])
        begin = 0
        for size in widths:
            # The last pass contains all ids with wanted logits.
            part = torch.cat([packed[:, begin : begin + size], packed[:, -1:] + begin], dim=-1)
            begin += size
            logits = self._held.run(part, 1 if begin < width else num_taken)
        self._follow(texts, num_cached)
        return logits[: len(texts), -num_logits:]

    def _passes(self, num_new: int, num_texts: int, num_logits: int) -> tuple[list[int], int, int]:
        """How many ids a row each forward pass takes, for how many rows, and how many logits the last one gives."""
        num_rows = _power_of_two(num_texts)
        widths = widths_of(num_rows)
        most = widths[-1]
        if num_logits <= most and (num_new <= most or self.mode == "fused"):
            num_full = (num_new - 1) // most
            first, num_taken = (
                next(width for width in widths if width >= count) for count in (num_new - num_full * most, num_logits)
            )
            return [first, *[most] * num_full], num_rows, num_taken
        at_once = max(num_logits, _IDS_AT_ONCE // num_texts)
        num_before = max(0, num_new - at_once)
        sizes = [at_once] * (num_before // at_once) + ([num_before % at_once] if num_before % at_once else [])
        return [*sizes, num_new - num_before], num_texts, num_logits

    def run_ahead(self, last_ids: Tensor) -> Tensor | None:
        """Start the step after one more id in every row; None if there is no room for it."""
        lengths = list(map(len, self.cached))
        if self._buffers is None or max(lengths) + 1 >= self._buffers.capacity:
            return None
        starts = [*lengths, *[-1] * (_power_of_two(len(lengths)) - len(lengths))]
        logits = self._held.run(torch.tensor([[0, start] for start in starts]), 1, last_ids)
        for held in self.cached:
            held.append(AHEAD)
        return logits[: len(lengths)]

    def cut(self, row: int, length: int) -> bool:
        """Let the cache of a row end earlier: what stands in later slots is never seen."""
        del self.cached[row][length:]
        return True

    def beside(self) -> AbstractContextManager[None]:
        """Launch on the stream of the steps; the rows must have been read."""
        return self._held.beside()

    def collect(self, logits: Tensor) -> Tensor:
        """Copy the logits of the last started step."""
        self._held.wait()
        return logits.clone() if self._held.holds_logits else logits

    def fork(self, rows: Sequence[int]) -> "StaticRows":
        """Return independent rows that continue from these."""
        twin = copy.copy(self)
        twin.cached = [list(self.cached[row]) for row in rows]
        buffers = twin._hold_buffers(_power_of_two(len(rows)), self._held.capacity)
        buffers.take(self._held, rows, range(len(rows)), max(map(len, twin.cached)))
        return twin

    def adopt(self, fork: "StaticRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        taken = {place: row for place, row in enumerate(rows) if row is not None}
        longest = max(len(fork.cached[row]) for row in taken.values())
        self.reserve(len(self.cached), longest)
        self._held.take(fork._held, list(taken.values()), list(taken), longest)
        for place, row in taken.items():
            self.cached[place] = list(fork.cached[row])

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self.cached = [list(self.cached[row]) for row in rows]
        old = self._buffers
        if old is not None and rows and list(rows) != list(range(len(rows))):
            if len(rows) > old.num_rows:
                give_back = self._give_back
                buffers = self._hold_buffers(_power_of_two(len(rows)), old.capacity)
                buffers.take(old, rows, range(len(rows)), max(map(len, self.cached)))
                give_back()
            else:
                old.take(old, rows, range(len(rows)), max(map(len, self.cached)))

    @property
    def _held(self) -> StaticBuffers:
        assert self._buffers is not None
        return self._buffers

    def reserve(self, num_rows: int, longest: int) -> None:
        """Reserve room for rows of up to `longest` ids, and for expected ids."""
        old, give_back = self._buffers, self._give_back
        if old is None:
            self._hold_buffers(_power_of_two(num_rows), _capacity(longest + self._num_expected))
        elif longest >= old.capacity:
            buffers = self._hold_buffers(old.num_rows, _capacity(max(longest, int(GROWTH * old.capacity))))
            buffers.take(old, range(num_rows), range(num_rows), max(map(len, self.cached)))
            give_back()

    def _hold_buffers(self, num_rows: int, capacity: int) -> StaticBuffers:
        made_for = None if self._buffers is None else self._buffers.made_for
        self._buffers = buffers = self._pool.acquire(num_rows, capacity, made_for, self.mode == "fused")
        self._give_back = weakref.finalize(self, self._pool.release, buffers)
        self._give_back.atexit = False
        return buffers


def _capacity(longest: int) -> int:
    return -(-(longest + 1) // _GRAIN) * _GRAIN


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
