"""The order in which examples run: the longest first, or, under a time limit, the same random one for all systems."""

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from ..state_file import hash_of
from .measures import Work
from .sets import EvaluationSet, Item

_TURN = 4
"""Number of batches in a system's turn, whose examples are drawn together. Turns exist because a system's data, such
as a method's tables, is not kept for all systems at once.
"""

_FIRST = 8
"""The first batch is smaller than a full one by this factor. It shows how long batches take."""


class Examples:
    """What systems read of a set for one kind of work. Examples with the same texts run once.

    Args:
        evaluation_set: The set.
        work: The work.

    Attributes:
        keys: The key of each example, by its index in the set.
        items: The examples by their keys.
    """

    def __init__(self, evaluation_set: EvaluationSet, work: Work):
        self.evaluation_set = evaluation_set
        self.work = work
        self.keys = [hash_of(self._texts(item)) for item in evaluation_set.items]
        self.items = dict(zip(self.keys, evaluation_set.items, strict=True))

    def longest_first(self, keys: Collection[str], size: int) -> Iterator[list[str]]:
        """Yield batches of similar lengths, the longest first, so that a lack of memory shows at once.

        Args:
            keys: Of the examples.
            size: Examples of a batch.
        """
        ordered = sorted(keys, key=self._length, reverse=True)
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    def drawn(self, keys: Collection[str], size: int) -> Iterator[list[str]]:
        """Yield batches of examples in a fixed random order, so that the first ones represent all.

        Several batches are drawn at a time and sorted by length; the order of these batches is random too. The first
        batches are small.

        Args:
            keys: Of the examples.
            size: Examples of a full batch.
        """
        # The example itself determines when it is drawn, whatever else is in the set.
        drawn_at = {key: hash_of(self.items[key]) for key in keys}
        ordered = sorted(keys, key=drawn_at.__getitem__)
        own = -(-size // _FIRST)
        while ordered:
            num_batches = 1 if own < size else min(_TURN, -(-len(ordered) // own))
            window, ordered = ordered[: num_batches * own], ordered[num_batches * own :]
            window.sort(key=self._length, reverse=True)
            cuts = [len(window) * n // num_batches for n in range(num_batches + 1)]
            batches = [window[start:stop] for start, stop in itertools.pairwise(cuts)]
            yield from sorted(batches, key=lambda batch: min(map(drawn_at.__getitem__, batch)))
            own = min(2 * own, size)

    def _texts(self, item: Item) -> tuple[str, ...]:
        """The texts of an example: its prompt, and the continuations that are scored."""
        return (item.prompt, *(item.continuations if self.work == "score" else ()))

    def _length(self, key: str) -> int:
        """Number of characters that are read of an example."""
        prompt, *continuations = self._texts(self.items[key])
        return len(prompt) + max(map(len, continuations), default=0)


class Task(Protocol):
    """The work of one system on examples.

    Attributes:
        num_left: Number of examples that have not run.
        last: Seconds and examples of its last batch; None before the first.
    """

    num_left: int
    last: tuple[float, int] | None

    @property
    def examples(self) -> Any:
        """The examples, which tasks may share."""

    def next_batch(self) -> Sequence[str]:
        """The keys of the examples that it runs next; empty if it is done."""


_Task = TypeVar("_Task", bound=Task)


def one_by_one(tasks: Sequence[_Task]) -> Iterator[_Task]:
    """Yield the task to run a batch next: the first until it is done, then the next."""
    for task in tasks:
        while task.next_batch():
            yield task


def in_turns(tasks: Sequence[_Task], time_limit: float) -> Iterator[_Task]:
    """Yield the task to run a batch next, until no batch would probably finish in time.

    Time is shared evenly between unfinished sets of examples. Among tasks that share examples, the one with most work
    left goes first, so they advance together.

    Args:
        tasks: The tasks, which run the batch while the generator waits.
        time_limit: Seconds from now.
    """
    ends = time.perf_counter() + time_limit
    groups: dict[Any, list[_Task]] = defaultdict(list)
    for task in tasks:
        groups[task.examples].append(task)
    spent = dict.fromkeys(groups, 0.0)
    while groups:
        examples = min(groups, key=spent.__getitem__)
        group = [task for task in groups[examples] if task.num_left]
        if not group:
            del groups[examples]
            continue
        task = max(group, key=lambda own: own.num_left)
        # A turn is short while batches still grow, and when not every task would get a long one.
        is_even = all(own.last and len(own.next_batch()) <= own.last[1] for own in group)
        share = (ends - time.perf_counter()) / len(groups)
        is_long = is_even and _TURN * sum(_seconds_of(own, tasks) for own in group) < share
        for _ in range(_TURN if is_long else 1):
            began = time.perf_counter()
            if not task.next_batch():
                break
            if began + _seconds_of(task, tasks) >= ends:
                del groups[examples]
                break
            yield task
            spent[examples] += time.perf_counter() - began


def _seconds_of(task: Task, tasks: Sequence[Task]) -> float:
    """The probable time of a task's next batch: from its last one, or from the longest of other tasks."""
    own = [other.last for other in tasks if other.last and other.examples is task.examples]
    known = task.last or max(own or [other.last for other in tasks if other.last], default=(0.0, 1))
    return known[0] * max(1.0, len(task.next_batch()) / known[1])
