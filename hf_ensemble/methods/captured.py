"""A method's arithmetic as one CUDA graph, since launching its many small kernels takes longer than running them."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Mixed, TokenMethod

_NUM_EAGER_STEPS = 2
"""Steps of the same shapes before a graph is captured: short calls need none, and they serve as its warm-up."""


class CapturedMix:
    """Calls `method.mix`; on CUDA through a graph, once the same shapes have come a few times.

    A graph's buffers belong to this object, so calls at the same time need one each.

    Args:
        method: The method.
    """

    def __init__(self, method: TokenMethod):
        self._method = method
        self._shapes: tuple[torch.Size | None, ...] = ()
        self._num_eager = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor | None] = []
        self._weights: Tensor | None = None
        self._mixed: Mixed | None = None

    def __call__(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """As `TokenMethod.mix`. The result is the caller's own."""
        if not weights.is_cuda or not self._method.is_capturable or torch.cuda.is_current_stream_capturing():
            return self._method.mix(logits, weights)
        shapes = tuple(None if member_logits is None else member_logits.shape for member_logits in logits)
        if shapes != self._shapes:
            self._shapes, self._num_eager, self._graph = shapes, 0, None
        if self._num_eager < _NUM_EAGER_STEPS:
            self._num_eager += 1
            return self._method.mix(logits, weights)
        if self._graph is None and not self._capture(logits, weights):
            return self._method.mix(logits, weights)
        assert self._graph is not None
        assert self._weights is not None
        assert self._mixed is not None
        for buffer, member_logits in zip(self._inputs, logits, strict=True):
            if buffer is not None and member_logits is not None:
                buffer.copy_(member_logits)
        self._weights.copy_(weights)
        self._graph.replay()
        return Mixed(self._mixed.logprobs.clone(), self._mixed.normalizers.clone())

    def _capture(self, logits: Sequence[Tensor | None], weights: Tensor) -> bool:
        self._inputs = [None if member_logits is None else member_logits.clone() for member_logits in logits]
        self._weights = weights.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local, so that other threads may go on launching on their own.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._mixed = self._method.mix(self._inputs, self._weights)
        except RuntimeError as error:
            warnings.warn(
                f"the mixing of a step cannot be captured as a CUDA graph ({error}): it runs uncaptured.", stacklevel=2
            )
            self._num_eager = -(2**62)
            return False
        self._graph = graph
        return True
