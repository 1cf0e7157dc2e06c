"""MinED: the weighted average, after moving every entry to the primary's with the most similar spelling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import METHODS, MethodConfig
from ..members.member import Member
from ..mixing import normalize_, put_eos
from ..optional_packages import not_installed
from ..vocabulary.alignment import load_or_build_nearest
from ..vocabulary.union import UnionVocabulary
from .base import EosIds, Mixed, TokenMethod


@dataclass(frozen=True)
class MinedConfig(MethodConfig):
    """MinED: an assistant's entry counts for the primary's entry with the most similar spelling. It has no options."""

    name: ClassVar[str] = "mined"

    def check_members(self, num_members: int) -> None:
        """Check that its maps can be built.

        Raises:
            ConfigurationError: If `rapidfuzz` is not installed.
        """
        try:
            import rapidfuzz  # noqa: F401
        except ImportError as error:
            raise not_installed("method 'mined' computes edit distances", "rapidfuzz") from error

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: EosIds, device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        return Mined(union, eos_ids, device)


METHODS[MinedConfig.name] = MinedConfig


class Mined(TokenMethod):
    """Fuse `q(x) = sum_i w_i sum_{y: near_i(y) = x} p_i(y)` over the primary's entries x.

    `near_i(y)` is y itself if the primary has it, else the primary's entry at the smallest edit distance. EOS is one
    entry of all members.

    Reference:
        The baseline MinED of Huang et al., "Ensemble Learning for Heterogeneous Large Language Models with Deep
        Parallel Collaboration" (https://arxiv.org/abs/2404.12715), after Fu et al. (https://arxiv.org/abs/2301.12726)
        and Wan et al. (https://arxiv.org/abs/2401.10491).

    Relations:
        GaC gives entries that only an assistant has their own columns. EVA compares embeddings, not spellings.
    """

    resync = "retokenize"
    is_wide = False

    def __init__(self, union: UnionVocabulary, eos_ids: EosIds, device: torch.device):
        super().__init__(union, eos_ids, device)
        # The column that each id's probability goes to; EOS has the last one. Ids that take no part have none.
        self._column_of = []
        for index, maps in enumerate(self.maps):
            to_primary = maps.to_union
            if index > 0:
                to_primary = torch.as_tensor(load_or_build_nearest(union, index), device=device)
            is_eos = maps.to_union == len(union)
            self._column_of.append(torch.where(is_eos, union.primary_size, to_primary).clamp_min(0).long())

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        normalizers = torch.zeros_like(weights)
        fused = primary.new_zeros(primary.shape[0], self.union.primary_size + 1)
        for index, member_logits in self.taking_part(logits, normalizers):
            probs = (member_logits - normalizers[:, index, None]).exp_().mul_(weights[:, index, None])
            fused.scatter_add_(1, self._column_of[index].expand_as(probs), probs)
        columns, eos_mass = fused[:, :-1], fused[:, -1]
        if self.maps[0].eos_ids.numel():
            put_eos(columns, eos_mass, primary, self.maps[0].eos_ids)
        else:
            normalize_(columns)
        return Mixed(columns.log(), normalizers)
