"""What choosing the best of several ensembles brings, measured on examples that had no part in the choice."""

import math

import numpy as np
from numpy.typing import NDArray

from ..evaluation.estimates import Estimate, ratio

_NUM_FOLDS = 10
_NUM_SPLITS = 20


def first_near_best(ensembles: NDArray[np.float64]) -> int:
    """Choose an ensemble: the first of those that are within a standard error of the best.

    What is a little better on some hundred examples is mostly luck; what stands first is the simpler.

    Args:
        ensembles: What each example is worth for each ensemble, the higher the better, the simpler ensembles first, of shape
            `(num_ensembles, num_examples)`.

    Returns:
        Its place.

    Reference:
        Breiman et al., "Classification and Regression Trees", 1984, section 3.4.3 (the rule of one standard error).
    """
    behind = ensembles[ensembles.sum(1).argmax()] - ensembles
    errors = behind.std(1, ddof=1) * math.sqrt(behind.shape[1])
    # Behind by one example is behind by one standard error, but for rounding.
    return int((behind.sum(1) <= errors + 1e-9).argmax())


def honest_gain(
    member: NDArray[np.float64], ensembles: NDArray[np.float64], sizes: NDArray[np.float64], most: float = math.inf
) -> Estimate:
    """Estimate by how much the chosen ensemble is above the best member, on examples that it was not chosen on.

    The best of many looks better than it is on the examples that it was chosen on. So the examples are split in ten; on
    each tenth the ensemble is compared that is chosen on the other nine. This is done for twenty splits, and an example's
    difference is the mean over them. The interval is at least as wide as that of the ensemble that is chosen on all, and as
    it is where nothing differs. The member is the best on all the examples, which favours it.

    Args:
        member: What each example is worth for the best member, the higher the better, of shape `(num_examples,)`.
        ensembles: Likewise for the ensembles, the simpler ones first, of shape `(num_ensembles, num_examples)`.
        sizes: By whose sum the differences' sum is divided, of shape `(num_examples,)`.
        most: Greatest difference that there can be.

    Returns:
        The gain, with its 95 % interval over examples.
    """
    differences = np.zeros(len(sizes))
    rng = np.random.default_rng(0)
    for _ in range(_NUM_SPLITS):
        folds = rng.permutation(len(sizes)) % _NUM_FOLDS
        for fold in range(_NUM_FOLDS):
            held = folds == fold
            # Divided at the end: where nothing differs, the sum is 0 and not a rounding error.
            differences[held] += ensembles[first_near_best(ensembles[:, ~held]), held] - member[held]
    chosen = ensembles[first_near_best(ensembles)] - member
    gain, of_chosen = (ratio(own.tolist(), sizes.tolist()) for own in (differences / _NUM_SPLITS, chosen))
    # Where nothing differs on n examples, up to 3 / n of all may still do so (the rule of three).
    least = 3 / len(sizes) if most == 1 else 0.0
    half = max(gain.high - gain.value, of_chosen.high - of_chosen.value, least)
    return Estimate(gain.value, max(-most, gain.value - half), min(most, gain.value + half))


def examples_to_decide(gain: Estimate, count: int) -> int:
    """About how many examples it takes until the interval of a gain of this size excludes 0, in four cases of five.

    Args:
        gain: As measured; not 0.
        count: Number of examples that it was measured on.
    """
    half = (gain.high - gain.low) / 2
    # Where the expected interval just excludes 0 it does so in one case of two, with twice as many examples in four of five.
    return math.ceil(2 * count * (half / gain.value) ** 2)
