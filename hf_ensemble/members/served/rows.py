"""Rows of a call whose texts a server reads; only the number of requests is kept here."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..cached_rows import CachedRows
from ..entries import Entries, EntryIds, padded_ids
from .completions import MAX_ASKED, Completions
from .threads import collected

SPARE = 10
"""Number of extra ids to request, because control ids are sometimes among the best."""


class ServedRows(CachedRows):
    """The rows of a call at a server, whose prefix cache holds what it has read before.

    Args:
        server: The model behind its server.
        num_rows: Number of rows.
        most: Number of best ids that the server lists, or the model has.

    Attributes:
        num_asked: Number of requests for the best entries of a row.
        num_asked_again: Number of further requests for given ids of a row.
    """

    mode = "served"
    run_beside = True
    is_elsewhere = True

    def __init__(self, server: Completions, num_rows: int, most: int):
        super().__init__(num_rows)
        self._server, self._most = server, most
        self.num_asked = self.num_asked_again = 0
        self._texts: list[list[int]] = []
        self._where: list[str] = []
        self._wanted: tuple[int, EntryIds] | None = None
        self._groups: dict[int, list[int]] = {}
        self._best: list[Future[dict[int, float]]] = []
        self._asked: list[tuple[int, Future[Mapping[int, float]]]] = []

    @property
    def share_in_one_request(self) -> float | None:
        """The share of rows and steps for which the first answer had all needed ids; None before the first."""
        return 1 - self.num_asked_again / self.num_asked if self.num_asked else None

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Never called, because a server sends no whole rows."""
        raise NotImplementedError

    def start_entries(
        self, texts: Sequence[Sequence[int]], rows: Sequence[int], count: int, entry_ids: EntryIds
    ) -> None:
        """Send a request for each row."""
        self._texts = [list(texts[row]) for row in rows]
        self._where = [self.where(row) for row in rows]
        if self._wanted is None or self._wanted[1] is not entry_ids:
            self._groups = _groups_of(entry_ids)
        self._wanted = count, entry_ids
        self.num_asked += len(rows)
        number = min(count + SPARE, self._most)
        self._best = [
            self._server.client.submit(self._server.best, text, number, where)
            for text, where in zip(self._texts, self._where, strict=True)
        ]

    def entries(self) -> Entries:
        """Return what the server has listed, without ids that take no part."""
        assert self._wanted is not None
        count, entry_ids = self._wanted
        mask, groups = entry_ids.mask, self._groups
        num_there = int((mask == 0).sum()) - len(entry_ids.duplicates.ids)
        rows, contenders = [], []
        for text, found, where in zip(self._texts, collected(self._best), self._where, strict=True):
            while True:
                # If the size of the vocabulary is unknown, ids beyond the tokenizer's are rows without a token.
                row = {i: value for i, value in found.items() if i < len(mask) and mask[i] == 0}
                num_entries = len({groups.get(i, (i,))[0] for i in row})
                if num_entries >= min(count, num_there):
                    break
                if len(found) >= self._most:
                    raise self._server.client.error(
                        where,
                        f"it lists {len(found)} ids, which are {num_entries} entries, but `top_k={count}` needs more. "
                        f"Start it with `--max-logprobs {2 * len(found)}`, or lower `top_k`.",
                    )
                found = self._server.best(text, min(2 * len(found), self._most), where)
            rows.append(row)
            contenders.append(_contenders(row, min(found.values()), groups, count))
        return replace(_entries(rows), contenders=contenders)

    def start_logits_of(self, ids: Sequence[Sequence[int]]) -> None:
        """Send requests for the ids of each row, as many as needed, all at once."""
        self._asked = []
        for row, (text, asked, where) in enumerate(zip(self._texts, ids, self._where, strict=True)):
            self.num_asked_again += bool(asked)
            for start in range(0, len(asked), MAX_ASKED):
                part = list(asked[start : start + MAX_ASKED])
                future: Any = self._server.client.submit(self._server.log_probs_of, text, part, where)
                self._asked.append((row, future))

    def logits_of(self) -> Entries:
        """Return the requested ids, and the one that the server has chosen beside them."""
        rows: list[dict[int, float]] = [{} for _ in self._texts]
        found = collected([future for _, future in self._asked])
        for (row, _), log_probs in zip(self._asked, found, strict=True):
            rows[row].update(log_probs)
        return _entries(rows)

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self.cached = [list(self.cached[row]) for row in rows]

    def fork(self, rows: Sequence[int]) -> "ServedRows":
        """Return independent rows that continue from these."""
        return ServedRows(self._server, len(rows), self._most)

    def adopt(self, fork: Any, rows: Sequence[int | None]) -> None:
        """Do nothing, because the server knows what it has read."""


def _groups_of(entry_ids: EntryIds) -> dict[int, list[int]]:
    """All ids of each entry that has several, by each of them."""
    groups = [[one, *others] for one, others in entry_ids.duplicates.by_canonical_id().items()]
    return {i: ids for ids in groups for i in ids}


def _contenders(row: Mapping[int, float], least: float, groups: Mapping[int, Sequence[int]], count: int) -> list[int]:
    """Ids of listed entries that are not among the best, but may be once the unlisted ids are known.

    Args:
        row: The log-probabilities of listed ids.
        least: The lowest listed value; no unlisted one is higher.
        groups: All ids of each entry that has several, by each of them.
        count: Number of best entries.
    """
    sums: dict[int, float] = {}
    unlisted: dict[int, int] = {}
    for i, value in row.items():
        ids = groups.get(i, (i,))
        sums[ids[0]] = sums.get(ids[0], 0.0) + math.exp(value)
        unlisted[ids[0]] = sum(other not in row for other in ids)
    order = sorted(sums, key=lambda i: -sums[i])
    if len(order) <= count:
        return []
    bar = sums[order[count - 1]]
    return [i for i in order[count:] if unlisted[i] and sums[i] + unlisted[i] * math.exp(least) >= bar]


def _entries(rows: Sequence[Mapping[int, float]]) -> Entries:
    ids = padded_ids(list(map(list, rows)))
    logits = torch.full(ids.shape, -torch.inf)
    logits[ids >= 0] = torch.tensor([value for row in rows for value in row.values()])
    return Entries(ids, logits)
