"""Evaluation sets: questions, right answers, and how answers are marked."""

import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config import check_positive_integer
from ..errors import ConfigurationError
from ..files import read_json_lines, read_text
from ..messages import warn

Kind = Literal["questions", "choices", "texts"]
Marking = Literal["text", "number"]

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}‘’´]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NUMBER = r"[-−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
"""Regular expression of a number; in sets marked by numbers, an answer's last number counts."""
_NUMBER = re.compile(NUMBER)


class Item(NamedTuple):
    """One example of a set.

    Attributes:
        prompt: What the model reads.
        continuations: The texts to score: the first accepted answer, every choice, or the text.
        right: Index of the right continuation.
        accepted: Accepted answers to a question; empty in other kinds of sets.
        lengths: Bytes of each choice, by which its log-probability is divided for the normalised accuracy.
    """

    prompt: str
    continuations: tuple[str, ...]
    right: int = 0
    accepted: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the right continuation."""
        return len(self.continuations[self.right].encode())


@dataclass(frozen=True)
class EvaluationSet:
    """Examples of one kind.

    Attributes:
        name: Its name in tables.
        kind: `"questions"`, `"choices"` or `"texts"`.
        items: The examples.
        marking: How a written answer is compared with the accepted ones: as a `"text"`, normalised, up to the end of its
            line; or by the last `"number"` in it, up to an empty line.
    """

    name: str
    kind: Kind
    items: tuple[Item, ...]
    marking: Marking = "text"

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end a written answer."""
        return ["\n"] if self.marking == "text" else ["\n\n", "Question:"]

    def answer(self, response: str) -> str:
        """Return the part of a response that is the answer, up to its end.

        Args:
            response: What was written after the prompt.
        """
        for stop in self.stop_strings:
            response = response.partition(stop)[0]
        return response

    def compared(self, response: str) -> str:
        """Return what to compare with others: the normalised answer (unchanged if that is empty), or the number.

        Args:
            response: What was written after the prompt.
        """
        return self._plain(self.answer(response))

    def is_right(self, response: str, item: Item) -> bool:
        """Whether a response is one of the accepted answers.

        Args:
            response: What was written after the prompt.
            item: The question.
        """
        own = self.compared(response)
        return own != "" and own in map(self._plain, item.accepted)

    def _plain(self, answer: str) -> str:
        """An answer's last number, or its words; if it has only signs and articles, these (TriviaQA accepts "+-*/")."""
        if self.marking == "number":
            found = _NUMBER.findall(answer)
            return str(_number(found[-1])) if found else ""
        return normalize_answer(answer) or answer.strip().lower()

    def f1(self, response: str, item: Item) -> float:
        """Return SQuAD's F1, from 0 to 1: the overlap in words of a response with the closest accepted answer.

        Both are normalised as in `is_right`; a right response has 1.

        Args:
            response: What was written after the prompt.
            item: The question.

        Raises:
            ConfigurationError: If answers are marked by their numbers.

        Reference:
            Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016.
        """
        if self.marking != "text":
            raise ConfigurationError(
                f"F1 needs answers marked as 'text', but {self.name!r} has `marking` {self.marking!r}: use exact "
                "match."
            )
        words = normalize_answer(self.answer(response)).split()
        if not words:
            return float(self.is_right(response, item))
        return max(_f1(words, normalize_answer(answer).split()) for answer in item.accepted)


def normalize_answer(answer: str) -> str:
    """Lower-case an answer, and replace punctuation, articles and white space by single spaces.

    The rules are those of TriviaQA's evaluation; underscores are punctuation.
    """
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub(" ", answer.lower())).split())


def _f1(found: list[str], wanted: list[str]) -> float:
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted))


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("−", "-"))


