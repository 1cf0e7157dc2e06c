"""What an evaluation found: intervals, comparisons with the best member, table and plot."""

import csv
import io
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from ..files import whole_file
from ..tables import aligned
from .intervals import Estimate, ratio, share
from .sets import EvaluationSet, Item

MEASURES = ("exact match", "accuracy", "normalized accuracy", "bits per byte")


class System(NamedTuple):
    """A row of the table."""

    name: str
    is_member: bool


class Outcomes(NamedTuple):
    """What a system wrote, or which log-probabilities it gave, on a set.

    Attributes:
        system: Whose they are.
        evaluation_set: The set.
        work: `"write"` or `"score"`.
        found: For each example a response, or the natural log-probability of each continuation, with the seconds it took;
            None where it did not run.
    """

    system: System
    evaluation_set: EvaluationSet
    work: str
    found: list[tuple[Any, float] | None]


@dataclass(frozen=True)
class Result:
    """One system at one measure on one set.

    Attributes:
        system: Name of the member or configuration.
        is_member: Whether it is a member alone.
        set_name: Name of the set.
        measure: `"exact match"`, `"accuracy"`, `"normalized accuracy"` (shares) or `"bits per byte"`.
        count: Number of examples that ran.
        num_examples: Number of examples in the set.
        estimate: The value with its interval.
        difference: The value less the best member's over the examples that both have, with its interval; None for that
            member itself, and where no member ran.
        num_without: Examples that the system gives no probability at all: choices of which none has any, right answers or
            texts that have none.
        seconds: How long the examples took; measures of one set that come from one run share them.
    """

    system: str
    is_member: bool
    set_name: str
    measure: str
    count: int
    num_examples: int
    estimate: Estimate
    difference: Estimate | None
    num_without: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """All results; `str()` gives the whole table, `to_markdown()` one with a row for each system.

    Attributes:
        results: By set, measure and system.
        is_complete: Whether everything ran.
        seconds: Seconds of each system over everything.
    """

    results: tuple[Result, ...]
    is_complete: bool
    seconds: dict[str, float]

    @classmethod
    def from_outcomes(cls, outcomes: Sequence[Outcomes], measures: Collection[str]) -> "Evaluation":
        """Mark what was written and scored."""
        results: list[Result] = []
        seconds: dict[str, float] = {}
        groups: dict[tuple[str, str], list[tuple[Outcomes, list[float | None]]]] = {}
        for own in outcomes:
            seconds[own.system.name] = seconds.get(own.system.name, 0.0) + math.fsum(f[1] for f in own.found if f)
            for measure in _measures_of(own, measures):
                values = [
                    None if found is None else _value(measure, own.evaluation_set, item, found[0])
                    for item, found in zip(own.evaluation_set.items, own.found, strict=True)
                ]
                groups.setdefault((own.evaluation_set.name, measure), []).append((own, values))
        for (set_name, measure), group in groups.items():
            sizes = _sizes(measure, group[0][0].evaluation_set)
            estimates = [_estimate(measure, values, sizes) for _, values in group]
            best = _best_member(measure, group, estimates)
            for n, (own, values) in enumerate(group):
                difference = None
                if best is not None and n != best:
                    difference = _difference(values, group[best][1], sizes)
                ran = [(item, f) for item, f in zip(own.evaluation_set.items, own.found, strict=True) if f is not None]
                results.append(
                    Result(
                        system=own.system.name,
                        is_member=own.system.is_member,
                        set_name=set_name,
                        measure=measure,
                        count=len(ran),
                        num_examples=len(values),
                        estimate=estimates[n],
                        difference=difference,
                        num_without=sum(_has_none(measure, own, item, f[0]) for item, f in ran),
                        seconds=math.fsum(f[1] for _, f in ran),
                    )
                )
        return cls(tuple(results), all(f is not None for own in outcomes for f in own.found), seconds)

    def __getitem__(self, key: tuple[str, str, str]) -> Result:
        """The result of a set, a measure and a system."""
        for result in self.results:
            if (result.set_name, result.measure, result.system) == key:
                return result
        raise KeyError(key)

    def __str__(self) -> str:
        """One line a result."""
        rows = [["set", "measure", "", "value", "95 %", "to the best member", "95 %", "examples", "seconds"]]
        for result in self.results:
            value, interval = _written(result.measure, result.estimate)
            difference, of_difference = ("", "")
            if result.difference is not None:
                difference, of_difference = _written(result.measure, result.difference, signed=True)
            count = (
                str(result.count)
                if result.count == result.num_examples
                else f"{result.count} of {result.num_examples}"
            )
            if result.num_without:
                count += f", {result.num_without} without probability"
            head = [result.set_name, result.measure, result.system]
            rows.append([*head, value, interval, difference, of_difference, count, f"{result.seconds:.1f}"])
        return aligned(rows)

    def to_markdown(self) -> str:
        """A table with a row for each system and a column for each measure of each set.

        A star marks values whose difference to the best member has an interval without 0.
        """
        columns = list(dict.fromkeys((result.set_name, result.measure) for result in self.results))
        systems = list(dict.fromkeys(result.system for result in self.results))
        cells = {(result.set_name, result.measure, result.system): _cell(result) for result in self.results}
        titles = [f"{name}, {measure}{'' if measure == 'bits per byte' else ', %'}" for name, measure in columns]
        lines = [["", *titles, "seconds"], ["---"] * (len(columns) + 2)]
        for system in systems:
            own = [cells.get((*column, system), "") for column in columns]
            lines.append([system, *own, f"{self.seconds[system]:.0f}"])
        return (
            "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
        )

    def to_records(self) -> list[dict[str, Any]]:
        """The results as dictionaries of plain values, intervals as `low` and `high`."""
        records = []
        for result in self.results:
            difference = result.difference or Estimate(math.nan, math.nan, math.nan)
            record: dict[str, Any] = {
                "set": result.set_name,
                "measure": result.measure,
                "system": result.system,
                "is_member": result.is_member,
                **result.estimate._asdict(),
                **{f"difference_{name}": value for name, value in difference._asdict().items()},
                "count": result.count,
                "num_examples": result.num_examples,
                "num_without": result.num_without,
                "seconds": round(result.seconds, 3),
            }
            records.append(
                {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
                | ({"value": "inf"} if math.isinf(result.estimate.value) else {})
            )
        return records

    def write_table(self, path: str | PathLike[str]) -> None:
        """Write the table: `.md` as `to_markdown`, `.txt` as `str`, `.csv` and `.json` all records.

        Raises:
            ConfigurationError: If the file has another ending.
        """
        path = Path(path)
        ending = check_ending(path, TABLE_ENDINGS)
        if ending == ".csv":
            buffer = io.StringIO()
            records = self.to_records()
            writer = csv.DictWriter(buffer, fieldnames=records[0].keys())
            writer.writeheader()
            writer.writerows(records)
            text = buffer.getvalue()
        elif ending == ".json":
            text = json.dumps(self.to_records(), indent=1) + "\n"
        else:
            text = self.to_markdown() if ending == ".md" else f"{self}\n"
        with whole_file(path) as unfinished:
            unfinished.write_bytes(text.encode())

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw a panel for each measure of each set, with a line and an interval for each system.

        Args:
            path: File to write; the ending (`.svg`, `.png`, `.pdf`) says what kind.

        Raises:
            ConfigurationError: If `matplotlib` is not installed, or the file has another ending.
        """
        path = Path(path)
        check_plot(path)
        import matplotlib
        from matplotlib.figure import Figure

        columns = list(dict.fromkeys((result.set_name, result.measure) for result in self.results))
        systems = list(dict.fromkeys(result.system for result in self.results))
        width = min(3, len(columns))
        height = -(-len(columns) // width)
        with matplotlib.rc_context({"svg.hashsalt": "hf_ensemble", "svg.fonttype": "none", "font.size": 9}):
            figure = Figure(figsize=(1.5 + 2.6 * width, height * (0.9 + 0.25 * len(systems))), layout="constrained")
            panels = figure.subplots(height, width, sharey=True, squeeze=False).flat
            for axes, (set_name, measure) in zip(panels, columns, strict=False):
                own = [r for r in self.results if (r.set_name, r.measure) == (set_name, measure)]
                factor = 1 if measure == "bits per byte" else 100
                for result in own:
                    value, low, high = (factor * number for number in result.estimate)
                    if math.isfinite(value):
                        errors = [[value - low], [high - value]] if math.isfinite(low) else None
                        color = "tab:gray" if result.is_member else "tab:blue"
                        at = systems.index(result.system)
                        axes.errorbar(value, at, xerr=errors, fmt="o", color=color, capsize=3)
                members = [r.estimate.value for r in own if r.is_member and math.isfinite(r.estimate.value)]
                if members:
                    best = min(members) if measure == "bits per byte" else max(members)
                    axes.axvline(factor * best, color="tab:gray", linestyle=":", linewidth=1)
                axes.set_title(f"{set_name} ({own[0].num_examples})")
                axes.set_xlabel(measure if factor == 1 else f"{measure}, %")
                axes.set_yticks(range(len(systems)), systems)
                axes.set_ylim(len(systems) - 0.5, -0.5)
                axes.grid(axis="x", alpha=0.3)
            for axes in list(figure.axes)[len(columns) :]:
                axes.set_visible(False)
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
            with whole_file(path) as unfinished:
                figure.savefig(unfinished, format=path.suffix[1:], metadata=metadata)


TABLE_ENDINGS = (".md", ".txt", ".csv", ".json")
PLOT_ENDINGS = (".svg", ".png", ".pdf")


def check_ending(path: Path, endings: Sequence[str]) -> str:
    """Return the ending of a file to be written.

    Raises:
        ConfigurationError: If it is none of these, or the folder does not exist.
    """
    if path.suffix not in endings:
        raise ConfigurationError(f"the file has to end in {', '.join(endings)}, but is {path.name!r}.")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: the folder does not exist.")
    return path.suffix


def check_plot(path: Path) -> None:
    """Check that a plot can be written.

    Raises:
        ConfigurationError: If it cannot.
    """
    check_ending(path, PLOT_ENDINGS)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            'a plot needs `matplotlib`, which is not installed: `pip install "hf_ensemble[plot]"`.'
        ) from error


def _measures_of(outcomes: Outcomes, measures: Collection[str]) -> list[str]:
    if outcomes.work == "write":
        return ["exact match"]
    own = MEASURES[1:] if outcomes.evaluation_set.kind == "choices" else MEASURES[3:]
    return [measure for measure in own if measure in measures]


def _value(measure: str, evaluation_set: EvaluationSet, item: Item, found: Any) -> float:
    """1 or 0 for shares, else bits."""
    if measure == "exact match":
        return float(evaluation_set.is_right(found, item))
    if measure == "bits per byte":
        return float(-found[item.right] / math.log(2))
    if max(found) == -math.inf:
        return 0.0
    scores = found if measure == "accuracy" else [x / n for x, n in zip(found, item.lengths, strict=True)]
    return float(scores.index(max(scores)) == item.right)


def _sizes(measure: str, evaluation_set: EvaluationSet) -> list[float]:
    if measure != "bits per byte":
        return [1.0] * len(evaluation_set.items)
    return [float(len(item.continuations[item.right].encode())) for item in evaluation_set.items]


def _has_none(measure: str, outcomes: Outcomes, item: Item, found: Any) -> bool:
    if outcomes.work == "write":
        return False
    return bool((found[item.right] if measure == "bits per byte" else max(found)) == -math.inf)


def _estimate(measure: str, values: Sequence[float | None], sizes: Sequence[float]) -> Estimate:
    pairs = [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]
    if not pairs:
        return Estimate(math.nan, math.nan, math.nan)
    if measure == "bits per byte":
        return ratio(*zip(*pairs, strict=True))
    return share(int(sum(value for value, _ in pairs)), len(pairs))


def _difference(
    values: Sequence[float | None], others: Sequence[float | None], sizes: Sequence[float]
) -> Estimate | None:
    pairs = [
        (value - other, size)
        for value, other, size in zip(values, others, sizes, strict=True)
        if value is not None and other is not None
    ]
    return ratio(*zip(*pairs, strict=True)) if pairs else None


def _best_member(
    measure: str, group: Sequence[tuple[Outcomes, list[float | None]]], estimates: Sequence[Estimate]
) -> int | None:
    """Place of the best member among those that ran on the most examples."""
    counts = [sum(value is not None for value in values) for _, values in group]
    members = [n for n, (own, _) in enumerate(group) if own.system.is_member and counts[n]]
    most = max((counts[n] for n in members), default=0)
    sign = -1 if measure == "bits per byte" else 1
    return max((n for n in members if counts[n] == most), key=lambda n: sign * estimates[n].value, default=None)


def _written(measure: str, estimate: Estimate, signed: bool = False) -> tuple[str, str]:
    """The value and its interval, shares in percent."""
    factor, digits = (1, 3) if measure == "bits per byte" else (100, 1)
    if math.isnan(estimate.value):
        return "-", ""
    if math.isinf(estimate.value):
        return "infinite", ""
    form = f"{'+' if signed else ''}.{digits}f"
    value, low, high = (f"{factor * number:{form}}" for number in estimate)
    return value, "" if math.isnan(estimate.low) else f"{low} to {high}"


def _cell(result: Result) -> str:
    value, interval = _written(result.measure, result.estimate)
    text = f"{value} ({interval})" if interval else value
    difference = result.difference
    if difference is not None and (difference.low > 0 or difference.high < 0):
        text += " *"
    notes = []
    if result.count < result.num_examples:
        notes.append(f"{result.count} of {result.num_examples} run")
    if result.num_without:
        notes.append(f"{result.num_without} without probability")
    return text + (f" [{', '.join(notes)}]" if notes else "")
