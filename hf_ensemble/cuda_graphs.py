"""Arithmetic as CUDA graphs, since launching its many small kernels takes longer than running them."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NUM_EAGER_STEPS = 2
"""Steps of the same shapes before a graph is captured: short calls need none, and they serve as its warm-up."""


_capturing = threading.Lock()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture what is launched, while other threads go on launching on their own.

    One thread captures at a time, since each waits for the whole device first, which would spoil another's capture.

    Args:
        graph: Takes what is launched.
        pool: Scratch memory, for graphs of which one at a time runs.
        stream: The stream to capture on; default: one of its own.
    """
    with _capturing, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield


@dataclass
class _Graph:
    """A captured function with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor | None]
    results: tuple[Tensor, ...]


class Captured:
    """Calls a function of tensors; on CUDA through a graph, once arguments of the same shapes have come a few times.

    There is one graph for each set of shapes. The buffers belong to this object, so calls at the same time need one
    each.

    Args:
        function: Does the same kernels whenever the shapes are the same, with no look at the host.
        can_capture: False to call it as it is.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], can_capture: bool):
        self._function = function
        self._can_capture = can_capture
        self._num_eager: Counter[tuple[torch.Size | None, ...]] = Counter()
        self._graphs: dict[tuple[torch.Size | None, ...], _Graph] = {}
        self._pool: Any = None

    def __call__(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """As `function`. The results are the caller's own."""
        is_cuda = any(argument is not None and argument.is_cuda for argument in arguments)
        if not (is_cuda and self._can_capture) or torch.cuda.is_current_stream_capturing():
            return self._function(*arguments)
        shapes = tuple(None if argument is None else argument.shape for argument in arguments)
        if shapes not in self._graphs:
            self._num_eager[shapes] += 1
            if self._num_eager[shapes] <= _NUM_EAGER_STEPS or not self._capture(shapes, arguments):
                return self._function(*arguments)
        captured = self._graphs[shapes]
        for buffer, argument in zip(captured.arguments, arguments, strict=True):
            if buffer is not None and argument is not None:
                buffer.copy_(argument)
        captured.graph.replay()
        return tuple(result.clone() for result in captured.results)

    def _capture(self, shapes: tuple[torch.Size | None, ...], arguments: Sequence[Tensor | None]) -> bool:
        buffers = [None if argument is None else argument.clone() for argument in arguments]
        graph = torch.cuda.CUDAGraph()
        # One at a time runs, so all may use the same scratch memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with capture(graph, self._pool):
                results = self._function(*buffers)
        except RuntimeError as error:
            warnings.warn(
                f"arithmetic of a step cannot be captured as a CUDA graph ({error}): it runs uncaptured.", stacklevel=2
            )
            self._can_capture = False
            return False
        self._graphs[shapes] = _Graph(graph, buffers, results)
        return True
