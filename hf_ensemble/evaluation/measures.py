"""The measures: which sets each is for, and what an example, or all of them, are worth."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Literal

from ..errors import ConfigurationError
from ..optional_packages import not_installed
from .estimates import Estimate, bootstrap, ratio, share
from .sets import EvaluationSet, Item, Kind

Work = Literal["write", "score"]


class Measure(ABC):
    """One measure. An example is kept as what its worth is computed from, so that no text is read twice.

    Attributes:
        name: What tables call it.
        work: What it takes of a system: to `"write"` responses, or to `"score"` continuations.
        kinds: The kinds of sets that it is for.
        sign: 1 if more is better, -1 if less is.
        factor: By which tables multiply it.
        digits: Digits after the point in tables.
        unit: What tables write after its name.
    """

    name: str
    work: Work
    kinds: tuple[Kind, ...]
    sign: int = 1
    factor: int = 100
    digits: int = 1
    unit: str = ", %"

    def is_for(self, evaluation_set: EvaluationSet) -> bool:
        """Whether a set can be measured so."""
        return evaluation_set.kind in self.kinds

    @abstractmethod
    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> Any:
        """What is kept of an example.

        Args:
            evaluation_set: Its set.
            item: The example.
            found: The response, or the natural log-probability of each continuation.
        """

    def value(self, kept: Any) -> float:
        """What an example by itself is worth."""
        return float(kept)

    @abstractmethod
    def estimate(self, kept: Sequence[Any]) -> Estimate:
        """What examples, at least one, are worth together."""

    @abstractmethod
    def difference(self, kept: Sequence[Any], others: Sequence[Any]) -> Estimate:
        """What one system is worth less what another is, on the same examples in the same order."""

    def lacks(self, item: Item, found: Any) -> bool:
        """Whether a system gives an example no probability at all."""
        return False


class _Mean(Measure):
    """A mean of values from 0 to 1."""

    def estimate(self, kept: Sequence[float]) -> Estimate:
        return ratio(kept, [1.0] * len(kept), 0.0, 1.0)

    def difference(self, kept: Sequence[float], others: Sequence[float]) -> Estimate:
        return ratio([a - b for a, b in zip(kept, others, strict=True)], [1.0] * len(kept), -1.0, 1.0)


class _Share(_Mean):
    """A share: the mean of values that are 0 or 1."""

    def estimate(self, kept: Sequence[float]) -> Estimate:
        return share(int(sum(kept)), len(kept))


class _ExactMatch(_Share):
    name, work, kinds = "exact match", "write", ("questions",)

    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> float:
        return float(evaluation_set.is_right(found, item))


class _F1(_Mean):
    name, work, kinds = "F1", "write", ("questions",)

    def is_for(self, evaluation_set: EvaluationSet) -> bool:
        return super().is_for(evaluation_set) and evaluation_set.marking == "text"

    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> float:
        return evaluation_set.f1(found, item)


class _Accuracy(_Share):
    name, work, kinds = "accuracy", "score", ("choices",)

    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> float:
        scores = self.scores(item, found)
        return float(not self.lacks(item, found) and scores.index(max(scores)) == item.right)

    def scores(self, item: Item, found: list[float]) -> list[float]:
        """By which the likeliest choice is found."""
        return found

    def lacks(self, item: Item, found: Any) -> bool:
        return bool(max(found) == -math.inf)


class _NormalizedAccuracy(_Accuracy):
    name = "normalized accuracy"

    def scores(self, item: Item, found: list[float]) -> list[float]:
        return [x / n for x, n in zip(found, item.lengths, strict=True)]


class _BitsPerByte(Measure):
    """An example is kept as its bits and its bytes."""

    name, work, kinds = "bits per byte", "score", ("questions", "choices", "texts")
    sign, factor, digits, unit = -1, 1, 3, ""

    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> tuple[float, int]:
        # A probability of 1 may come out a little above.
        return max(0.0, -found[item.right] / math.log(2)), item.num_bytes

    def value(self, kept: tuple[float, int]) -> float:
        return kept[0] / kept[1]

    def estimate(self, kept: Sequence[tuple[float, int]]) -> Estimate:
        return ratio([bits for bits, _ in kept], [size for _, size in kept], 0.0)

    def difference(self, kept: Sequence[tuple[float, int]], others: Sequence[tuple[float, int]]) -> Estimate:
        pairs = zip(kept, others, strict=True)
        return ratio([one - other for (one, _), (other, _) in pairs], [size for _, size in kept])

    def lacks(self, item: Item, found: Any) -> bool:
        return bool(found[item.right] == -math.inf)


class _Corpus(Measure):
    """A score of sums over the examples, each of which is kept as the counts that `sacrebleu` adds up; from 0 to 100."""

    work: Work = "write"
    kinds: tuple[Kind, ...] = ("questions",)
    factor, unit = 1, ""

    def is_for(self, evaluation_set: EvaluationSet) -> bool:
        return super().is_for(evaluation_set) and evaluation_set.marking == "text"

    def read(self, evaluation_set: EvaluationSet, item: Item, found: Any) -> list[int]:
        answer = evaluation_set.answer(found).strip()
        (counts,) = self.metric()._extract_corpus_statistics([answer], [[text] for text in item.accepted])
        return [int(count) for count in counts]

    @abstractmethod
    def metric(self, alone: bool = False) -> Any:
        """What computes it, of the whole set or of an example alone."""

    def value(self, kept: list[int]) -> float:
        return self.score(kept, alone=True)

    def score(self, counts: list[int], alone: bool = False) -> float:
        """Of counts, which may be summed."""
        # Rounding may carry the exponential of a mean of logarithms a little above 100.
        return min(100.0, float(self.metric(alone)._compute_score_from_stats(counts).score))

    def estimate(self, kept: Sequence[list[int]]) -> Estimate:
        return bootstrap(self.score, kept)

    def difference(self, kept: Sequence[list[int]], others: Sequence[list[int]]) -> Estimate:
        return bootstrap(self.score, kept, others)


class _ChrF(_Corpus):
    name = "chrF"

    def metric(self, alone: bool = False) -> Any:
        return _metrics().chrf


class _Bleu(_Corpus):
    name = "BLEU"

    def metric(self, alone: bool = False) -> Any:
        # Of a short text alone only the orders that it has count, or nearly all would be 0.
        return _metrics().bleu_alone if alone else _metrics().bleu


class _Metrics:
    """The metrics of `sacrebleu`, with its defaults."""

    def __init__(self) -> None:
        try:
            from sacrebleu.metrics import BLEU, CHRF
        except ImportError as error:
            raise not_installed("chrF and BLEU are among `measures`", "sacrebleu") from error
        self.chrf, self.bleu, self.bleu_alone = CHRF(), BLEU(), BLEU(effective_order=True)


_metrics = functools.cache(_Metrics)

_ALL: tuple[Measure, ...] = (
    _ExactMatch(),
    _F1(),
    _Accuracy(),
    _NormalizedAccuracy(),
    _BitsPerByte(),
    _ChrF(),
    _Bleu(),
)

MEASURES = tuple(measure.name for measure in _ALL)

DEFAULT_MEASURES = tuple(measure.name for measure in _ALL if not isinstance(measure, _Corpus))
"""Those that need nothing which is not installed."""


def measure_of(name: str) -> Measure:
    """The measure of a name."""
    return _ALL[MEASURES.index(name)]


def read_measures(names: Collection[str]) -> list[Measure]:
    """Return the measures of some names, in the order of tables.

    Raises:
        ConfigurationError: If there is none, one is unknown, or one needs what is not installed.
    """
    if isinstance(names, str) or not names or not set(names) <= set(MEASURES):
        raise ConfigurationError(f"`measures` have to be of {', '.join(MEASURES)}, but are {names!r}.")
    found = [measure for measure in _ALL if measure.name in names]
    if any(isinstance(measure, _Corpus) for measure in found):
        _metrics()
    return found


def works_for(evaluation_set: EvaluationSet, measures: Collection[Measure]) -> list[Work]:
    """The kinds of work that a set takes for some measures.

    Args:
        evaluation_set: The set.
        measures: Which are wanted.
    """
    found = {measure.work for measure in measures if measure.is_for(evaluation_set)}
    works: tuple[Work, ...] = ("write", "score")
    return [work for work in works if work in found]
