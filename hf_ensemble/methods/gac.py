"""GaC: the weighted average of the members' distributions over the union vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mixing import log_normalizer, put_eos
from ..vocabulary.context import Resync
from ..vocabulary.union import UnionVocabulary
from .base import Mixed, TokenMethod


class Gac(TokenMethod):
    """Fuse `q(x) = sum_i w_i p_i(x)` over the entries x of the union vocabulary.

    Ids of one member that write the same are one entry; the EOS ids of all members are one entry. Entries that the
    primary cannot write are dropped and the rest renormalised.

    Reference:
        Yu et al., "Breaking the Ceiling of the LLM Community by Treating Token Generation as a Classification for
        Ensembling" (https://arxiv.org/abs/2406.12585).

    Relations:
        UniTE mixes over the few best entries of each member instead of all, and needs no column for what only an
        assistant has.
    """

    resync: Resync = "append"
    is_wide = True

    def __init__(self, union: UnionVocabulary, eos_ids: Sequence[Sequence[int]], device: torch.device):
        super().__init__(union, eos_ids, device)
        self._read_tables()

    def _read_tables(self) -> None:
        union, device = self.union, self.device
        # For each union entry the column of a member's probabilities to read, one past the last for none; None where
        # that is every column in its place, as for members with the same vocabulary.
        self._read_from: list[Tensor | None] = []
        for maps in self.maps:
            ids = maps.from_union[:-1]
            vocab_size = maps.mask.shape[0]
            ids = torch.where(ids < 0, vocab_size, ids)
            in_place = torch.equal(ids[: len(union)], torch.arange(len(union), device=device).clamp_max(vocab_size))
            self._read_from.append(None if in_place else ids)

    @classmethod
    def beside(cls, method: TokenMethod) -> "Gac":
        """The same members' average, with the maps of another method."""
        twin = cls.__new__(cls)
        twin.union, twin.device, twin.maps, twin.captured_mixes = method.union, method.device, method.maps, []
        twin._read_tables()
        return twin

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        batch_size, union_size = primary.shape[0], len(self.union)
        fused = primary.new_zeros(batch_size, union_size)
        eos_mass = primary.new_zeros(batch_size)
        normalizers = primary.new_zeros(batch_size, len(logits))
        for index, member_logits in enumerate(logits):
            if member_logits is None:
                continue
            maps = self.maps[index]
            member_logits = self.masked(member_logits, index)
            normalizers[:, index] = log_normalizer(member_logits)
            # One column more, which stays 0, is what an entry that the member lacks reads.
            probs = primary.new_zeros(batch_size, member_logits.shape[-1] + 1)
            torch.sub(member_logits, normalizers[:, index, None], out=probs[:, :-1])
            probs[:, :-1].exp_()
            weight = weights[:, index]
            if maps.duplicates.ids.numel():
                into = maps.duplicates.canonical_ids[maps.duplicates.position]
                probs.index_add_(1, into, probs[:, maps.duplicates.ids])
                probs.index_fill_(1, maps.duplicates.ids, 0.0)
            if maps.eos_ids.numel():
                eos_mass += weight * probs.index_select(1, maps.eos_ids[:1])[:, 0]
                probs.index_fill_(1, maps.eos_ids[:1], 0.0)
            read_from = self._read_from[index]
            if index == 0:
                fused[:, : self.union.primary_size].addcmul_(probs[:, :-1], weight[:, None])
            elif read_from is None:
                fused.addcmul_(probs[:, : len(self.union)], weight[:, None])
            else:
                fused.addcmul_(probs.index_select(1, read_from), weight[:, None])
        loses_mass = self.unwritable.numel() > 0
        if loses_mass:
            fused.index_fill_(1, self.unwritable, 0.0)
        if self.maps[0].eos_ids.numel():
            put_eos(fused, eos_mass, primary, self.maps[0].eos_ids)
        else:
            loses_mass = True
        if loses_mass:
            fused /= fused.sum(-1, keepdim=True)
        return Mixed(fused.log_(), normalizers)
