"""What a cache reads of a row: its ids, and how many of them are as they were at the last reading."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..vocabulary.context import num_common


class ContextIds(Protocol):
    """What a state reads of a row: its ids, and how many leading ones are unchanged since the last reading."""

    ids: list[int]
    num_kept: int


@dataclass
class PlainContext:
    """Ids that whoever holds them changes."""

    ids: list[int]
    num_kept: int = 0

    def change(self, ids: list[int]) -> None:
        """Put other ids in their place; of those that are cached, what both begin with stays."""
        self.num_kept = min(self.num_kept, num_common(self.ids, ids))
        self.ids = ids


class WaitingContext(PlainContext):
    """What is cached of a row that is not wanted just now."""


def num_new_ids(contexts: Sequence[ContextIds], lengths: Sequence[int], num_last: Sequence[int]) -> int:
    """How many ids every row takes in a forward pass: what the most of them need, cached ones for their logits included.

    Args:
        contexts: What each row is brought to.
        lengths: How many ids of each row are cached.
        num_last: Of how many last ids of each row logits are wanted.
    """
    return max(
        max(wanted, 1, len(context.ids) - min(context.num_kept, length))
        for context, length, wanted in zip(contexts, lengths, num_last, strict=True)
    )


def last_ids(context: ContextIds, count: int) -> list[int]:
    """So many last ids of a row, after zeros where it has fewer."""
    tail = context.ids[-count:]
    return [0] * (count - len(tail)) + tail
