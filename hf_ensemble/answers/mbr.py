"""Minimum Bayes risk: the answer most similar to all the others.

Reference:
    Kumar and Byrne, "Minimum Bayes-Risk Decoding for Statistical Machine Translation" (NAACL 2004). Its aggregated form:
    Vamvas and Sennrich, "Linear-time Minimum Bayes Risk Decoding with Reference Aggregation"
    (https://arxiv.org/abs/2402.04251).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..config import METHODS, check_option
from ..errors import ConfigurationError
from .base import AnswersConfig, Choice, Panel, Question, best_first
from .chrf import aggregated_chrf, pairwise_chrf
from .functions import call_for_numbers, has_parameter, name_of

Utility = Callable[[list[str], list[str]], Sequence[float]]


@dataclass(frozen=True)
class MbrConfig(AnswersConfig):
    """Minimum Bayes risk: the candidate with the highest expected utility, with all candidates as references.

    The expected utility of a candidate is the sum over all candidates, itself included, of their weights times its utility
    against them. Ties go to the earliest.

    Reference:
        Kumar and Byrne, "Minimum Bayes-Risk Decoding for Statistical Machine Translation" (NAACL 2004); aggregated:
        Vamvas and Sennrich, "Linear-time Minimum Bayes Risk Decoding with Reference Aggregation"
        (https://arxiv.org/abs/2402.04251).

    Relations:
        For tasks with many right texts, no two of them equal: translations and summaries. For single words, it is a
        vote that counts similar words too.
    """

    name: ClassVar[str] = "mbr"

    utility: str | Utility = "chrf"
    """How good a text is if another is right: `"chrf"`, character n-grams as in `sacrebleu` from 0 to 100; or a
    function of two lists of texts, candidates and references, that returns a number for each pair. If the function has
    a parameter `prompts`, it also receives the prompt of each pair: a text, or the turns of a conversation with more
    than one.
    """

    aggregate: bool = False
    """Whether to compute chrF once per candidate, against the mean counts of all references, in linear time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_right = self.utility == "chrf" or callable(self.utility)
        check_option("utility", self.utility, is_right, "'chrf' or a function of two lists of texts")
        check_option("aggregate", self.aggregate, isinstance(self.aggregate, bool), "True or False")
        if self.aggregate and self.utility != "chrf":
            raise ConfigurationError(
                '`aggregate=True` needs `utility="chrf"`: other utilities have no aggregated form.'
            )

    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Choose by expected utility; see `AnswersConfig.choose`."""
        return [self._choose(question) for question in questions]

    def _choose(self, question: Question) -> Choice:
        weights = [candidate.weight for candidate in question.candidates]
        if self.aggregate:
            scores = aggregated_chrf(question.texts, weights)
        else:
            scores = [
                math.fsum(weight * value for weight, value in zip(weights, row, strict=True))
                for row in self._utilities(question)
            ]
        criterion = name_of(self.utility) if callable(self.utility) else self.utility
        return Choice(best_first(scores), {criterion: scores})

    @property
    def least_members(self) -> int:
        """Smallest number of members with which it can be better than each: of two answers, chrF prefers the longer."""
        return 3 if self.has_one_each else 1

    def _utilities(self, question: Question) -> list[list[float]]:
        """By candidate, its utility against every candidate."""
        texts = question.texts
        if not callable(self.utility):
            return pairwise_chrf(texts)
        count = len(texts)
        hypotheses, references = [text for text in texts for _ in texts], texts * count
        by_name = {"prompts": [question.prompt] * count**2} if has_parameter(self.utility, "prompts") else {}
        values = call_for_numbers(self.utility, "utility", count**2, hypotheses, references, **by_name)
        return [values[n * count : (n + 1) * count] for n in range(count)]


METHODS[MbrConfig.name] = MbrConfig
