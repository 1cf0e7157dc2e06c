"""What all ways of choosing among whole answers share: candidates, questions, choices, and options."""

import dataclasses
import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from typing_extensions import Self

from ..config import MethodConfig, check_option, check_positive_integer, is_local, method_config
from ..errors import ConfigurationError
from ..offers import Offer
from .functions import Imported, check_importable, path_of

Turns = list[dict[str, Any]]
"""A conversation: turns with `role` and `content`."""

_Loaded = TypeVar("_Loaded")

_MOST_KEPT = 2
"""Number of models that are kept from call to call: a judge and a fuser."""


@dataclass(frozen=True)
class Written:
    """An answer as one writer wrote it.

    Attributes:
        writer: Number of the member; None for a method.
        name: Name of the member or the method.
        number: Which of the writer's answers it is, from 0 on.
        ids: The new ids, including the one that ended it: the member's own, or the primary's if a method wrote them.
        data: The bytes they write; fewer if it was cut to fit the primary's ids.
        end: `"eos"` if a control token ended it, `"text"` if a stop string, another criterion or an end id that writes
            text did; None if it has not ended.
        log_prob: Natural logarithm of the probability that the member gave the ids; None if it was not computed.
        seconds: Its share of the seconds that the writer took.
    """

    writer: int | None
    name: str
    number: int
    ids: tuple[int, ...]
    data: bytes
    end: Literal["eos", "text"] | None
    log_prob: float | None = None
    seconds: float = 0.0

    @property
    def is_in_primary_ids(self) -> bool:
        """Whether its ids belong to the primary."""
        return self.writer in (0, None)


@dataclass(frozen=True)
class Candidate:
    """One of the answers to choose from.

    Attributes:
        data: Its bytes.
        ended: Whether it has ended.
        writers: Its writers, members before methods; at least one.
        weights: The share of each writer; the shares of all candidates of a question sum to 1.
    """

    data: bytes
    ended: bool
    writers: tuple[Written, ...]
    weights: tuple[float, ...]

    @property
    def text(self) -> str:
        """The answer as text; U+FFFD stands for invalid bytes."""
        return self.data.decode("utf-8", "replace")

    @property
    def weight(self) -> float:
        """The sum of its writers' shares."""
        return math.fsum(self.weights)

    @property
    def has_eos(self) -> bool:
        """Whether a control token ends it."""
        return self.writers[0].end == "eos"

    @property
    def is_primarys(self) -> bool:
        """Whether the primary is among its writers."""
        return any(writer.writer == 0 for writer in self.writers)


@dataclass(frozen=True)
class Question:
    """A row of a call.

    Attributes:
        turns: The conversation behind its prompt; a single user turn if the prompt is plain text.
        candidates: Its answers, the earliest first.
    """

    turns: Turns
    candidates: tuple[Candidate, ...]

    @property
    def prompt(self) -> str | Turns:
        """The prompt as a text, or the list of turns if the conversation has more than one."""
        return self.turns if len(self.turns) > 1 else str(self.turns[0].get("content") or "")

    @property
    def texts(self) -> list[str]:
        """The candidates' texts."""
        return [candidate.text for candidate in self.candidates]


@dataclass(frozen=True)
class Choice:
    """The choice for one question.

    Attributes:
        ranking: Numbers of the candidates, the best first.
        scores: For each criterion, by its name, the score of every candidate; None for no score.
        answers: What was read out of every candidate, or None for nothing; None as a whole if nothing is read out.
        written: A text that another model wrote to return instead of a candidate; None if a candidate is returned.
    """

    ranking: list[int]
    scores: Mapping[str, Sequence[float | None]]
    answers: list[str | None] | None = None
    written: str | None = None


