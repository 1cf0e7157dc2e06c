"""Runs an ensemble and its members over evaluation sets, so that the work can be stopped and continued."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from transformers.utils import logging

from ..config import MethodConfig, check_positive_integer, is_number, method_config, normalize_weights
from ..dev_set import run_batches, with_greedy
from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM
from ..state_file import (
    StateFile,
    can_be_found_again,
    describe_generation_config,
    describe_method,
    hash_of,
)
from .marking import Outcomes
from .measures import DEFAULT_MEASURES, read_measures, works_for
from .order import Examples, in_turns, one_by_one
from .results import Evaluation
from .sets import EvaluationSet, Item

_SEED = 0
"""Seed of samples, which depend on the example alone: neither on batches nor on earlier runs."""


class Configuration(NamedTuple):
    """How an ensemble decodes in one row of the table. None: the ensemble's own setting."""

    method: str | MethodConfig | None = None
    weights: Sequence[float] | None = None


class _Runner(NamedTuple):
    """A member or a configuration.

    Attributes:
        name: Its name in the table.
        member: Index of the member; None for a configuration.
        model: The ensemble, or the member as an ensemble of one.
        method: Its method.
        weights: Its mixing weights.
    """

    name: str
    member: int | None
    model: EnsembleForCausalLM
    method: MethodConfig
    weights: list[float]


