"""Options of methods: their base class, their checks, and the register of methods."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from .errors import ConfigurationError
from .messages import wrong_count
from .offers import Offer


@dataclass(frozen=True)
class MethodConfig:
    """Base of the methods' options: frozen dataclasses, each in its method's file.

    Besides its fields, a config tells the rest of the library what it has to know about the method.

    Attributes:
        name: Name of the method, unique among `METHODS`.
        decides: What one decision is about: a token, a span of several, or a whole answer.
        likelihoods_ignore_options: Whether the options change only what is written, not the likelihoods of texts.
        takes_seed: Whether a call may set the seed of its samples.
    """

    name: ClassVar[str]
    decides: ClassVar[Literal["tokens", "spans", "answers"]] = "tokens"
    likelihoods_ignore_options: ClassVar[bool] = False
    takes_seed: ClassVar[bool] = False

    @property
    def asks(self) -> frozenset[Offer]:
        """What every member that takes part has to provide."""
        return frozenset({Offer.ROWS})

    @property
    def num_entries(self) -> int | None:
        """Number of best entries that every member has to provide, if a few are enough."""
        return None

    @property
    def takes_weights_as_given(self) -> bool:
        """Whether mixing weights may be negative and need not sum to 1."""
        return False

    @property
    def gate_rule(self) -> tuple[int, float] | None:
        """The gate member's number and the threshold; None for no gate."""
        return None

    @property
    def draws_one(self) -> bool:
        """Whether one member, drawn at random, decides each token."""
        return False

    @property
    def acts_on_one(self) -> bool:
        """Whether it changes anything if the primary has all the weight."""
        return False

    @property
    def models(self) -> tuple[str, ...]:
        """Hub ids and paths of models that are loaded beside the members."""
        return ()

    @property
    def gives_likelihoods(self) -> bool:
        """Whether it has likelihoods of texts, which `score` needs."""
        return True

    @property
    def least_members(self) -> int:
        """Smallest number of equally weighted members with which it can be better than each of them."""
        return 2

    @property
    def greedy_only(self) -> str | None:
        """Why these options allow neither sampling nor beams; None if they do."""
        return None

    def imported(self, is_trusted: bool) -> Self:
        """Return the same options with saved functions imported.

        Args:
            is_trusted: Whether their code may run.

        Raises:
            ConfigurationError: If it may not, or one cannot be imported.
        """
        return self

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Return the same options with other paths of the models that are loaded beside the members.

        Args:
            change: Returns the new path, or Hub id, of each.
        """
        return self

    def check_saveable(self, is_for_hub: bool) -> None:
        """Refuse options that could not be loaded again.

        Args:
            is_for_hub: Whether it is to be loaded on other machines.

        Raises:
            ConfigurationError: If there are some.
        """

    def generate_options_beside(self, generation_config: Any) -> dict[str, Any]:
        """Return options of `generate` that apply unless the call or this generation config (or None) overrides them."""
        return {}

    def check_members(self, num_members: int) -> None:
        """Check the options against the number of members.

        Raises:
            ConfigurationError: If the gate is not a member.
        """
        if self.gate_rule is not None and self.gate_rule[0] >= num_members:
            raise ConfigurationError(
                f"`gate` is {self.gate_rule[0]}, but the ensemble's members are numbered from 0 to {num_members - 1}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name and options, as they are saved."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def build(self, members: Any, union: Any, eos_ids: Any, device: Any) -> Any:
        """Build the method for a set of members, if it decides tokens.

        Args:
            members: The members, of type `Member`; the first is the primary.
            union: Their `UnionVocabulary`.
            eos_ids: For each member, the ids that end a text.
            device: Device of the primary's logits.

        Returns:
            A `TokenMethod`.

        Raises:
            ConfigurationError: If the method does not decide tokens, or cannot be built for these members.
        """
        raise ConfigurationError(f"{type(self).__name__} is not a token-level method.")


def check_option(name: str, value: Any, is_right: bool, rule: str) -> None:
    """Refuse an option that breaks its rule.

    Args:
        name: Of the option, for the error.
        value: Its value.
        is_right: Whether it follows the rule.
        rule: What it has to be.

    Raises:
        ConfigurationError: If it does not.
    """
    if not is_right:
        raise ConfigurationError(f"`{name}` has to be {rule}, but is {value!r}.")


def check_positive_integer(name: str, value: Any) -> None:
    """Refuse an option that is not an integer of at least 1.

    Args:
        name: Of the option, for the error.
        value: Its value.

    Raises:
        ConfigurationError: If it is not.
    """
    check_option(name, value, is_integer(value) and value > 0, "a positive integer")


def is_number(value: Any) -> bool:
    """Whether a value is a number; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class GatedConfig(MethodConfig):
    """Base of the options of methods with a gate: a member that may decide tokens alone."""

    threshold: float | None = None
    """If the gate member gives one entry a probability above this, it decides alone and the others do not run. None:
    all members decide at every step.
    """

    gate: int = 0
    """Index of the gate member."""

    def __post_init__(self) -> None:
        threshold, gate = self.threshold, self.gate
        is_probability = threshold is None or (is_number(threshold) and 0 <= threshold <= 1)
        check_option("threshold", threshold, is_probability, "a probability from 0 to 1, or None")
        check_option("gate", gate, is_integer(gate) and gate >= 0, "the number of a member, from 0 on")
        if threshold is None and gate != 0:
            raise ConfigurationError(f"`gate` is {gate}, but has no effect without a `threshold`.")

    @property
    def gate_rule(self) -> tuple[int, float] | None:
        """The gate member's number and the threshold; None for no gate."""
        return None if self.threshold is None else (self.gate, self.threshold)