def read_set(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    name: str | None = None,
    worked_examples: str | os.PathLike[str] | None = None,
    cue: str = "\nAnswer:",
    marking: Marking = "text",
    limit: int | None = None,
    skip_damaged: bool = False,
) -> EvaluationSet:
    """Read a set from a file of JSON lines, or from dictionaries.

    All examples of a set have the same form, which determines its kind:

    - `question` and `answer` (a text, or a list of accepted ones; the first is scored): *questions*. The prompt is
      "Question: …" and the cue; the answer follows after a space, or directly if the prompt ends in white space.
    - `question`, the choices under the letters `A`, `B`, …, and in `answer` the right letter: *choices*, asked in the
      same way. Empty choices are ignored, for files whose questions have different numbers of choices.
    - `prompt` and `reference` (or `answers`): *questions* with complete prompts.
    - `text`: *texts*; `prompt`, if given, is what precedes it.

    Args:
        source: The file or the examples.
        name: Name of the set. Default: the file's name without its ending.
        worked_examples: File of worked examples to put before every prompt, followed by an empty line.
        cue: The text between a question and its answer.
        marking: How written answers are compared with the accepted ones.
        limit: Largest number of examples; the first ones are taken. Default: all.
        skip_damaged: Whether to skip examples of unknown form, with a warning that says how many.

    Raises:
        ConfigurationError: If the set is empty, or an example has an unknown form, or another form than the first.
    """
    if marking not in ("text", "number"):
        raise ConfigurationError(f"`marking` has to be 'text' or 'number', but is {marking!r}.")
    if limit is not None:
        check_positive_integer("limit", limit)
    if isinstance(source, (str, os.PathLike)):
        default, records = Path(source).stem, read_json_lines(source)
    else:
        default, records = "examples", list(source)
    name = default if name is None else name
    head = "" if worked_examples is None else read_text(worked_examples).rstrip() + "\n\n"
    kind: Kind | None = None
    items: list[Item] = []
    damaged = []
    for n, record in enumerate(records, start=1):
        if len(items) == limit:
            break
        try:
            own_kind, item = _item(record, head, cue)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if skip_damaged:
                damaged.append(n)
                continue
            raise ConfigurationError(
                f"example {n} of {name!r} has no known form: it needs 'question' and 'answer' (with choices 'A', 'B', "
                "…, one of their letters), 'prompt' and 'reference', or 'text', none of them empty, but is "
                f"{record!r:.200}. Fix it, or skip such examples with `skip_damaged=True`."
            ) from error
        if kind not in (None, own_kind):
            raise ConfigurationError(
                f"example {n} of {name!r} is a {own_kind} example, but the ones before are of kind {kind}."
            )
        if marking == "number" and not all(_NUMBER.search(answer) for answer in item.accepted):
            raise ConfigurationError(
                f"example {n} of {name!r} has an answer without a number: {item.accepted!r:.200}."
            )
        kind = own_kind
        items.append(item)
    if damaged:
        warn(
            f"{len(damaged)} examples of {name!r} have no known form and are skipped; the first is example "
            f"{damaged[0]}."
        )
    if kind is None:
        raise ConfigurationError(f"the set {name!r} is empty: give at least one example.")
    return EvaluationSet(name, kind, tuple(items), marking)


def _item(record: Mapping[str, Any], head: str, cue: str) -> tuple[Kind, Item]:
    if "text" in record:
        return "texts", Item(head + record.get("prompt", ""), (_text(record["text"]),))
    is_asked = "question" in record
    prompt = head + (f"Question: {_text(record['question'])}{cue}" if is_asked else _text(record["prompt"]))
    space = "" if prompt[-1].isspace() else " "
    if is_asked and "A" in record:
        letters = [letter for letter in string.ascii_uppercase if record.get(letter, "") != ""]
        choices = [_text(record[letter]) for letter in letters]
        if len(choices) < 2:
            raise ValueError("one choice only")
        lengths = tuple(len(choice.encode()) for choice in choices)
        continuations = tuple(space + choice for choice in choices)
        return "choices", Item(prompt, continuations, letters.index(record["answer"]), lengths=lengths)
    name = "answer" if is_asked else "reference" if "reference" in record else "answers"
    answers = record[name]
    accepted = tuple(map(_text, [answers] if isinstance(answers, str) else answers))
    return "questions", Item(prompt, (space + accepted[0],), accepted=accepted)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError("a non-empty text")
    return value
