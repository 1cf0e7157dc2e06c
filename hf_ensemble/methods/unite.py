"""UniTE: mixing over the union of the members' few best entries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import METHODS, GatedConfig, MethodConfig, check_positive_integer
from ..members.member import Member
from ..mixing import log_normalizer, merge_duplicates, normalize_, put_eos, top_entries_of_each
from ..offers import Offer
from ..vocabulary.union import UnionVocabulary
from .base import EosIds, Mixed, TokenMethod


@dataclass(frozen=True)
class _TopKConfig(MethodConfig):
    top_k: int = 10
    """Number of entries that each member proposes at a step; a smaller vocabulary proposes all its entries."""


@dataclass(frozen=True)
class UniteConfig(GatedConfig, _TopKConfig):  # the fields of the last base come first
    """UniTE: mixing over the union of the members' best entries."""

    name: ClassVar[str] = "unite"

    def __post_init__(self) -> None:
        check_positive_integer("top_k", self.top_k)
        super().__post_init__()

    @property
    def asks(self) -> frozenset[Offer]:
        """What every member that takes part has to provide."""
        return frozenset({Offer.ENTRIES})

    @property
    def num_entries(self) -> int:
        """Number of best entries that every member has to provide."""
        return self.top_k

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: EosIds, device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        return Unite(union, eos_ids, device, top_k=self.top_k)


METHODS[UniteConfig.name] = UniteConfig


class Unite(TokenMethod):
    """Fuse over U, the union of each member's `top_k` best entries: `P = sum_i w_i softmax_U(logits_i)`.

    For an entry that a member lacks, its logit is that of the first id with which it would write the entry. The
    primary writes such an entry with its first id, whose column holds the sum over all entries that start with it.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Device of the primary's logits.
        top_k: Number of entries that each member proposes; at most its whole vocabulary.

    Reference:
        Yao et al., "Determine-Then-Ensemble: Necessity of Top-k Union for Large Language Model Ensembling"
        (https://arxiv.org/abs/2410.03777). As in its published code, the softmax is over logits.

    Relations:
        GaC averages over all entries of the union vocabulary.
    """

    resync = "retokenize"
    is_wide = False
    reads_first_ids = True
    proposes_few = True

    def __init__(self, union: UnionVocabulary, eos_ids: EosIds, device: torch.device, top_k: int = 10):
        super().__init__(union, eos_ids, device)
        self.top_k = self.num_entries = top_k
        # A step is a chain of small kernels, so the tables of all members are read at once.
        self._read_from = torch.stack([maps.read_from() for maps in self.maps])  # (M, union_size + 1)
        self._to_union = pad_sequence([maps.to_union for maps in self.maps], batch_first=True, padding_value=-1)
        self._written_as = self.maps[0].first_id.clamp_min(0)
        self._may_be_written = (self.maps[0].first_id >= 0).float()

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        masked = {index: self.masked(one, index) for index, one in enumerate(logits) if one is not None}
        present = list(masked)
        nothing = primary.new_zeros(len(primary))
        found = [log_normalizer(masked[index]) if index in masked else nothing for index in range(len(logits))]
        normalizers = torch.stack(found, dim=-1)
        entries = [merge_duplicates(row, self.maps[index].duplicates) for index, row in masked.items()]
        shares = _some(weights.T, present)[..., None]  # (M, B, 1)
        keys, is_key = self._keys(entries, present, shares > 0)
        at = _some(self._read_from[:, keys], present)  # (M, B, M * k)
        is_read = (at >= 0) & is_key
        at.clamp_min_(0)
        rows = [self.maps[n].readable(masked[n], merged) for n, merged in zip(present, entries, strict=True)]
        key_logits = torch.stack([row.gather(-1, places) for row, places in zip(rows, at, strict=True)])
        # In a row without this member, it may be unable to write any key: all `-inf`, so NaN.
        probs = torch.where(is_read, key_logits, -torch.inf).softmax(-1).nan_to_num_()
        fused = (probs * shares).sum(0)  # (B, M * k)
        written_as = self._written_as[keys]
        fused *= self._may_be_written[keys]
        normalize_(fused)
        columns = primary.new_zeros(primary.shape).scatter_add_(1, written_as, fused)
        # The logarithm of a whole row of zeros takes milliseconds on a CPU.
        logprobs = torch.full_like(primary, -torch.inf)
        logprobs.scatter_(1, written_as, columns.gather(1, written_as).log_())
        eos_ids = self.maps[0].eos_ids
        if len(eos_ids) > 1:  # so far, the first one has it
            put_eos(logprobs, logprobs.index_select(1, eos_ids[:1])[:, 0], primary, eos_ids, nothing=-torch.inf)
        return Mixed(logprobs, normalizers)

    def _keys(self, entries: Sequence[Tensor], present: Sequence[int], takes_part: Tensor) -> tuple[Tensor, Tensor]:
        """The entries that members propose.

        Args:
            entries: Logits of the members present, with duplicates merged, each `(batch_size, vocab_size)`.
            present: Their indices.
            takes_part: Which of them take part in which row, of shape `(num_present, batch_size, 1)`.

        Returns:
            Union ids, and which of them count, once each; of shape `(batch_size, num_present * k)`.
        """
        top_k = min(self.top_k, max(row.shape[-1] for row in entries))
        values, ids = top_entries_of_each(entries, top_k)  # (M, B, k)
        proposed = _some(self._to_union, present).gather(1, ids.flatten(1)).view_as(ids)
        proposed = torch.where((values > -torch.inf) & takes_part, proposed, -1)
        keys = proposed.transpose(0, 1).flatten(1).sort(dim=-1).values  # (B, M * k), each row's entries and -1
        is_key = keys >= 0
        is_key[:, 1:] &= keys[:, 1:] != keys[:, :-1]
        return keys.clamp_min_(0), is_key

    def asked(
        self,
        logits: Sequence[Tensor | None],
        takes_part: Tensor,
        contenders: Mapping[int, Mapping[int, Sequence[int]]],
    ) -> list[list[list[int]]]:
        """The ids with which each member writes all proposed entries; see `TokenMethod.asked`."""
        present = [index for index, one in enumerate(logits) if one is not None]
        rows = [(self.masked(one, index), index) for index, one in enumerate(logits) if one is not None]
        entries = [merge_duplicates(row, self.maps[index].duplicates) for row, index in rows]
        keys, is_key = self._keys(entries, present, takes_part.to(self.device).T[present, :, None])
        if any(of_member.values() for of_member in contenders.values()):
            more = [
                torch.tensor(
                    [
                        int(self._to_union[index, i])
                        for index, of_rows in contenders.items()
                        for i in of_rows.get(row, ())
                    ],
                    dtype=torch.long,
                )
                for row in range(len(keys))
            ]
            padded = pad_sequence(more, batch_first=True, padding_value=-1).to(self.device)
            keys = torch.cat([keys, padded.clamp_min(0)], dim=-1)
            is_key = torch.cat([is_key, padded >= 0], dim=-1)
        at = torch.where(is_key, self._read_from[:, keys], -1)  # (M, B, M * k)
        return [maps.ids_read(of_member) for maps, of_member in zip(self.maps, at.tolist(), strict=True)]


def _some(of_members: Tensor, indices: Sequence[int]) -> Tensor:
    """The part for these members, of shape `(len(indices), ...)`."""
    return of_members if len(indices) == len(of_members) else torch.stack([of_members[index] for index in indices])
