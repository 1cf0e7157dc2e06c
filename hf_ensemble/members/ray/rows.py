"""Caches in an actor, for a member's state."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cached_rows import CachedRows
from ..entries import Entries, EntryIds, padded_ids
from .actor import EntriesFound
from .link import ActorLink
from .wire import Delta, Packed, ids_of

_FEWEST_ENTRIES = 32
"""The least number of entries to send, 8 bytes each: they often include the others' proposals, which then need no
second request.
"""


class RemoteRows(CachedRows):
    """A member's caches for the rows of a call, in its actor: ids and row moves go there, logits come back.

    Args:
        link: The actor.
        num_rows: Number of rows.
        num_expected: Expected number of new ids per row.
        mode: The cache mode in the actor; None for the member's.
        dtype: The member's dtype, in which whole rows travel.
        vocab_size: Width of its logits.
    """

    mode = "remote"
    run_beside = True

    def __init__(
        self, link: ActorLink, num_rows: int, num_expected: int, mode: str | None, dtype: torch.dtype, vocab_size: int
    ):
        super().__init__(num_rows)
        self._link, self._dtype, self._vocab_size = link, dtype, vocab_size
        self._take_number()
        link.moves.append(("new", self._number, num_rows, num_expected, mode))
        self._asked: Any = None
        self._num_last: list[int] = []
        self._asked_ids: list[list[int]] = []

    def _take_number(self) -> None:
        self._number = next(self._link.numbers)
        # A finalizer must not talk to the actor; it is told with the next request.
        weakref.finalize(self, self._link.moves.append, ("drop", self._number)).atexit = False

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Start to bring every row to its text; see `CachedRows.forward`."""
        kept = self._num_cached_of(texts)
        self._asked = self._link.start("forward", self._number, Delta.of(texts, kept, num_last))
        self._num_last = list(num_last)
        self._follow(texts, kept)
        # Before `collect`, only its shape is read.
        return torch.empty((), dtype=self._dtype).expand(len(texts), max(num_last), self._vocab_size)

    def collect(self, logits: Tensor) -> Tensor:
        """Wait for the last started logits."""
        found: Packed
        found, self.num_forwards = self._waited()
        return _at_right_edge(found.tensor(), self._num_last)

    def start_entries(
        self, texts: Sequence[Sequence[int]], rows: Sequence[int], count: int, entry_ids: EntryIds
    ) -> None:
        """Start to find the best entries after texts; see `CachedRows.start_entries`."""
        # A model cannot run an empty row, so this one runs too.
        run = {*rows, *(row for row, held in enumerate(self.cached) if not held)}
        texts = [text if row in run else self.cached[row] for row, text in enumerate(texts)]
        kept = self._num_cached_of(texts)
        delta = Delta.of(texts, kept, [int(row in run) for row in range(len(texts))])
        kind = self._link.kind_of(entry_ids)
        self._asked = self._link.start("best", self._number, delta, ids_of(rows), kind, max(count, _FEWEST_ENTRIES))
        self._follow(texts, kept)

    def entries(self) -> Entries:
        """Wait for the last started entries."""
        found: EntriesFound
        found, self.num_forwards = self._waited()
        ids, logits = torch.from_numpy(found.ids.astype(np.int64)), torch.from_numpy(np.array(found.logits))
        return Entries(ids, logits, torch.from_numpy(np.array(found.normalizers)))

    def start_logits_of(self, ids: Sequence[Sequence[int]]) -> None:
        """Start to find the logits of these ids; see `CachedRows.start_logits_of`."""
        self._asked_ids = [list(row) for row in ids]
        counts, flat = ids_of(list(map(len, ids))), ids_of([i for row in ids for i in row])
        self._asked = self._link.start("logits_of", self._number, counts, flat)

    def logits_of(self) -> Entries:
        """Wait for the last started logits."""
        found = torch.from_numpy(np.array(self._waited()))
        ids = padded_ids(self._asked_ids)
        return Entries(ids, torch.zeros(ids.shape).masked_scatter_(ids >= 0, found))

    def _waited(self) -> Any:
        asked, self._asked = self._asked, None
        return self._link.wait(asked)

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self._link.moves.append(("select", self._number, ids_of(rows)))
        self.cached = [list(self.cached[row]) for row in rows]

    def fork(self, rows: Sequence[int]) -> "RemoteRows":
        """Return independent rows that continue from these."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._take_number()
        twin.cached = [list(self.cached[row]) for row in rows]
        self._link.moves.append(("fork", self._number, twin._number, ids_of(rows)))
        return twin

    def adopt(self, fork: Any, rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        numbers = ids_of([-1 if row is None else row for row in rows])
        self._link.moves.append(("adopt", self._number, fork._number, numbers))
        self.cached = [self.cached[place] if row is None else list(fork.cached[row]) for place, row in enumerate(rows)]

    def hold(self) -> None:
        """Remember the current rows, if they could not be rolled back to otherwise."""
        self._link.moves.append(("hold", self._number))


def _at_right_edge(flat: Tensor, num_last: Sequence[int]) -> Tensor:
    """Arrange consecutive rows of logits in the form of `CachedRows.forward`.

    Args:
        flat: Of shape `(sum(num_last), vocab_size)`.
        num_last: How many of them belong to each row.
    """
    width = max(num_last)
    if all(count == width for count in num_last):
        return flat.view(len(num_last), width, -1)
    logits = flat.new_zeros(len(num_last), width, flat.shape[-1])
    start = 0
    for row, count in enumerate(num_last):
        logits[row, width - count :] = flat[start : start + count]
        start += count
    return logits
