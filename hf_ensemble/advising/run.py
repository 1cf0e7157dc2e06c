"""Whether an ensemble of given members pays: which ensembles are tried, and the verdict."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..answers import MbrConfig, RerankConfig, VoteConfig
from ..choosing.prompt_weights import weights_from_scores
from ..choosing.selection import select_members
from ..config import MethodConfig, is_number, method_config
from ..errors import ConfigurationError
from ..evaluation import EvaluationSet, read_set
from ..evaluation.estimates import Estimate
from ..evaluation.measures import DEFAULT_MEASURES, measure_of
from ..evaluation.results import written
from ..evaluation.sets import NUMBER
from ..methods import GacConfig, SweetSpanConfig, UniteConfig
from ..model import EnsembleForCausalLM
from ..tables import spelled
from .advice import Advice, TriedEnsemble, TriedMember
from .honest_gain import examples_to_decide
from .trial import Plan, Trial

_MEASURE_OF = {"questions": "exact match", "choices": "accuracy", "texts": "bits per byte"}

LEAST_EXAMPLES = 20

_LEAST_LEVEL = 0.1
"""Below this share of right answers, an ensemble is not what is missing."""

FIRST_METHODS = (
    *(GacConfig(), UniteConfig(), SweetSpanConfig(span_length=1), SweetSpanConfig()),
    *(VoteConfig(), MbrConfig(), RerankConfig()),
)

_MEMBERS_SHARE, _EQUAL_SHARE = 0.4, 0.65
"""Shares of the time that is left: for single members, then for equal weights. The rest is for other weights."""

_SHARES_OF_THE_BEST = (0.6, 0.4, 0.75)
"""Weights to try for the best member; the others share the rest."""


def advise(
    ensemble: EnsembleForCausalLM,
    data: EvaluationSet | str | PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    measure: str | None = None,
    methods: Sequence[str | MethodConfig] = FIRST_METHODS,
    least_gain: float = 0.01,
    minutes: float = 10.0,
    max_new_tokens: int = 32,
    batch_size: int = 8,
    state_folder: str | PathLike[str] | None = None,
) -> Advice:
    """Find out whether an ensemble of these members pays, by trying it on examples of your task.

    1. Every member runs alone (`evaluate`), which shows the best member, those close to it (`select_members`) and
       where they differ.
    2. The methods run with equal weights: on the best two members that differ, and on all members that come near, if
       there are more. A vote and minimum Bayes risk need three.
    3. Other weights run for the best method that has weights: by the members' values (`weights_from_scores`), and more
       or less for the best member.

    The choice is the first ensemble within a standard error of the best. It pays if the 95 % interval of its gain over
    the best member, on examples that had no part in the choice, is above 0. It does not pay if the interval is below
    `least_gain`, or if the best member answers less than a tenth correctly. Otherwise it is not decided. Intervals
    treat examples as independent of each other.

    Args:
        ensemble: An ensemble of all members. It is not changed.
        data: The development set, or anything that `read_set` reads: a few hundred examples, at least 20.
        measure: The measure that counts: `"exact match"` or `"F1"` of questions, `"accuracy"` or `"normalized
            accuracy"` of choices, or `"bits per byte"`. Default: exact match, accuracy, or bits per byte of texts.
        methods: The methods to try. The default leaves out DeePEn, which took the most time and gained nothing where
            it was measured.
        least_gain: The smallest gain that is worth the cost of an ensemble: 0.01 is one point, or 1 % of the best
            member's bits per byte.
        minutes: Approximate time limit, not counting loading. If time runs out, the rest runs on fewer examples, drawn
            at random.
        max_new_tokens: Most ids of a written answer.
        batch_size: Number of texts that run together.
        state_folder: Folder for finished work, so that the same call can continue; created if it does not exist.

    Raises:
        ConfigurationError: If an argument is invalid, before anything runs; if the time is too short, later.
        MemberError: If a member fails; finished work is kept.
    """
    if not (is_number(minutes) and 0 < minutes < 1e6):
        raise ConfigurationError(f"`minutes` has to be a positive number, but is {minutes!r}.")
    if not (is_number(least_gain) and 0 <= least_gain < 1):
        raise ConfigurationError(f"`least_gain` has to be a number from 0 to 1, but is {least_gain!r}.")
    stop_at = time.monotonic() + 60 * minutes
    questions = data if isinstance(data, EvaluationSet) else read_set(data)
    # Duplicates would land on both sides of a split.
    questions = dataclasses.replace(questions, items=tuple(dict.fromkeys(questions.items)))
    measure = _MEASURE_OF[questions.kind] if measure is None else measure
    if measure not in DEFAULT_MEASURES or not measure_of(measure).is_for(questions):
        fitting = [name for name in DEFAULT_MEASURES if measure_of(name).is_for(questions)]
        raise ConfigurationError(
            f"`measure` has to be one of {', '.join(fitting)} for {questions.name!r}, a set of {questions.kind}, but "
            f"is {measure!r}. A measure of the whole set, such as BLEU, cannot be compared example by example."
        )
    _check(ensemble, questions)
    configs = _read_methods(methods, len(ensemble.members), questions)
    if measure_of(measure).work == "score":
        # One is enough of methods that give texts the same likelihoods whatever their options.
        configs = [method for method in configs if method.decides != "answers"]
        configs = list({type(m) if m.likelihoods_ignore_options else spelled(m): m for m in configs}.values())
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    trial = Trial(ensemble, questions, measure, options, state_folder)
    trial.run_members(_MEMBERS_SHARE * (stop_at - time.monotonic()))
    if len(trial.places) < LEAST_EXAMPLES:
        raise ConfigurationError(
            f"in the members' share of {minutes:g} minutes, only {len(trial.places)} of {len(questions.items)} "
            f"examples ran on all of them, but {LEAST_EXAMPLES} are needed: give more minutes, or fewer members. If "
            "other programs use this CPU, set OMP_WAIT_POLICY=passive first."
        )
    nearness = _nearness(trial)
    groups = _groups(trial, nearness)
    plans = [
        Plan(group, own, (1 / len(group),) * len(group))
        for group in groups
        for method in configs
        if len(group) >= method.least_members and (own := _within(method, group))
    ]
    if groups and not plans:
        raise ConfigurationError(
            "none of `methods` works with the members that are tried: its gate is not among them, a vote needs more "
            "members, or it has no likelihoods to measure. Give other methods."
        )
    trial.run_ensembles(plans, _EQUAL_SHARE * (stop_at - time.monotonic()))
    trial.run_ensembles(_weighed(trial), stop_at - time.monotonic())
    return _conclude(trial, nearness, least_gain)


def _read_methods(
    methods: Sequence[str | MethodConfig], num_members: int, questions: EvaluationSet
) -> list[MethodConfig]:
    if isinstance(methods, str) or not methods:
        raise ConfigurationError(f"`methods` has to be a list of at least one method, but is {methods!r}.")
    configs = [_reading(method_config(method), questions) for method in methods]
    for own in configs:
        own.check_members(num_members)
        if own.draws_one:
            raise ConfigurationError(
                f"method {spelled(own)!r} samples tokens, but `advise` writes answers greedily. Leave it out of "
                "`methods`."
            )
    return configs


def _reading(method: MethodConfig, questions: EvaluationSet) -> MethodConfig:
    """The method, reading answers as the set does: if answers are numbers, the last number."""
    if isinstance(method, VoteConfig) and method.extract is None and questions.marking == "number":
        return dataclasses.replace(method, extract=NUMBER)
    return method


def _within(method: MethodConfig, group: Sequence[int]) -> MethodConfig | None:
    """A method for members in another order, or for some of them; None if its gate is not among them."""
    if method.gate_rule is None:
        return method
    gate = method.gate_rule[0]
    options: Any = {"gate": group.index(gate)} if gate in group else None
    return options and dataclasses.replace(method, **options)


def _check(ensemble: Any, questions: EvaluationSet) -> None:
    if not isinstance(ensemble, EnsembleForCausalLM):
        raise ConfigurationError(
            "`ensemble` has to be an ensemble of all members, as `EnsembleForCausalLM.from_pretrained` returns it, "
            f"but is {ensemble!r:.200}."
        )
    names = [view.name for view in ensemble.member_views]
    if len(set(names)) < max(2, len(names)):
        raise ConfigurationError(
            f"`advise` needs two or more members with different names, but got {', '.join(map(repr, names))}. Give "
            "other members, or other names with `MemberConfig(name=...)`."
        )
    if len(questions.items) < LEAST_EXAMPLES:
        raise ConfigurationError(
            f"{questions.name!r} has {len(questions.items)} examples, too few to compare anything: give at least "
            f"{LEAST_EXAMPLES}, better a few hundred."
        )


def _nearness(trial: Trial) -> dict[int, tuple[bool, str]]:
    """For each member, whether it comes near the best, and why."""
    values = [ran.estimate.value for ran in trial.members]
    best = trial.order[0]
    if trial.sign < 0 or values[best] <= 0.01:
        # Not points, or no two differ by more than one point.
        factor, unit = (1, "bits more") if trial.sign < 0 else (100, "points less")
        gaps = [factor * abs(value - values[best]) for value in values]
        said = [f"{gap:.3g} {unit} than {trial.names[best]}" if gap else "the best" for gap in gaps]
        return {m: (True, text) for m, text in enumerate(said)}
    table = select_members(trial.names, scores=[100 * v for v in values], responses=trial.responses).table
    return {row.index: (row.is_taken, row.reason) for row in table}


def _groups(trial: Trial, nearness: Mapping[int, tuple[bool, str]]) -> list[tuple[int, ...]]:
    """Which members to try together, the best first: the best two that differ, and all that come near."""
    best, *others = trial.order
    others = [member for member in others if trial.differing((best, member))]
    near = [member for member in others if nearness[member][0]]
    return list(dict.fromkeys(group for group in ((best, *others[:1]), (best, *near)) if len(group) > 1))


def _compared(trial: Trial) -> list[Plan]:
    """The ensembles that can be compared, in the order in which they were tried.

    They ran on enough examples, and give each a probability above 0, which truncating methods may not.
    """
    most = max((len(ran.values) for ran in trial.ensembles.values()), default=0)
    enough = {plan: ran for plan, ran in trial.ensembles.items() if 2 * len(ran.values) > most}
    return [plan for plan, ran in enough.items() if all(map(math.isfinite, ran.values.values()))]


def _weighed(trial: Trial) -> list[Plan]:
    """Weights to try, for the best ensemble whose method has weights."""
    plans = [plan for plan in _compared(trial) if plan.method.decides == "tokens"]
    if not plans:
        return []
    best = trial.choose(plans)
    count = len(best.indices)
    values = [trial.members[m].estimate.value for m in best.indices]
    weights = [] if trial.sign < 0 or not any(values) else [tuple(weights_from_scores(values))]
    weights += [(share, *[(1 - share) / (count - 1)] * (count - 1)) for share in _SHARES_OF_THE_BEST]
    return [Plan(best.indices, best.method, own) for own in weights]


def _conclude(trial: Trial, nearness: Mapping[int, tuple[bool, str]], least_gain: float) -> Advice:
    plans = _compared(trial)
    gain, chosen = None, None
    pays: bool | None = False
    reason = (
        f"No: {' and '.join(trial.names)} give the same answers to everything, so together they are no better than "
        "one of them."
    )
    if trial.ensembles:
        pays, reason = None, "Not decided: no ensemble gives every example a probability above 0."
    if plans:
        chosen = _tried(trial, trial.choose(plans))
        gain, count = trial.gain(plans)
        pays, reason = _verdict(trial, chosen, gain, count, least_gain)
    ensembles = [_tried(trial, plan) for plan, ran in trial.ensembles.items() if ran.values]
    ensembles.sort(key=lambda one: -trial.sign * one.difference.value)
    group = chosen.indices if chosen else trial.order[:2]
    members = [
        TriedMember(
            index=m,
            name=trial.names[m],
            estimate=trial.members[m].estimate,
            count=len(trial.members[m].values),
            seconds=trial.members[m].seconds,
            num_bytes=trial.num_bytes([m]),
            reason=nearness[m][1],
        )
        for m in trial.order
    ]
    return Advice(
        pays=pays,
        reason=reason,
        gain=gain,
        chosen=chosen,
        members=tuple(members),
        ensembles=tuple(ensembles),
        set_name=trial.questions.name,
        measure=trial.measure,
        num_examples=len(trial.questions.items),
        differing=trial.differing(group),
        either=trial.either(group),
        shared=trial.ensemble.compatibility().summary,
    )


def _tried(trial: Trial, plan: Plan) -> TriedEnsemble:
    ran = trial.ensembles[plan]
    return TriedEnsemble(
        indices=plan.indices,
        members=tuple(trial.names[m] for m in plan.indices),
        method=plan.method,
        weights=plan.weights,
        estimate=ran.estimate,
        difference=trial.difference(ran),
        count=len(ran.values),
        seconds=ran.seconds,
        num_bytes=trial.num_bytes(plan.indices),
    )


def _verdict(
    trial: Trial, chosen: TriedEnsemble, gain: Estimate, count: int, least_gain: float
) -> tuple[bool | None, str]:
    """Whether it pays, and the answer in words."""
    best = trial.names[trial.order[0]]
    value, interval = written(trial.measure, gain, signed=True)
    unit = "bits a byte" if trial.sign < 0 else "points"
    if count < LEAST_EXAMPLES:
        return (
            None,
            f"Not decided: there was time for only {count} {'example' if count == 1 else 'examples'}. Give more minutes, or a larger batch size.",
        )
    measured = f"{value} {unit} (95 %: {interval}) on {count} examples that had no part in the choice"
    least, most = sorted((trial.sign * gain.low, trial.sign * gain.high))
    if least > 0:
        return True, f"Yes: {chosen.title} against {best}, the best member: {measured}."
    level = trial.members[trial.order[0]].estimate
    if most < least_gain * (1 if trial.sign > 0 else level.value):
        return (
            False,
            f"No: nothing that was tried is worth its cost. {chosen.title} against {best}, the best member: "
            f"{measured}.",
        )
    if trial.responses is not None and level.value < _LEAST_LEVEL:
        right, _ = written(trial.measure, level)
        return False, (
            f"No: the members cannot do this task yet. {best}, the best member, reaches {right} %, and nothing is "
            f"clearly better; {chosen.title} against it: {measured}. Give prompts that show how to answer, or members "
            "that can do it."
        )
    text = f"Not decided: {chosen.title} against {best}, the best member: {measured}."
    if trial.sign * gain.value > 0:
        text += (
            f" About {examples_to_decide(gain, count):,} examples would probably settle it, if the gain is as large "
            "as it seems."
        )
    return None, text
