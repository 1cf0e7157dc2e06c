"""In which order examples run: the longest first, or, if time may not suffice, the same drawn ones for all systems."""

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from ..state_file import hash_of
from .measures import Work
from .sets import EvaluationSet, Item

_TURN = 4
"""Batches that a system runs before it is another's turn, and whose examples are drawn together: what is made for a system,
such as a method's tables, is not kept for all of them at once."""

_FIRST = 8
"""By this the first batch is smaller than a full one. It shows how long batches take."""


class Examples:
    """What systems read of a set for one kind of work. Examples that are read alike run once.

    Args:
        evaluation_set: The set.
        work: The work.

    Attributes:
        keys: By its place in the set, the key of each example.
        items: The examples by their keys.
    """

    def __init__(self, evaluation_set: EvaluationSet, work: Work):
        self.evaluation_set = evaluation_set
        self.work = work
        self.keys = [hash_of(self._texts(item)) for item in evaluation_set.items]
        self.items = dict(zip(self.keys, evaluation_set.items, strict=True))

    def longest_first(self, keys: Collection[str], size: int) -> Iterator[list[str]]:
        """Yield batches of even lengths, such that memory that does not suffice is missed at once.

        Args:
            keys: Of the examples.
            size: Examples of a batch.
        """
        ordered = sorted(keys, key=self._length, reverse=True)
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    def drawn(self, keys: Collection[str], size: int) -> Iterator[list[str]]:
        """Yield batches of examples drawn at random, always in the same order, so that the first of them stand for all.

        Some batches' worth is drawn at a time and sorted by length, and which of these batches is the first is random too.
        The first batches are small ones.

        Args:
            keys: Of the examples.
            size: Examples of a full batch.
        """
        # What an example is says when it is drawn, whatever else is in the set.
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
        """What is read of an example: its prompt, and the continuations that are scored."""
        return (item.prompt, *(item.continuations if self.work == "score" else ()))

    def _length(self, key: str) -> int:
        """Number of characters that are read of an example."""
        prompt, *continuations = self._texts(self.items[key])
        return len(prompt) + max(map(len, continuations), default=0)


class Task(Protocol):
    """What one system has to do with examples.

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
        """The keys of the examples that it runs next; none if it is through."""


_Task = TypeVar("_Task", bound=Task)


def one_by_one(tasks: Sequence[_Task]) -> Iterator[_Task]:
    """Yield whichever task shall run a batch next: the first until it is through, then the next."""
    for task in tasks:
        while task.next_batch():
            yield task


def in_turns(tasks: Sequence[_Task], time_limit: float) -> Iterator[_Task]:
    """Yield whichever task shall run a batch next, until none would probably end in time.

    Time is shared evenly between the examples that are not through, and of the tasks that share examples the one that has
    most left goes first. So the tasks are about as far at any time.

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
        # A turn is short while batches still grow, and when not all would come to a long one.
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
    """How long a task's next batch will probably take: from its last, or the longest of others, best on its examples."""
    own = [other.last for other in tasks if other.last and other.examples is task.examples]
    known = task.last or max(own or [other.last for other in tasks if other.last], default=(0.0, 1))
    return known[0] * max(1.0, len(task.next_batch()) / known[1])
