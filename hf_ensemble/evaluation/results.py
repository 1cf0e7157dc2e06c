"""The results of an evaluation, as a table, records or a plot."""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import check_ending, whole_file
from ..optional_packages import not_installed
from ..pages import tables_in_notebook
from ..tables import aligned
from .estimates import NO_ESTIMATE, Estimate
from .marking import Marks, Outcomes, Result, mark
from .measures import measure_of, read_measures

TABLE_ENDINGS = (".md", ".txt", ".csv", ".json")
RESPONSES_ENDINGS = (".jsonl",)
PLOT_ENDINGS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Check that a plot can be written.

    Raises:
        ConfigurationError: If it cannot.
    """
    check_ending(path, PLOT_ENDINGS)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise not_installed("this run draws a plot", "matplotlib") from error


@dataclass(frozen=True)
class Evaluation:
    """All results. `str()` returns the whole table, `to_markdown()` one with a row per system.

    Attributes:
        results: By set, measure and system.
        is_complete: Whether everything ran.
        seconds: Seconds of each system over everything.
        unmeasured: Names of the sets to which none of the measures applies.
    """

    results: tuple[Result, ...]
    is_complete: bool
    seconds: dict[str, float]
    unmeasured: tuple[str, ...] = ()
    _outcomes: tuple[Outcomes, ...] = field(default=(), repr=False, compare=False)
    _marks: dict[tuple[str, str], Marks] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_outcomes(
        cls, outcomes: Sequence[Outcomes], measures: Collection[str], unmeasured: Sequence[str] = ()
    ) -> "Evaluation":
        """Mark responses and scores.

        Args:
            outcomes: Outcomes of several systems on several sets.
            measures: The measures to compute.
            unmeasured: Names of sets to which none of them applies.

        Raises:
            ConfigurationError: If there is no measure, one is unknown, or one needs a package that is not installed.
        """
        seconds: dict[str, float] = {}
        for own in outcomes:
            seconds[own.system] = seconds.get(own.system, 0.0) + math.fsum(spent for _, spent in own.ran.values())
        is_complete = all(len(own.ran) == len(own.evaluation_set.items) for own in outcomes)
        marks = mark(outcomes, read_measures(measures))
        results = tuple(result for own in marks.values() for result in own.results())
        return cls(results, is_complete, seconds, tuple(unmeasured), tuple(outcomes), marks)

    def __getitem__(self, key: tuple[str, str, str]) -> Result:
        """Return the result for a set, a measure and a system."""
        return {(result.set_name, result.measure, result.system): result for result in self.results}[key]

    # Examples

    def values(self, set_name: str, measure: str, system: str) -> dict[int, float]:
        """Return the value of each example that ran, by its index in the set, from 0.

        Exact match and the accuracies are 0 or 1; F1 is between. Bits per byte, chrF and BLEU are those of the single
        example; for a set, they are computed from sums over its examples, not as a mean. The BLEU of an example uses
        only the lengths of word sequences that it has (`effective_order`).

        Args:
            set_name: Name of the set.
            measure: Name of the measure.
            system: Name of the member or configuration.

        Raises:
            ConfigurationError: If there is no such set, measure or system.
        """
        return self._marks_of(set_name, measure).values(system)

    def compare(self, set_name: str, measure: str, system: str, other: str) -> Estimate:
        """Return a system's value minus another's, over the examples that both ran, with a paired interval.

        Args:
            set_name: Name of the set.
            measure: Name of the measure.
            system: Name of a member or configuration.
            other: Name of the one whose value is subtracted.

        Returns:
            The difference; NaN if no example ran on both.

        Raises:
            ConfigurationError: If there is no such set, measure or system.
        """
        return self._marks_of(set_name, measure).compare(system, other)

    def _marks_of(self, set_name: str, measure: str) -> Marks:
        if (set_name, measure) not in self._marks:
            known = "; ".join(f"{name}, {own}" for name, own in self._marks)
            raise ConfigurationError(f"{set_name!r} was not measured by {measure!r}. Measured: {known or 'nothing'}.")
        return self._marks[set_name, measure]

    @property
    def responses(self) -> dict[tuple[str, str], list[str | None]]:
        """The responses, by the names of set and system: a text per example, or None if it did not run."""
        return {
            (own.evaluation_set.name, own.system): _by_place(own, lambda response: response)
            for own in self._outcomes
            if own.work == "write"
        }

    @property
    def choices(self) -> dict[tuple[str, str], list[int | None]]:
        """The choices, by the names of set and system: for each example, the index of the likeliest choice."""
        return {
            (own.evaluation_set.name, own.system): _by_place(own, lambda log_probs: log_probs.index(max(log_probs)))
            for own in self._outcomes
            if own.evaluation_set.kind == "choices"
        }

    def write_responses(self, path: str | PathLike[str]) -> None:
        """Write the responses as JSON lines, one per example and system.

        A line has `set`, `place` (from 0), `prompt`, `accepted`, `system`, `response`, and in `values` the example's
        value for each measure of responses.

        Args:
            path: File to write, ending in `.jsonl`.

        Raises:
            ConfigurationError: If no measure takes responses, or the file has another ending.
        """
        path = Path(path)
        check_ending(path, RESPONSES_ENDINGS)
        written = [own for own in self._outcomes if own.work == "write"]
        if not written:
            raise ConfigurationError(
                "there are no responses, because none was needed: ask for exact match, F1, chrF or BLEU of a set of "
                "questions."
            )
        with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for own in written:
                for record in self._records_of(own):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _records_of(self, own: Outcomes) -> Iterator[dict[str, Any]]:
        """A system's responses on a set, as records for a file."""
        name = own.evaluation_set.name
        marks = [one for (set_name, _), one in self._marks.items() if set_name == name]
        values = {one.measure.name: one.values(own.system) for one in marks if one.measure.work == "write"}
        for place, (response, _) in sorted(own.ran.items()):
            item = own.evaluation_set.items[place]
            yield {
                "set": name,
                "place": place,
                "prompt": item.prompt,
                "accepted": list(item.accepted),
                "system": own.system,
                "response": response,
                "values": {measure: found[place] for measure, found in values.items()},
            }

    # Tables and plots

    def __str__(self) -> str:
        """One line per result."""
        return "\n".join([aligned(self._rows()), *self._remarks()])

    def _repr_html_(self) -> str:
        """A table for each measure of each set, for notebooks."""
        titles, *lines = self._rows()
        tables: dict[tuple[str, str], list[list[str]]] = {}
        for set_name, measure, *line in lines:
            tables.setdefault((set_name, measure), [[f"{set_name}, {measure}", *titles[3:]]]).append(line)
        return tables_in_notebook("Evaluation", list(tables.values()), self._remarks())

    def _rows(self) -> list[list[str]]:
        """The header and a line of cells for each result."""
        rows = [["set", "measure", "", "value", "95 %", "to the best member", "95 %", "examples", "seconds"]]
        for result in self.results:
            value, interval = written(result.measure, result.estimate)
            difference, of_difference = written(result.measure, result.difference, signed=True)
            of_all = "" if result.count == result.num_examples else f" of {result.num_examples}"
            count = ", ".join([f"{result.count}{of_all}", *_without(result)])
            head = [result.set_name, result.measure, result.system]
            rows.append([*head, value, interval, difference, of_difference, count, f"{result.seconds:.1f}"])
        return rows

    def to_markdown(self) -> str:
        """Return a table with a row per system and a column per measure of each set.

        A star marks values whose difference to the best member has an interval that excludes 0.
        """
        columns, systems = self._columns_and_systems()
        cells = {(result.set_name, result.measure, result.system): _cell(result) for result in self.results}
        titles = [f"{name}, {measure}{measure_of(measure).unit}" for name, measure in columns]
        lines = [["", *titles, "seconds"], ["---"] * (len(columns) + 2)]
        for system in systems:
            own = [cells.get((*column, system), "") for column in columns]
            lines.append([system, *own, f"{self.seconds[system]:.0f}"])
        table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
        return "".join(f"{line}\n" for line in [*table, *(part for text in self._remarks() for part in ("", text))])

    def _columns_and_systems(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Sets with their measures, and systems, each once."""
        columns = dict.fromkeys((result.set_name, result.measure) for result in self.results)
        return list(columns), list(dict.fromkeys(result.system for result in self.results))

    def _remarks(self) -> list[str]:
        return [
            f"nothing to measure in {name}: none of these measures applies to such a set" for name in self.unmeasured
        ]

    def to_records(self) -> list[dict[str, Any]]:
        """Return the results as dictionaries of plain values, with intervals as `low` and `high`."""
        return [_record(result) for result in self.results]

    def write_table(self, path: str | PathLike[str]) -> None:
        """Write the table: `.md` as `to_markdown`, `.txt` as `str`, `.csv` and `.json` all records.

        Raises:
            ConfigurationError: If the file has another ending.
        """
        path = Path(path)
        ending = check_ending(path, TABLE_ENDINGS)
        if ending == ".csv":
            buffer = io.StringIO()
            writer = csv.DictWriter(buffer, _record(Result("", False, "", "", 0, 0, NO_ESTIMATE, None, 0, 0.0)))
            writer.writeheader()
            writer.writerows(self.to_records())
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
            path: File to write, ending in `.svg`, `.png` or `.pdf`.

        Raises:
            ConfigurationError: If `matplotlib` is not installed, or the file has another ending.
        """
        path = Path(path)
        check_plot(path)
        import matplotlib
        from matplotlib.figure import Figure

        columns, systems = self._columns_and_systems()
        width = min(3, len(columns)) or 1
        height = -(-len(columns) // width) or 1
        with matplotlib.rc_context({"svg.hashsalt": "hf_ensemble", "svg.fonttype": "none", "font.size": 9}):
            figure = Figure((1.5 + 2.6 * width, height * (0.9 + 0.25 * len(systems))), layout="constrained")
            panels = figure.subplots(height, width, sharey=True, squeeze=False).flat
            if not columns:
                figure.suptitle("nothing to measure")
            for axes, column in zip(panels, columns, strict=False):
                _draw_panel(axes, [r for r in self.results if (r.set_name, r.measure) == column], systems)
            for axes in list(figure.axes)[len(columns) :]:
                axes.set_visible(False)
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
            with whole_file(path) as unfinished:
                figure.savefig(unfinished, format=path.suffix[1:], metadata=metadata)


def _by_place(own: Outcomes, read: Callable[[Any], Any]) -> list[Any]:
    """A value from each example's outcome, in the order of the set; None if it did not run."""
    return [read(own.ran[n][0]) if n in own.ran else None for n in range(len(own.evaluation_set.items))]


def _record(result: Result) -> dict[str, Any]:
    difference = result.difference or NO_ESTIMATE
    numbers = {**result.estimate._asdict(), **{f"difference_{k}": v for k, v in difference._asdict().items()}}
    finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
    return {
        "set": result.set_name,
        "measure": result.measure,
        "system": result.system,
        "is_member": result.is_member,
        **(finite | {"value": "inf"} if math.isinf(result.estimate.value) else finite),
        "count": result.count,
        "num_examples": result.num_examples,
        "num_without": result.num_without,
        "seconds": round(result.seconds, 3),
    }


def written(measure: str, estimate: Estimate | None, signed: bool = False) -> tuple[str, str]:
    """Format a value and its interval as in tables.

    Args:
        measure: Name of the measure.
        estimate: The estimate; None gives an empty text.
        signed: Whether it is a difference, with a sign.
    """
    if estimate is None:
        return "", ""
    factor, digits = measure_of(measure).factor, measure_of(measure).digits
    if not math.isfinite(estimate.value):
        return "-" if math.isnan(estimate.value) else "infinite", ""
    form = f"{'+' if signed else ''}.{digits}f"
    value, low, high = (f"{factor * number:{form}}" for number in estimate)
    return value, "no interval" if math.isnan(estimate.low) else f"{low} to {high}"


def _cell(result: Result) -> str:
    value, interval = written(result.measure, result.estimate)
    text = f"{value} ({interval})" if interval else value
    difference = result.difference
    if difference is not None and (difference.low > 0 or difference.high < 0):
        text += " *"
    partly = [f"{result.count} of {result.num_examples} run"] if result.count < result.num_examples else []
    notes = ", ".join([*partly, *_without(result)])
    return f"{text} [{notes}]" if notes else text


def _without(result: Result) -> list[str]:
    return [f"{result.num_without} without probability"] if result.num_without else []


def _draw_panel(axes: Any, results: Sequence[Result], systems: Sequence[str]) -> None:
    measure = measure_of(results[0].measure)
    factor = measure.factor
    for result in results:
        value, low, high = (factor * number for number in result.estimate)
        if math.isfinite(value):
            errors = [[value - low], [high - value]] if math.isfinite(low) else None
            color = "tab:gray" if result.is_member else "tab:blue"
            axes.errorbar(value, systems.index(result.system), xerr=errors, fmt="o", color=color, capsize=3)
    members = [r.estimate.value for r in results if r.is_member and math.isfinite(r.estimate.value)]
    if members:
        best = max(members, key=lambda value: measure.sign * value)
        axes.axvline(factor * best, color="tab:gray", linestyle=":", linewidth=1)
    axes.set_title(f"{results[0].set_name} ({results[0].num_examples})")
    axes.set_xlabel(f"{measure.name}{measure.unit}")
    axes.set_yticks(range(len(systems)), systems)
    axes.set_ylim(len(systems) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
