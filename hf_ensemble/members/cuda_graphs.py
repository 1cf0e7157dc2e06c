"""Arithmetic as CUDA graphs, because launching its many small kernels takes longer than running them."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import messages

_NUM_EAGER_STEPS = 2
"""Number of steps of the same shapes before a graph is captured; they are its warm-up, and short calls need no graph.
"""

_MOST_GRAPHS = 16
"""Number of sets of shapes for which graphs are kept."""

_capturing = threading.Lock()
_in_use: dict[tuple[int, int], threading.RLock] = {}


def lock_of(stream: torch.cuda.Stream) -> threading.RLock:
    """Return the lock for launches on a stream.

    Torch reuses a few streams. A launch on a stream on which another thread captures spoils both.
    """
    return _in_use.setdefault((stream.device_index, stream.cuda_stream), threading.RLock())


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture launches on the current device, while other threads keep launching on their own.

    One thread captures at a time, because each waits for the whole device first, which would spoil another capture.

    Args:
        graph: Receives the launches.
        pool: Scratch memory for graphs that never run at the same time.
        stream: The stream to capture on. Graphs captured on one stream may share scratch memory of libraries, so they
            must not run at the same time.
    """
    torch.cuda.current_blas_handle()  # a thread's first one cannot be created during a capture
    graphing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with lock_of(stream), _capturing, _no_collection(), graphing:
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: freeing a graph in this thread would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class _Graph:
    """A captured function with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor | None]
    results: tuple[Tensor, ...]


class Captured:
    """Calls a function of tensors; on CUDA through a graph, once the same shapes have occurred a few times.

    There is one graph for each set of shapes. The buffers belong to this object, so concurrent calls need separate
    objects.

    Args:
        function: Runs the same kernels whenever the shapes are the same, and reads nothing on the host.
        can_capture: False to call it directly.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], can_capture: bool):
        self._function = function
        self._can_capture = can_capture
        self._num_eager: Counter[tuple[torch.Size | None, ...]] = Counter()
        self._graphs: dict[tuple[torch.Size | None, ...], _Graph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        """As `function`. The results belong to the caller."""
        device = next((argument.device for argument in arguments if argument is not None), torch.device("cpu"))
        if device.type != "cuda" or not self._can_capture or torch.cuda.is_current_stream_capturing():
            return self._function(*arguments)
        # Buffers live longer than a call, so they must not be tied to its inference mode.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            return self._run(*arguments)

    def _run(self, *arguments: Tensor | None) -> tuple[Tensor, ...]:
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
        self._stream = self._stream or torch.cuda.Stream()
        if len(self._graphs) == _MOST_GRAPHS:
            self._graphs.clear()
        try:
            with capture(graph, self._pool, self._stream):
                results = self._function(*buffers)
        except RuntimeError as error:
            messages.warn(
                f"the arithmetic of a step cannot be captured as a CUDA graph ({error}): it runs uncaptured."
            )
            self._can_capture = False
            return False
        self._graphs[shapes] = _Graph(graph, buffers, results)
        return True
