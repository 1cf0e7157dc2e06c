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
        # Where each entry's logit stands in a member's row; -1 for nowhere. First ids are looked up before duplicates are
        # merged, in a second row after the merged one.
        self._read_from: list[Tensor] = []
        for maps in self.maps:
            plain_row = maps.mask.shape[0] if maps.duplicates.ids.numel() else 0
            first = torch.where(maps.first_id >= 0, maps.first_id + plain_row, -1)
            self._read_from.append(torch.where(maps.from_union >= 0, maps.from_union, first))

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        batch_size, union_size = primary.shape[0], len(self.union)
        normalizers = primary.new_zeros(batch_size, len(logits))
        rows: list[Tensor | None] = []
        proposed = []
        for index, member_logits in enumerate(logits):
            if member_logits is None:
                rows.append(None)
                continue
            maps = self.maps[index]
            member_logits = self.masked(member_logits, index)
            normalizers[:, index] = log_normalizer(member_logits)
            entries = merge_duplicates(member_logits, maps.duplicates)
            values, ids = top_entries(entries, min(self.top_k, entries.shape[-1]))
            takes_part = (values > -torch.inf) & (weights[:, index, None] > 0)
            proposed.append(torch.where(takes_part, maps.to_union[ids], -1))
            rows.append(entries if entries is member_logits else torch.cat([entries, member_logits], dim=-1))
        keys = torch.cat(proposed, dim=-1).sort(dim=-1).values  # (B, M * k), each row's entries and -1
        is_key = keys >= 0
        is_key[:, 1:] &= keys[:, 1:] != keys[:, :-1]
        keys = keys.clamp_min(0)
        fused = primary.new_zeros(keys.shape)
        for index, row in enumerate(rows):
            if row is None:
                continue
            at = self._read_from[index][keys]  # (B, M * k)
            key_logits = row.gather(-1, at.clamp_min(0)).masked_fill_((at < 0) | ~is_key, -torch.inf)
            # A row in which the member takes no part may hold no key that it can write: all `-inf`, so NaN.
            fused.addcmul_(key_logits.softmax(-1).nan_to_num_(), weights[:, index, None])
        eos_ids = self.maps[0].eos_ids
        is_eos = keys == union_size
        written_as = self.maps[0].first_id[keys].masked_fill_(is_eos, -1)
        may_be_written = written_as >= 0
        if eos_ids.numel():
            may_be_written |= is_eos
        fused *= may_be_written
        fused /= fused.sum(-1, keepdim=True)
        written_as.clamp_min_(0)
        columns = primary.new_zeros(primary.shape).scatter_add_(1, written_as, fused.masked_fill(is_eos, 0.0))
        # The logarithm of a whole row of zeros takes a CPU milliseconds.
        logprobs = torch.full_like(primary, -torch.inf)
        logprobs.scatter_(1, written_as, columns.gather(1, written_as).log_())
        if eos_ids.numel():
            put_eos(logprobs, (fused * is_eos).sum(-1).log_(), primary, eos_ids, nothing=-torch.inf)
        return Mixed(logprobs, normalizers)
