"""What all token-level methods share: index maps on the device, and the base class with `mix`."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..members.adapted import address_of
from ..members.cuda_graphs import Captured
from ..members.entries import EntryIds
from ..members.member import Member
from ..mixing import Duplicates, log_normalizer, merge_duplicates
from ..vocabulary.context import Resync
from ..vocabulary.token_bytes import NO_TOKEN, TEXT
from ..vocabulary.union import UnionVocabulary

EosIds = Sequence[Sequence[int]]
"""For each member, the ids that end a text."""


@dataclass(frozen=True)
class Mixed:
    """The result of one step.

    Attributes:
        logprobs: Fused log-probabilities, of shape `(batch_size, union_size)` for a method that decides over the union
            vocabulary, else `(batch_size, primary_vocab_size)`.
        normalizers: Logsumexp of every member's logits, of shape `(batch_size, num_members)`; 0 for members that gave
            no logits. NaN or infinite if a member's logits are. The caller multiplies them by the mixing weights, so a
            method that mixes with different weights scales them accordingly.
    """

    logprobs: Tensor
    normalizers: Tensor


class MemberMaps:
    """One member's index maps as tensors on the device where the mixing happens.

    Args:
        union: The union vocabulary of the members.
        index: Index of the member; 0 is the primary.
        eos_ids: Its ids that end a text.
        device: Device of the maps.

    Attributes:
        mask: 0 for ids that take part and `-inf` for the others, of shape `(vocab_size,)`.
        takes_all: Whether all ids take part.
        eos_ids: Its EOS ids that are control tokens, of shape `(num_eos,)`.
        duplicates: Its ids that write the same entry, including EOS, which is its first EOS id.
        to_union: Union id of each id, of shape `(vocab_size,)`; `union_size` for EOS, -1 for ids that take no part.
        from_union: Id of each union entry, -1 for none, of shape `(union_size + 1,)`; the last is its first EOS id.
        first_id: First id that writes each union entry, -1 for none, of shape `(union_size + 1,)`.
    """

    def __init__(self, union: UnionVocabulary, index: int, eos_ids: Sequence[int], device: torch.device):
        token_bytes = union.encoders[index].token_bytes
        kinds = torch.tensor(token_bytes.kinds, device=device)
        maps = (union.member_to_union, union.union_to_member, union.union_to_first)
        to_union, own, first = (torch.tensor(of[index], dtype=torch.int64, device=device) for of in maps)
        control_eos = [i for i in eos_ids if token_bytes.is_control(i)]
        self.eos_ids = eos = torch.tensor(control_eos, dtype=torch.int64, device=device)

        takes_part = kinds != NO_TOKEN if index == 0 else kinds == TEXT
        takes_part[eos] = True
        self.takes_all = bool(takes_part.all())
        self.mask = torch.where(takes_part, 0.0, -torch.inf)

        text_ids = (kinds == TEXT).nonzero()[:, 0]
        canonical = own[to_union[text_ids]]
        is_duplicate = text_ids != canonical
        # All EOS ids count as the first EOS id.
        stands_for = torch.cat([canonical[is_duplicate], eos[:1].expand(len(eos[1:]))])
        canonical_ids, position = stands_for.unique(return_inverse=True)
        self.duplicates = Duplicates(torch.cat([text_ids[is_duplicate], eos[1:]]), canonical_ids, position)

        if index == 0:
            own[eos], first[eos] = -1, -1
        self.to_union = to_union.index_fill_(0, eos, len(union))
        first_eos = torch.tensor([control_eos[0] if control_eos else -1], device=device)
        self.from_union, self.first_id = torch.cat([own, first_eos]), torch.cat([first, first_eos])

    def masked(self, logits: Tensor) -> Tensor:
        """Set the logits of ids that take no part to `-inf`; returns `logits` itself if all take part."""
        return logits if self.takes_all else logits + self.mask

    def read_from(self) -> Tensor:
        """The index of each union entry's logit in a row of `readable`, of shape `(union_size + 1,)`; -1 for no logit.

        For an entry that the member lacks, it is the logit of the first id that writes it, unmerged.
        """
        first_row = len(self.mask) if self.duplicates.ids.numel() else 0
        first = torch.where(self.first_id >= 0, self.first_id + first_row, -1)
        return torch.where(self.from_union >= 0, self.from_union, first)

    @cached_property
    def entry_ids(self) -> EntryIds:
        """What a member has to know about the method to send its best entries."""
        return EntryIds(self.mask, self.duplicates, self.eos_ids)

    def ids_read(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """The ids whose logits are at, or summed into, positions of `readable`.

        Args:
            rows: The positions, as in `read_from`; -1 for none.
        """
        first_row = len(self.mask) if self.duplicates.ids.numel() else 0
        ids = []
        for row in rows:
            found = {at - first_row if at >= first_row else at for at in row if at >= 0}
            summed = (self._standing_for.get(at, ()) for at in row if 0 <= at < first_row)
            ids.append(sorted(found.union(*summed)))
        return ids

    @cached_property
    def _standing_for(self) -> dict[int, list[int]]:
        """The other ids of every entry that has several, by its canonical id."""
        return self.duplicates.by_canonical_id()

    def readable(self, logits: Tensor, merged: Tensor) -> Tensor:
        """Rows of logits for `read_from`: the merged ones and, where they differ, the unmerged ones."""
        return logits if merged is logits else torch.cat([merged, logits], dim=-1)


class TokenMethod(ABC):
    """A token-level method for one set of members. It turns their logits of a step into one distribution.

    A subclass implements `mix`, and sets how assistants follow the text (`resync`) and whether the result has columns
    beyond the primary's vocabulary (`is_wide`). It sets the other attributes if it differs from their defaults.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Device of the primary's logits.
    """

    resync: Resync
    is_wide: bool
    is_capturable: bool = True
    """Whether `mix` runs the same kernels at every step and reads nothing on the host, so it can be a CUDA graph."""
    reads_first_ids: bool = False
    """Whether an entry that a member lacks counts as the first id with which it would write it."""
    starts_from_primary: bool = False
    """Whether `mix` needs the primary's logits even if the primary's weight is 0."""
    num_entries: int | None = None
    """Number of best entries per member that `mix` reads, along with the logits of the others' proposals. None: it
    reads whole rows.
    """
    proposes_few: bool = False
    """Whether `mix` gives probability only to entries that members propose or that a cut-off keeps, so constraints may
    allow none of them.
    """

    def __init__(self, union: UnionVocabulary, eos_ids: EosIds, device: torch.device):
        self.union = union
        self.device = device
        self.maps = [MemberMaps(union, index, ids, device) for index, ids in enumerate(eos_ids)]
        self.captured_mixes: list[Captured] = []
        """Graphs of `mix` that no call is using."""
        self.average: TokenMethod | None = None
        """Averages the members' whole distributions beside this method; kept once created (`Gac.beside`)."""

        self.build_at_start: Callable[[], TokenMethod] | None = None
        """Creates the same method for the beginning of a text; None if no member's entries differ there."""

    @abstractmethod
    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step.

        Args:
            logits: Each member's logits in float32 on this method's device, of shape `(batch_size, vocab_size)`; None
                for an assistant that takes no part in any row. The primary's are zeros if it takes no part.
            weights: Mixing weights of shape `(batch_size, num_members)`; every row sums to 1, unless the method takes
                weights as given.
        """

    def confidence(self, logits: Tensor, member: int, normalizer: Tensor | None = None) -> Tensor:
        """The probability of a member's best entry, over all that it may write.

        Args:
            logits: The member's, of shape `(batch_size, vocab_size)`.
            member: Its number.
            normalizer: Logsumexp of all its logits, of shape `(batch_size,)`, where these are not all of them.

        Returns:
            Of shape `(batch_size,)`; NaN if the logits contain NaN or `inf`.
        """
        masked = self.masked(logits, member)
        best = merge_duplicates(masked, self.maps[member].duplicates).amax(-1)
        total = log_normalizer(masked) if normalizer is None else normalizer.to(best.device)
        return (best - total).exp().clamp_max(1.0)

    @property
    def is_stale(self) -> bool:
        """Whether something the method was built from has changed, so that it has to be built again."""
        return False

    def forget(self) -> None:
        """Free memory that can be rebuilt, when another method is used."""
        self.captured_mixes.clear()
        self.average = None
        if (at_start := vars(self).get("at_start")) is not None:
            at_start.forget()

    @cached_property
    def at_start(self) -> "TokenMethod":
        """The same method for the beginning of a text, where some members' entries lose a leading space."""
        assert self.build_at_start is not None
        return self.build_at_start()

    @cached_property
    def first_ids_beyond_primary(self) -> Tensor:
        """The primary's first id for each union entry that the primary does not have."""
        # Entries that the primary cannot write have no probability, so it does not matter where they fold to.
        return self.maps[0].first_id[self.union.primary_size : -1].clamp_min(0)

    @cached_property
    def unwritable(self) -> Tensor:
        """Union entries that the primary cannot write."""
        return (self.maps[0].first_id[self.union.primary_size : -1] < 0).nonzero()[:, 0] + self.union.primary_size

    def asked(
        self,
        logits: Sequence[Tensor | None],
        takes_part: Tensor,
        contenders: Mapping[int, Mapping[int, Sequence[int]]],
    ) -> list[list[list[int]]]:
        """The ids of each member that `mix` reads, if `num_entries` limits them.

        Args:
            logits: As for `mix`; the best `num_entries` entries of each row are enough.
            takes_part: Which members take part in which row, of shape `(batch_size, num_members)`.
            contenders: By member and row, ids of further entries that the member may propose once all their ids are
                known.

        Returns:
            For each member and row the ids.
        """
        raise NotImplementedError

    def primary_ids(self, columns: Tensor) -> Tensor:
        """The primary's first id for each of some columns.

        Args:
            columns: Union ids, of any shape.

        Returns:
            Of the same shape; -1 for entries that the primary cannot write.
        """
        first = self.maps[0].first_id[columns]
        # EOS ids are control tokens of the primary: not entries, but columns under their own numbers.
        return torch.where(columns < self.union.primary_size, columns, first)

    def taking_part(self, logits: Sequence[Tensor | None], normalizers: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Go through the members that take part in a step, one at a time.

        Args:
            logits: As for `mix`.
            normalizers: Zeros of shape `(batch_size, num_members)`, filled with every member's logsumexp.

        Yields:
            Its index, and its logits of shape `(batch_size, vocab_size)`, with `-inf` for ids that take no part.
        """
        for index, own in enumerate(logits):
            if own is not None:
                masked = self.masked(own, index)
                normalizers[:, index] = log_normalizer(masked)
                yield index, masked

    def masked(self, logits: Tensor, member: int) -> Tensor:
        """Set the logits of ids that take no part to `-inf`.

        Args:
            logits: The member's, of shape `(batch_size, vocab_size)`.
            member: Its number.

        Returns:
            Of the same shape; `logits` itself if all ids take part.
        """
        return self.maps[member].masked(logits)


class CapturedMix:
    """Calls `method.mix`, through CUDA graphs if the method allows (see `Captured`).

    There is one graph for each set of members that take part (behind a gate they change from step to step). The method
    keeps the graphs for the next call.

    Args:
        method: The method.
    """

    def __init__(self, method: TokenMethod):
        self._method = method
        unused = method.captured_mixes
        try:
            self._captured = unused.pop()
        except IndexError:
            self._captured = _captured_mix(method)
        weakref.finalize(self, unused.append, self._captured).atexit = False

    def __call__(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """As `TokenMethod.mix`. The result belongs to the caller."""
        return Mixed(*self._captured(*logits, weights))


def _captured_mix(method: TokenMethod) -> Captured:
    unheld = weakref.proxy(method)  # which holds the graphs

    def mix(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        *logits, weights = arguments
        assert weights is not None
        mixed = unheld.mix(logits, weights)
        return mixed.logprobs, mixed.normalizers

    return Captured(mix, method.is_capturable)


def versions_of(weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """A value that changes when weights are moved, cast, replaced or trained; only for comparison."""
    return [(address_of(w), w.dtype, w.device, 0 if w.is_inference() else w._version) for w in weights]


def eos_ids_of(members: Sequence[Member], primary_eos_ids: Sequence[int]) -> list[list[int]]:
    """The ids that end a text for each member: the call's for the primary, an assistant's own for an assistant.

    Args:
        members: The members.
        primary_eos_ids: The call's. Ids that the primary does not have are left out.
    """
    return [members[0].ids_with_row(primary_eos_ids), *(member.eos_token_ids for member in members[1:])]
