"""Runs members alone and together on one set, and keeps the value of each example."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..choosing.selection import ensemble_of
from ..config import MethodConfig
from ..errors import ConfigurationError
from ..evaluation import Configuration, Evaluation, EvaluationSet, evaluate
from ..evaluation.estimates import Estimate, ratio
from ..evaluation.measures import measure_of
from ..members.member_model import tensors_of
from ..model import EnsembleForCausalLM
from ..tables import spelled
from .honest_gain import first_near_best, honest_gain


class Plan(NamedTuple):
    """An ensemble to try.

    Attributes:
        indices: Positions of its members in the order you gave, the primary first.
        method: Its method.
        weights: Their weights.
    """

    indices: tuple[int, ...]
    method: MethodConfig
    weights: tuple[float, ...]


class Ran(NamedTuple):
    """The result of a member or an ensemble.

    Attributes:
        estimate: Its value.
        seconds: Seconds per example.
        values: The value of each example that ran, by its position in the set: bits, or a value from 0 to 1.
    """

    estimate: Estimate
    seconds: float
    values: dict[int, float]


class Trial:
    """The members and ensembles that have run on a set.

    Args:
        ensemble: All members.
        questions: The set.
        measure: The measure that counts.
        options: Options of `evaluate`.
        state_folder: Folder for finished work; created if it does not exist.

    Attributes:
        names: The members' names.
        sign: 1 if more is better, -1 if less is better.
        members: The result of each member alone.
        order: Their indices, the best first.
        places: Positions of the examples that all of them ran on.
        responses: What each wrote for these examples; None if nothing is written.
        ensembles: The result of each ensemble.
    """

    def __init__(
        self,
        ensemble: EnsembleForCausalLM,
        questions: EvaluationSet,
        measure: str,
        options: dict[str, Any],
        state_folder: str | PathLike[str] | None,
    ):
        self.ensemble, self.questions, self.measure = ensemble, questions, measure
        self.names = [view.name for view in ensemble.member_views]
        self.sign = measure_of(measure).sign
        self.ensembles: dict[Plan, Ran] = {}
        self._options = {**options, "measures": [measure]}
        self._folder = None if state_folder is None else _made(state_folder)
        # Bits are compared as a sum over a sum of bytes, everything else as a mean.
        self._sizes = np.array([item.num_bytes if self.sign < 0 else 1 for item in questions.items], dtype=float)
        self._most = np.inf if self.sign < 0 else 1.0

    def run_members(self, seconds: float) -> None:
        """Run every member alone.

        Args:
            seconds: Time limit in seconds.
        """
        found = self._evaluate(self.ensemble, {}, seconds, "members", members=True)
        self.members = [self._ran(found, name) for name in self.names]
        self.order = sorted(range(len(self.names)), key=lambda m: -self.sign * self.members[m].estimate.value)
        self.places = sorted(set.intersection(*(set(ran.values) for ran in self.members)))
        texts = [found.responses.get((self.questions.name, name), []) for name in self.names]
        self.responses = [[own[n] or "" for n in self.places] for own in texts] if all(texts) else None
        self._choices = [found.choices.get((self.questions.name, name)) for name in self.names]

    def run_ensembles(self, plans: Iterable[Plan], seconds: float) -> None:
        """Run the ensembles that have not run yet.

        Args:
            plans: The ensembles.
            seconds: Time limit in seconds, shared evenly between groups of the same members.
        """
        stop_at = time.monotonic() + seconds
        groups: dict[tuple[int, ...], list[Plan]] = defaultdict(list)
        for plan in dict.fromkeys(plans):
            if plan not in self.ensembles:
                groups[plan.indices].append(plan)
        for n, (indices, own) in enumerate(groups.items()):
            # An ensemble of just these members: one that sits out may still count, as in DeePEn's anchors.
            together = ensemble_of(self.ensemble, indices)
            # Two plans of one ensemble have different names: their weights as they are, not rounded.
            names = {plan: f"{spelled(plan.method)}@{','.join(map(str, plan.weights))}" for plan in own}
            configurations = {names[plan]: Configuration(plan.method, list(plan.weights)) for plan in own}
            share = (stop_at - time.monotonic()) / (len(groups) - n)
            found = self._evaluate(together, configurations, share, f"ensembles-{'-'.join(map(str, indices))}")
            self.ensembles |= {plan: self._ran(found, names[plan]) for plan in own}

    def _evaluate(
        self,
        ensemble: EnsembleForCausalLM,
        configurations: dict[str, Configuration],
        seconds: float,
        name: str,
        members: bool = False,
    ) -> Evaluation:
        options = {**self._options, "members": members, "time_limit": max(seconds, 1e-3)}
        if self._folder is not None:
            options["state_file"] = self._folder / f"{name}.jsonl"
        return evaluate(ensemble, self.questions, configurations=configurations, **options)

    def _ran(self, found: Evaluation, name: str) -> Ran:
        key = (self.questions.name, self.measure, name)
        result = found[key]
        values = {n: value * self._sizes[n] for n, value in found.values(*key).items()}
        return Ran(result.estimate, result.seconds / max(1, result.count), values)

    def difference(self, ran: Ran) -> Estimate:
        """An ensemble's value minus the best member's, over the examples that both ran on."""
        best = self.members[self.order[0]].values
        both = sorted(set(ran.values) & set(best))
        return ratio([ran.values[n] - best[n] for n in both], self._sizes[both].tolist(), -self._most, self._most)

    def choose(self, plans: Sequence[Plan]) -> Plan:
        """Choose an ensemble.

        Args:
            plans: The ensembles, the simpler ones first; they have run.
        """
        return plans[first_near_best(self._worth([self.ensembles[plan] for plan in plans], self._common(plans)))]

    def gain(self, plans: Sequence[Plan]) -> tuple[Estimate, int]:
        """The gain of choosing an ensemble, and the number of examples it was measured on.

        Args:
            plans: The ensembles, the simpler ones first; they have run.
        """
        places = self._common(plans)
        table = self._worth([self.members[self.order[0]], *(self.ensembles[plan] for plan in plans)], places)
        gain = honest_gain(table[0], table[1:], self._sizes[places], self._most)
        # If less is better, the greatest gain is the lowest difference.
        return gain if self.sign > 0 else Estimate(-gain.value, -gain.high, -gain.low), len(places)

    def _common(self, plans: Sequence[Plan]) -> list[int]:
        """Positions of the examples that all members and these ensembles ran on."""
        return [n for n in self.places if all(n in self.ensembles[plan].values for plan in plans)]

    def _worth(self, ran: Sequence[Ran], places: Sequence[int]) -> NDArray[np.float64]:
        """The values of examples for several systems, higher is better, of shape `(num_ran, num_places)`."""
        return np.array([[self.sign * one.values[n] for n in places] for one in ran])

    def differing(self, members: Sequence[int]) -> float:
        """Share of the examples on which members answer differently, or score differently."""
        columns = [self._answers(member) for member in members]
        return sum(len(set(answers)) > 1 for answers in zip(*columns, strict=True)) / len(self.places)

    def _answers(self, member: int) -> list[Any]:
        if self.responses is not None:
            return [self.questions.compared(response) for response in self.responses[member]]
        answers = self._choices[member] or self.members[member].values
        return [answers[n] for n in self.places]

    def either(self, members: Sequence[int]) -> float:
        """The value of always picking the better of the members' answers."""
        best = [self.sign * max(self.sign * self.members[m].values[n] for m in members) for n in self.places]
        return float(np.sum(best) / self._sizes[self.places].sum())

    def num_bytes(self, members: Sequence[int]) -> int:
        """Bytes of members' weights; shared weights count once."""
        return sum(tensor.nbytes for tensor in tensors_of(self.ensemble.members[m] for m in members))


def _made(folder: str | PathLike[str]) -> Path:
    """The folder, created if it does not exist.

    Raises:
        ConfigurationError: If it cannot be created.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"`state_folder` {path} cannot be created: {error}. Name another one.") from error
    return path
