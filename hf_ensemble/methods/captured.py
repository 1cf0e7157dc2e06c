"""A method's arithmetic as one CUDA graph."""

import weakref
from collections.abc import Sequence

from torch import Tensor

from ..members.cuda_graphs import Captured
from .base import Mixed, TokenMethod


class CapturedMix:
    """Calls `method.mix`, through CUDA graphs if the method allows (see `Captured`).

    There is one graph for each set of members that take part (behind a gate they change from step to step). The method
    keeps the graphs for the next call.

    Args:
        method: The method.
    """

    def __init__(self, method: TokenMethod):
        self._method = method
        unused = method.captured_mixes
        try:
            self._captured = unused.pop()
        except IndexError:
            self._captured = _captured_mix(method)
        weakref.finalize(self, unused.append, self._captured).atexit = False

    def __call__(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """As `TokenMethod.mix`. The result is the caller's own."""
        return Mixed(*self._captured(*logits, weights))


def _captured_mix(method: TokenMethod) -> Captured:
    unheld = weakref.proxy(method)  # which holds the graphs

    def mix(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        *logits, weights = arguments
        assert weights is not None
        mixed = unheld.mix(logits, weights)
        return mixed.logprobs, mixed.normalizers

    return Captured(mix, method.is_capturable)
