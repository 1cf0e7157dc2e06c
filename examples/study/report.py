"""The study's tables and plots, from its result files.

    python examples/study/report.py                  # tables.md and the plots, in the study's `report`
    python examples/study/report.py --no-plots       # without matplotlib

Seeds are pooled: the values of an example are averaged over them, and intervals (95 %) are of a bootstrap over documents of
paired differences to the better member: that with the higher exact match on these examples, on the average of the seeds. A
star marks intervals without 0.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cells, Key, read_cells, read_examples
from marks import Estimate, answer_of, document_of, evaluation_set, exact_matches, f1_scores, ratio
from trained import without_seed

HEADS = ["", "exact match, %", "F1, %", "to the better member", "each seed"]
HEADS += ["bits per byte", "to the better member", "tokens", "seconds"]

System = str | int
"""An ensemble's system, or the number of a member that is alone."""
Points = dict[str, list[tuple[Any, Estimate]]]
"""Where, and what is gained there, by what the legend says."""


class Group:
    """One ensemble on one task, over all seeds."""

    def __init__(self, cells: Cells, folder: Path, ensembles: list[tuple[str, ...]], task: str):
        self.cells, self.ensembles, self.task = cells, ensembles, task
        self.names = tuple(map(without_seed, ensembles[0]))
        examples = read_examples(folder, task)
        self.questions = evaluation_set(task, examples)
        self.documents = [document_of(example["cluster"]) for example in examples]
        self.num_bytes = np.array([len(item.continuations[item.right].encode()) for item in self.questions.items])
        self.known: dict[int, np.ndarray] = {}
        found = [key.system for key in cells if key.members in ensembles and key.task == task]
        self.systems = [system for system in dict.fromkeys(found) if system != "alone"]

    def runs(self, system: System, work: str = "write") -> list[tuple[dict, dict]]:
        """For each seed that has both, the cells of a system and of the better member."""
        found = []
        for own in self.ensembles:
            asked = [
                (own, system) if isinstance(system, str) else ((own[system],), "alone"),
                ((own[self.better],), "alone"),
            ]
            keys = [Key(members, name, self.task, work) for members, name in asked]
            if all(key in self.cells for key in keys):
                found.append((self.cells[keys[0]], self.cells[keys[1]]))
        return found

    def exact(self, member: int) -> np.ndarray:
        """Exact match of a member alone, of shape `(num_seeds, num_examples)`."""
        keys = [Key((own[member],), "alone", self.task, "write") for own in self.ensembles]
        return np.array([self.marked(self.cells[key]) for key in keys])

    @cached_property
    def shares(self) -> list[float]:
        """Exact match of each member alone, in percent."""
        return [100 * float(self.exact(n).mean()) for n in range(len(self.names))]

    @property
    def better(self) -> int:
        return int(np.argmax(self.shares))

    @property
    def gap(self) -> float:
        return round(max(self.shares) - min(self.shares), 1)

    @cached_property
    def disagreement(self) -> float:
        """Percent of the examples that not all members answer alike."""
        written = [
            [self.cells[Key((n,), "alone", self.task, "write")]["responses"] for n in own] for own in self.ensembles
        ]
        rows = [row for texts in written for row in zip(*texts, strict=True)]
        return round(100 * float(np.mean([len(set(map(answer_of, row))) > 1 for row in rows])), 1)

    def gain(self, system: System) -> Estimate:
        """Points of exact match above the better member, pooled."""
        differences = [100 * (self.marked(own) - self.marked(better)) for own, better in self.runs(system)]
        return ratio(np.mean(differences, axis=0), np.ones(len(self.documents)), self.documents)

    def marked(self, cell: dict) -> np.ndarray:
        """Exact match of each example, which is marked once."""
        if id(cell) not in self.known:
            self.known[id(cell)] = exact_matches(self.questions, cell)
        return self.known[id(cell)]

    def row(self, title: str, system: System) -> list[str]:
        """A line of the table."""
        wrote, scored = self.runs(system), self.runs(system, "score")
        cells = [title] + [""] * 8
        if wrote:
            own = [cell for cell, _ in wrote]
            cells[1] = f"{100 * np.mean([self.marked(cell) for cell in own]):.1f}"
            if self.questions.marking == "text":
                cells[2] = f"{100 * np.mean([f1_scores(self.questions, cell) for cell in own]):.1f}"
            cells[7] = f"{np.mean([cell['tokens'] for cell in own]):.1f}"
            cells[8] = f"{np.mean([cell['seconds'] for cell in own]):.0f}"
        if scored:
            bits = np.mean([[cell["bits"], better["bits"]] for cell, better in scored], axis=0)
            cells[5] = f"{bits[0].sum() / self.num_bytes.sum():.3f}"
        if system != self.better:
            if wrote:
                cells[3] = written(self.gain(system), 1)
                each = [100 * (self.marked(cell) - self.marked(better)).mean() for cell, better in wrote]
                cells[4] = ", ".join(f"{value:+.1f}" for value in each)
            if scored:
                cells[6] = written(ratio(bits[0] - bits[1], self.num_bytes, self.documents), 3)
        return cells

    def table(self) -> str:
        rows = [HEADS, ["---"] * len(HEADS)]
        rows += [self.row(f"{name} alone", n) for n, name in enumerate(self.names)]
        rows += [self.row(system, system) for system in self.systems]
        oracle = np.max([self.exact(n) for n in range(len(self.names))], axis=0)
        about = f"{len(self.documents)} examples of {len(set(self.documents))} documents, {len(self.ensembles)} seeds. The "
        about += (
            f"members are {self.gap:.1f} points apart and disagree on {self.disagreement:.0f} %; the better answer of "
        )
        about += f"each example: {100 * oracle.mean():.1f} %."
        for system in self.systems:
            if "@dev" in system or "tuned" in system:
                about += f" {system}: {', '.join(cell['as'] for cell, _ in self.runs(system))}."
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"## {self.task}: {', '.join(self.names)}\n\n{about}\n\n{table}\n"