METHODS: dict[str, type[MethodConfig]] = {}
"""The options of every method by its name; each method's file adds its own."""


def method_config(method: "str | MethodConfig | dict[str, Any]") -> MethodConfig:
    """Turn a method's name, options or saved options into its configuration.

    Raises:
        ConfigurationError: If there is no such method or option.
    """
    if isinstance(method, MethodConfig):
        return method
    options = dict(method) if isinstance(method, dict) else {"name": method}
    kind = method_class(options.pop("name", None), is_saved=isinstance(method, dict))
    return made(kind, options)


def method_class(name: Any, is_saved: bool = False) -> type[MethodConfig]:
    """Return the class of a method's options.

    Args:
        name: The method's name.
        is_saved: Whether a saved ensemble names it.

    Raises:
        ConfigurationError: If there is no such method.
    """
    if not isinstance(name, str) or name not in METHODS:
        own = " To use a method of your own, add it to `hf_ensemble.config.METHODS` first." if is_saved else ""
        raise ConfigurationError(f"unknown method {name!r}. Known methods: {', '.join(sorted(METHODS))}.{own}")
    return METHODS[name]


def made(kind: type[MethodConfig], options: dict[str, Any]) -> MethodConfig:
    """Create a method's configuration from options by name.

    Args:
        kind: Its class.
        options: The options.

    Raises:
        ConfigurationError: If one is unknown, missing or wrong.
    """
    fields = {option.name: option for option in dataclasses.fields(kind)}
    if unknown := sorted(set(options) - set(fields)):
        raise ConfigurationError(
            f"method {kind.name!r} has no option {unknown[0]!r}. Options: {sorted(fields) or 'none'}."
        )
    if missing := [name for name, option in fields.items() if name not in options and _is_required(option)]:
        raise ConfigurationError(f"method {kind.name!r} needs its option `{missing[0]}`.")
    return kind(**options)


def _is_required(option: Any) -> bool:
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def normalize_weights(weights: Sequence[float] | None, num_members: int, as_given: bool = False) -> list[float]:
    """Check mixing weights and scale them to sum to 1; None gives equal weights.

    Args:
        weights: One weight per member.
        num_members: Number of members.
        as_given: Whether weights may be negative and are not scaled.

    Raises:
        ConfigurationError: If there is not one weight per member, or one is negative or not finite, or all are 0.
    """
    if weights is None:
        return [1.0 / num_members] * num_members
    try:
        if isinstance(weights, (str, bytes, dict, set)):
            raise TypeError
        values = [float(w) for w in weights]
        total = math.fsum(values)
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(
            f"`weights` must be a list of one number per member, but are {weights!r:.200}. Only `generate` takes one "
            "list per row, or a function."
        ) from None
    if len(values) != num_members:
        raise wrong_count("weights", len(values), num_members)
    if any(not math.isfinite(w) or (w < 0 and not as_given) for w in values):
        raise ConfigurationError(
            f"`weights` must be finite{'' if as_given else ' and at least 0'}, but are {values}."
            + ("" if as_given or not all(map(math.isfinite, values)) else ' Negative ones need `space="log"`.')
        )
    if not any(values):
        raise ConfigurationError(f"`weights` must not all be 0, but are {values}.")
    return values if as_given else [w / total for w in values]
