"""A method's arithmetic as one CUDA graph, since launching its many small kernels takes longer than running them."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Mixed, TokenMethod

_NUM_EAGER_STEPS = 2
"""Steps of the same shapes before a graph is captured: short calls need none, and they serve as its warm-up."""


@dataclass
class _Graph:
    """A captured step with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    logits: list[Tensor | None]
    weights: Tensor
    mixed: Mixed


class CapturedMix:
    """Calls `method.mix`; on CUDA through a graph, once the same shapes have come a few times.

    There is one graph for each set of members that take part (behind a gate they change from step to step). Its buffers
    belong to this object, so calls at the same time need one each.

    Args:
        method: The method.
    """

    def __init__(self, method: TokenMethod):
        self._method = method
        self._num_eager: Counter[tuple[torch.Size | None, ...]] = Counter()
        self._graphs: dict[tuple[torch.Size | None, ...], _Graph] = {}
        self._can_capture = method.is_capturable

    def __call__(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """As `TokenMethod.mix`. The result is the caller's own."""
        if not (weights.is_cuda and self._can_capture) or torch.cuda.is_current_stream_capturing():
            return self._method.mix(logits, weights)
        shapes = tuple(None if member_logits is None else member_logits.shape for member_logits in logits)
        if shapes not in self._graphs:
            self._num_eager[shapes] += 1
            if self._num_eager[shapes] <= _NUM_EAGER_STEPS or not self._capture(shapes, logits, weights):
                return self._method.mix(logits, weights)
        captured = self._graphs[shapes]
        for buffer, member_logits in zip(captured.logits, logits, strict=True):
            if buffer is not None and member_logits is not None:
                buffer.copy_(member_logits)
        captured.weights.copy_(weights)
        captured.graph.replay()
        return Mixed(captured.mixed.logprobs.clone(), captured.mixed.normalizers.clone())

    def _capture(
        self, shapes: tuple[torch.Size | None, ...], logits: Sequence[Tensor | None], weights: Tensor
    ) -> bool:
        inputs = [None if member_logits is None else member_logits.clone() for member_logits in logits]
        weights = weights.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # Thread-local, so that other threads may go on launching on their own.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                mixed = self._method.mix(inputs, weights)
        except RuntimeError as error:
            warnings.warn(
                f"the mixing of a step cannot be captured as a CUDA graph ({error}): it runs uncaptured.", stacklevel=2
            )
            self._can_capture = False
            return False
        self._graphs[shapes] = _Graph(graph, inputs, weights, mixed)
        return True
