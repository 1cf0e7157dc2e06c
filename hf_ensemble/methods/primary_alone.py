"""The primary alone, as a method, for calls with all the weight on the primary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Mixed, TokenMethod


class PrimaryAlone(TokenMethod):
    """The primary's own logits, unchanged."""

    resync = "append"
    is_wide = False
    is_capturable = False

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Return the primary's logits; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        normalizers = torch.zeros_like(weights)
        normalizers[:, 0] = 0 * primary.amax(-1)  # NaN if the primary returned any
        return Mixed(primary, normalizers)
