"""A member's cached state for the rows of one call."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..vocabulary.context import num_common
from .cached_rows import AHEAD, CAPTURED_MODES, CachedRows
from .entries import Entries, EntryIds
from .member import Member
from .transfer import sent

_LEAST_SAVED = 256
"""Number of ids, over all rows, that a common beginning must save, because it takes a forward pass of its own."""


@dataclass
class PlainContext:
    """Ids that their owner changes."""

    ids: list[int]


class MemberState:
    """A member's caches for the rows of a call: brings every row to its context and returns the logits after it.

    Args:
        member: The member.
        contexts: One context per row: any object with `ids`.
        mode: The cache mode; default: the member's.
        num_expected: Expected number of new ids per row.

    Attributes:
        contexts: The context that each row is brought to when its logits are requested. They may be replaced; only
            what is new is computed.
        num_forwards: Number of forward passes so far.
        where: Returns the position of a row, for errors; None if unused.
    """

    def __init__(self, member: Member, contexts: Sequence[Any], mode: str | None = None, num_expected: int = 0):
        self.member = member
        self.contexts = list(contexts)
        self.num_forwards = 0
        self.where: Callable[[int], str] | None = None
        self._mode = mode
        self._num_expected = num_expected
        self._logits: Tensor | None = None
        self._is_pending = False
        self._has_logits = [False] * len(self.contexts)  # whether `_logits` are up to date with a row's cache

    @cached_property
    def caches(self) -> CachedRows:
        """The caches; created on first use, because finding the mode runs the member."""
        return self.member.new_rows(len(self.contexts), self._num_expected, self._mode)

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs."""
        return self.caches.mode in CAPTURED_MODES

    def logits(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> Tensor:
        """Bring rows to their contexts and return the logits after their last ids.

        Only what differs from the cached contexts is computed: each row rolls back to the longest common prefix and
        reads what is new, all rows in one forward pass if the member's cache allows.

        Args:
            num_last: Number of last ids with logits, for all rows or one per row.
            rows: The wanted rows; the others stay as they are and catch up later. Default: all. The first time, all
                rows run.

        Returns:
            Logits of shape `(num_rows, vocab_size)` for the number 1, else `(num_rows, num_last, vocab_size)` with the
            greatest of the numbers, on the member's device. Each row's logits are at the right edge; what is before
            them, and rows that were not wanted, have no meaning.
        """
        self.start(num_last, rows)
        self._collect()
        assert self._logits is not None
        if num_last == 1:
            return self._logits[:, -1]
        return self._logits[:, -(num_last if isinstance(num_last, int) else max(num_last)) :]

    def start(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> None:
        """Start the work for `logits` with the same arguments, so that members run side by side."""
        of_rows = [num_last] * len(self.contexts) if isinstance(num_last, int) else list(num_last)
        if len(of_rows) > 1 and not any(self.caches.cached):
            self._read_beginning(of_rows)
        held, fresh = self.caches.cached, self._up_to_date()
        wanted = set(range(len(held)) if rows is None else rows)
        # A model cannot run a row of padding only.
        wanted.update(row for row, ids in enumerate(held) if not ids)
        if wanted <= fresh and self._logits is not None and self._logits.shape[1] >= max(of_rows):
            return
        wanted |= fresh
        texts = [context.ids if row in wanted else held[row] for row, context in enumerate(self.contexts)]
        self._logits = self.caches.forward(texts, [n if row in wanted else 0 for row, n in enumerate(of_rows)])
        self._is_pending = True
        self.num_forwards += self.caches.num_forwards
        self._has_logits = [row in wanted for row in range(len(texts))]

    def _read_beginning(self, num_last: Sequence[int]) -> None:
        """Read the ids that all rows begin with (a system prompt, examples) once, if that saves enough.

        Args:
            num_last: Number of last ids with logits, for each row.
        """
        # With `row_tokens`, only a fresh row reads many ids at once.
        if not self.member.shares_beginnings or self.caches.mode in ("recompute", "row_tokens"):
            return
        contexts, texts = self.contexts, [context.ids for context in self.contexts]
        longest = min(len(ids) - max(1, count) for ids, count in zip(texts, num_last, strict=True))
        # What the first and the last text in order begin with, all begin with.
        length = min(num_common(min(texts), max(texts)), longest)
        if length * (len(texts) - 1) < _LEAST_SAVED:
            return
        self.select([0], [PlainContext(texts[0][:length])])
        self.caches.reserve(len(texts), max(map(len, texts)))
        self.start()
        self.select([0] * len(contexts), contexts)

    # For members that send few entries instead of whole rows

    def start_entries(self, count: int, rows: Sequence[int], entry_ids: EntryIds) -> None:
        """Start the work for `entries`.

        Args:
            count: Number of best entries of each row.
            rows: Rows that are wanted.
            entry_ids: Which ids take part, and which of them are the same entry.
        """
        if self.where is not None:
            self.caches.where = self.where
        self.caches.start_entries([context.ids for context in self.contexts], rows, count, entry_ids)
        self.num_forwards += 1

    def entries(self) -> Entries:
        """Return the best entries of the wanted rows, with all ids of each and of EOS, and the normalizers."""
        return self.caches.entries()

    def start_logits_of(self, ids: Sequence[Sequence[int]]) -> None:
        """Start the work for `logits_of`: the logits of these ids, for each wanted row."""
        self.caches.start_logits_of(ids)

    def logits_of(self) -> Entries:
        """Return the requested ids with their logits."""
        return self.caches.logits_of()

    def know(self, row: int, logits: Tensor) -> None:
        """Set the logits after a row's context, if the cache can be cut there; otherwise they are computed when needed.

        Args:
            row: The row, whose cache begins with its context.
            logits: Of shape `(vocab_size,)`.
        """
        count = len(self.contexts[row].ids)
        if (
            self._logits is not None
            and self.num_cached(row, self.contexts[row]) == count
            and self.caches.cut(row, count)
        ):
            self._collect()
            self._logits[row, -1] = logits
            self._has_logits[row] = True

    def run_ahead(self, last_ids: Tensor) -> bool:
        """Start the step after one more id of every row before the host knows it, if the cache allows.

        The contexts must grow by these ids before they are read again; if they do not, say so by `forget_ahead`.

        Args:
            last_ids: On the member's device, of shape `(num_rows,)`.

        Returns:
            Whether it was started.
        """
        is_full = any(len(context.ids) >= self.member.max_length for context in self.contexts)
        if not self.contexts or is_full or len(self._up_to_date()) < len(self.contexts):
            return False
        logits = self.caches.run_ahead(last_ids)
        if logits is None:
            return False
        self._logits, self._is_pending = logits, True
        self.num_forwards += 1
        return True

    def forget_ahead(self) -> None:
        """Roll back a step that ran ahead with ids that the host never learns."""
        for row, ids in enumerate(self.caches.cached):
            while ids and ids[-1] == AHEAD:
                ids.pop()
                self._has_logits[row] = False

    def num_cached(self, row: int, context: Any) -> int:
        """Return the number of leading ids of a context in a row's cache."""
        return self.caches.num_cached(row, context.ids)

    def _up_to_date(self) -> set[int]:
        """The rows whose contexts equal the cache, with the logits after it."""
        return {
            row
            for row, (context, has_logits) in enumerate(zip(self.contexts, self._has_logits, strict=True))
            if has_logits and len(context.ids) == len(self.caches.cached[row]) == self.num_cached(row, context)
        }

    def _collect(self) -> None:
        if self._is_pending and self._logits is not None:
            self._is_pending = False
            self._logits = self.caches.collect(self._logits)

    def fork(self, rows: Sequence[int], contexts: Sequence[Any]) -> "MemberState":
        """Return an independent state whose row n continues from row `rows[n]` and follows `contexts[n]`."""
        self._collect()
        twin = copy.copy(self)
        twin.caches = self.caches.fork(rows)
        twin.contexts = list(contexts)
        twin.num_forwards = 0
        twin._logits, twin._has_logits = None, [False] * len(twin.contexts)
        return twin

    def adopt(self, fork: "MemberState", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        self._collect()
        fork._collect()
        self.caches.adopt(fork.caches, rows)
        taken = [(place, row) for place, row in enumerate(rows) if row is not None]
        for place, row in taken:
            self.contexts[place] = fork.contexts[row]
            self._has_logits[place] = fork._has_logits[row]
        if self._logits is not None and fork._logits is not None:
            own, new = (logits[:, -1:] for logits in (self._logits, fork._logits))
            places, of_fork = sent(taken, own.device).T
            self._logits = own.index_copy(0, places, new[of_fork])

    def extend(self, contexts: Sequence[Any]) -> None:
        """Add rows; none has been read yet."""
        assert "caches" not in vars(self)
        self.contexts += contexts
        self._has_logits += [False] * len(contexts)

    def join(self, other: "MemberState") -> None:
        """Append the rows of another state of the member, which is not used afterwards."""
        states = (self, other)
        if any("caches" in vars(state) for state in states):
            for state in states:
                if "caches" not in vars(state) and not state.caches.is_elsewhere:
                    state.start()
                state._collect()
            self.caches.join(other.caches)
        self.contexts += other.contexts
        self.num_forwards += other.num_forwards
        # Few rows have their logits already; the others are about to read the last id.
        self._logits, self._has_logits = None, [False] * len(self.contexts)

    def select(self, rows: Sequence[int], contexts: Sequence[Any] | None = None) -> None:
        """Keep, repeat or drop rows: row n continues from former row `rows[n]`, and now follows `contexts[n]`.

        If no row moves, nothing is waited for. Default: every row keeps its context.
        """
        if list(rows) != list(range(len(self.contexts))):
            self._collect()
            if "caches" in vars(self):
                self.caches.select(rows)
            self._has_logits = [self._has_logits[row] for row in rows]
            if self._logits is not None:
                self._logits = self._logits[sent(torch.tensor(list(rows), dtype=torch.long), self._logits.device)]
        self.contexts = [self.contexts[row] for row in rows] if contexts is None else list(contexts)


def padded_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids padded on the left, and a mask with 0 for padding, each of shape `(num_rows, longest)`."""
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    ids = torch.tensor([[pad] * n + list(row) for n, row in zip(missing, rows, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)])
    return ids, mask
