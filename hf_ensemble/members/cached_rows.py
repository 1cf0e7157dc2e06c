"""The interface of all kinds of caches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..vocabulary.context import num_common
from .entries import Entries, EntryIds

CACHE_MODES = ("fused", "static", "repack", "row_chunks", "row_tokens", "recompute")
"""The cache modes, the fastest first; see `LocalMember.cache_mode`."""

CAPTURED_MODES = ("fused", "static")
"""The modes whose steps run as CUDA graphs."""

AHEAD = -1
"""Stands for a cached id that the host does not know yet; the next text determines it."""


class CachedRows(ABC):
    """A member's caches for the rows of a call.

    Args:
        num_rows: Number of rows.

    Attributes:
        mode: The cache mode; see `LocalMember.cache_mode`.
        cached: The ids of each row that are in its cache. They alone determine how much of a text is cached: their
            common prefix with the text is not computed again.
        can_be_cut: Whether rows can roll back to any length without reading again.
        run_beside: Whether started work runs beside the host, on a GPU or elsewhere.
        is_elsewhere: Whether the cache is not in this process, so that reading a prompt ahead is no use.
        num_forwards: Number of forward passes that the last `forward` took.
        where: Returns the position of a row, for errors: "in row 0 at step 1".
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
            texts: The ids of each row. A row that has to wait gets its cached ids.
            num_last: For each row, the number of last ids with logits; 0 for a row that has to wait.

        Returns:
            Logits of shape `(num_rows, max(num_last), vocab_size)`, each row's at the right edge; read them after
            `collect`.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""

    @abstractmethod
    def fork(self, rows: Sequence[int]) -> "CachedRows":
        """Return independent rows that continue from these."""

    @abstractmethod
    def adopt(self, fork: Any, rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""

    def join(self, other: Any) -> None:
        """Append the rows of other caches of the member, which are not used afterwards."""
        count, num_more = len(self.cached), len(other.cached)
        self.select([*range(count), *[0] * num_more])
        self.adopt(other, [*[None] * count, *range(num_more)])

    def reserve(self, num_rows: int, longest: int) -> None:
        """Make room for so many rows of up to `longest` ids, if room cannot grow without a copy."""
        return

    def hold(self) -> None:
        """Remember the current rows, if they could not be rolled back to otherwise."""
        return

    def cut(self, row: int, length: int) -> bool:
        """Let the cache of a row end earlier, if that takes no work.

        Returns:
            Whether it does now.
        """
        return False

    def collect(self, logits: Tensor) -> Tensor:
        """Wait for the last started logits, and return the caller a copy."""
        return logits

    @property
    def share_in_one_request(self) -> float | None:
        """The share of rows and steps for which one request to a server was enough; None without a server."""
        return None

    # Only for members that send few entries instead of whole rows.

    def start_entries(
        self, texts: Sequence[Sequence[int]], rows: Sequence[int], count: int, entry_ids: EntryIds
    ) -> None:
        """Start to find the best entries after texts.

        Args:
            texts: The ids of each row.
            rows: The wanted rows.
            count: Number of entries.
            entry_ids: Which ids take part, and which of them are the same entry.
        """
        raise NotImplementedError

    def entries(self) -> Entries:
        """Wait for the last started entries."""
        raise NotImplementedError

    def start_logits_of(self, ids: Sequence[Sequence[int]]) -> None:
        """Start to find the logits of these ids after the texts of the last `start_entries`.

        Args:
            ids: The ids for each wanted row.
        """
        raise NotImplementedError

    def logits_of(self) -> Entries:
        """Wait for the logits that were started last; the best are not among them."""
        raise NotImplementedError

    def run_ahead(self, last_ids: Tensor) -> Tensor | None:
        """Start the step after one more id in every row, on the device, if possible.

        Args:
            last_ids: Of shape `(num_rows,)`.

        Returns:
            Logits of shape `(num_rows, 1, vocab_size)`, or None.
        """
        return None

    def beside(self) -> AbstractContextManager[None]:
        """Launch beside everything that does not wait for these rows, which must have been read."""
        return nullcontext()

    def num_cached(self, row: int, text: Sequence[int]) -> int:
        """The number of leading ids of a text in a row's cache; an id that ran ahead counts as the text's."""
        held, count = self.cached[row], len(self.cached[row])
        if held and held[-1] == AHEAD and len(text) >= count:
            held[-1] = text[count - 1]
        # Usually the text has only grown. A slice would copy everything already known.
        held += text[count:]
        has_grown = held == text
        del held[count:]
        return count if has_grown else num_common(held, text)

    def _num_cached_of(self, texts: Sequence[Sequence[int]]) -> list[int]:
        return [self.num_cached(row, text) for row, text in enumerate(texts)]

    def _follow(self, texts: Sequence[Sequence[int]], num_cached: Sequence[int]) -> None:
        """Record that the texts are cached, and how many of their ids were before."""
        for held, text, start in zip(self.cached, texts, num_cached, strict=True):
            held[start:] = text[start:]


def most_new(texts: Sequence[Sequence[int]], num_cached: Sequence[int], num_last: Sequence[int]) -> int:
    """The number of ids that every row takes in a forward pass: the most that any row needs."""
    return max(
        max(wanted, 1, len(text) - cached) for text, cached, wanted in zip(texts, num_cached, num_last, strict=True)
    )


def last_ids(text: Sequence[int], count: int) -> list[int]:
    """The last ids of a text, after zeros if it has fewer."""
    tail = list(text[-count:])
    return [0] * (count - len(tail)) + tail
