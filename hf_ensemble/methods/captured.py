"""A method's arithmetic as one CUDA graph."""

from collections.abc import Sequence

from torch import Tensor

from ..cuda_graphs import Captured
from .base import Mixed, TokenMethod


class CapturedMix:
    """Calls `method.mix`, through CUDA graphs if the method allows (see `Captured`).

    There is one graph for each set of members that take part (behind a gate they change from step to step).

    Args:
        method: The method.
    """

    def __init__(self, method: TokenMethod):
        def mix(*arguments: Tensor | None) -> tuple[Tensor, ...]:
            *logits, weights = arguments
            assert weights is not None
            mixed = method.mix(logits, weights)
            return mixed.logprobs, mixed.normalizers

        self._captured = Captured(mix, method.is_capturable)

    def __call__(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """As `TokenMethod.mix`. The result is the caller's own."""
        return Mixed(*self._captured(*logits, weights))
