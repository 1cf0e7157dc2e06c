"""Estimates with 95 % confidence intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959963984540054
"""Of the normal distribution, 2.5 % are above this."""


class Estimate(NamedTuple):
    """A value, and the ends of its 95 % confidence interval; NaN where there is none."""

    value: float
    low: float
    high: float


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
"""Of nothing."""


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
