"""Rerank: the answer that the members find likeliest, or that a judge rates best.

Reference:
    Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion"
    (https://arxiv.org/abs/2306.02561).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..config import METHODS, check_option
from .base import AnswersConfig, Candidate, Choice, Panel, Question, Turns, best_first
from .functions import call_for_numbers, name_of
from .judges import PairRanker, RewardModel, judge_of

Score = Callable[[list[str | Turns], list[str]], Sequence[float]]


@dataclass(frozen=True)
class RerankConfig(AnswersConfig):
    """Rerank: the candidate with the best score; ties go to the earliest.

    By likelihood, the best score is the lowest mean, over the members with a weight above 0, of the bits per byte of
    the whole answer after the prompt, including its end.

    Reference:
        Jiang, Ren and Lin, "LLM-Blender: Ensembling Large Language Models with Pairwise Ranking and Generative Fusion"
        (https://arxiv.org/abs/2306.02561), for judges.

    Relations:
        For open answers, which have no single right text to agree on. By likelihood, it is SweetSpan with one span for
        the whole answer, without the filter.
    """

    name: ClassVar[str] = "rerank"
    likelihoods_ignore_options: ClassVar[bool] = True

    score: Literal["likelihood"] | RewardModel | PairRanker | Score = "likelihood"
    """The judge: `"likelihood"` (the members, in bits per byte), a `RewardModel`, a `PairRanker`, or a function of two
    lists, prompts and answers, that returns a number for each pair; higher is better. A prompt is a text, or the turns
    of a conversation with more than one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        score = self.score
        is_judge = isinstance(score, (RewardModel, PairRanker))
        is_right = score == "likelihood" or is_judge or (callable(score) and not isinstance(score, type))
        check_option("score", score, is_right, "'likelihood', a `RewardModel`, a `PairRanker` or a function")

    def read_saved(self, option: str, value: dict[str, Any]) -> Any:
        """Read a judge too; see `AnswersConfig.read_saved`."""
        return judge_of(value) if option == "score" and "kind" in value else super().read_saved(option, value)

    @property
    def gives_likelihoods(self) -> bool:
        """Whether it has likelihoods of texts: yes, if it ranks by them."""
        return self.score == "likelihood"

    @property
    def models(self) -> tuple[str, ...]:
        """Hub ids and paths of models that are loaded beside the members."""
        return (self.score.path,) if isinstance(self.score, (RewardModel, PairRanker)) else ()

    def load(self, panel: Panel) -> None:
        """Load the judge; see `AnswersConfig.load`."""
        if isinstance(self.score, (RewardModel, PairRanker)):
            panel.loaded(self.score, self.score.load)

    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Choose by score; see `AnswersConfig.choose`."""
        score = self.score
        if isinstance(score, (RewardModel, PairRanker)):
            judge = panel.loaded(score, score.load)
            scores = [judge.scores(question.turns, question.texts) for question in questions]
            return [Choice(best_first(row), {score.kind: row}) for row in scores]
        if callable(score):
            return self._by_function(score, questions)
        return [
            _by_likelihood(question.candidates, log_probs)
            for question, log_probs in zip(questions, panel.log_probs(questions), strict=True)
        ]

    def _by_function(self, score: Score, questions: Sequence[Question]) -> list[Choice]:
        prompts = [question.prompt for question in questions for _ in question.candidates]
        answers = [text for question in questions for text in question.texts]
        values = iter(call_for_numbers(score, "score", len(answers), prompts, answers))
        rows = [[next(values) for _ in question.candidates] for question in questions]
        return [Choice(best_first(row), {name_of(score): row}) for row in rows]


def _by_likelihood(candidates: Sequence[Candidate], log_probs: Sequence[Sequence[float | None]]) -> Choice:
    scores = []
    for candidate, by_member in zip(candidates, log_probs, strict=True):
        own = [_bits_per_byte(candidate, log_prob) for log_prob in by_member if log_prob is not None]
        scores.append(math.fsum(own) / len(own) if all(map(math.isfinite, own)) else math.inf)
    return Choice(best_first([-score for score in scores]), {"bits per byte": scores})


def _bits_per_byte(candidate: Candidate, log_prob: float) -> float:
    """Bits per byte of a whole answer, counting the control token that ends it as one byte; infinite for an empty one.

    Args:
        candidate: The answer.
        log_prob: Natural logarithm of its probability, including its end.
    """
    num_bytes = len(candidate.data) + candidate.has_eos
    return -log_prob / (math.log(2) * num_bytes) if num_bytes else math.inf


METHODS[RerankConfig.name] = RerankConfig
