"""What an ensemble hangs into the stock decoding loop: processors and criteria."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteriaList

from .token_decoder import TokenDecoder


class FusionProcessor(LogitsProcessor):
    """First processor of an ensemble's call: the primary's logits in, the fused scores out.

    Args:
        decoder: The call's decoder.
        is_beam_search: Whether rows move between steps and scores arrive as log-probabilities.
    """

    def __init__(self, decoder: TokenDecoder, is_beam_search: bool):
        self._decoder = decoder
        self._is_beam_search = is_beam_search
        self._is_first = True

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        if self._is_beam_search and not self._is_first:
            self._decoder.follow_beams(input_ids)
        self._is_first = False
        fused = self._decoder.fuse(scores, normalize=not self._is_beam_search)
        if self._is_beam_search:
            self._decoder.check_finite()
        return fused  # type: ignore[return-value]


class SettlingProcessor(LogitsProcessor):
    """Stands after the last constraint and before the warpers: proposals decide alone wherever some of them are left.

    Args:
        decoder: The call's decoder.
    """

    def __init__(self, decoder: TokenDecoder):
        self._decoder = decoder

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        return self._decoder.settle(input_ids, scores)  # type: ignore[return-value]


class SelectionProcessor(LogitsProcessor):
    """Last processor of an ensemble's call: chooses over the union vocabulary where the decision is made there.

    Args:
        decoder: The call's decoder.
        do_sample: Whether to sample.
        num_beams: Number of beams; above 1, `generate` itself chooses.
    """

    def __init__(self, decoder: TokenDecoder, do_sample: bool, num_beams: int):
        self._decoder = decoder
        self._do_sample = do_sample
        self._num_beams = num_beams

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        if self._num_beams > 1:
            self._decoder.check_candidates(scores, self._num_beams)
            return scores
        return self._decoder.select(scores, self._do_sample)  # type: ignore[return-value]


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
