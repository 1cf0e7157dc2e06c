"""Choosing members before building an ensemble: determine, then ensemble."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import MethodConfig, check_positive_integer, is_number
from ..dev_set import DevSet, Metric, mean_lengths_of, run_members
from ..errors import ConfigurationError
from ..messages import wrong_count
from ..model import EnsembleForCausalLM
from ..tables import aligned


@dataclass(frozen=True)
class CandidateReport:
    """Why one candidate was taken or left out.

    Attributes:
        index: Its position among the candidates in the order you gave.
        name: Its name.
        score: Its score, in points.
        gap: Points below the best score.
        mean_length: Mean number of characters of its responses; None if lengths were not given.
        length_ratio: Its mean length and the best candidate's, the longer over the shorter; None like `mean_length`.
        is_taken: Whether it is a member.
        reason: Why.
        responses: Its responses, if there are any.
    """

    index: int
    name: str
    score: float
    gap: float
    mean_length: float | None
    length_ratio: float | None
    is_taken: bool
    reason: str
    responses: tuple[str, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Selection:
    """The members chosen, and why; `str()` gives the table.

    Attributes:
        table: All candidates, the best score first.
    """

    table: tuple[CandidateReport, ...]

    @property
    def indices(self) -> list[int]:
        """Positions of the chosen members among the candidates, the primary first."""
        return [row.index for row in self.table if row.is_taken]

    @property
    def names(self) -> list[str]:
        """Names of the chosen members, the primary first."""
        return [row.name for row in self.table if row.is_taken]

    @property
    def scores(self) -> list[float]:
        """Scores of the chosen members, the primary first."""
        return [row.score for row in self.table if row.is_taken]

    def __str__(self) -> str:
        """The table, one line a candidate."""
        rows = [["", "candidate", "score", "length", "reason"]]
        for row in self.table:
            length = "-" if row.mean_length is None else f"{row.mean_length:.1f}"
            rows.append(["taken" if row.is_taken else "left", row.name, f"{row.score:.2f}", length, row.reason])
        return aligned(rows)


def select_members(
    candidates: EnsembleForCausalLM | Sequence[str],
    examples: Iterable[Any] | None = None,
    metric: str | Metric | None = None,
    *,
    scores: Sequence[float] | None = None,
    mean_lengths: Sequence[float] | None = None,
    responses: Sequence[Sequence[str]] | None = None,
    max_members: int | None = None,
    max_gap: float = 10.0,
    max_length_ratio: float = 2.0,
    max_new_tokens: int | None = None,
    batch_size: int = 8,
    **generate_options: Any,
) -> Selection:
    """Choose the members of an ensemble: the best one, and those that are nearly as good and answer at similar length.

    The best candidate comes first. The others follow in order of their scores, if their score is within `max_gap`
    points of the best and their mean response length within a factor `max_length_ratio` of its (both limits
    inclusive), up to `max_members`. Equal scores keep your order.

    Either pass scores, or let them be measured: then every member of an ensemble answers a small development set by
    itself, greedily unless `generate_options` say otherwise.

    Args:
        candidates: An ensemble of all candidates, or, with `scores`, their names.
        examples: A development set to run: dictionaries with `prompt` and `reference`, or pairs of them.
        metric: A function of a response and a reference that returns a number from 0 to 1, or `"exact_match"` or
            `"contains"` (the reference is then a text or a list of texts). A score is 100 times its mean.
        scores: One score per candidate, in points (percent).
        mean_lengths: One mean response length per candidate, in any unit.
        responses: For each candidate its responses, to compute mean lengths in characters. Without lengths or
            responses, lengths are not compared, and the reasons say so.
        max_members: Largest number of members. Default: no limit.
        max_gap: Largest number of points below the best.
        max_length_ratio: Largest ratio between the two mean lengths.
        max_new_tokens: Largest number of ids of a response, if members run.
        batch_size: Number of prompts that run together.
        **generate_options: Other options of the members' `generate`.

    Returns:
        The choice, and a table that says why each candidate was taken or left out.

    Raises:
        ConfigurationError: If the figures do not match, a limit is out of range, the development set is empty, or the
            metric returns anything but a number from 0 to 1.

    Reference:
        Yao et al., "Determine-Then-Ensemble: Necessity of Top-k Union for Large Language Model Ensembling"
        (https://arxiv.org/abs/2410.03777), section 4.1.
    """
    if max_members is not None:
        check_positive_integer("max_members", max_members)
    for name, value, least in (("max_gap", max_gap, 0), ("max_length_ratio", max_length_ratio, 1)):
        if not (is_number(value) and value >= least):
            raise ConfigurationError(f"`{name}` has to be a number of at least {least}, but is {value!r}.")
    names = _names_of(candidates)
    if (examples is None) == (scores is None):
        raise ConfigurationError("give either `scores`, or `examples` and a `metric` to measure them with.")
    options = {"max_new_tokens": max_new_tokens, **generate_options}
    if scores is None:
        if mean_lengths is not None or responses is not None:
            raise ConfigurationError(
                "`mean_lengths` and `responses` are measured when you give `examples`: leave them out."
            )
        figures, responses = _measure(candidates, examples, metric, {"batch_size": batch_size, **options})
    else:
        if given := [name for name, value in {"metric": metric, **options}.items() if value is not None]:
            raise ConfigurationError(f"`{given[0]}` has no effect if `scores` are given: leave it out.")
        figures = _figures("scores", scores, len(names))
        if 0 < max(figures) <= 1 < max_gap:
            raise ConfigurationError(
                f"`scores` are in points (percent), but the best is {max(figures):g}. Give percent, or a `max_gap` on "
                "the same scale."
            )
    lengths = _lengths(mean_lengths, responses, len(names))
    order = sorted(range(len(names)), key=lambda i: -figures[i])
    best = order[0]
    table: list[CandidateReport] = []
    for i in order:
        row = CandidateReport(
            index=i,
            name=names[i],
            score=figures[i],
            gap=figures[best] - figures[i],
            mean_length=lengths[i],
            length_ratio=_length_ratio(lengths[best], lengths[i]),
            is_taken=False,
            reason="",
            responses=None if responses is None else tuple(responses[i]),
        )
        taken = [other for other in table if other.is_taken]
        is_taken, reason = _judge(row, taken, max_members, max_gap, max_length_ratio)
        table.append(dataclasses.replace(row, is_taken=is_taken, reason=reason))
    return Selection(tuple(table))


def ensemble_of(
    candidates: EnsembleForCausalLM,
    indices: Sequence[int],
    method: str | MethodConfig = "unite",
    weights: Sequence[float] | None = None,
) -> EnsembleForCausalLM:
    """Build an ensemble of some members of another one, with which it shares their models and tokenizers.

    Args:
        candidates: The ensemble of all candidates; not changed.
        indices: Positions of the members in it, the primary first.
        method: The method.
        weights: Mixing weights, one per chosen member.
    """
    every: Any = (candidates.members, candidates.tokenizers, candidates.config.members)
    models, tokenizers, configs = ([values[i] for i in indices] for values in every)
    return EnsembleForCausalLM.from_members(models, tokenizers, method, weights, member_configs=configs)


def _judge(
    row: CandidateReport, taken: Sequence[CandidateReport], max_members: int | None, max_gap: float, max_ratio: float
) -> tuple[bool, str]:
    """Whether to take a candidate in addition to those already taken, and why."""
    if not taken:
        return True, "the best score"
    best, ratio = taken[0], row.length_ratio
    # Differences of decimal figures are not exact: 64.4 - 54.4 is above 10.
    if row.gap > max_gap + 1e-9:
        return False, f"{row.gap:.1f} points below {best.name}, more than {max_gap:g}"
    if ratio is not None and ratio > max_ratio + 1e-9:
        longer = "longer" if (row.mean_length or 0) > (best.mean_length or 0) else "shorter"
        return False, f"responses {ratio:.1f} times {longer} than those of {best.name}, more than {max_ratio:g}"
    if len(taken) == max_members:
        return False, f"there are {max_members} members already"
    alike = "lengths not compared" if ratio is None else f"lengths within a factor {ratio:.1f}"
    return True, f"{row.gap:.1f} points below {best.name}, {alike}"


def _names_of(candidates: Any) -> list[str]:
    if isinstance(candidates, EnsembleForCausalLM):
        return [member.name for member in candidates.member_views]
    names = [] if isinstance(candidates, str) else [str(name) for name in candidates]
    if not names:
        raise ConfigurationError(
            f"`candidates` has to be an ensemble or a list of at least one name, but is {candidates!r}."
        )
    return names


def _lengths(
    given: Sequence[float] | None, responses: Sequence[Sequence[str]] | None, count: int
) -> Sequence[float | None]:
    """The candidates' mean lengths, given or computed from their responses."""
    if given is None:
        return mean_lengths_of(responses, count, "candidate")
    if responses is not None:
        raise ConfigurationError("give `responses` or `mean_lengths`, not both.")
    lengths = _figures("mean_lengths", given, count)
    if min(lengths) < 0:
        raise ConfigurationError(f"`mean_lengths` must be at least 0, but are {list(given)}.")
    return lengths


def _measure(
    candidates: Any, examples: Any, metric: Any, options: dict[str, Any]
) -> tuple[list[float], list[list[str]]]:
    """Run every candidate on the development set: their scores in points, and their responses."""
    if not isinstance(candidates, EnsembleForCausalLM):
        raise ConfigurationError("`candidates` has to be an ensemble to run its members, not a list of names.")
    if metric is None:
        raise ConfigurationError("`metric` must be given with `examples`.")
    dev_set = DevSet(examples, metric)
    responses = run_members(candidates, dev_set.prompts, **options)
    values = [dev_set.score(texts) for texts in responses]
    for member, value in zip(candidates.member_views, values, strict=True):
        if not 0 <= value <= 1:
            raise ConfigurationError(
                f"the metric has to return numbers from 0 to 1, but its mean for {member.name!r} is {value:g}. Divide "
                "it by its greatest value."
            )
    return [100 * value for value in values], responses


def _figures(name: str, values: Sequence[float], count: int) -> list[float]:
    try:
        figures = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ConfigurationError(f"`{name}` must be numbers, one per candidate, but are {values!r:.200}.") from None
    if len(figures) != count:
        raise wrong_count(name, len(figures), count, "candidate")
    if not all(map(math.isfinite, figures)):
        raise ConfigurationError(f"`{name}` must be finite, but are {figures}.")
    return figures


def _length_ratio(a: float | None, b: float | None) -> float | None:
    """The longer length divided by the shorter."""
    if a is None or b is None:
        return None
    short, long = sorted((a, b))
    if short == long:
        return 1.0
    return long / short if short else math.inf
