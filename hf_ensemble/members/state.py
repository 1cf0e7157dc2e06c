"""A member's cached state for the rows of one call."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..vocabulary.context import num_common
from .cached_rows import CachedRows
from .contexts import ContextIds, WaitingContext
from .member import Member

C = TypeVar("C", bound=ContextIds)


class MemberState(Generic[C]):
    """A member's caches for the rows of one call: brings every row to its context and gives the logits after it.

    Args:
        member: The member.
        contexts: One context a row.
        mode: The cache mode; default: the member's.
        num_expected: Number of ids by which each row is expected to grow.

    Attributes:
        num_forwards: Number of forward passes so far.
    """

    def __init__(self, member: Member, contexts: Sequence[C], mode: str | None = None, num_expected: int = 0):
        self.member = member
        self.contexts = list(contexts)
        self.num_forwards = 0
        self._mode = mode
        self._num_expected = num_expected
        self._logits: Tensor | None = None
        self._is_pending = False
        self._lengths: list[int] = []

    @cached_property
    def _rows(self) -> CachedRows:
        """The caches; made when they are first needed, since finding the mode runs the member."""
        return self.member.new_rows(len(self.contexts), self._num_expected, self._mode)

    @property
    def cache_mode(self) -> str:
        """How its caches follow a text; see `Member.cache_mode`."""
        return self._rows.mode

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs."""
        return self.cache_mode == "static"

    def logits(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> Tensor:
        """Bring rows to their contexts and return the logits after their last ids.

        Only what differs from the cached contexts is computed: each row rolls back to the longest common prefix and
        takes what is new, all rows in one forward where the member's cache allows.

        Args:
            num_last: Number of last ids after each of which logits are wanted; or one such number a row.
            rows: Rows that are wanted; the others stay where they are and catch up when they are wanted. Default: all.
                All are run the first time.

        Returns:
            Logits of shape `(num_rows, vocab_size)`, or, if numbers above 1 are asked for, `(num_rows, num_last,
            vocab_size)` with the greatest of them, on the member's device: each row's stand at the right edge, and what
            is before them has no meaning. Nor have those of rows that were not wanted.
        """
        self.start(num_last, rows)
        self._collect()
        assert self._logits is not None
        num_last = num_last if isinstance(num_last, int) else max(num_last)
        logits = self._logits[:, -num_last:]
        return logits[:, -1] if num_last == 1 else logits

    def start(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> None:
        """Start what `logits` with the same arguments waits for, so that members run side by side."""
        of_rows = [num_last] * len(self.contexts) if isinstance(num_last, int) else list(num_last)
        num_last = max(of_rows)
        if rows is None or not self._lengths:
            rows = range(len(self.contexts))
        stale = [
            row
            for row, context in enumerate(self.contexts)
            if not self._lengths or not len(context.ids) == self._lengths[row] == context.num_kept
        ]
        wanted = set(stale).intersection(rows)
        if self._logits is None or self._logits.shape[1] < num_last or wanted:
            contexts: list[ContextIds] = list(self.contexts)
            for row in set(stale).difference(rows):
                kept = self.contexts[row].num_kept
                if kept:
                    contexts[row] = WaitingContext(self.contexts[row].ids[:kept], kept)
                else:
                    # Nothing of it stays, and a row of nothing but padding is no input for a model.
                    wanted.add(row)
            self._logits = self._rows.forward(contexts, of_rows)
            self._is_pending = True
            self.num_forwards += self._rows.num_forwards
            # A row that waits is not up to date, whatever its context becomes.
            self._lengths = [-1 if isinstance(c, WaitingContext) else len(c.ids) for c in contexts]
            for row in wanted:
                self.contexts[row].num_kept = len(self.contexts[row].ids)

    def run_ahead(self, last_ids: Tensor) -> bool:
        """Start the step after one more id of every row before the host knows it, where the cache allows.

        The contexts must grow by these ids before they are read again.

        Args:
            last_ids: On the member's device, of shape `(num_rows,)`.

        Returns:
            Whether it was started.
        """
        has_read_all = self._lengths and all(
            len(context.ids) == length == context.num_kept
            for context, length in zip(self.contexts, self._lengths, strict=True)
        )
        limit = self.member.max_positions
        if not has_read_all or (limit is not None and max(self._lengths) >= limit):
            return False
        logits = self._rows.run_ahead(last_ids)
        if logits is None:
            return False
        self._logits, self._is_pending = logits, True
        self.num_forwards += 1
        self._lengths = [length + 1 for length in self._lengths]
        for context in self.contexts:
            context.num_kept += 1
        return True

    def beside(self) -> AbstractContextManager[None]:
        """Launch what follows on the device beside everything else, where the cache allows; the rows must have been read."""
        return self._rows.beside()

    def _collect(self) -> None:
        if self._is_pending and self._logits is not None:
            self._is_pending = False
            self._logits = self._rows.collect(self._logits)

    def follow(self, contexts: Sequence[C]) -> None:
        """Follow other contexts from now on; of what is cached, what they have in common with the last ones stays."""
        for old, new in zip(self.contexts, contexts, strict=True):
            cached = old.ids[: old.num_kept]
            new.num_kept = len(cached) if new.ids[: len(cached)] == cached else num_common(cached, new.ids)
        self.contexts = list(contexts)

    def hold(self) -> None:
        """Remember the contexts as they are cached now, since rows will roll back to them."""
        self._rows.hold()

    def fork(self, rows: Sequence[int]) -> "MemberState[C]":
        """Return a state of its own that continues from row `rows[n]` in its row n; its contexts are yet to follow."""
        self._collect()
        twin: MemberState[C] = copy.copy(self)
        twin._rows = self._rows.fork(rows)
        twin.contexts = [copy.copy(self.contexts[row]) for row in rows]
        twin.num_forwards = 0
        twin._logits, twin._lengths = None, []
        return twin

    def adopt(self, fork: "MemberState[C]", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork, or, where that is None, stay as it is."""
        self._collect()
        fork._collect()
        self._rows.adopt(fork._rows, rows)
        taken = [(place, row) for place, row in enumerate(rows) if row is not None]
        for place, row in taken:
            self.contexts[place] = fork.contexts[row]
            self._lengths[place] = fork._lengths[row]
        if self._logits is not None and fork._logits is not None:
            own, new = (logits[:, -1:] for logits in (self._logits, fork._logits))
            places, of_fork = torch.tensor(taken, device=own.device).T
            self._logits = own.index_copy(0, places, new[of_fork])

    def select(self, rows: Sequence[int], contexts: Sequence[C]) -> None:
        """Keep, repeat or drop rows: row n continues from what was row `rows[n]`, and now follows `contexts[n]`."""
        self._collect()
        if "_rows" in vars(self):
            self._rows.select(rows)
        self.contexts = list(contexts)
        self._lengths = [self._lengths[row] for row in rows] if self._lengths else []
        if self._logits is not None:
            self._logits = self._logits[torch.tensor(list(rows), device=self._logits.device, dtype=torch.long)]


def padded_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids padded on the left, and 1 for what is no padding, each of shape `(num_rows, longest)`."""
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    ids = torch.tensor([[pad] * n + list(row) for n, row in zip(missing, rows, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)])
    return ids, mask