def written(estimate: Estimate, digits: int) -> str:
    value, low, high = (f"{number:+.{digits}f}" for number in estimate)
    return f"{value} ({low}, {high})" + (" *" if estimate.low > 0 or estimate.high < 0 else "")


def groups_of(cells: Cells, folder: Path) -> list[Group]:
    """Ensembles of which every member also ran alone, by task and names without seeds."""
    found: dict[Any, dict[tuple[str, ...], None]] = {}
    for key in cells:
        alone = [Key((name,), "alone", key.task, "write") for name in key.members]
        if key.system != "alone" and "_test_" in key.task and all(own in cells for own in alone):
            found.setdefault((key.task, *map(without_seed, key.members)), {})[key.members] = None
    return [Group(cells, folder, list(ensembles), task) for (task, *_), ensembles in found.items()]


def by_option(groups: Sequence[Group], prefix: str) -> Points:
    """Gains against the value of an option, a line for each ensemble."""
    points: Points = {}
    for group in groups:
        for value in sorted(int(s.removeprefix(prefix)) for s in group.systems if s.removeprefix(prefix).isdigit()):
            points.setdefault(" + ".join(group.names), []).append((value, group.gain(f"{prefix}{value}")))
    return points


def by_ensemble(groups: Sequence[Group], where: Callable[[Group], Any]) -> Points:
    """Gains against something of the ensemble, a line for each system."""
    points: Points = {}
    for group in sorted(groups, key=where):
        for system in group.systems:
            if group.runs(system):
                points.setdefault(system, []).append((where(group), group.gain(system)))
    return points


def plots_of(groups: Sequence[Group]) -> dict[str, tuple[str, Points]]:
    """What is drawn of the ensembles on one task: by the file's name, the label of the axis and the points."""
    pairs = [group for group in groups if len(group.names) == 2]
    turned = [group for group in pairs if any(other.names == group.names[::-1] != group.names for other in pairs)]
    return {
        "systems": ("", {" + ".join(g.names): [(s, g.gain(s)) for s in g.systems if g.runs(s)] for g in groups}),
        "gap": ("points between the members", by_ensemble(pairs, lambda group: group.gap)),
        "disagreement": ("% on which they disagree", by_ensemble(pairs, lambda group: group.disagreement)),
        "top_k": ("k of UniTE", by_option(groups, "unite:top_k=")),
        "span_length": ("words of a span", by_option(groups, "sweetspan:span_length=")),
        "order": ("place of the better member", by_ensemble(turned, lambda group: ("first", "second")[group.better])),
        "members": ("members", by_ensemble(groups, lambda group: str(len(group.names)))),
    }


def draw(file: Path, panels: dict[str, tuple[str, Points]]) -> bool:
    """Draw a panel for each task; whether there is any with more than one place."""
    lines = {
        task: {name: p for name, p in points.items() if len({x for x, _ in p}) > 1}
        for task, (_, points) in panels.items()
    }
    tasks = [task for task in lines if lines[task]]
    if not tasks:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    # Other ensembles or methods, not one that changes.
    style = "none" if file.stem in ("systems", "gap", "disagreement") else "-"
    with matplotlib.rc_context({"svg.hashsalt": "study", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4.2 * len(tasks), 3.4), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for name, points in lines[task].items():
                errors = [[g.value - g.low for _, g in points], [g.high - g.value for _, g in points]]
                places, values = [x for x, _ in points], [g.value for _, g in points]
                axes.errorbar(places, values, errors, marker="o", linestyle=style, capsize=2, label=name)
            axes.axhline(0, color="gray", linestyle=":")
            axes.set(title=task, xlabel=panels[task][0], ylabel="points above the better member")
            if file.stem == "systems":
                axes.tick_params("x", rotation=25)
                for label in axes.get_xticklabels():
                    label.set_horizontalalignment("right")
            axes.legend(fontsize="x-small")
        figure.savefig(file, metadata={"Date": None})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    groups = groups_of(read_cells(args.folder), args.folder)
    if not groups:
        sys.exit(f"report.py: {args.folder / 'results'} holds no ensemble on a test set whose members ran alone too")
    folder = args.folder / "report"
    folder.mkdir(exist_ok=True)
    text = "\n".join(group.table() for group in sorted(groups, key=lambda group: group.task))
    (folder / "tables.md").write_text(text, "utf-8")
    print(text)
    if not args.no_plots:
        tasks = sorted({group.task for group in groups})
        plots = {task: plots_of([group for group in groups if group.task == task]) for task in tasks}
        for name in plots[tasks[0]]:
            if draw(folder / f"{name}.svg", {task: plots[task][name] for task in tasks}):
                print(f"drawn: {folder / name}.svg")


if __name__ == "__main__":
    main()
