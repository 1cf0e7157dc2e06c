"""Token-level methods, one a file."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import DeepenConfig, EvaConfig, GacConfig, MethodConfig, MinedConfig, UniteConfig
from ..members.member import Member
from ..vocabulary.union import UnionVocabulary
from .base import TokenMethod
from .deepen import Deepen
from .eva import Eva, output_embeddings_of
from .gac import Gac
from .mined import Mined
from .product import ProductOfExperts
from .unite import Unite


def build_method(
    config: MethodConfig,
    members: Sequence[Member],
    union: UnionVocabulary,
    eos_ids: Sequence[Sequence[int]],
    device: torch.device,
) -> TokenMethod:
    """Build a token-level method for a set of members.

    Args:
        config: The method's options.
        members: The members; the first is the primary.
        union: The members' union vocabulary.
        eos_ids: For each member, the ids that end a text.
        device: Where the primary's logits are.
    """
    if isinstance(config, UniteConfig):
        return Unite(union, eos_ids, device, top_k=config.top_k)
    if isinstance(config, GacConfig) and config.space == "log":
        return ProductOfExperts(union, eos_ids, device, alpha=config.alpha)
    if isinstance(config, GacConfig):
        return Gac(union, eos_ids, device)
    if isinstance(config, DeepenConfig):
        embeddings = [member.model.get_input_embeddings() for member in members]
        return Deepen(union, eos_ids, device, embeddings, config)
    if isinstance(config, MinedConfig):
        return Mined(union, eos_ids, device)
    if isinstance(config, EvaConfig):
        options = {name: value for name, value in config.to_dict().items() if name != "name"}

        def output_embeddings() -> list[Tensor]:
            return [output_embeddings_of(member) for member in members]

        return Eva(union, eos_ids, device, output_embeddings, **options)
    method: TokenMethod = config.build(members, union, eos_ids, device)
    return method
