"""The record of a call that chose among whole answers: all answers, their writers and their scores."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..files import whole_file
from ..pages import MOST_IN_NOTEBOOK, in_notebook
from ..tables import data_frame
from .answers_html import answers_page
from .base import Candidate, Choice, Question, Written


@dataclass(frozen=True)
class AnswerWriter:
    """One writer of an answer.

    Attributes:
        name: Name of the member or the method.
        member: Index of the member; None for a method.
        number: Which of the writer's answers it is, from 0 on.
        num_tokens: Number of new ids, including the one that ended it: the member's own, or the primary's if a method
            wrote them.
        ended_by: `"eos"` if a control token ended it, `"text"` if a stop string, another criterion or an end id that writes
            text did; None if it has not ended.
        log_prob: Natural logarithm of the probability that the member gave the ids; None if it was not computed.
        seconds: Its share of the seconds that the writer took.
    """

    name: str
    member: int | None
    number: int
    num_tokens: int
    ended_by: Literal["eos", "text"] | None
    log_prob: float | None
    seconds: float


@dataclass(frozen=True)
class Answer:
    """One candidate: a text and its writers.

    Attributes:
        text: The text; `�` stands for bytes that are not a character.
        data: Its bytes.
        ended: Whether it has ended.
        writers: Its writers, members before methods.
        weight: The sum of its writers' shares; the weights of a prompt's candidates sum to 1.
        scores: The candidate's score for every criterion, by its name; None for no score.
        answer: What a vote read out of it; None for nothing.
        rank: Its rank among the candidates, 0 for the best; None if it was not ranked.
        places: Which of the sequences returned for its prompt have this text, from 0 on; empty for none.
    """

    text: str
    data: bytes
    ended: bool
    writers: tuple[AnswerWriter, ...]
    weight: float
    scores: dict[str, float | None] = field(hash=False)
    answer: str | None
    rank: int | None
    places: tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """All candidates of one `generate` call.

    Attributes:
        rows: For each prompt, its candidates, the earliest first: members before methods, in the order of their answers.
        prompts: The prompts.
        criteria: Names of the scores.
        method: Name of the method that chose.
        written: For each prompt, the text that another model wrote to return instead of a candidate; None if a
            candidate was returned.
    """

    rows: tuple[tuple[Answer, ...], ...]
    prompts: tuple[str, ...]
    criteria: tuple[str, ...]
    method: str
    written: tuple[str | None, ...]

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Answer, ...]:
        """A prompt's candidates."""
        return self.rows[row]

    def __iter__(self) -> Iterator[tuple[Answer, ...]]:
        """Iterate over the prompts."""
        return iter(self.rows)

    def __repr__(self) -> str:
        num = sum(map(len, self.rows))
        return f"Answers(prompts={len(self.rows)}, candidates={num}, method={self.method!r})"

    def to_pandas(self) -> Any:
        """Return the candidates as a `pandas.DataFrame`, with one row per candidate and writer.

        Columns of the candidate, the same in the rows of all its writers: `row`, the number of its prompt;
        `candidate`, counted from 0 in its row; `text`; `ended`; `weight`; `answer`; `rank`; `places`, a list; and for
        each criterion `score_` with its name. Columns of the writer: `writer`, a name; `member`; `number`;
        `num_tokens`; `ended_by`; `log_prob`; `seconds`. The meanings are those of `Answer` and `AnswerWriter`; None
        becomes a missing value. A text that another model wrote is not a candidate, and has no row.

        Raises:
            ConfigurationError: If pandas is not installed.
        """
        scores = [f"score_{name}" for name in self.criteria]
        lines = [
            (row, number, *_values_of(answer, self.criteria), *_values_of_writer(writer))
            for row, answers in enumerate(self.rows)
            for number, answer in enumerate(answers)
            for writer in answer.writers
        ]
        types = dict.fromkeys([*_NUMBERS, *scores], "float64")
        return data_frame("to_pandas", lines, (*_OF_ANSWER, *scores, *_OF_WRITER), types)

    def to_html(self, path: str | os.PathLike[str], title: str = "Answers") -> None:
        """Write a page that needs no network and no script: for each prompt its candidates, the best first.

        Args:
            path: File to write.
            title: Heading of the page.
        """
        with whole_file(path) as unfinished:
            unfinished.write_text(answers_page(self, title), "utf-8")

    def _repr_html_(self) -> str:
        """The page of the first prompts, for notebooks."""
        num = min(len(self.rows), MOST_IN_NOTEBOOK)
        first = Answers(self.rows[:num], self.prompts[:num], self.criteria, self.method, self.written[:num])
        title = "Answers" if num == len(self.rows) else f"Answers: {num} of {len(self.rows)} prompts"
        texts = [answer.text for answers in first for answer in answers]
        heads = [writer.name for answers in first for answer in answers for writer in answer.writers]
        written = [text for text in first.written if text is not None]
        return in_notebook(answers_page(first, title), [*first.prompts, *texts, *heads, *written])


