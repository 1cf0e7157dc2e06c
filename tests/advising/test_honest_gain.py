"""The gain of choosing is honest: nothing where there is nothing, and what there is where there is something."""

import math

import numpy as np
import pytest

from hf_ensemble.advising.honest_gain import examples_to_decide, first_near_best, honest_gain
from hf_ensemble.evaluation import Estimate


def drawn(rng, shares, count):
    """1 or 0 for each example, of shape `(len(shares), count)`."""
    return (rng.random((len(shares), count)) < np.array(shares)[:, None]).astype(float)


def test_the_best_of_many_equals_gains_nothing():
    """The best of eight looks three points better on 300 examples, and is not."""
    honest, naive = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        members, ensembles = drawn(rng, [0.5], 300), drawn(rng, [0.5] * 8, 300)
        naive.append(ensembles.mean(1).max() - members.mean())
        honest.append(honest_gain(members[0], ensembles, np.ones(300), 1.0))
    assert np.mean(naive) > 0.03
    assert abs(np.mean([gain.value for gain in honest])) < 0.02
    assert np.mean([gain.low > 0 for gain in honest]) < 0.08


def test_what_there_is_is_found():
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        members, ensembles = drawn(rng, [0.5], 400), drawn(rng, [0.7, 0.6], 400)
        found.append(honest_gain(members[0], ensembles, np.ones(400), 1.0))
    assert np.mean([gain.value for gain in found]) == pytest.approx(0.2, abs=0.02)
    assert np.mean([gain.low > 0 for gain in found]) > 0.9


def test_of_one_member_and_one_ensemble_it_is_the_paired_difference():
    rng = np.random.default_rng(0)
    member, ensemble = drawn(rng, [0.5], 50), drawn(rng, [0.6], 50)
    gain = honest_gain(member[0], ensemble, np.ones(50), 1.0)
    differences = (ensemble - member)[0]
    half = 1.959964 * differences.std(ddof=1) / math.sqrt(50)
    assert gain == pytest.approx((differences.mean(), differences.mean() - half, differences.mean() + half))


def test_examples_to_decide():
    assert examples_to_decide(Estimate(0.02, -0.02, 0.06), 100) == 800


def test_few_examples_without_a_difference_prove_no_equality():
    assert honest_gain(np.ones(20), np.ones((2, 20)), np.ones(20), 1.0) == (0, -0.15, 0.15)
    assert honest_gain(np.ones(600), np.ones((2, 600)), np.ones(600), 1.0) == (0, -0.005, 0.005)


def test_one_example_less_is_within_a_standard_error():
    for count in (20, 30, 50, 300):
        ensembles = np.ones((2, count))
        ensembles[0, 0] = 0
        assert first_near_best(ensembles) == 0


def test_the_first_within_a_standard_error_of_the_best_is_chosen():
    ensembles = np.zeros((3, 100))
    ensembles[0, :50] = ensembles[1, :52] = 1
    ensembles[2, :60] = 1
    # Behind the best by 10 and 8 of 100 examples, all of them lost: far more than one standard error, 3.0 and 2.7.
    assert first_near_best(ensembles) == 2
    ensembles[0, 52:62] = 1
    # Right on as many, others: behind by nothing, the standard error is 4.2.
    assert first_near_best(ensembles) == 0
    ensembles[0, 50:52] = ensembles[0, 60:62] = 0
    # Behind by two that are lost: the standard error is 1.4.
    assert ensembles.sum(1).tolist() == [58, 52, 60]
    assert first_near_best(ensembles) == 2


@pytest.mark.parametrize("count", [0, 1])
def test_one_example_tells_no_ensembles_apart(count):
    assert first_near_best(np.array([[0.0], [1.0]])[:, :count]) == 0


def test_what_is_the_same_has_no_gain_at_all():
    """Not even one of rounding, which would be above 0."""
    values = np.random.default_rng(0).random(30)
    assert honest_gain(values, np.stack([values, values]), np.ones(30)) == (0, 0, 0)
