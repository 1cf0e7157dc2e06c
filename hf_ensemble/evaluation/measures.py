"""The measures: the sets each applies to, and how it values one example or all of them."""

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
    """One measure. It keeps of each example only the data for its value, so that no text is read twice.

    Attributes:
        name: Its name in tables.
        work: What a system has to do: `"write"` responses, or `"score"` continuations.
        kinds: The kinds of sets it applies to.
        sign: 1 if more is better, -1 if less is.
        factor: Factor for tables.
        digits: Digits after the point in tables.
        unit: Unit after its name in tables.
    """

    name: str
    work: Work
    kinds: tuple[Kind, ...]
    sign: int = 1
    factor: int = 100
    digits: int = 1
    unit: str = ", %"

    def is_for(self, evaluation_set: EvaluationSet) -> bool:
        """Whether it applies to a set."""
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
        """The value of a single example."""
        return float(kept)

    @abstractmethod
    def estimate(self, kept: Sequence[Any]) -> Estimate:
        """The value of one or more examples together."""

    @abstractmethod
    def difference(self, kept: Sequence[Any], others: Sequence[Any]) -> Estimate:
        """One system's value minus another's, on the same examples in the same order."""

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
    """A share: the mean of values 0 or 1."""

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
        """The numbers by which the likeliest choice is found."""
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
    """A score from sums over the examples, kept as the counts that `sacrebleu` adds up; from 0 to 100."""

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
        """The metric that computes it, for the whole set or for a single example."""

    def value(self, kept: list[int]) -> float:
        return self.score(kept, alone=True)

    def score(self, counts: list[int], alone: bool = False) -> float:
        """The score of counts, which may be summed."""
        # Rounding may move the exponential of a mean of logarithms slightly above 100.
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
        # For a single short text, only the orders that it has count, or nearly all scores would be 0.
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
"""The measures that need no optional package."""


def measure_of(name: str) -> Measure:
    """Return the measure with a name."""
    return _ALL[MEASURES.index(name)]


def read_measures(names: Collection[str]) -> list[Measure]:
    """Return the measures of some names, in the order of tables.

    Raises:
        ConfigurationError: If there is none, one is unknown, or one needs a package that is not installed.
    """
    if isinstance(names, str) or not names or not set(names) <= set(MEASURES):
        raise ConfigurationError(f"`measures` have to be of {', '.join(MEASURES)}, but are {names!r}.")
    found = [measure for measure in _ALL if measure.name in names]
    if any(isinstance(measure, _Corpus) for measure in found):
        _metrics()
    return found


def works_for(evaluation_set: EvaluationSet, measures: Collection[Measure]) -> list[Work]:
    """Return the kinds of work that a set needs for some measures.

    Args:
        evaluation_set: The set.
        measures: The measures.
    """
    found = {measure.work for measure in measures if measure.is_for(evaluation_set)}
    works: tuple[Work, ...] = ("write", "score")
    return [work for work in works if work in found]