class _Job:
    """One kind of work on one set, by a member or a configuration.

    Args:
        runner: The member or configuration.
        examples: The set's examples for this work.
        max_new_tokens: Largest number of ids of an answer.
        kept: Outcomes of earlier runs, and the place for new ones.

    Attributes:
        known: The outcomes of examples, by their keys.
        num_left: Number of examples that have not run.
        last: Seconds and examples of the last batch; None before the first.
    """

    def __init__(self, runner: _Runner, examples: Examples, max_new_tokens: int, kept: "_Kept"):
        self.runner = runner
        self.examples = examples
        self._limits: dict[str, Any] = {}
        if examples.work == "write":
            stop_strings = examples.evaluation_set.stop_strings
            self._limits = {"max_new_tokens": max_new_tokens, "stop_strings": stop_strings}
        self._kept = kept
        self._label = self._labelled()
        self.known = kept.known[hash_of(self._label)]
        self.num_left = 0
        self.last: tuple[float, int] | None = None
        self._batches: Iterator[list[str]] = iter(())
        self._batch: list[str] = []

    def check(self) -> None:
        """Refuse what the method cannot do, before any system runs.

        Raises:
            ConfigurationError: If so.
        """
        if self.examples.work == "write":
            options = {"method": self.runner.method, "weights": self.runner.weights, **self._limits}
            self.runner.model.check_options(**with_greedy(self.runner.model, options))

    def prepare(self, batch_size: int, is_drawn: bool) -> None:
        """Put the examples that have not run into batches.

        Args:
            batch_size: Number of texts that run together.
            is_drawn: Whether the examples are drawn at random.
        """
        keys = [key for key in self.examples.items if key not in self.known]
        self.num_left, self._batch_size = len(keys), batch_size
        num_texts = 1
        if self.examples.work == "score":
            num_texts = max(len(item.continuations) for item in self.examples.items.values())
        order = self.examples.drawn if is_drawn else self.examples.longest_first
        self._batches = order(keys, max(1, batch_size // num_texts))

    def next_batch(self) -> list[str]:
        """The keys of the examples that run next; none if all have."""
        # Jobs with the same outcomes may have run some of them.
        found = [key for key in self._batch if key not in self.known]
        self.num_left -= len(self._batch) - len(found)
        while not found:
            batch = next(self._batches, None)
            if batch is None:
                break
            found = [key for key in batch if key not in self.known]
            self.num_left -= len(batch) - len(found)
        self._batch = found
        return found

    def run(self) -> None:
        """Run the next batch, and keep its outcomes."""
        keys = self.next_batch()
        began = time.perf_counter()
        outcomes = self._outcomes([self.examples.items[key] for key in keys])
        seconds = time.perf_counter() - began
        self._kept.add(self._label, dict(zip(keys, outcomes, strict=True)), seconds)
        self.last = seconds, len(keys)
        self.num_left -= len(keys)
        self._batch = []

    def result(self) -> Outcomes:
        """The outcomes of all examples so far."""
        ran = {n: self.known[key] for n, key in enumerate(self.examples.keys) if key in self.known}
        runner, examples = self.runner, self.examples
        return Outcomes(runner.name, runner.member is not None, examples.evaluation_set, examples.work, ran)

    def _labelled(self) -> dict[str, Any]:
        """What the outcome of an example depends on, besides the example and the members."""
        method, work = self.runner.method, self.examples.work
        if work == "score" and method.likelihoods_ignore_options:
            method = type(method)()
        who: dict[str, Any] = {"method": describe_method(method), "weights": self.runner.weights}
        if method.takes_seed:
            who |= {"seed": _SEED}
        if self.runner.member is not None:
            who = {"member": self.runner.member}
        elif not can_be_found_again(method):
            # Functions of two configurations may have the same name.
            who["name"] = self.runner.name
        return {"work": work, **who, **self._limits}

    def _outcomes(self, items: Sequence[Item]) -> list[Any]:
        """Run examples together."""
        options = {"method": self.runner.method, "weights": self.runner.weights, **self._limits}
        if self.runner.method.takes_seed and self.examples.work == "write":
            options["seed"] = _SEED
        prompts = [item.prompt for item in items]
        if self.examples.work == "write":
            return next(run_batches(self.runner.model, prompts, batch_size=len(items), **options))
        repeated = [item.prompt for item in items for _ in item.continuations]
        continuations = [text for item in items for text in item.continuations]
        scores = self.runner.model.score(repeated, continuations, batch_size=self._batch_size, **options)
        log_probs = iter(scores.log_probs.tolist())
        return [[next(log_probs) for _ in item.continuations] for item in items]


def evaluate(
    ensemble: EnsembleForCausalLM,
    sets: EvaluationSet | Sequence[EvaluationSet],
    *,
    configurations: Mapping[str, Configuration] | None = None,
    members: bool = True,
    measures: Collection[str] = DEFAULT_MEASURES,
    max_new_tokens: int = 32,
    batch_size: int = 8,
    state_file: str | PathLike[str] | None = None,
    time_limit: float | None = None,
) -> Evaluation:
    """Evaluate an ensemble and each of its members on sets of examples.

    - *Exact match* (questions): the share of questions whose answer, written greedily up to the end of its line,
      equals an accepted one after normalisation (`normalize_answer`).
    - *F1* (questions marked as texts): the mean of SQuAD's F1 between the words of that answer and the closest
      accepted one, after the same normalisation (`EvaluationSet.f1`).
    - *chrF* and *BLEU* (questions marked as texts; only on request): the same answers, unchanged, against all accepted
      ones, over the whole set, from 0 to 100, by `sacrebleu` with its defaults.
    - *Accuracy* (choices): the share of questions whose likeliest choice is the right one; the text of every choice is
      scored after the question. *Normalized accuracy* divides the log-probability by the bytes. They correspond to
      `acc` and `acc_norm` of lm-evaluation-harness, but `acc_norm` counts characters. If no choice has any
      probability, which happens with methods that truncate, the question counts as wrong.
    - *Bits per byte* (all): the bits of the first accepted answer, the right choice or the text after its prompt,
      divided by its bytes, both summed over the set. Infinite if one of them has no probability; the table says how
      many.

    Methods that choose among whole answers are measured by what they write; only `RerankConfig` by likelihood also has
    likelihoods. If they sample, an example's samples are the same in every run.

    Intervals are 95 % intervals: Wilson's for shares, normal ones for F1 and for the ratio of bits to bytes, and
    bootstrap intervals over examples for chrF and BLEU. Every system is compared with the member that is best at the
    measure on the same examples, by paired differences. That member is chosen on these very examples, which favours it
    a little.

    Args:
        ensemble: The ensemble; not changed.
        sets: One or more sets with different names (`read_set`).
        configurations: Methods and weights to evaluate, by the names that the table shows. Default: the ensemble's
            own, named after its method.
        members: Whether to run the members alone too. Each runs by itself, with its own generation config.
        measures: The measures; work that none of them needs does not run. Default: all except chrF and BLEU.
        max_new_tokens: Largest number of ids of a written answer.
        batch_size: Number of texts that run together.
        state_file: File for the outcomes of every batch, so that stopped work can continue. Configurations, sets,
            examples and measures may change between runs; other members or generation configs are refused.
        time_limit: Time limit in seconds: no batch starts that would probably not finish in time. The result then
            covers what has run, and `is_complete` is false. To represent the whole sets, examples run in a random
            order that is the same for all systems and runs, time is shared evenly between sets, and the systems take
            turns. Without a limit, the longest examples run first, one system after the other.

    Returns:
        The table, with intervals and comparisons, and all responses.

    Raises:
        ConfigurationError: Before anything runs, if an argument is invalid, a measure needs a package that is not
            installed, or the state file belongs to something else.
        MemberError: If a member fails.
    """
    sets = [sets] if isinstance(sets, EvaluationSet) else list(sets)
    names = [evaluation_set.name for evaluation_set in sets]
    if not sets or len(set(names)) < len(names):
        raise ConfigurationError(f"`sets` have to be at least one, with different names, but are {names}.")
    wanted = read_measures(measures)
    if time_limit is not None and not (is_number(time_limit) and time_limit > 0):
        raise ConfigurationError(f"`time_limit` has to be a positive number of seconds, but is {time_limit!r}.")
    check_positive_integer("max_new_tokens", max_new_tokens)
    check_positive_integer("batch_size", batch_size)
    runners = _runners(ensemble, configurations, members)
    if state_file is not None:
        for runner in runners:
            # Otherwise, the outcomes of one function would be taken for another's.
            runner.method.check_saveable(is_for_hub=False)
    kept = _Kept(ensemble, state_file)
    shared = [Examples(evaluation_set, work) for evaluation_set in sets for work in works_for(evaluation_set, wanted)]
    jobs = [
        _Job(runner, examples, max_new_tokens, kept)
        for examples in shared
        for runner in runners
        if examples.work == "write" or runner.method.gives_likelihoods
    ]
    idle = [runner.name for runner in runners if all(job.runner is not runner for job in jobs)]
    if idle and shared:
        raise ConfigurationError(
            f"{idle[0]!r} chooses among whole answers and has no likelihoods, but only likelihoods are measured here: "
            "ask for a measure of written text, on a set of questions."
        )
    for job in jobs:
        job.check()
        job.prepare(batch_size, is_drawn=time_limit is not None)
    num_left = total = sum(len(job.examples.items) for job in jobs)
    with logging.tqdm(total=total, desc="evaluating", unit="example") as bar:
        for job in one_by_one(jobs) if time_limit is None else in_turns(jobs, time_limit):
            bar.set_postfix_str(f"{job.examples.evaluation_set.name}, {job.runner.name}")
            job.run()
            before, num_left = num_left, sum(own.num_left for own in jobs)
            bar.update(before - num_left)
    unmeasured = [s.name for s in sets if not works_for(s, wanted)]
    return Evaluation.from_outcomes([job.result() for job in jobs], measures, unmeasured)


class _Kept:
    """What examples came to, each with its share of the seconds; in a state file too if there is one."""

    def __init__(self, ensemble: EnsembleForCausalLM, path: str | PathLike[str] | None):
        self._state = None
        # By label, what is there of the examples by their keys.
        self.known: dict[str, dict[str, tuple[Any, float]]] = defaultdict(dict)
        if path is not None:
            settings = {
                # Raised when what is kept of an example can change.
                "format": 1,
                "members": [member.description() for member in ensemble.member_views],
                "generation config": [
                    describe_generation_config(model) for model in (ensemble, *ensemble.member_views)
                ],
            }
            self._state = StateFile(path, settings, work="evaluation")
            self._state.read(self._remember)

    def add(self, label: dict[str, Any], outcomes: dict[str, Any], seconds: float) -> None:
        """Keep the outcomes of a batch."""
        part = {"label": label, "outcomes": outcomes, "seconds": seconds}
        if self._state is not None:
            self._state.add({**part, "seconds": round(seconds, 4)})
        self._remember(part)

    def _remember(self, part: dict[str, Any]) -> None:
        outcomes = dict(part["outcomes"])
        wanted = str if part["label"]["work"] == "write" else list
        if not all(isinstance(outcome, wanted) for outcome in outcomes.values()):
            raise ValueError(f"an outcome is not a {wanted.__name__}")
        each = float(part["seconds"]) / max(1, len(outcomes))
        self.known[hash_of(part["label"])].update((key, (outcome, each)) for key, outcome in outcomes.items())


def _runners(
    ensemble: EnsembleForCausalLM, configurations: Mapping[str, Configuration] | None, members: bool
) -> list[_Runner]:
    """The single members, if requested, and the configurations."""
    views = ensemble.member_views
    runners = [
        _Runner(view.name, index, ensemble.alone(index), method_config("gac"), [1.0])
        for index, view in enumerate(views if members else ())
    ]
    if configurations is None:
        configurations = {ensemble.config.method.name: Configuration()}
    if not isinstance(configurations, Mapping) or not all(
        isinstance(c, Configuration) for c in configurations.values()
    ):
        raise ConfigurationError(
            f"`configurations` has to be a dictionary of `Configuration`s by name, but is {configurations!r:.200}."
        )
    for name, (method, weights) in configurations.items():
        own = ensemble.config.method if method is None else method_config(method)
        own.check_members(len(views))
        given = ensemble.config.weights if weights is None else weights
        own_weights = normalize_weights(given, len(views), own.takes_weights_as_given)
        runners.append(_Runner(name, None, ensemble, own, own_weights))
    taken = [runner.name for runner in runners]
    if len(set(taken)) < len(taken):
        raise ConfigurationError(f"members and configurations must have different names, but are {taken}.")
    return runners
