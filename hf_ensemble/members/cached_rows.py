"""What every kind of cache offers to a state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..vocabulary.context import num_common
from .entries import Entries, EntryIds

CACHE_MODES = ("fused", "static", "repack", "row_chunks", "row_tokens", "recompute")
"""How caches can follow a text, the fastest first; see `LocalMember.cache_mode`."""

CAPTURED_MODES = ("fused", "static")
"""Those whose steps run as CUDA graphs."""

AHEAD = -1
"""Stands for a cached id that the host does not know yet: the text says what it is when it is read next."""


class CachedRows(ABC):
    """A member's caches for the rows of a call.

    Args:
        num_rows: Number of rows.

    Attributes:
        mode: The cache mode; see `LocalMember.cache_mode`.
        cached: The ids of each row that are in its cache. Nothing else says how much of a text is cached: what a text
            has in common with them need not be computed again.
        can_be_cut: Whether rows roll back to any length without being read anew.
        run_beside: Whether what is started runs beside the host, on a GPU or elsewhere.
        is_elsewhere: Whether nothing of a text is kept here, so that it helps nobody to read a prompt ahead.
        num_forwards: Number of forward passes that the last `forward` took.
        where: Says where a row is, for errors: "in row 0 at step 1".
    """

    mode: str
    can_be_cut = True
    run_beside = False
    is_elsewhere = False
    num_forwards = 1

    def __init__(self, num_rows: int):
        self.cached: list[list[int]] = [[] for _ in range(num_rows)]
        self.where: Callable[[int], str] = lambda row: f"in row {row}"

    @abstractmethod
    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Start to bring every row to its text.

        Args:
            texts: The ids of each row. A row that has to wait is given what it has cached.
            num_last: After how many last ids of each row logits are wanted; 0 for a row that has to wait.

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

    def join(self, other: Any) -> None:
        """Let the rows of other caches of the member, which nobody uses any more, stand after these."""
        count, num_more = len(self.cached), len(other.cached)
        self.select([*range(count), *[0] * num_more])
        self.adopt(other, [*[None] * count, *range(num_more)])

    def hold(self) -> None:
        """Remember the rows as they are, where they could not roll back to them otherwise."""
        return

    def cut(self, row: int, length: int) -> bool:
        """Let the cache of a row end earlier, if that takes no work.

        Returns:
            Whether it does now.
        """
        return False

    def collect(self, logits: Tensor) -> Tensor:
        """Wait for the logits that were started last, and give the caller its own."""
        return logits

    @property
    def share_in_one_request(self) -> float | None:
        """In which share of rows and steps one request to a server was enough; None where there is no server."""
        return None

    # Of members that send few entries in place of whole rows; others are never asked.

    def start_entries(
        self, texts: Sequence[Sequence[int]], rows: Sequence[int], count: int, entry_ids: EntryIds
    ) -> None:
        """Start to find the best entries after texts.

        Args:
            texts: The ids of each row.
            rows: Those of them that are wanted.
            count: Number of entries.
            entry_ids: Which ids take part, and make an entry together.
        """
        raise NotImplementedError

    def entries(self) -> Entries:
        """Wait for the entries that were started last."""
        raise NotImplementedError

    def start_logits_of(self, ids: Sequence[Sequence[int]]) -> None:
        """Start to find the logits of these ids after the texts of the last `start_entries`.

        Args:
            ids: For each row that was wanted.
        """
        raise NotImplementedError

    def logits_of(self) -> Entries:
        """Wait for the logits that were started last; the best are not among them."""
        raise NotImplementedError

    def run_ahead(self, last_ids: Tensor) -> Tensor | None:
        """Start the step after one more id in every row, on the device, where that can be done.

        Args:
            last_ids: Of shape `(num_rows,)`.

        Returns:
            Logits of shape `(num_rows, 1, vocab_size)`, or None.
        """
        return None

    def beside(self) -> AbstractContextManager[None]:
        """Launch beside all that is not told to wait for these rows, which must have been read."""
        return nullcontext()

    def num_cached(self, row: int, text: Sequence[int]) -> int:
        """How many leading ids of a text are in the cache of a row; an id that ran ahead takes the text's word for itself."""
        held, count = self.cached[row], len(self.cached[row])
        if held and held[-1] == AHEAD and len(text) >= count:
            held[-1] = text[count - 1]
        # Mostly the text has grown. A slice of it would be a copy of all that is long known.
        held += text[count:]
        has_grown = held == text
        del held[count:]
        return count if has_grown else num_common(held, text)

    def _num_cached_of(self, texts: Sequence[Sequence[int]]) -> list[int]:
        return [self.num_cached(row, text) for row, text in enumerate(texts)]

    def _follow(self, texts: Sequence[Sequence[int]], num_cached: Sequence[int]) -> None:
        """Take note that the texts are in the caches, of which so many ids were before."""
        for held, text, start in zip(self.cached, texts, num_cached, strict=True):
            held[start:] = text[start:]


def most_new(texts: Sequence[Sequence[int]], num_cached: Sequence[int], num_last: Sequence[int]) -> int:
    """How many ids every row takes in a forward pass: what the most of them need, those of their logits included."""
    return max(
        max(wanted, 1, len(text) - cached) for text, cached, wanted in zip(texts, num_cached, num_last, strict=True)
    )


def last_ids(text: Sequence[int], count: int) -> list[int]:
    """So many last ids of a text, after zeros where it has fewer."""
    tail = list(text[-count:])
    return [0] * (count - len(tail)) + tail
