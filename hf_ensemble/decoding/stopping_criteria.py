"""The stopping criterion that tells the fusion what has been chosen."""

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from .token_decoder import TokenFusion


class FollowingCriteriaList(StoppingCriteriaList):
    """Stopping criteria after which a fusion takes up the step's ids, before any streamer sees them.

    Args:
        criteria: The criteria of the call.
        fusion: The call's fusion.
    """

    def __init__(self, criteria: StoppingCriteriaList, fusion: TokenFusion):
        super().__init__(criteria)
        self._fusion = fusion
        self._done: Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Say which rows have ended, of shape `(batch_size,)`, and let the fusion follow."""
        # Criteria answer for this id only; a row that has ended stays so.
        done: Any = super().__call__(input_ids, scores, **kwargs)
        self._done = done if self._done is None else self._done | done
        self._done = self._fusion.receive(input_ids, self._done)
        return self._done
