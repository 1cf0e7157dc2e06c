"""Anchor tokens: entries that all members have, which serve as axes of a shared space."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..errors import VocabularyError
from .token_bytes import TEXT
from .union import UnionVocabulary


class AnchorTokens:
    """The entries common to all members, or some of them drawn at random, each with its id in every member.

    Control tokens are never anchors. The choice depends only on the vocabularies, `num_anchors` and `seed`. Finding
    the anchors takes milliseconds once the union vocabulary, which is kept on disk, is there.

    Args:
        union: The members' union vocabulary.
        num_anchors: Number of anchors to draw; None, or more than there are common entries, takes all.
        seed: Seed of the draw. The global random state does not change.

    Attributes:
        union_ids: Union ids of the anchors in ascending order, of shape `(num_anchors,)`.
        ids: For each member its ids of the anchors, in the order of `union_ids`.
        num_common: Number of common entries that the anchors were drawn from.

    Raises:
        VocabularyError: If the members have no entry in common.

    Reference:
        Huang et al., "Ensemble Learning for Heterogeneous Large Language Models with Deep Parallel Collaboration"
        (https://arxiv.org/abs/2404.12715), section 3.2.
    """

    def __init__(self, union: UnionVocabulary, num_anchors: int | None = None, seed: int = 0):
        has_all = np.logical_and.reduce([ids >= 0 for ids in union.union_to_member])
        has_all[: union.primary_size] &= union.encoders[0].token_bytes.kinds == TEXT
        common = np.flatnonzero(has_all)
        if not len(common):
            raise VocabularyError(
                "the members' tokenizers have no entry in common, so there are no anchor tokens. Use a method that "
                "needs none, such as 'unite'."
            )
        self.num_common = len(common)
        if num_anchors is not None and num_anchors < len(common):
            drawn = torch.randperm(len(common), generator=torch.Generator().manual_seed(seed))[:num_anchors]
            common = common[np.sort(drawn.numpy())]
        self.union_ids = common
        self.ids = [ids[common].astype(np.int64) for ids in union.union_to_member]

    @classmethod
    def from_tokenizers(
        cls,
        tokenizers: Sequence[PreTrainedTokenizerBase],
        num_anchors: int | None = None,
        seed: int = 0,
        cache: bool = True,
    ) -> "AnchorTokens":
        """Find the anchors of fast tokenizers; the first is the primary's.

        Args:
            tokenizers: Fast tokenizers. They are read, never changed.
            num_anchors: Number of anchors to draw; None, or more than there are common entries, takes all.
            seed: Seed of the draw.
            cache: Whether to read and write the store on disk.

        Raises:
            VocabularyError: If a tokenizer cannot be understood, or they have no entry in common.
        """
        return cls(UnionVocabulary.from_tokenizers(tokenizers, cache=cache), num_anchors, seed)

    def __len__(self) -> int:
        """Number of anchors."""
        return len(self.union_ids)
