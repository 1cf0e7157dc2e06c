"""What members that list few ids add to the mean of whole distributions: they are asked for ids if these matter."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..methods.base import TokenMethod
from ..mixing import put_eos

MAX_ALLOWED = 1024
"""The number of ids per row that a member may be asked for, if constraints allow none of the proposals."""

UNKNOWN = 1e-30
"""Stands for the probability of an id that no member has listed, to show processors that it may be chosen."""


class ListedIds:
    """Maps ids of members that never send whole rows to the primary's columns.

    Args:
        method: The method, made for its members.
    """

    def __init__(self, method: TokenMethod):
        self._method = method
        self._columns: dict[int, Tensor] = {}
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}

    def columns(self, member: int) -> Tensor:
        """The column of the primary's that each id of a member counts for, of shape `(vocab_size,)`; -1 for none."""
        if member not in self._columns:
            maps = self._method.maps[member]
            # Control tokens of the primary keep their own columns.
            own = torch.arange(len(maps.mask), device=maps.mask.device) if member == 0 else -1
            columns = torch.where(maps.to_union >= 0, self._method.primary_ids(maps.to_union), own)
            self._columns[member] = torch.where(maps.mask == 0, columns, -1)
        return self._columns[member]

    def ids_of(self, member: int, columns: Iterable[int]) -> list[int]:
        """All ids of a member that count for the given columns of the primary."""
        if member not in self._sorted:
            values, ids = self.columns(member).cpu().sort(stable=True)
            self._sorted[member] = values.contiguous(), ids
        values, ids = self._sorted[member]
        wanted = torch.tensor(self._with_eos(columns), dtype=torch.long)
        starts, ends = (torch.searchsorted(values, wanted, right=right).tolist() for right in (False, True))
        return [i for start, end in zip(starts, ends, strict=True) for i in ids[start:end].tolist()]

    def _with_eos(self, columns: Iterable[int]) -> list[int]:
        """EOS is one entry; it counts for the primary's first EOS id until the best one is known."""
        eos = self._method.maps[0].eos_ids.tolist()
        return sorted({eos[0] if column in eos else column for column in columns})

    def masses(self, logprobs: Mapping[int, Tensor], shares: Tensor, primary_logits: Tensor) -> Tensor:
        """The weighted mean of members' distributions, as far as it is known.

        Args:
            logprobs: By member, of shape `(num_positions, vocab_size)`; `-inf` for ids not listed.
            shares: Of each member, of shape `(num_positions, num_members)`.
            primary_logits: Of shape `(num_positions, primary_vocab_size)`, by which EOS is written.

        Returns:
            Probabilities over the primary's ids, of the shape of `primary_logits`.
        """
        masses = torch.zeros_like(primary_logits)
        for member, rows in logprobs.items():
            columns = self.columns(member)
            counts = columns >= 0
            # A row of zeros belongs to a member that takes no part there.
            masses.index_add_(1, columns[counts], rows[:, counts].exp() * shares[:, member, None])
        eos_ids = self._method.maps[0].eos_ids
        if len(eos_ids) > 1:
            put_eos(masses, masses[:, eos_ids[0]].clone(), primary_logits, eos_ids)
        return masses
