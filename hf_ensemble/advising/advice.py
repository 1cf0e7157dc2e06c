"""The advice: the members, the ensembles that were tried, and the answer."""

import dataclasses
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..choosing.selection import ensemble_of
from ..config import MethodConfig
from ..errors import ConfigurationError
from ..evaluation.estimates import Estimate
from ..evaluation.measures import measure_of
from ..evaluation.results import written
from ..files import check_ending, whole_file
from ..model import EnsembleForCausalLM
from ..tables import aligned, spelled
from .page import advice_page


@dataclass(frozen=True)
class TriedMember:
    """The result of one member alone.

    Attributes:
        index: Its position among the members in the order you gave.
        name: Its name.
        estimate: Its value with the interval.
        count: Number of examples that it ran on.
        seconds: Seconds per example.
        num_bytes: Bytes of its weights.
        reason: Why it is taken or left out, in the words of `select_members`.
    """

    index: int
    name: str
    estimate: Estimate
    count: int
    seconds: float
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class TriedEnsemble:
    """One ensemble that was tried.

    Attributes:
        indices: Positions of its members in the order you gave, the primary first.
        members: Their names.
        method: Its method.
        weights: Their mixing weights, which sum to 1.
        estimate: Its value with the interval.
        difference: Its value minus the best member's, over the examples that both ran on.
        count: Number of examples that it ran on.
        seconds: Seconds per example.
        num_bytes: Bytes of its members' weights; shared weights count once.
    """

    indices: tuple[int, ...]
    members: tuple[str, ...]
    method: MethodConfig
    weights: tuple[float, ...]
    estimate: Estimate
    difference: Estimate
    count: int
    seconds: float
    num_bytes: int

    @property
    def title(self) -> str:
        """Method, weights and members."""
        return f"{self.spelled} of {' and '.join(self.members)}"

    @property
    def spelled(self) -> str:
        """Method and weights in the form of `hf-ensemble eval --also`, with the weights in the order of `members`."""
        weights = f"@{','.join(f'{weight:.3g}' for weight in self.weights)}"
        return spelled(self.method) + (weights if self.method.decides == "tokens" else "")


@dataclass(frozen=True)
class Advice:
    """Whether an ensemble pays. `str()` gives words and tables, `write_page` a page with plots.

    Attributes:
        pays: True if the interval of the gain is above 0. False if it is below `least_gain`, the members always answer
            alike, or the best member gets less than a tenth right. None if it is not decided.
        reason: The answer in words.
        gain: The value of the chosen ensemble minus the best member's, on examples that had no part in the choice (for
            bits per byte, below 0 is better). None if nothing was chosen.
        chosen: The first ensemble within a standard error of the best, whether it pays or not. None if no ensemble
            could be compared.
        members: The members, the best first.
        ensembles: The ensembles, the best first.
        set_name: Name of the set.
        measure: What was measured.
        num_examples: Number of examples in the set.
        differing: Share of the examples on which the members of the chosen ensemble differ; if none was chosen, the
            best two members.
        either: Value of always picking the better of these members' answers.
        shared: A sentence about how much of their vocabularies and words the members share.
    """

    pays: bool | None
    reason: str
    gain: Estimate | None
    chosen: TriedEnsemble | None
    members: tuple[TriedMember, ...]
    ensembles: tuple[TriedEnsemble, ...]
    set_name: str
    measure: str
    num_examples: int
    differing: float
    either: float
    shared: str

    def build(self, ensemble: EnsembleForCausalLM) -> EnsembleForCausalLM:
        """Build the chosen ensemble.

        Args:
            ensemble: The ensemble of all members that the advice is about. It is not changed, and the new ensemble
                shares its models.

        Raises:
            ConfigurationError: If no ensemble was tried, or `ensemble` has other members.
        """
        if self.chosen is None:
            raise ConfigurationError(f"there is no ensemble to build: {self.reason}")
        names = [view.name for view in ensemble.member_views]
        known = {member.index: member.name for member in self.members}
        if names != [known[index] for index in sorted(known)]:
            raise ConfigurationError(
                f"this advice is about the members {list(known.values())}, but the ensemble has {names}."
            )
        return ensemble_of(ensemble, self.chosen.indices, self.chosen.method, list(self.chosen.weights))

    def __str__(self) -> str:
        """The answer, and the tables behind it."""
        parts = [f"Does it pay? {self.reason}", aligned(self.member_rows())]
        if self.ensembles:
            parts.append(aligned(self.ensemble_rows()))
        return "\n\n".join([*parts, "\n".join(self.remarks())])

    @property
    def _title(self) -> str:
        return f"{self.measure}{measure_of(self.measure).unit}"

    def member_rows(self) -> list[list[str]]:
        """The table of the members, its head first."""
        rows = [["member", self._title, "95 %", "examples", "s/example", "weights, GiB", ""]]
        for one in self.members:
            value, interval = written(self.measure, one.estimate)
            rows.append(
                [one.name, value, interval, f"{one.count}", f"{one.seconds:.3f}", _gib(one.num_bytes), one.reason]
            )
        return rows

    def ensemble_rows(self) -> list[list[str]]:
        """The table of the ensembles, its head first."""
        rows = [["ensemble", "of", self._title, "95 %", "to the best member", "95 %", "examples", "s/example"]]
        for one in self.ensembles:
            value, interval = written(self.measure, one.estimate)
            difference, of_difference = written(self.measure, one.difference, signed=True)
            own = [one.spelled, " + ".join(one.members), value, interval, difference, of_difference]
            rows.append([*own, f"{one.count}", f"{one.seconds:.3f}"])
        return rows

    def remarks(self) -> list[str]:
        """Sentences about what the tables do not show."""
        value, _ = written(self.measure, Estimate(self.either, math.nan, math.nan))
        who = " and ".join(self.chosen.members if self.chosen else [member.name for member in self.members[:2]])
        found = [
            f"{who} answer {100 * self.differing:.0f} % of the examples differently; always picking the better answer "
            f"would reach {value}.",
            self.shared,
        ]
        if self.chosen is not None and self.pays is not False:
            chosen, best = self.chosen, self.members[0]
            found.append(
                f"It takes {chosen.seconds / best.seconds:.1f} times as long as {best.name} alone, and "
                f"{chosen.num_bytes / best.num_bytes:.1f} times the memory for weights."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; a number that is not finite becomes None."""
        values: dict[str, Any] = dataclasses.asdict(self)
        tried = zip([*values["ensembles"], values["chosen"]], [*self.ensembles, self.chosen], strict=True)
        for own, one in tried:
            if one is not None:
                own["method"] = one.method.to_dict()
        return {name: _plain(value) for name, value in values.items()}

    def write_page(self, path: str | PathLike[str]) -> None:
        """Write a page that needs no network, with the answer, the tables, and plots of values and costs.

        Args:
            path: The file; its name has to end in `.html`.

        Raises:
            ConfigurationError: If the name ends differently, or its folder does not exist.
        """
        check_ending(Path(path), (".html",))
        with whole_file(path) as unfinished:
            unfinished.write_text(advice_page(self), "utf-8")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
