"""UniTE: mixing over the union of the members' few best entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mixing import log_normalizer, merge_duplicates, put_eos, top_entries_of_each
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
        present = [index for index, one in enumerate(logits) if one is not None]
        masked = [self.masked(one, index) for index, one in enumerate(logits) if one is not None]
        for index, row in zip(present, masked, strict=True):
            normalizers[:, index] = log_normalizer(row)
        entries = [
            merge_duplicates(row, self.maps[index].duplicates) for index, row in zip(present, masked, strict=True)
        ]
        top_k = min(self.top_k, max(row.shape[-1] for row in entries))
        values, ids = top_entries_of_each(entries, top_k)  # (M, B, k)
        shares = torch.stack([weights[:, index, None] for index in present])  # (M, B, 1)
        proposed = torch.stack([self.maps[index].to_union[own] for index, own in zip(present, ids, strict=True)])
        proposed = torch.where((values > -torch.inf) & (shares > 0), proposed, -1)
        keys = proposed.transpose(0, 1).flatten(1).sort(dim=-1).values  # (B, M * k), each row's entries and -1
        is_key = keys >= 0
        is_key[:, 1:] &= keys[:, 1:] != keys[:, :-1]
        keys.clamp_min_(0)
        at = torch.stack([self._read_from[index][keys] for index in present])  # (M, B, M * k)
        is_read = (at >= 0) & is_key
        at.clamp_min_(0)
        tables = [
            merged if merged is row else torch.cat([merged, row], dim=-1)
            for merged, row in zip(entries, masked, strict=True)
        ]
        key_logits = torch.stack([table.gather(-1, places) for table, places in zip(tables, at, strict=True)])
        # A row in which the member takes no part may hold no key that it can write: all `-inf`, so NaN.
        probs = torch.where(is_read, key_logits, -torch.inf).softmax(-1).nan_to_num_()
        fused = (probs * shares).sum(0)  # (B, M * k)
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
