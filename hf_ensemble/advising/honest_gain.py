"""The gain of the best of several ensembles, measured on examples that had no part in the choice."""

import math

import numpy as np
from numpy.typing import NDArray

from ..evaluation.estimates import Estimate, ratio

_NUM_FOLDS = 10
_NUM_SPLITS = 20


def first_near_best(ensembles: NDArray[np.float64]) -> int:
    """Choose the first ensemble that is within a standard error of the best.

    A small advantage on a few hundred examples is mostly luck, and the first ensembles are the simplest.

    Args:
        ensembles: The value of each example for each ensemble, higher is better, the simpler ensembles first, of shape
            `(num_ensembles, num_examples)`.

    Returns:
        Its index: 0 if there are fewer than two examples.

    Reference:
        Breiman et al., "Classification and Regression Trees", 1984, section 3.4.3 (the rule of one standard error).
    """
    if ensembles.shape[1] < 2:
        return 0  # one example has no standard error
    behind = ensembles[ensembles.sum(1).argmax()] - ensembles
    errors = behind.std(1, ddof=1) * math.sqrt(behind.shape[1])
    # One example less is exactly one standard error less, up to rounding.
    return int((behind.sum(1) <= errors + 1e-9).argmax())


def honest_gain(
    member: NDArray[np.float64], ensembles: NDArray[np.float64], sizes: NDArray[np.float64], most: float = math.inf
) -> Estimate:
    """Estimate the gain of the chosen ensemble over the best member, on examples that had no part in the choice.

    The best of many looks better than it is on the examples it was chosen on. So the examples are split into ten
    parts, and each part compares the ensemble chosen on the other nine. This is done for twenty splits, and an
    example's difference is the mean over them. The interval is at least as wide as that of the ensemble chosen on all
    examples, and as the interval for no difference at all. The member is the best one on all the examples, which
    favours it.

    Args:
        member: The value of each example for the best member, higher is better, of shape `(num_examples,)`.
        ensembles: The same for the ensembles, the simpler ones first, of shape `(num_ensembles, num_examples)`.
        sizes: The sum of the differences is divided by the sum of these, of shape `(num_examples,)`.
        most: Greatest possible difference.

    Returns:
        The gain, with its 95 % interval over examples.
    """
    differences = np.zeros(len(sizes))
    rng = np.random.default_rng(0)
    for _ in range(_NUM_SPLITS):
        folds = rng.permutation(len(sizes)) % _NUM_FOLDS
        for fold in range(_NUM_FOLDS):
            held = folds == fold
            # Divided at the end, so that without differences the sum is exactly 0.
            differences[held] += ensembles[first_near_best(ensembles[:, ~held]), held] - member[held]
    chosen = ensembles[first_near_best(ensembles)] - member
    gain, of_chosen = (ratio(own.tolist(), sizes.tolist()) for own in (differences / _NUM_SPLITS, chosen))
    # If n examples show no difference, up to 3 / n of all examples may still differ (the rule of three).
    least = 3 / len(sizes) if most == 1 else 0.0
    half = max(gain.high - gain.value, of_chosen.high - of_chosen.value, least)
    return Estimate(gain.value, max(-most, gain.value - half), min(most, gain.value + half))


def examples_to_decide(gain: Estimate, count: int) -> int:
    """Estimate how many examples the interval of such a gain needs to exclude 0, in four cases out of five.

    Args:
        gain: The measured gain; not 0.
        count: Number of examples that it was measured on.
    """
    half = (gain.high - gain.low) / 2
    # If the expected interval just excludes 0, it does so in one case out of two; with twice as many examples, in four
    # out of five.
    return math.ceil(2 * count * (half / gain.value) ** 2)
