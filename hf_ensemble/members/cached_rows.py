"""What every kind of cache offers to a state."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from .contexts import ContextIds


class CachedRows(ABC):
    """A member's caches for the rows of a call.

    Attributes:
        mode: The cache mode; see `Member.cache_mode`.
        num_forwards: Number of forward passes that the last `forward` took.
    """

    mode: str
    num_forwards = 1

    @abstractmethod
    def forward(self, contexts: Sequence[ContextIds], num_last: Sequence[int]) -> Tensor:
        """Start to bring every row to its context.

        Args:
            contexts: One a row.
            num_last: After how many last ids of each row logits are wanted.

        Returns:
            Logits of shape `(num_rows, max(num_last), vocab_size)`, each row's at the right edge; to be read after
            `collect`.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> "CachedRows":
        """Rows of their own that continue from these."""

    @abstractmethod
    def adopt(self, fork: Any, rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork, or, where that is None, stay."""

    def hold(self) -> None:
        """Remember the rows as they are, where they could not roll back to them otherwise."""
        return

    def collect(self, logits: Tensor) -> Tensor:
        """Wait for the logits that were started last, and give the caller its own."""
        return logits

    def run_ahead(self, last_ids: Tensor) -> Tensor | None:
        """Start the step after one more id in every row, on the device, where that can be done.

        Args:
            last_ids: Of shape `(num_rows,)`.

        Returns:
            Logits of shape `(num_rows, 1, vocab_size)`, or None.
        """
        return None

    def beside(self) -> AbstractContextManager[None]:
        """Launch beside all that is not told to wait for these rows."""
        return nullcontext()
