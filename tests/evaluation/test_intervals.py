"""Intervals are those of the textbooks."""

import math
import random

import pytest

from hf_ensemble.evaluation.estimates import Z, ratio, share


@pytest.mark.parametrize(
    ("num_right", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (15, 50, 0.1910, 0.4375)]
)
def test_shares_have_wilsons_interval(num_right, count, low, high):
    estimate = share(num_right, count)
    assert estimate.value == num_right / count
    assert estimate.low == pytest.approx(low, abs=1e-4)
    assert estimate.high == pytest.approx(high, abs=1e-4)


@pytest.mark.parametrize("count", [*range(1, 30), 1000])
def test_a_share_lies_in_its_interval_and_that_between_0_and_1(count):
    for num_right in range(count + 1):
        value, low, high = share(num_right, count)
        assert 0 <= low <= value <= high <= 1
        assert low < high


@pytest.mark.parametrize("values", [[9.0, 0.1], [1.0, 0.0, 0.0], [0.0, 0.0], [1e-9, 5.0, 0.0]])
def test_a_ratio_lies_in_its_interval_and_that_within_limits(values):
    sizes = [4.0, 5.0, 6.0][: len(values)]
    value, low, high = ratio(values, sizes, least=0.0)
    assert 0 <= low <= value <= high
    assert ratio(values, sizes).high == high
    value, low, high = ratio([-v for v in values], sizes, most=0.0)
    assert low <= value <= high <= 0


def test_a_ratio_over_equal_sizes_is_a_mean():
    values = [1.0, 2.0, 4.0, 9.0]
    estimate = ratio(values, [2.0] * 4)
    deviation = math.sqrt(sum((v - 4) ** 2 for v in values) / 3)
    assert estimate.value == 2
    assert estimate.high - estimate.value == pytest.approx(Z * deviation / math.sqrt(4) / 2)


def test_intervals_of_ratios_hold_the_truth_in_95_of_100_samples():
    rng = random.Random(0)
    inside = 0
    for _ in range(400):
        sizes = [rng.randint(5, 60) for _ in range(100)]
        estimate = ratio([size * 1.5 + rng.gauss(0, 4) * math.sqrt(size) for size in sizes], sizes)
        inside += estimate.low < 1.5 < estimate.high
    assert 365 <= inside <= 395  # 380 ± 3.4 standard errors


def test_what_is_infinite_has_no_interval():
    estimate = ratio([1.0, math.inf], [1.0, 1.0])
    assert estimate.value == math.inf
    assert math.isnan(estimate.low)
    assert math.isnan(ratio([math.inf, -math.inf], [1.0, 1.0]).value)
    assert math.isnan(ratio([3.0], [1.0]).low)
