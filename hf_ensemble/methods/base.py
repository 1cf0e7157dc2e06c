"""What every token-level method works with: index maps on the device, and the one thing it computes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..members.cuda_graphs import Captured
from ..members.member import Member
from ..mixing import Duplicates, log_normalizer, merge_duplicates
from ..vocabulary.context import Resync
from ..vocabulary.token_bytes import CONTROL, TEXT
from ..vocabulary.union import UnionVocabulary


@dataclass(frozen=True)
class Mixed:
    """What a method makes of one step.

    Attributes:
        logprobs: Fused log-probabilities, of shape `(batch_size, union_size)` for a method that decides over the union
            vocabulary, else `(batch_size, primary_vocab_size)`.
        normalizers: Logsumexp of every member's logits, of shape `(batch_size, num_members)`; 0 for members that gave
            none. NaN or infinite where a member's logits are. The caller weighs them with the mixing weights: a method
            that mixes with others scales them accordingly.
    """

    logprobs: Tensor
    normalizers: Tensor


class MemberMaps:
    """One member's index maps as tensors on the device where the mixing happens.

    Args:
        union: The union vocabulary of the members.
        index: Number of the member; 0 is the primary.
        eos_ids: Its ids that end a text.
        device: Where the maps are put.

    Attributes:
        mask: 0 for ids that take part and `-inf` for the others, of shape `(vocab_size,)`.
        takes_all: Whether all ids take part.
        eos_ids: Its EOS ids that are control tokens, of shape `(num_eos,)`.
        duplicates: Its ids that stand for the same entry; EOS, which has its first EOS id, included.
        to_union: Union id of each id, of shape `(vocab_size,)`; `union_size` for EOS, -1 for ids that take no part.
        from_union: Id of each union entry, -1 for none, of shape `(union_size + 1,)`; the last is its first EOS id.
        first_id: First id that writes each union entry, -1 for none, of shape `(union_size + 1,)`.
    """

    def __init__(self, union: UnionVocabulary, index: int, eos_ids: Sequence[int], device: torch.device):
        token_bytes = union.encoders[index].token_bytes
        kinds = token_bytes.kinds
        control_eos = [i for i in eos_ids if token_bytes.is_control(i)]
        takes_part = kinds == TEXT
        takes_part[control_eos] = True
        if index == 0:
            takes_part |= kinds == CONTROL
        to_union = union.member_to_union[index].astype(np.int64)
        own = union.union_to_member[index].astype(np.int64)
        text_ids = np.flatnonzero(kinds == TEXT)
        canonical = own[to_union[text_ids]]
        to_union[control_eos] = len(union)
        eos = control_eos[0] if control_eos else -1
        first = union.union_to_first[index].astype(np.int64)
        if index == 0:
            own[control_eos], first[control_eos] = -1, -1

        def tensor(array: np.ndarray | list[int]) -> Tensor:
            return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

        self.mask = torch.zeros(len(kinds), device=device).masked_fill_(
            torch.as_tensor(~takes_part, device=device), -torch.inf
        )
        self.takes_all = bool(takes_part.all())
        self.eos_ids = tensor(control_eos)
        is_duplicate = text_ids != canonical
        stands_for = np.append(canonical[is_duplicate], control_eos[:1] * len(control_eos[1:])).astype(np.int64)
        canonical_ids, position = np.unique(stands_for, return_inverse=True)
        self.duplicates = Duplicates(
            tensor(np.append(text_ids[is_duplicate], control_eos[1:])), tensor(canonical_ids), tensor(position)
        )
        self.to_union = tensor(to_union)
        self.from_union = tensor(np.append(own, eos))
        self.first_id = tensor(np.append(first, eos))


class TokenMethod(ABC):
    """A token-level method for one set of members: turns their logits of a step into one distribution.

    A subclass implements `mix` and says how assistants follow the text (`resync`) and whether columns beyond the
    primary's vocabulary come back (`is_wide`); where it differs from the defaults, the other attributes too.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Where the primary's logits are.
    """

    resync: Resync
    is_wide: bool
    is_capturable: bool = True
    """Whether `mix` does the same kernels at every step, with no look at the host, so that a CUDA graph can hold it."""
    reads_first_ids: bool = False
    """Whether an entry that a member lacks counts as the first id with which it would write it."""
    starts_from_primary: bool = False
    """Whether `mix` needs the primary's logits even where the primary's weight is 0."""
    proposes_few: bool = False
    """Whether `mix` gives mass only to entries that members propose or that a cut-off leaves, so that constraints may leave
    none of them."""

    def __init__(self, union: UnionVocabulary, eos_ids: Sequence[Sequence[int]], device: torch.device):
        self.union = union
        self.device = device
        self.maps = [MemberMaps(union, index, ids, device) for index, ids in enumerate(eos_ids)]
        self.captured_mixes: list[Captured] = []
        """Graphs of `mix` that no call uses just now."""
        self.average: TokenMethod | None = None
        """What averages the members' whole distributions beside this method; kept once it is made (`Gac.beside`)."""

    @abstractmethod
    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step.

        Args:
            logits: Each member's logits in float32 on this method's device, of shape `(batch_size, vocab_size)`; None
                for an assistant that takes no part in any row. The primary's are zeros where it takes no part.
            weights: Mixing weights of shape `(batch_size, num_members)`; every row sums to 1, unless the method takes
                weights as given.
        """

    def confidence(self, logits: Tensor, member: int) -> Tensor:
        """The probability of a member's best entry, over all that it may write.

        Args:
            logits: The member's, of shape `(batch_size, vocab_size)`.
            member: Its number.

        Returns:
            Of shape `(batch_size,)`; NaN where the logits hold NaN or `inf`.
        """
        masked = self.masked(logits, member)
        best = merge_duplicates(masked, self.maps[member].duplicates).amax(-1)
        return (best - log_normalizer(masked)).exp().clamp_max(1.0)

    @property
    def is_stale(self) -> bool:
        """Whether something that the method was made of has changed, so that it has to be made again."""
        return False

    def forget(self) -> None:
        """Give back memory of what can be made again, when another method is used."""
        self.captured_mixes.clear()
        self.average = None

    @cached_property
    def first_ids_beyond_primary(self) -> Tensor:
        """The first primary id of each union entry that is no entry of the primary."""
        # Entries that the primary cannot write carry no mass, so where they fold to does not matter.
        return self.maps[0].first_id[self.union.primary_size : -1].clamp_min(0)

    @cached_property
    def unwritable(self) -> Tensor:
        """Union entries that the primary cannot write."""
        return (self.maps[0].first_id[self.union.primary_size : -1] < 0).nonzero()[:, 0] + self.union.primary_size

    def primary_ids(self, columns: Tensor) -> Tensor:
        """The primary's id that each of some columns is written with first.

        Args:
            columns: Union ids, of any shape.

        Returns:
            Of the same shape; -1 for what the primary cannot write.
        """
        first = self.maps[0].first_id[columns]
        # EOS ids, the primary's control tokens, are no entries but stand under their own numbers.
        return torch.where(columns < self.union.primary_size, columns, first)

    def taking_part(self, logits: Sequence[Tensor | None], normalizers: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Go through the members that take part in a step, one at a time.

        Args:
            logits: As for `mix`.
            normalizers: Zeros of shape `(batch_size, num_members)`, in which every member's logsumexp is put.

        Yields:
            Its number, and its logits with ids that take no part at `-inf`, of shape `(batch_size, vocab_size)`.
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
            Of the same shape; `logits` itself where all ids take part.
        """
        maps = self.maps[member]
        return logits if maps.takes_all else logits + maps.mask


def versions_of(weights: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What changes when somebody moves, casts, replaces or trains some weights; to be compared, no more."""
    return [(w.data_ptr(), w.dtype, w.device, 0 if w.is_inference() else w._version) for w in weights]


def eos_ids_of(members: Sequence[Member], primary_eos_ids: Sequence[int]) -> list[list[int]]:
    """The ids that end a text for each member: those of the call for the primary, its own for an assistant.

    Args:
        members: The members.
        primary_eos_ids: Those of the call. Ids that the primary does not have are left out.
    """
    return [members[0].ids_with_row(primary_eos_ids), *(member.eos_token_ids for member in members[1:])]