class Panel:
    """What a chooser may ask for: the members' log-probabilities of candidates, and loaded judges.

    Args:
        log_probs: Returns, for some questions, the log-probability of every candidate under every member, including
            its end; by question, candidate and member, None for members of weight 0.
        generate_options: Options of `generate` for a model that writes an answer itself.
        kept: Models loaded for earlier calls, by their sources.
    """

    def __init__(
        self,
        log_probs: Callable[[Sequence[Question]], list[list[list[float | None]]]],
        generate_options: Mapping[str, Any],
        kept: dict[Any, Any],
    ):
        self.log_probs = log_probs
        self.generate_options = generate_options
        self._kept = kept

    def loaded(self, source: Any, load: Callable[[], _Loaded]) -> _Loaded:
        """Return the model of a source, loaded now or for an earlier call.

        Args:
            source: Identifies the model.
            load: Loads it.
        """
        found: _Loaded | None = self._kept.pop(source, None)
        if found is None:
            found = load()
        # The model unused for longest is dropped.
        self._kept[source] = found
        while len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return found


@dataclass(frozen=True)
class AnswersConfig(MethodConfig):
    """Base of the ways of choosing among whole answers.

    Reference:
        Each way names its own.
    """

    decides: ClassVar[Literal["answers"]] = "answers"
    takes_seed: ClassVar[bool] = True

    num_candidates: int = field(default=1, kw_only=True)
    """Number of answers that every member writes. More than one are sampled."""

    methods: tuple[MethodConfig, ...] = field(default=(), kw_only=True)
    """Token- or span-level methods, by name or configuration, whose answers are candidates too."""

    generate_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False)
    """Options of `generate` for writing candidates, such as `{"do_sample": True}`. Options of the call override them.
    """

    def __post_init__(self) -> None:
        for name, value in self._options.items():
            if isinstance(value, dict) and name != "generate_options":
                object.__setattr__(self, name, self.read_saved(name, value))
        check_positive_integer("num_candidates", self.num_candidates)
        is_list = isinstance(self.methods, (list, tuple))
        check_option("methods", self.methods, is_list, "a list of methods")
        methods = tuple(method_config(method) for method in self.methods)
        object.__setattr__(self, "methods", methods)
        for method in methods:
            if method.decides == self.decides:
                raise ConfigurationError(
                    f"`methods` contains {method.name!r}, which chooses among whole answers itself. Name token- or "
                    "span-level methods."
                )
        is_mapping = isinstance(self.generate_options, Mapping) and all(
            isinstance(k, str) for k in self.generate_options
        )
        check_option("generate_options", self.generate_options, is_mapping, "a dictionary of options of `generate`")
        object.__setattr__(self, "generate_options", dict(self.generate_options))

    @property
    def _options(self) -> dict[str, Any]:
        """The options by name."""
        return {option.name: getattr(self, option.name) for option in dataclasses.fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name and options as they are saved, functions by their import paths."""
        return {"name": self.name, **{name: _saved(value) for name, value in self._options.items()}}

    def imported(self, is_trusted: bool) -> Self:
        """Return the same options with saved functions imported; see `MethodConfig.imported`."""

        def change(value: Any) -> Any:
            if isinstance(value, Imported):
                return value.load(is_trusted)
            return value.imported(is_trusted) if isinstance(value, MethodConfig) else value

        return self._changed(change)

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Return the same options with other paths of judges and fusers; see `MethodConfig.with_paths`."""

        def moved(value: Any) -> Any:
            if isinstance(value, MethodConfig):
                return value.with_paths(change)
            if dataclasses.is_dataclass(value) and not isinstance(value, (type, Imported)):
                return dataclasses.replace(value, path=change(value.path))  # type: ignore[attr-defined]
            return value

        return self._changed(moved)

    def _changed(self, change: Callable[[Any], Any]) -> Self:
        """The same with every option changed, and each of the methods that write."""
        options = {name: change(value) for name, value in self._options.items()}
        return dataclasses.replace(self, **{**options, "methods": tuple(map(change, self.methods))})

    def check_saveable(self, is_for_hub: bool) -> None:
        """Refuse options that could not be loaded again: functions without an import path, models of this machine."""
        for name, value in self._options.items():
            if callable(value):
                check_importable(value, name)
        for nested in (*self.methods, *self._options.values()):
            if isinstance(nested, MethodConfig):
                nested.check_saveable(is_for_hub)
        try:
            json.dumps(self.generate_options)
        except TypeError as error:
            raise ConfigurationError(
                f"`generate_options` cannot be saved as JSON: {error}. Give numbers, texts and lists."
            ) from error
        for path in self.models if is_for_hub else ():
            if is_local(path):
                raise ConfigurationError(
                    f"method {self.name!r} uses the model {path!r}, a folder of this machine, which others could not "
                    "load. Push that model to the Hub, and name it by its id."
                )

    @property
    def acts_on_one(self) -> bool:
        """Whether it changes anything if the primary has all the weight: yes, because it may sample, and ranks."""
        return True

    @property
    def asks(self) -> frozenset[Offer]:
        """What every writer has to provide, and what the methods among them ask for."""
        own = {Offer.ANSWERS, *({Offer.LIKELIHOODS} if self.gives_likelihoods else ())}
        return frozenset(own.union(*(method.asks for method in self.methods)))

    @property
    def gives_likelihoods(self) -> bool:
        """Whether it has likelihoods of texts, which `score` needs."""
        return False

    @property
    def has_one_each(self) -> bool:
        """Whether each member writes exactly one candidate, and no method writes any."""
        return self.num_candidates == 1 and not self.methods

    @property
    def returns_one(self) -> bool:
        """Whether it returns a single answer, whatever the number of candidates."""
        return False

    def generate_options_beside(self, generation_config: Any) -> dict[str, Any]:
        """Return the `generate_options` that this generation config does not set."""
        return {k: v for k, v in self.generate_options.items() if getattr(generation_config, k, None) is None}

    def check_members(self, num_members: int) -> None:
        """Check the options of the methods that write against the number of members."""
        for method in self.methods:
            method.check_members(num_members)

    def read_saved(self, option: str, value: dict[str, Any]) -> Any:
        """Read an option that was saved as a dictionary.

        Args:
            option: Its name.
            value: The dictionary.

        Raises:
            ConfigurationError: If it is of no known kind.
        """
        if set(value) == {"function"} and isinstance(value["function"], str):
            return Imported(value["function"])
        if set(value) == {"pattern", "flags"}:
            return re.compile(value["pattern"], value["flags"])
        raise ConfigurationError(
            f"`{option}` of method {self.name!r} cannot be read: {value!r:.200}. Pass another `method`."
        )

    def load(self, panel: Panel) -> None:
        """Load judges and fusers before any member writes.

        Args:
            panel: Keeps what is loaded.

        Raises:
            ConfigurationError: If a model cannot be loaded.
        """

    @abstractmethod
    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Choose among the candidates of each question.

        Args:
            questions: The questions, each with one candidate at least.
            panel: Provides log-probabilities and loaded models.

        Returns:
            A choice for each question.

        Raises:
            ConfigurationError: If a function or model that the user gave fails.
        """


def _saved(value: Any) -> Any:
    if isinstance(value, MethodConfig):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_saved(part) for part in value]
    if isinstance(value, re.Pattern):
        return {"pattern": value.pattern, "flags": value.flags}
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and hasattr(value, "to_dict"):
        return value.to_dict()
    return {"function": path_of(value)} if callable(value) else value


def is_tie(a: float, b: float) -> bool:
    """Whether two numbers differ by rounding only: three times 1/9 is 1/3."""
    return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def best_first(scores: Sequence[float], is_preferred: Sequence[bool] | None = None) -> list[int]:
    """Rank by scores: the highest, then the highest of the rest, and so on.

    Args:
        scores: A score each.
        is_preferred: Whether a candidate goes first in a tie; otherwise, and by default, the earliest does.
    """
    # Ties go to the earliest, so the scores within rounding of the highest are searched again each time.
    left = sorted(range(len(scores)), key=lambda n: not (is_preferred and is_preferred[n]))
    ranking: list[int] = []
    while left:
        highest = max(map(scores.__getitem__, left))
        chosen = next(n for n in left if is_tie(scores[n], highest))
        left.remove(chosen)
        ranking.append(chosen)
    return ranking
