"""What the outcomes of examples are worth: values with intervals, and how they differ from the best member's."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .sets import EvaluationSet, Item, Kind

Work = Literal["write", "score"]

MEASURES = ("exact match", "accuracy", "normalized accuracy", "bits per byte")

_MEASURES_OF: dict[tuple[Kind, Work], tuple[str, ...]] = {
    ("questions", "write"): MEASURES[:1],
    ("questions", "score"): MEASURES[3:],
    ("choices", "score"): MEASURES[1:],
    ("texts", "score"): MEASURES[3:],
}
"""What can be measured of each kind of set, by the work that it takes."""


def works_for(kind: Kind, measures: Collection[str]) -> list[Work]:
    """The kinds of work that a set takes for some measures.

    Args:
        kind: Kind of the set.
        measures: Which measures are wanted.
    """
    return [work for (own, work), found in _MEASURES_OF.items() if own == kind and not set(found).isdisjoint(measures)]


class Outcomes(NamedTuple):
    """What a system wrote, or which log-probabilities it gave, on a set.

    Attributes:
        system: Name of the member or configuration whose they are.
        is_member: Whether it is a member alone.
        evaluation_set: The set.
        work: `"write"` or `"score"`.
        ran: By its place in the set, for each example that ran a response, or the natural log-probability of each
            continuation, with the seconds it took.
    """

    system: str
    is_member: bool
    evaluation_set: EvaluationSet
    work: Work
    ran: dict[int, tuple[Any, float]]


Z = 1.959963984540054
"""Of the normal distribution, 2.5 % are above this."""


class Estimate(NamedTuple):
    """A value, and the ends of its 95 % confidence interval; NaN where there is none."""

    value: float
    low: float
    high: float


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
"""Of nothing."""


@dataclass(frozen=True)
class Result:
    """One system at one measure on one set.

    Attributes:
        system: Name of the member or configuration.
        is_member: Whether it is a member alone.
        set_name: Name of the set.
        measure: `"exact match"`, `"accuracy"`, `"normalized accuracy"` (shares) or `"bits per byte"`.
        count: Number of examples that ran.
        num_examples: Number of examples in the set.
        estimate: The value with its interval.
        difference: The value less the best member's over the examples that both have, with its interval; None for that
            member itself, and where no member ran.
        num_without: Examples that the system gives no probability at all: choices of which none has any, right answers or
            texts that have none.
        seconds: How long the examples took; measures of one set that come from one run share them.
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


def mark(outcomes: Sequence[Outcomes], measures: Collection[str]) -> list[Result]:
    """Mark what was written and scored.

    Args:
        outcomes: Outcomes of several systems on several sets.
        measures: Which measures are wanted.

    Returns:
        The results by set, measure and system.
    """
    groups: dict[tuple[str, str], list[Outcomes]] = defaultdict(list)
    for own in outcomes:
        for measure in _MEASURES_OF[own.evaluation_set.kind, own.work]:
            if measure in measures:
                groups[own.evaluation_set.name, measure].append(own)
    return [result for (_, measure), group in groups.items() for result in _compare(measure, group)]


def _compare(measure: str, group: Sequence[Outcomes]) -> Iterator[Result]:
    """The results of one measure on one set, each with its difference to the best member's."""
    items = group[0].evaluation_set.items
    is_bits = measure == "bits per byte"
    sizes = [len(item.continuations[item.right].encode()) if is_bits else 1 for item in items]
    # What each example that ran is worth, by its place in the set.
    found = [{n: _value(measure, own.evaluation_set, items[n], x) for n, (x, _) in own.ran.items()} for own in group]
    worth = [{place: value for place, (value, _) in values.items()} for values in found]
    estimates = [_estimate(is_bits, values, sizes) for values in worth]
    # The best of the members that ran on the most examples.
    sign = -1 if is_bits else 1
    members = [n for n, own in enumerate(group) if own.is_member and own.ran]
    best = max(members, key=lambda n: (len(worth[n]), sign * estimates[n].value), default=-1)
    for n, own in enumerate(group):
        both = [] if best in (-1, n) else [place for place in worth[n] if place in worth[best]]
        differences = [worth[n][place] - worth[best][place] for place in both]
        most = math.inf if is_bits else 1.0
        yield Result(
            system=own.system,
            is_member=own.is_member,
            set_name=own.evaluation_set.name,
            measure=measure,
            count=len(own.ran),
            num_examples=len(items),
            estimate=estimates[n],
            difference=ratio(differences, [sizes[place] for place in both], -most, most) if both else None,
            num_without=sum(has_none for _, has_none in found[n].values()),
            seconds=math.fsum(seconds for _, seconds in own.ran.values()),
        )


def _value(measure: str, evaluation_set: EvaluationSet, item: Item, found: Any) -> tuple[float, bool]:
    """1 or 0 for shares, else bits; and whether there is no probability at all."""
    if measure == "exact match":
        return float(evaluation_set.is_right(found, item)), False
    if measure == "bits per byte":
        # A probability of 1 may come out a little above.
        return max(0.0, -found[item.right] / math.log(2)), found[item.right] == -math.inf
    if max(found) == -math.inf:
        return 0.0, True
    scores = found if measure == "accuracy" else [x / n for x, n in zip(found, item.lengths, strict=True)]
    return float(scores.index(max(scores)) == item.right), False


def _estimate(is_bits: bool, values: dict[int, float], sizes: Sequence[int]) -> Estimate:
    if not values:
        return NO_ESTIMATE
    if is_bits:
        return ratio(list(values.values()), [sizes[n] for n in values], least=0.0)
    return share(int(sum(values.values())), len(values))


def share(num_right: int, count: int) -> Estimate:
    """Estimate a share, with Wilson's interval.

    Args:
        num_right: Successes.
        count: Trials, at least one.

    Reference:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927.
    """
    p, shrink = num_right / count, 1 + Z**2 / count
    middle = (p + Z**2 / (2 * count)) / shrink
    half = Z / shrink * math.sqrt(p * (1 - p) / count + Z**2 / (4 * count**2))
    # At 0 and at 1 the interval ends in the share itself, but for rounding.
    return Estimate(p, max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half)))


def ratio(
    values: Sequence[float], sizes: Sequence[float], least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """Estimate the sum of values over the sum of sizes, as bits over bytes, with the normal interval.

    The error is that of the linearised ratio over examples. Differences of paired values over the same sizes are
    differences of their ratios, so this also compares. One example has no interval, and infinite values have none.

    Args:
        values: One an example; may be infinite.
        sizes: One an example, positive.
        least: Least value that such a ratio can have: no interval goes below.
        most: Greatest value that it can have: none goes above.
    """
    n, total = len(values), math.fsum(sizes)
    if not all(map(math.isfinite, values)):
        return Estimate(math.nan if any(map(math.isnan, values)) else sum(values), math.nan, math.nan)
    estimate = math.fsum(values) / total
    if n < 2:
        return Estimate(estimate, math.nan, math.nan)
    squares = math.fsum((value - estimate * size) ** 2 for value, size in zip(values, sizes, strict=True))
    half = Z * math.sqrt(squares * n / (n - 1)) / total
    return Estimate(estimate, max(least, estimate - half), min(most, estimate + half))
