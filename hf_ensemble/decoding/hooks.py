"""What an ensemble hangs into the stock decoding loop: processors and criteria."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteriaList


class Hook(LogitsProcessor):
    """A processor that leaves to somebody what becomes of the scores.

    Args:
        act: Takes all ids so far, of shape `(batch_size, length)`, and the scores, of shape `(batch_size, width)`; returns
            the scores for the next processor.
    """

    def __init__(self, act: Callable[[Any, Any], Any]):
        self._act = act

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        return self._act(input_ids, scores)


class FollowingCriteriaList(StoppingCriteriaList):
    """Stopping criteria after which somebody takes up the step's ids, before any streamer sees them.

    A row that has ended stays so, whatever the criteria answer for its later ids.

    Args:
        criteria: The criteria of the call.
        follow: Takes all ids so far, of shape `(batch_size, length)`, and which rows have ended, of shape
            `(batch_size,)`; returns which have now.
    """

    def __init__(self, criteria: StoppingCriteriaList, follow: Callable[[Tensor, Tensor], Tensor]):
        super().__init__(criteria)
        self._follow = follow
        self._done: Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """Say which rows have ended, of shape `(batch_size,)`."""
        done: Any = super().__call__(input_ids, scores, **kwargs)
        self._done = self._follow(input_ids, done if self._done is None else self._done | done)
        return self._done
