"""EVA: the weighted average, after moving entries to the primary's with the most similar output embeddings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import METHODS, MethodConfig, check_option, check_positive_integer, is_number
from ..errors import ConfigurationError
from ..members.member import Member
from ..mixing import merge_duplicates, normalize_, top_entries, top_entries_of_each
from ..offers import Offer
from ..vocabulary.alignment import load_or_build_similar
from ..vocabulary.union import UnionVocabulary
from .base import EosIds, Mixed, TokenMethod, versions_of


@dataclass(frozen=True)
class EvaConfig(MethodConfig):
    """EVA: an assistant's entry counts for the primary's entries with the most similar output embeddings."""

    name: ClassVar[str] = "eva"

    neighbours: int = 10
    """Number of nearest entries that scale an entry's similarities, and largest number of the primary's entries that
    an assistant's entry counts for.
    """

    min_similarity: float = 0.1
    """Smallest similarity at which one entry counts for another."""

    top_k: int = 320
    """Number of entries that each member proposes at a step; a smaller vocabulary proposes all its entries."""

    filter_top_k: int = 5
    """A member sits a step out if its best entry is not among this many best entries of any other member."""

    def __post_init__(self) -> None:
        for name in ("neighbours", "top_k", "filter_top_k"):
            check_positive_integer(name, getattr(self, name))
        least = self.min_similarity
        check_option("min_similarity", least, is_number(least) and 0 < least < math.inf, "a positive number")

    @property
    def asks(self) -> frozenset[Offer]:
        """What every member that takes part has to provide."""
        return frozenset({Offer.ROWS, Offer.EMBEDDINGS})

    def build(
        self, members: Sequence[Member], union: UnionVocabulary, eos_ids: EosIds, device: torch.device
    ) -> TokenMethod:
        """Build the method; see `MethodConfig.build`."""
        return Eva(union, eos_ids, device, lambda: [output_embeddings_of(member) for member in members], self)


METHODS[EvaConfig.name] = EvaConfig


class Eva(TokenMethod):
    """Fuse `q(x) = sum_i w_i sum_y p_i(y) S_i(y, x)` over the primary's entries x and each member's best entries y.

    Row y of `S_i` is y itself if the primary has it, else the few of the primary's entries with the most similar
    output embeddings, after an orthogonal map between the two spaces. An entry without counterpart is dropped, and the
    fused distribution is renormalised. A member sits the step out if its best entry, once moved, is not among any
    other member's best; if that is true of all members, none sits out.

    Args:
        union: The union vocabulary of the members.
        eos_ids: For each member, the ids that end a text.
        device: Device of the primary's logits.
        output_embeddings: Returns each member's current output embeddings, of shape `(vocab_size, hidden_size)`.
        config: The options.

    Reference:
        Xu, Lu and Zhang, "Bridging the Gap between Different Vocabularies for LLM Ensemble"
        (https://arxiv.org/abs/2404.09492).

    Relations:
        MinED moves an entry to the one with the most similar spelling. DeePEn compares whole distributions by their
        similarities to anchors, without a map.
    """

    resync = "retokenize"
    is_wide = False
    proposes_few = True

    def __init__(
        self,
        union: UnionVocabulary,
        eos_ids: EosIds,
        device: torch.device,
        output_embeddings: Callable[[], Sequence[Tensor]],
        config: EvaConfig,
    ):
        super().__init__(union, eos_ids, device)
        self._output_embeddings = output_embeddings
        embeddings = output_embeddings()
        self._versions = versions_of(embeddings)
        self.config = config
        # The columns that each id's probability goes to (-1 for none, `primary_size` for EOS), and the shares.
        self._columns_of, self._shares_of = [], []
        for index, maps in enumerate(self.maps):
            columns = maps.to_union[:, None]
            shares = torch.ones(columns.shape, device=device)
            if index > 0:
                pair = (embeddings[0], embeddings[index])
                arrays = load_or_build_similar(union, index, pair, config.neighbours, config.min_similarity, device)
                columns, shares = (torch.as_tensor(array, device=device) for array in arrays)
            is_eos = torch.zeros_like(columns, dtype=torch.bool)
            is_eos[:, 0] = maps.to_union == len(union)
            has_column = torch.where(is_eos, self.maps[0].eos_ids.numel() > 0, columns >= 0)
            self._columns_of.append(torch.where(is_eos, union.primary_size, columns.clamp_min(0)))
            self._shares_of.append(torch.where(is_eos, 1.0, shares) * has_column)

    @property
    def is_stale(self) -> bool:
        """Whether output embeddings have changed since the maps were made."""
        return self._versions != versions_of(self._output_embeddings())

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Fuse one step; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        eos_ids = self.maps[0].eos_ids
        eos = eos_ids[primary[:, eos_ids].argmax(-1)][:, None, None] if eos_ids.numel() else 0  # (B, 1, 1)
        normalizers = torch.zeros_like(weights)
        moved: dict[int, Tensor] = {}
        for index, member_logits in self.taking_part(logits, normalizers):
            entries = merge_duplicates(member_logits, self.maps[index].duplicates)
            values, ids = top_entries(entries, min(self.config.top_k, entries.shape[-1]))  # (B, k)
            shares = values.softmax(-1)[..., None] * self._shares_of[index][ids]  # (B, k, neighbours)
            columns = self._columns_of[index][ids].long()
            columns = torch.where(columns == self.union.primary_size, eos, columns)
            moved[index] = torch.zeros_like(primary).scatter_add_(1, columns.flatten(1), shares.flatten(1))
        agreeing = self._agreeing(moved, weights)
        kept = agreeing / agreeing.sum(-1, keepdim=True)
        fused = torch.zeros_like(primary)
        for index, probs in moved.items():
            fused.addcmul_(probs, kept[:, index, None])
        normalize_(fused)
        # The caller multiplies the normalizers by `weights`, so they are scaled to count as the members do here.
        return Mixed(fused.log_(), torch.where(weights > 0, normalizers * kept / weights, normalizers))

    def _agreeing(self, moved: dict[int, Tensor], weights: Tensor) -> Tensor:
        """Set the weight of members whose best entry no other member supports to 0, unless that is all of them.

        Args:
            moved: For each member that takes part, its distribution over the primary's ids, of shape
                `(batch_size, primary_vocab_size)`.
            weights: Of shape `(batch_size, num_members)`.
        """
        k = min(self.config.filter_top_k, self.union.primary_size)
        values, best = top_entries_of_each(list(moved.values()), k)  # (M, B, k)
        shares = torch.stack([weights[:, index] for index in moved])  # (M, B)
        proposed = torch.where((values > 0) & (shares[..., None] > 0), best, -1)
        is_among = (proposed == best[:, None, :, :1]).any(-1)  # (M, M, B): whose best is among whose
        is_among &= ~torch.eye(len(moved), dtype=torch.bool, device=weights.device)[..., None]
        agreeing = torch.zeros_like(weights)
        kept = torch.where(is_among.any(1) & (values[..., 0] > 0), shares, 0.0)
        for index, of_member in zip(moved, kept, strict=True):
            agreeing[:, index] = of_member
        return torch.where(agreeing.sum(-1, keepdim=True) > 0, agreeing, weights)


def output_embeddings_of(member: Member) -> Tensor:
    """A member's output embeddings, of shape `(vocab_size, hidden_size)`.

    Raises:
        ConfigurationError: If they cannot be read, for example because they are quantised or not in memory.
    """
    weight = member.output_embeddings().weight
    if not isinstance(weight, Tensor):
        raise ConfigurationError(
            f"EVA reads the output embeddings of every member, but those of {member.name!r} are packed in a "
            f"{type(member.output_embeddings()).__name__}. Load it without quantising its head, or use another method."
        )
    weight = weight.detach()
    if weight.is_meta or not weight.is_floating_point() or weight.shape[0] != member.vocab_size or weight.ndim != 2:
        raise ConfigurationError(
            f"EVA reads the output embeddings of every member, but those of {member.name!r} are a {weight.dtype} "
            f"tensor of shape {tuple(weight.shape)}{' that is not in memory' if weight.is_meta else ''}. Load it "
            "without quantising or offloading its head, or use another method."
        )
    return weight
