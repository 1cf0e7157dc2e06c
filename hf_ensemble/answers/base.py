"""What every way of choosing among whole answers works with: candidates, questions, choices, and its options."""

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
"""Models that are kept from call to call: a judge and a fuser."""


@dataclass(frozen=True)
class Written:
    """An answer as one writer wrote it.

    Attributes:
        writer: Number of the member; None for a method.
        name: Name of the member or the method.
        number: Which of the writer's answers it is, from 0 on.
        ids: The new ids, the one that ended it included: the member's own, or the primary's if a method wrote them.
        data: What they write; less where it was cut to fit the primary's ids.
        end: `"eos"` if a control token ended it, `"text"` if a stop string, another criterion or an end id that writes
            text did; None if it has not ended.
        log_prob: Natural logarithm of the probability that the member gave the ids; None where nobody has computed it.
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
        """Whether its ids are the primary's."""
        return self.writer in (0, None)


@dataclass(frozen=True)
class Candidate:
    """One of the answers to choose from.

    Attributes:
        data: What it writes.
        ended: Whether it has ended.
        writers: Who wrote it, members before methods; never nobody.
        weights: The share of each of them; those of all candidates of a question sum to 1.
    """

    data: bytes
    ended: bool
    writers: tuple[Written, ...]
    weights: tuple[float, ...]

    @property
    def text(self) -> str:
        """The answer as text; U+FFFD stands for what is none."""
        return self.data.decode("utf-8", "replace")

    @property
    def weight(self) -> float:
        """The share of all its writers."""
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
        turns: The conversation that its prompt stands for; one turn of the user if it is plain text.
        candidates: Its answers, the earliest first.
    """

    turns: Turns
    candidates: tuple[Candidate, ...]

    @property
    def prompt(self) -> str | Turns:
        """The prompt as a text; the turns of a conversation of more than one."""
        return self.turns if len(self.turns) > 1 else str(self.turns[0].get("content") or "")

    @property
    def texts(self) -> list[str]:
        """The candidates' texts."""
        return [candidate.text for candidate in self.candidates]


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        ranking: Numbers of the candidates, the best first.
        scores: For each criterion, by its name, what it says of every candidate; None for nothing.
        answers: What was read out of every candidate, where something was; None for nothing.
        written: What another model wrote in place of any candidate; None if a candidate is returned.
    """

    ranking: list[int]
    scores: Mapping[str, Sequence[float | None]]
    answers: list[str | None] | None = None
    written: str | None = None


class Panel:
    """What a chooser may ask for: the members' view of candidates, and models that were loaded to judge them.

    Args:
        log_probs: Gives, for some questions, the log-probability of every candidate under every member, with its end; by
            question, candidate and member, None for members of weight 0.
        generate_options: Options of `generate` for a model that writes an answer itself.
        kept: Models that were loaded for earlier calls, by what they were loaded from.
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
        """What was loaded from a source, now or for an earlier call.

        Args:
            source: What tells it from others.
            load: Loads it.
        """
        found: _Loaded | None = self._kept.pop(source, None)
        if found is None:
            found = load()
        # The one that was longest not asked for is let go.
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
    """Options of `generate` with which candidates are written, where the call does not say other: `{"do_sample": True}`."""

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
                    f"`methods` holds {method.name!r}, which chooses among whole answers itself. Name token- or span-level "
                    "methods."
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
        """The method's name and options, as they are saved; functions by their import paths."""
        return {"name": self.name, **{name: _saved(value) for name, value in self._options.items()}}

    def imported(self, is_trusted: bool) -> Self:
        """The same with functions that a saved configuration names imported; see `MethodConfig.imported`."""

        def change(value: Any) -> Any:
            if isinstance(value, Imported):
                return value.load(is_trusted)
            return value.imported(is_trusted) if isinstance(value, MethodConfig) else value

        return self._changed(change)

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """The same with other paths of judges and fusers; see `MethodConfig.with_paths`."""

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
        """Refuse options that nobody could load again: functions without an import path, models of this machine."""
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
                f"`generate_options` cannot be saved, since JSON cannot hold them: {error}. Give numbers, texts and lists."
            ) from error
        for path in self.models if is_for_hub else ():
            if is_local(path):
                raise ConfigurationError(
                    f"method {self.name!r} uses the model {path!r}, a folder of this machine, where nobody else could load "
                    "it. Push that model to the Hub, and name it by its id."
                )

    @property
    def acts_on_one(self) -> bool:
        """Whether it is more than the primary by itself even where that has all the weight: it may sample, and ranks."""
        return True

    @property
    def asks(self) -> frozenset[Offer]:
        """What every writer has to give, and what the methods among them ask for."""
        own = {Offer.ANSWERS, *({Offer.LIKELIHOODS} if self.gives_likelihoods else ())}
        return frozenset(own.union(*(method.asks for method in self.methods)))

    @property
    def gives_likelihoods(self) -> bool:
        """Whether it says how likely a text is, so that `score` can use it."""
        return False

    @property
    def has_one_each(self) -> bool:
        """Whether there is one candidate of each member and no other."""
        return self.num_candidates == 1 and not self.methods

    @property
    def returns_one(self) -> bool:
        """Whether there is only one answer to return, whatever the number of candidates."""
        return False

    def generate_options_beside(self, generation_config: Any) -> dict[str, Any]:
        """Those of `generate_options` that this generation config leaves open."""
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
        raise ConfigurationError(f"`{option}` of method {self.name!r} cannot be read: {value!r:.200}.")

    def load(self, panel: Panel) -> None:
        """Load what judges or fuses, before anybody writes.

        Args:
            panel: Keeps what is loaded.

        Raises:
            ConfigurationError: If something cannot be loaded.
        """

    @abstractmethod
    def choose(self, questions: Sequence[Question], panel: Panel) -> list[Choice]:
        """Choose among the candidates of each question.

        Args:
            questions: The questions, each with one candidate at least.
            panel: What may be asked for.

        Returns:
            A choice for each question.

        Raises:
            ConfigurationError: If something that was given (a function, a model) cannot do it.
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
        is_preferred: Who goes first among those that tie; then, and by default, it is the earliest.
    """
    # Earlier ones stand first, so those that differ from the highest by rounding only must be looked for anew each time.
    left = sorted(range(len(scores)), key=lambda n: not (is_preferred and is_preferred[n]))
    ranking: list[int] = []
    while left:
        highest = max(map(scores.__getitem__, left))
        chosen = next(n for n in left if is_tie(scores[n], highest))
        left.remove(chosen)
        ranking.append(chosen)
    return ranking