_OF_ANSWER = ("row", "candidate", "text", "ended", "weight", "answer", "rank", "places")
_OF_WRITER = ("writer", "member", "number", "num_tokens", "ended_by", "log_prob", "seconds")
_NUMBERS = ("weight", "rank", "member", "log_prob", "seconds")
"""Numeric columns in which some or all values may be missing."""


def _values_of(answer: Answer, criteria: Sequence[str]) -> tuple[Any, ...]:
    """The values of a candidate's columns from `text` on."""
    scores = [answer.scores.get(name) for name in criteria]
    return answer.text, answer.ended, answer.weight, answer.answer, answer.rank, list(answer.places), *scores


def _values_of_writer(writer: AnswerWriter) -> tuple[Any, ...]:
    who = writer.name, writer.member, writer.number
    return *who, writer.num_tokens, writer.ended_by, writer.log_prob, writer.seconds


def record_of(
    questions: Sequence[Question],
    choices: Sequence[Choice],
    places: Sequence[Sequence[int]],
    prompts: Sequence[str],
    method: str,
) -> Answers:
    """Create the record of a call.

    Args:
        questions: What was asked.
        choices: What was chosen, by question.
        places: By question, the index of the candidate for each returned sequence; ignored if another model wrote it.
        prompts: The prompts, by question.
        method: Name of the method that chose.
    """
    # A criterion may have no scores for some questions.
    criteria = tuple(dict.fromkeys(name for choice in choices for name in choice.scores))
    rows = tuple(
        _answers_of(question.candidates, choice, returned if choice.written is None else (), criteria)
        for question, choice, returned in zip(questions, choices, places, strict=True)
    )
    written = tuple(choice.written for choice in choices)
    return Answers(rows, tuple(prompts), criteria, method, written)


def _answers_of(
    candidates: Sequence[Candidate], choice: Choice, returned: Sequence[int], criteria: Sequence[str]
) -> tuple[Answer, ...]:
    ranks = {number: rank for rank, number in enumerate(choice.ranking)}
    nothing = [None] * len(candidates)
    return tuple(
        Answer(
            text=candidate.text,
            data=candidate.data,
            ended=candidate.ended,
            writers=tuple(map(_writer_of, candidate.writers)),
            weight=candidate.weight,
            scores={name: choice.scores.get(name, nothing)[number] for name in criteria},
            answer=(choice.answers or nothing)[number],
            rank=ranks.get(number),
            places=tuple(place for place, chosen in enumerate(returned) if chosen == number),
        )
        for number, candidate in enumerate(candidates)
    )


def _writer_of(written: Written) -> AnswerWriter:
    return AnswerWriter(
        name=written.name,
        member=written.writer,
        number=written.number,
        num_tokens=len(written.ids),
        ended_by=written.end,
        log_prob=written.log_prob,
        seconds=written.seconds,
    )
