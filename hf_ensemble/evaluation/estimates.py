"""Values with 95 % confidence intervals: shares, ratios, means, and scores computed from sums."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054
"""The quantile of the normal distribution with 2.5 % above it."""

NUM_DRAWS = 1000
"""Number of samples that a bootstrap draws."""


class Estimate(NamedTuple):
    """A value, and the ends of its 95 % confidence interval; NaN for no value or interval."""

    value: float
    low: float
    high: float


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
"""The estimate of nothing."""


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
    # At 0 and at 1, the interval ends at the share itself, up to rounding.
    return Estimate(p, max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half)))


def ratio(
    values: Sequence[float], sizes: Sequence[float], least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """Estimate the sum of values over the sum of sizes, as bits over bytes, with the normal interval.

    The error is that of the linearised ratio over examples. Differences of paired values over the same sizes are
    differences of their ratios, so this also compares systems. One example has no interval, and neither have infinite
    values.

    Args:
        values: One per example; may be infinite.
        sizes: One per example, positive.
        least: Smallest possible value of such a ratio; no interval goes below it.
        most: Largest possible value; no interval goes above it.
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


def bootstrap(score: Callable[[list[int]], float], *systems: Sequence[Sequence[int]]) -> Estimate:
    """Estimate a score of summed statistics, or the difference between two systems on the same examples.

    The interval has the percentiles of a bootstrap over examples, whose statistics are summed again for each sample.
    For the same number of examples, the samples are always the same. One example has no interval.

    Args:
        score: Computes the score from statistics summed over examples.
        *systems: The statistics of each example, for one system, or for two to subtract the second's score.

    Reference:
        Koehn, "Statistical Significance Tests for Machine Translation Evaluation", 2004.
    """
    # For each system, statistics of shape `(num_examples, num_statistics)`.
    arrays = [np.array(rows, dtype=np.float64) for rows in systems]

    def difference(counts: np.ndarray) -> float:
        scores = [score((counts @ array).astype(np.int64).tolist()) for array in arrays]
        return scores[0] - math.fsum(scores[1:])

    count = len(arrays[0])
    value = difference(np.ones(count))
    if count < 2:
        return Estimate(value, math.nan, math.nan)
    generator = np.random.default_rng(0)
    draws = (np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(NUM_DRAWS))
    low, high = np.percentile([difference(draw) for draw in draws], [2.5, 97.5]).tolist()
    return Estimate(value, min(value, low), max(value, high))
