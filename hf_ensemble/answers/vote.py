"""Vote: the answer that most of the weight agrees on; over samples of one model, self-consistency.

Reference:
    Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models"
    (https://arxiv.org/abs/2203.11171).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .. import messages
from ..config import METHODS, check_option
from ..errors import ConfigurationError
from .base import AnswersConfig, Candidate, Choice, Panel, Question, best_first
from .functions import called, path_of

Extractor = Callable[[str], str | None]


@dataclass(frozen=True)
class VoteConfig(AnswersConfig):
    """Vote: the answer with the most weight, and its earliest candidate.

    Answers are compared as strings, whether or not their texts have ended. A tie goes to the primary's answer if it is
    among the tied ones, else to the earliest. Candidates without an answer have no vote; if there is no answer at all,
    the primary's first candidate is returned, with a warning.

    Reference:
        Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models"
        (https://arxiv.org/abs/2203.11171).

    Relations:
        For answers that are either equal or not: labels, numbers, short facts. Longer texts are hardly ever equal; see
        `MbrConfig`.
    """

    name: ClassVar[str] = "vote"

    extract: str | re.Pattern[str] | Extractor | None = field(default=None)
    """How to find the answer in a text: a regular expression (its last match, or that match's first group if it has
    one), or a function of the text that returns the answer, or None for no answer. None: the text without white space
    at its ends.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        extract = self.extract
        is_right = extract is None or isinstance(extract, (str, re.Pattern)) or callable(extract)
        check_option("extract", extract, is_right, "a regular expression, a function of a text, or None")
        if isinstance(extract, str):
            try:
                re.compile(extract)
            except re.error as error:
                raise ConfigurationError(
                    f"`extract` has to be a regular expression, but {extract!r:.200} is not: {error}."
                ) from error
        elif isinstance(extract, re.Pattern) and not isinstance(extract.pattern, str):
            raise ConfigurationError(
                f"`extract` has to be a regular expression over text, not bytes: {extract!r:.200}."
            )

    @property
    def least_members(self) -> int:
        """Smallest number of members with which it can be better than each: of two answers, the primary's wins."""
        return 3 if self.has_one_each else 1

    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Choose by the weight of answers; see `AnswersConfig.choose`."""
        return [self._choose(question.candidates) for question in questions]

    def _choose(self, candidates: Sequence[Candidate]) -> Choice:
        answers = [self._answer_in(candidate.text) for candidate in candidates]
        holders: dict[str, list[int]] = {}
        for index, answer in enumerate(answers):
            if answer is not None:
                holders.setdefault(answer, []).append(index)
        groups = list(holders.values())
        votes = [math.fsum(w for n in group for w in candidates[n].weights) for group in groups]
        is_primarys = [any(candidates[n].is_primarys for n in group) for group in groups]
        ranking = [n for place in best_first(votes, is_primarys) for n in groups[place]]
        votes_for = dict(zip(holders, votes, strict=True))
        silent = [index for index, answer in enumerate(answers) if answer is None]
        if not ranking:
            silent.sort(key=lambda index: not candidates[index].is_primarys)
            messages.warn(
                "no candidate contains an answer, so there is nothing to vote on: the primary's first text is "
                f"returned. Check `extract` ({self._described()})."
            )
        scores = [None if answer is None else votes_for[answer] for answer in answers]
        return Choice([*ranking, *silent], {"votes": scores}, answers)

    def _answer_in(self, text: str) -> str | None:
        extract = self.extract
        if extract is None:
            return text.strip()
        if isinstance(extract, (str, re.Pattern)):
            found = list(re.finditer(extract, text))
            return found[-1].group(1 if found[-1].re.groups else 0) if found else None
        answer = called(extract, "extract", text)
        if answer is not None and not isinstance(answer, str):
            raise ConfigurationError(
                f"`extract` ({path_of(extract)}) has to return a string or None, but returned {answer!r:.80} for "
                f"{text!r:.80}."
            )
        return answer

    def _described(self) -> str:
        extract: Any = self.extract
        return path_of(extract) if callable(extract) else repr(extract)


METHODS[VoteConfig.name] = VoteConfig
