"""chrF between texts: pair by pair, or each against the weighted average of all."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_ORDER = 6
_BETA = 2


def pairwise_chrf(texts: Sequence[str]) -> list[list[float]]:
    """The chrF of each text against each: `sacrebleu`'s of sentences, but 100 for two empty texts.

    White space is ignored, so a text of white space counts as empty.

    Args:
        texts: The texts, valid Unicode.

    Returns:
        From 0 to 100, of shape `(num_texts, num_texts)`: `[h][r]` is that of hypothesis h against reference r.
    """
    bare = _without_white_space(texts)
    shape = (len(bare), len(bare))
    lengths = np.array([len(text) for text in bare], dtype=np.int64)
    precisions, recalls = np.zeros(shape), np.zeros(shape)
    for order, (ngrams, owners, counts) in enumerate(_count_ngrams(bare), start=1):
        matches = np.empty(shape)
        for hypothesis in range(len(bare)):
            is_own = owners == hypothesis
            own = np.zeros(ngrams[-1] + 1, dtype=np.int64)
            own[ngrams[is_own]] = counts[is_own]
            matches[hypothesis] = np.bincount(owners, weights=np.minimum(counts, own[ngrams]), minlength=len(bare))
        totals = np.maximum(lengths - order + 1, 1)
        in_both = np.minimum.outer(lengths, lengths) >= order
        precisions += in_both * matches / totals[:, None]
        recalls += in_both * matches / totals

    num_orders = np.clip(np.minimum.outer(lengths, lengths), 1, _ORDER)
    of_empty = 100.0 * np.logical_and.outer(lengths == 0, lengths == 0)
    found: list[list[float]] = _f_scores(precisions / num_orders, recalls / num_orders, of_empty).tolist()
    return found


def aggregated_chrf(texts: Sequence[str], weights: Sequence[float]) -> list[float]:
    """The chrF of each text against the average n-gram counts of all, in time linear in their number.

    An empty text has 100 for the weight of the empty ones.

    Reference:
        Vamvas and Sennrich (2024), https://arxiv.org/abs/2402.04251, who weight all texts alike.

    Args:
        texts: The texts, valid Unicode.
        weights: The weight of each, above 0; they sum to 1.

    Returns:
        From 0 to 100, of shape `(num_texts,)`.
    """
    bare = _without_white_space(texts)
    shares = np.array(weights, dtype=np.float64)
    lengths = np.array([len(text) for text in bare], dtype=np.int64)
    precisions, recalls = np.zeros(len(bare)), np.zeros(len(bare))
    for order, (ngrams, owners, counts) in enumerate(_count_ngrams(bare), start=1):
        averages = np.bincount(ngrams, weights=shares[owners] * counts)
        matches = np.bincount(owners, weights=np.minimum(counts, averages[ngrams]), minlength=len(bare))
        precisions += matches / np.maximum(lengths - order + 1, 1)
        recalls += matches / averages.sum()

    num_orders = np.clip(lengths, 1, _ORDER)
    # A text that is not empty matches itself, so neither is 0.
    of_empty = np.full(len(bare), 100 * shares[lengths == 0].sum())
    found: list[float] = _f_scores(precisions / num_orders, recalls / num_orders, of_empty).tolist()
    return found


def _f_scores(
    precisions: NDArray[np.float64], recalls: NDArray[np.float64], otherwise: NDArray[np.float64]
) -> NDArray[np.float64]:
    """F-scores from 0 to 100, with recall counting `_BETA` times as much; `otherwise` where both are 0."""
    numerators, denominators = 100 * (1 + _BETA**2) * precisions * recalls, _BETA**2 * precisions + recalls
    scores: NDArray[np.float64] = otherwise.copy()
    np.divide(numerators, denominators, out=scores, where=denominators > 0)
    return scores


def _without_white_space(texts: Sequence[str]) -> list[str]:
    """Leave out what Python calls white space, as `sacrebleu` does."""
    return ["".join(text.split()) for text in texts]


def _count_ngrams(texts: list[str]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Count the n-grams of each text, order by order, up to the last that any text has.

    Yields:
        A line for each n-gram of each text, as three arrays of shape `(num_lines,)`: a number of the n-gram, the same in
        all texts; the text; how often it has it.
    """
    chars = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4").astype(np.int64)
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    ngrams = np.zeros(len(chars) + 1, dtype=np.int64)
    for order in range(1, _ORDER + 1):
        # An n-gram is the one before it in order, and the next character.
        _, ngrams = np.unique(ngrams[:-1] * 0x110000 + chars[order - 1 :], return_inverse=True)
        firsts = owners[: len(ngrams)]
        inside = firsts == owners[order - 1 :]
        if not inside.any():
            return
        lines, counts = np.unique((ngrams * len(texts) + firsts)[inside], return_counts=True)
        yield lines // len(texts), lines % len(texts), counts
