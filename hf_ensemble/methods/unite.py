"""UniTE: mixing over the union of the members' few best entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mixing import log_normalizer, merge_duplicates, put_eos, top_entries
from ..vocabulary.context import Resync
from ..vocabulary.union import UnionVocabulary
from .base import Mixed, TokenMethod


class Unite(TokenMethod):
    """Fuse over U, the union of each member's `top_k` best entries: `P = sum_i w_i softmax_U(logits_i)`.

    A member's logit for an entry that it lacks is that of the first id with which it would write it; the primary writes
    such an entry with its first id, whose column holds the sum over the entries that it starts.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Where the primary's logits are.
        top_k: Number of entries that each member proposes; at most its whole vocabulary.

    Reference:
        Yao et al., "Determine-Then-Ensemble: Necessity of Top-k Union for Large Language Model Ensembling"
        (https://arxiv.org/abs/2410.03777). As in its published code, the softmax is over logits.

    Relations:
        GaC averages over all entries of the union vocabulary.
    """

    resync: Resync = "retokenize"
    is_wide = False
    reads_first_ids = True

    def __init__(
        self, union: UnionVocabulary, eos_ids: Sequence[Sequence[int]], device: torch.device, top_k: int = 10
    ):
        super().__init__(union, eos_ids, device)
        self.top_k = top_k

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        batch_size, union_size = primary.shape[0], len(self.union)
        normalizers = primary.new_zeros(batch_size, len(logits))
        plain: list[Tensor | None] = []
        merged: list[Tensor | None] = []
        proposed = []
        for index, member_logits in enumerate(logits):
            if member_logits is None:
                plain.append(None)
                merged.append(None)
                continue
            maps = self.maps[index]
            member_logits = self.masked(member_logits, index)
            normalizers[:, index] = log_normalizer(member_logits)
            entries = merge_duplicates(member_logits, maps.duplicates)
            values, ids = top_entries(entries, min(self.top_k, entries.shape[-1]))
            union_ids = maps.to_union[ids]
            takes_part = (values > -torch.inf) & (weights[:, index, None] > 0)
            proposed.append(torch.where(takes_part, union_ids, -1))
            plain.append(member_logits)
            merged.append(entries)
        keys = torch.cat(proposed, dim=-1).sort(dim=-1).values  # (B, M * k), each row's entries and -1
        is_key = keys >= 0
        is_key[:, 1:] &= keys[:, 1:] != keys[:, :-1]
        keys = keys.clamp_min(0)
        fused = primary.new_zeros(keys.shape)
        for index, (member_plain, member_merged) in enumerate(zip(plain, merged, strict=True)):
            if member_plain is None or member_merged is None:
                continue
            maps = self.maps[index]
            own, first = maps.from_union[keys], maps.first_id[keys]  # (B, M * k)
            key_logits = torch.where(
                own >= 0, member_merged.gather(-1, own.clamp_min(0)), member_plain.gather(-1, first.clamp_min(0))
            )
            key_logits = key_logits.masked_fill(~is_key | ((own < 0) & (first < 0)), -torch.inf)
            # A row in which the member takes no part may hold no key that it can write: all `-inf`, so NaN.
            fused += torch.nan_to_num(key_logits.softmax(-1)) * weights[:, index, None]
        is_eos = keys == union_size
        written_as = self.maps[0].first_id[keys].masked_fill(is_eos, -1)
        columns = primary.new_zeros(primary.shape)
        columns.scatter_add_(1, written_as.clamp_min(0), fused.masked_fill(written_as < 0, 0.0))
        if self.maps[0].eos_ids.numel():
            put_eos(columns, fused.masked_fill(~is_eos, 0.0).sum(-1), primary, self.maps[0].eos_ids)
        columns /= columns.sum(-1, keepdim=True)
        return Mixed(columns.log_(), normalizers)
