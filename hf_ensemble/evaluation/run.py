"""Running an ensemble and its members over evaluation sets, so that the work can be stopped and go on."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from transformers.utils import logging

from ..config import MethodConfig, check_positive_integer, method_config, normalize_weights
from ..dev_set import run_batches
from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM
from ..state_file import StateFile, describe_generation_config, describe_member, hash_of
from .marking import Outcomes
from .measures import DEFAULT_MEASURES, Work, read_measures, works_for
from .results import Evaluation
from .sets import EvaluationSet, Item


class Configuration(NamedTuple):
    """How an ensemble decodes in one row of the table; None: as the ensemble says."""

    method: str | MethodConfig | None = None
    weights: Sequence[float] | None = None


class _Job(NamedTuple):
    """One kind of work on one set, by a member or a configuration.

    Attributes:
        name: What the table calls who does it.
        member: Number of the member; None for a configuration.
        model: The ensemble, or the member as an ensemble of one.
        method: Its method.
        weights: Its mixing weights.
        evaluation_set: The set.
        work: The work.
        max_new_tokens: Most ids of an answer.
    """

    name: str
    member: int | None
    model: EnsembleForCausalLM
    method: MethodConfig
    weights: list[float]
    evaluation_set: EvaluationSet
    work: Work
    max_new_tokens: int

    def label(self) -> dict[str, Any]:
        """What the outcome of an example depends on, beside the example and the members."""
        method = self.method
        if self.work == "score" and method.likelihoods_ignore_options:
            method = type(method)()
        alone = self.member is not None
        who = {"member": self.member} if alone else {"method": method.to_dict(), "weights": self.weights}
        return {"work": self.work, **who, **self.limits}

    @property
    def limits(self) -> dict[str, Any]:
        """Where a text ends that is written."""
        if self.work == "score":
            return {}
        return {"max_new_tokens": self.max_new_tokens, "stop_strings": self.evaluation_set.stop_strings}

    def texts(self, item: Item) -> tuple[str, ...]:
        """What is read of an example: its prompt, and the continuations that are scored."""
        return (item.prompt, *(item.continuations if self.work == "score" else ()))

    def length(self, item: Item) -> int:
        """Number of characters that are read of an example."""
        prompt, *continuations = self.texts(item)
        return len(prompt) + max(map(len, continuations), default=0)

    def run(self, items: Sequence[Item], batch_size: int) -> Iterator[list[Any]]:
        """Yield the outcomes of batches of examples, in their order."""
        options = {"method": self.method, "weights": self.weights, "batch_size": batch_size, **self.limits}
        if self.work == "write":
            yield from run_batches(self.model, [item.prompt for item in items], **options)
            return
        per_batch = max(1, batch_size // len(items[0].continuations))
        for start in range(0, len(items), per_batch):
            batch = items[start : start + per_batch]
            prompts = [item.prompt for item in batch for _ in item.continuations]
            continuations = [text for item in batch for text in item.continuations]
            log_probs = iter(self.model.score(prompts, continuations, **options).log_probs.tolist())
            yield [[next(log_probs) for _ in item.continuations] for item in batch]


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

    - *Exact match* (questions): the share of questions whose answer, written greedily up to the end of its line, is an
      accepted one once both are normalised (`normalize_answer`).
    - *F1* (questions marked as texts): the mean of SQuAD's F1, over the words of that answer and of the nearest accepted
      one, normalised alike (`EvaluationSet.f1`).
    - *chrF* and *BLEU* (questions marked as texts; only if asked for): of the same answers as they are against all accepted
      ones, over the whole set, from 0 to 100, by `sacrebleu` with its defaults (extra `translation`).
    - *Accuracy* (choices): the share of questions whose likeliest choice is the right one, the text of every choice being
      scored after the question; *normalized accuracy*: with its log-probability over its bytes. They are what
      lm-evaluation-harness calls `acc` and `acc_norm` (which counts characters). Where no choice has any probability,
      which happens to methods that truncate, the question counts as not answered, and not right.
    - *Bits per byte* (all): bits of the first accepted answer, the right choice or the text after its prompt, over its
      bytes, both summed over the set. Infinite where one has no probability; the table says how many.

    Intervals are for 95 %: Wilson's for shares, the normal one for F1 and for the ratio of bits to bytes, and for chrF and
    BLEU that of a bootstrap over examples. Everybody is compared with the member that is best at the measure on the same
    examples, by the paired differences. That member is chosen on these very examples, which favours it a little.

    Args:
        ensemble: The ensemble; not changed.
        sets: One set or more, with different names (`read_set`).
        configurations: Methods and weights to evaluate, by the names that the table shows. Default: the ensemble as it
            is, named after its method.
        members: Whether to run the members alone too. A member is run by itself, with its own generation config.
        measures: Which measures; what is not needed for them does not run. Default: all but chrF and BLEU.
        max_new_tokens: Most ids of a written answer.
        batch_size: Number of texts that run together.
        state_file: Where outcomes are kept after every batch, so that work which was stopped goes on. Configurations, sets,
            examples and measures may change between runs; with other members or generation configs it is refused.
        time_limit: Seconds after which no batch is started that would probably not end in time. The result is then of
            what there is, and `is_complete` is false.

    Returns:
        The table, with intervals and comparisons, and all that was written.

    Raises:
        ConfigurationError: Before anything runs, if an argument is no good, a measure needs what is not installed, or the
            state file is of something else.
        MemberError: If a member fails.
    """
    sets = [sets] if isinstance(sets, EvaluationSet) else list(sets)
    names = [evaluation_set.name for evaluation_set in sets]
    if not sets or len(set(names)) < len(names):
        raise ConfigurationError(f"`sets` have to be at least one, with different names, but are {names}.")
    wanted = read_measures(measures)
    if time_limit is not None and not time_limit > 0:
        raise ConfigurationError(f"`time_limit` has to be a positive number of seconds, but is {time_limit!r}.")
    check_positive_integer("max_new_tokens", max_new_tokens)
    check_positive_integer("batch_size", batch_size)
    runners = _runners(ensemble, configurations, members)
    kept = _Kept(ensemble, state_file)
    jobs = [
        _Job(*runner, evaluation_set, work, max_new_tokens)
        for evaluation_set in sets
        for work in works_for(evaluation_set, wanted)
        for runner in runners
    ]
    outcomes: list[Outcomes] = []
    began, longest = time.perf_counter(), 0.0
    total = sum(len(job.evaluation_set.items) for job in jobs)
    with logging.tqdm(total=total, desc="evaluating", unit="example") as bar:
        for job in jobs:
            label, keys = job.label(), [hash_of(job.texts(item)) for item in job.evaluation_set.items]
            known = kept.known[hash_of(label)]
            missing = {key: item for key, item in zip(keys, job.evaluation_set.items, strict=True) if key not in known}
            bar.set_postfix_str(f"{job.evaluation_set.name}, {job.name}")
            bar.update(len(keys) - len(missing))
            # The longest first, so that batches are even, and memory that does not suffice is missed at once.
            waiting = sorted(missing, key=lambda key: -job.length(missing[key]))
            batches = job.run([missing[key] for key in waiting], batch_size)
            # A batch like the longest so far has to end in time.
            while waiting and (time_limit is None or time.perf_counter() - began + longest < time_limit):
                batch_began = time.perf_counter()
                batch = next(batches)
                seconds = time.perf_counter() - batch_began
                longest = max(longest, seconds)
                kept.add(label, dict(zip(waiting[: len(batch)], batch, strict=True)), seconds)
                del waiting[: len(batch)]
                bar.update(len(batch))
            ran = {n: known[key] for n, key in enumerate(keys) if key in known}
            outcomes.append(Outcomes(job.name, job.member is not None, job.evaluation_set, job.work, ran))
    return Evaluation.from_outcomes(outcomes, measures, [s.name for s in sets if not works_for(s, wanted)])


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
                "members": [describe_member(member) for member in ensemble.member_views],
                "generation config": [describe_generation_config(model) for model in (ensemble, *ensemble.members)],
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
        each = float(part["seconds"]) / max(1, len(outcomes))
        self.known[hash_of(part["label"])].update((key, (outcome, each)) for key, outcome in outcomes.items())


def _runners(
    ensemble: EnsembleForCausalLM, configurations: Mapping[str, Configuration] | None, members: bool
) -> list[tuple[str, int | None, EnsembleForCausalLM, MethodConfig, list[float]]]:
    """What jobs begin with: the members alone, if they are asked for, and the configurations."""
    views = ensemble.member_views
    runners: list[Any] = [
        (view.name, index, ensemble.alone(index), method_config("gac"), [1.0])
        for index, view in enumerate(views if members else ())
    ]
    if configurations is None:
        configurations = {ensemble.config.method.name: Configuration()}
    for name, (method, weights) in configurations.items():
        own = ensemble.config.method if method is None else method_config(method)
        own.check_members(len(views))
        given = ensemble.config.weights if weights is None else weights
        own_weights = normalize_weights(given, len(views), own.takes_weights_as_given)
        runners.append((name, None, ensemble, own, own_weights))
    taken = [runner[0] for runner in runners]
    if len(set(taken)) < len(taken):
        raise ConfigurationError(f"members and configurations must have different names, but are {taken}.")
    return runners
