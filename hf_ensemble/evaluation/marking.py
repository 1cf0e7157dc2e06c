"""Turns outcomes of examples into values with intervals and differences to the best member."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from .estimates import NO_ESTIMATE, Estimate
from .measures import Measure, Work
from .sets import EvaluationSet


class Outcomes(NamedTuple):
    """What a system wrote, or the log-probabilities it gave, on a set.

    Attributes:
        system: Name of the member or configuration.
        is_member: Whether it is a member alone.
        evaluation_set: The set.
        work: `"write"` or `"score"`.
        ran: For each example that ran, by its index in the set: the response, or the natural log-probability of each
            continuation, and the seconds it took.
    """

    system: str
    is_member: bool
    evaluation_set: EvaluationSet
    work: Work
    ran: dict[int, tuple[Any, float]]


@dataclass(frozen=True)
class Result:
    """One system at one measure on one set.

    Attributes:
        system: Name of the member or configuration.
        is_member: Whether it is a member alone.
        set_name: Name of the set.
        measure: `"exact match"`, `"F1"`, `"accuracy"`, `"normalized accuracy"` (from 0 to 1), `"bits per byte"`, `"chrF"` or
            `"BLEU"` (from 0 to 100).
        count: Number of examples that ran.
        num_examples: Number of examples in the set.
        estimate: The value with its interval.
        difference: The value minus the best member's over the examples that both ran on, with its interval; None for
            that member itself, and if no member ran.
        num_without: Number of examples to which the system gives no probability at all: no choice has any, or the
            right answer or the text has none.
        seconds: How long the examples took; measures of a set that come from the same run share them.
    """

    system: str
    is_member: bool
    set_name: str
    measure: str
    count: int
    num_examples: int
    estimate: Estimate
    difference: Estimate | None
    num_without: int
    seconds: float


class Marks:
    """All systems at one measure on one set.

    Args:
        measure: The measure.
        outcomes: The outcomes of each system.
    """

    def __init__(self, measure: Measure, outcomes: Sequence[Outcomes]):
        self.measure = measure
        self.evaluation_set = outcomes[0].evaluation_set
        self._outcomes = {own.system: own for own in outcomes}
        items = self.evaluation_set.items
        # The kept data of each example that ran, by its index in the set.
        self._kept = {
            own.system: {n: measure.read(self.evaluation_set, items[n], found) for n, (found, _) in own.ran.items()}
            for own in outcomes
        }

    def values(self, system: str) -> dict[int, float]:
        """Return the value of each example that ran, by its index in the set.

        Raises:
            ConfigurationError: If there is no such system.
        """
        return {n: self.measure.value(kept) for n, kept in self._of(system).items()}

    def compare(self, system: str, other: str) -> Estimate:
        """Return a system's value minus another's, over the examples that both ran; NaN without such examples.

        Raises:
            ConfigurationError: If there is no such system.
        """
        one, two = self._of(system), self._of(other)
        both = [n for n in one if n in two]
        if not both:
            return NO_ESTIMATE
        return self.measure.difference([one[n] for n in both], [two[n] for n in both])

    def results(self) -> Iterator[Result]:
        """The result of each system."""
        kept = {system: list(own.values()) for system, own in self._kept.items()}
        estimates = {system: self.measure.estimate(own) if own else NO_ESTIMATE for system, own in kept.items()}
        # The best of the members that ran on the most examples.
        members = [own.system for own in self._outcomes.values() if own.is_member and own.ran]
        rank = {system: (len(kept[system]), self.measure.sign * estimates[system].value) for system in members}
        best = max(members, key=rank.__getitem__, default=None)
        items = self.evaluation_set.items
        for system, own in self._outcomes.items():
            both = set() if best in (None, system) else own.ran.keys() & self._kept[str(best)].keys()
            yield Result(
                system=system,
                is_member=own.is_member,
                set_name=self.evaluation_set.name,
                measure=self.measure.name,
                count=len(own.ran),
                num_examples=len(items),
                estimate=estimates[system],
                difference=self.compare(system, str(best)) if both else None,
                num_without=sum(self.measure.lacks(items[n], found) for n, (found, _) in own.ran.items()),
                seconds=math.fsum(seconds for _, seconds in own.ran.values()),
            )

    def _of(self, system: str) -> dict[int, Any]:
        if system not in self._kept:
            raise ConfigurationError(f"unknown system {system!r}: there are {', '.join(map(repr, self._kept))}.")
        return self._kept[system]


def mark(outcomes: Sequence[Outcomes], measures: Sequence[Measure]) -> dict[tuple[str, str], Marks]:
    """Mark responses and scores.

    Args:
        outcomes: Outcomes of several systems on several sets.
        measures: The measures to compute.

    Returns:
        The marks, by the names of set and measure.
    """
    groups: dict[tuple[str, Measure], list[Outcomes]] = defaultdict(list)
    for own in outcomes:
        for measure in measures:
            if measure.work == own.work and measure.is_for(own.evaluation_set):
                groups[own.evaluation_set.name, measure].append(own)
    return {(name, measure.name): Marks(measure, group) for (name, measure), group in groups.items()}
