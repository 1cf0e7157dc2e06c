"""Running an ensemble and its members over evaluation sets, so that the work can be stopped and go on."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, NamedTuple

from transformers.utils import logging

from ..config import MethodConfig, SweetSpanConfig, check_positive_integer, method_config, normalize_weights
from ..dev_set import run_batches
from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM
from ..state_file import StateFile, describe_generation_config, describe_member, hash_of
from .results import MEASURES, Evaluation, Outcomes, System
from .sets import EvaluationSet, Item

_FORMAT = 1
"""Part of every line of a state file: raise it when what is kept of an example can change."""

Work = Literal["write", "score"]


class Configuration(NamedTuple):
    """How an ensemble decodes in one row of the table; None: as the ensemble says."""

    method: str | MethodConfig | None = None
    weights: Sequence[float] | None = None


@dataclass(frozen=True)
class _Runner:
    """A member or a configuration, with what is run for it."""

    system: System
    model: EnsembleForCausalLM
    method: MethodConfig
    weights: list[float]
    member: int | None

    def label(self, work: Work, evaluation_set: EvaluationSet, max_new_tokens: int) -> dict[str, Any]:
        """What the outcome of an example depends on, beside the example and the members."""
        method: MethodConfig = self.method
        if work == "score" and isinstance(method, SweetSpanConfig):
            # The score of a text is the mean over the members, whatever the options.
            method = SweetSpanConfig()
        who = {"method": method.to_dict(), "weights": self.weights} if self.member is None else {"member": self.member}
        if work == "score":
            return {"work": work, **who}
        stops = evaluation_set.stop_strings
        return {"work": work, **who, "max_new_tokens": max_new_tokens, "stop_strings": stops}

    def run(
        self, work: Work, items: Sequence[Item], stops: list[str], max_new_tokens: int, batch_size: int
    ) -> Iterator[list[Any]]:
        """Yield the outcomes of batches of items, in their order."""
        model: Any = self.model
        options = {"method": self.method, "weights": self.weights}
        if work == "write":
            prompts = [item.prompt for item in items]
            own = {**options, "stop_strings": stops}
            yield from run_batches(model, prompts, max_new_tokens, batch_size, own)
            return
        per_batch = max(1, batch_size // len(items[0].continuations))
        for start in range(0, len(items), per_batch):
            batch = items[start : start + per_batch]
            prompts = [item.prompt for item in batch for _ in item.continuations]
            continuations = [text for item in batch for text in item.continuations]
            log_probs = iter(model.score(prompts, continuations, batch_size=batch_size, **options).log_probs.tolist())
            yield [[next(log_probs) for _ in item.continuations] for item in batch]


def evaluate(
    ensemble: EnsembleForCausalLM,
    sets: EvaluationSet | Sequence[EvaluationSet],
    *,
    configurations: Mapping[str, Configuration] | None = None,
    members: bool = True,
    measures: Collection[str] = MEASURES,
    max_new_tokens: int = 32,
    batch_size: int = 8,
    state_file: str | PathLike[str] | None = None,
    time_limit: float | None = None,
) -> Evaluation:
    """Evaluate an ensemble and each of its members on sets of examples.

    - *Exact match* (questions): the share of questions whose answer, written greedily up to the end of its line, is an
      accepted one once both are normalised (`normalize_answer`).
    - *Accuracy* (choices): the share of questions whose likeliest choice is the right one, the text of every choice being
      scored after the question; *normalized accuracy*: with its log-probability over its bytes. They are what
      lm-evaluation-harness calls `acc` and `acc_norm` (which counts characters). Where no choice has any probability,
      which happens to methods that truncate, the question counts as not answered, and not right.
    - *Bits per byte* (all): bits of the first accepted answer, the right choice or the text after its prompt, over its
      bytes, both summed over the set. Infinite where one has no probability; the table says how many.

    Intervals are for 95 %: Wilson's for shares, the normal one of the ratio for bits per byte. Everybody is compared with
    the member that is best at the measure on the same examples, by the paired differences. That member is chosen on these
    very examples, which favours it a little.

    Args:
        ensemble: The ensemble; not changed.
        sets: One set or more, with different names (`read_set`).
        configurations: Methods and weights to evaluate, by the names that the table shows. Default: the ensemble as it
            is, named after its method.
        members: Whether to run the members alone too. A member is run by itself, with its own generation config.
        measures: Which measures; what is not needed for them does not run.
        max_new_tokens: Most ids of a written answer.
        batch_size: Number of texts that run together.
        state_file: Where outcomes are kept after every batch, so that work which was stopped goes on. Configurations, sets,
            examples and measures may change between runs; with other members or generation configs it is refused.
        time_limit: Seconds after which no batch is started that would probably not end in time. The result is then of
            what there is, and `is_complete` is false.

    Returns:
        The table, with intervals and comparisons.

    Raises:
        ConfigurationError: Before anything runs, if an argument is no good or the state file is of something else.
        MemberError: If a member fails.
    """
    sets = [sets] if isinstance(sets, EvaluationSet) else list(sets)
    names = [evaluation_set.name for evaluation_set in sets]
    if not sets or len(set(names)) < len(names):
        raise ConfigurationError(f"`sets` have to be at least one, with different names, but are {names}.")
    if not measures or not set(measures) <= set(MEASURES):
        raise ConfigurationError(f"`measures` have to be of {', '.join(MEASURES)}, but are {list(measures)}.")
    check_positive_integer("max_new_tokens", max_new_tokens)
    check_positive_integer("batch_size", batch_size)
    if time_limit is not None and not time_limit > 0:
        raise ConfigurationError(f"`time_limit` has to be a positive number of seconds, but is {time_limit!r}.")
    runners = [*(_members(ensemble) if members else []), *_configured(ensemble, configurations)]
    taken = [runner.system.name for runner in runners]
    if len(set(taken)) < len(taken):
        raise ConfigurationError(f"members and configurations must have different names, but are {taken}.")

    state = None
    kept: dict[str, dict[str, tuple[Any, float]]] = {}
    if state_file is not None:
        settings = {
            "format": _FORMAT,
            "members": [describe_member(member) for member in ensemble.member_views],
            "generation config": [describe_generation_config(model) for model in (ensemble, *ensemble.members)],
        }
        state = StateFile(state_file, settings, work="evaluation")
        for name, found in state.read(_read_part):
            kept.setdefault(name, {}).update(found)

    jobs = [
        (evaluation_set, work, runner)
        for evaluation_set in sets
        for work in _works(evaluation_set, measures)
        for runner in runners
    ]
    outcomes: list[Outcomes] = []
    clock = _Clock(time_limit)
    with logging.tqdm(total=sum(len(job[0].items) for job in jobs), desc="evaluating", unit="example") as bar:
        for evaluation_set, work, runner in jobs:
            label = runner.label(work, evaluation_set, max_new_tokens)
            known = kept.setdefault(hash_of(label), {})
            keys = [
                hash_of([item.prompt, *(item.continuations if work == "score" else ())])
                for item in evaluation_set.items
            ]
            missing = {key: item for key, item in zip(keys, evaluation_set.items, strict=True) if key not in known}
            bar.set_postfix_str(f"{evaluation_set.name}, {runner.system.name}")
            bar.update(len(keys) - len(missing))
            # The longest first, so that batches are even, and memory that does not suffice is missed at once.
            order = sorted(missing, key=lambda key: -_length(missing[key], work))
            batches = runner.run(
                work, [missing[key] for key in order], evaluation_set.stop_strings, max_new_tokens, batch_size
            )
            done = 0
            while done < len(order) and clock.allows_another():
                batch, seconds = clock.time(batches)
                own = dict(zip(order[done : done + len(batch)], batch, strict=True))
                known |= {key: (outcome, seconds / len(own)) for key, outcome in own.items()}
                if state is not None:
                    state.add({"label": label, "outcomes": own, "seconds": round(seconds, 4)})
                done += len(batch)
                bar.update(len(batch))
            outcomes.append(Outcomes(runner.system, evaluation_set, work, [known.get(key) for key in keys]))
    return Evaluation.from_outcomes(outcomes, measures)


class _Clock:
    """Says whether there is time for another batch."""

    def __init__(self, limit: float | None):
        self.limit = limit
        self.began = time.perf_counter()
        self.longest = 0.0

    def allows_another(self) -> bool:
        """Whether a batch like the longest so far would end in time."""
        return self.limit is None or time.perf_counter() - self.began + self.longest < self.limit

    def time(self, batches: Iterator[list[Any]]) -> tuple[list[Any], float]:
        """The next batch, and its seconds."""
        began = time.perf_counter()
        batch = next(batches)
        seconds = time.perf_counter() - began
        self.longest = max(self.longest, seconds)
        return batch, seconds


def _read_part(part: dict[str, Any]) -> tuple[str, dict[str, tuple[Any, float]]]:
    """The label of a finished part; and for each of its examples the outcome and its share of the seconds."""
    outcomes = dict(part["outcomes"])
    each = float(part["seconds"]) / max(1, len(outcomes))
    return hash_of(part["label"]), {key: (outcome, each) for key, outcome in outcomes.items()}


def _works(evaluation_set: EvaluationSet, measures: Collection[str]) -> list[Work]:
    works: list[Work] = []
    if evaluation_set.kind == "questions" and "exact match" in measures:
        works.append("write")
    if "bits per byte" in measures or (
        evaluation_set.kind == "choices" and not {"accuracy", "normalized accuracy"}.isdisjoint(measures)
    ):
        works.append("score")
    return works


def _length(item: Item, work: Work) -> int:
    return len(item.prompt) + (max(map(len, item.continuations)) if work == "score" else 0)


def _members(ensemble: EnsembleForCausalLM) -> list[_Runner]:
    return [
        _Runner(System(member.name, True), ensemble.alone(index), method_config("gac"), [1.0], index)
        for index, member in enumerate(ensemble.member_views)
    ]


def _configured(ensemble: EnsembleForCausalLM, configurations: Mapping[str, Configuration] | None) -> list[_Runner]:
    count = len(ensemble.members)
    if configurations is None:
        configurations = {ensemble.config.method.name: Configuration()}
    runners = []
    for name, (method, weights) in configurations.items():
        own = ensemble.config.method if method is None else method_config(method)
        own.check_members(count)
        own_weights = normalize_weights(
            ensemble.config.weights if weights is None else weights, count, own.takes_weights_as_given
        )
        runners.append(_Runner(System(name, False), ensemble, own, own_weights, None))
    return runners
