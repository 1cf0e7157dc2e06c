"""The study's tables and plots, from its result files.

    python examples/study/report.py                  # tables.md and the plots, in the study's `report`
    python examples/study/report.py --no-plots       # without matplotlib

Seeds are pooled: the values of an example are averaged over them, and intervals (95 %) are of a bootstrap over documents of
paired differences to the best member: that with the higher exact match on these examples, on the average of the seeds. A
star marks intervals without 0. The oracle picks the best of the members' answers to each example, and of their bits.
Development sets, on which values and weights are chosen, come last.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cells, Key, read_cells, read_examples
from marks import Estimate, answers, document_of, evaluation_set, exact_matches, f1_scores, ratio
from trained import without_seed

HEADS = ["exact match, %", "F1, %", "to the best member (95 %)", "each seed"]
HEADS += ["bits per byte", "to the best member (95 %)", "tokens", "seconds"]
SETS = {"qamr": "QAMR", "squad": "SQuAD", "gsm": "GSM8K", "qa": "QAMR"}
METHODS = {"gac": "GaC", "unite": "UniTE", "mined": "MinED", "eva": "EVA", "deepen": "DeePEn", "sweetspan": "spans"}
OPTIONS = {
    "span_length=1": "of 1 word",
    "span_length=": "of {} words",
    "top_k=": "k = {}",
    "num_anchors=none": "all anchors",
    "num_anchors=": "{:,} anchors",
    "learning_rate=tuned": "rate from dev",
    "learning_rate=": "rate {}",
    "threshold=tuned": "gate from dev",
    "threshold=": "gate {}",
    "@dev": "weights from dev scores",
    "@tuned": "weights tuned on dev",
    "@": "weights {}",
}
"""How parts of a system are told, by how they begin; the first that fits."""
ORACLE = -1

System = str | int
"""An ensemble's system, the number of a member that is alone, or `ORACLE`."""
Points = dict[str, list[tuple[Any, Estimate]]]
"""Where, and what is gained there, by what the legend says."""


def in_words(system: str) -> str:
    """A system as tables call it.

    Args:
        system: As in a cell's key.
    """
    head, _, weights = system.partition("@")
    name, _, options = head.partition(":")
    told = [METHODS.get(name, name)]
    for part in [*filter(None, options.split(",")), *(["@" + weights] if weights else [])]:
        start = next((start for start in OPTIONS if part.startswith(start)), "")
        value = part.removeprefix(start)
        told.append(OPTIONS.get(start, "{}").format(int(value) if value.isdigit() else value.replace(",", " : ")))
    return re.sub("^spans, of", "spans of", ", ".join(told))


def member_titles(names: Sequence[str]) -> list[str]:
    """Members as tables call them; equal ones are numbered.

    Args:
        names: Without seeds.
    """
    found = []
    for name in names:
        base, *parts = name.split("-")
        title = {"smollm2": "SmolLM2", "gemma": "Gemma"}.get(base, base)
        percent = next((part[2:] for part in parts if part.startswith("at")), None)
        found.append(title + (f", {percent} % trained" if percent else "" if parts else ", untuned"))
    twice = [title for title in found if found.count(title) > 1]
    return [f"{t} ({found[: n + 1].count(t)})" if t in twice else t for n, t in enumerate(found)]


class Group:
    """One ensemble on one task, over all seeds."""

    def __init__(self, cells: Cells, folder: Path, ensembles: list[tuple[str, ...]], task: str):
        self.cells, self.ensembles, self.task = cells, ensembles, task
        self.names = tuple(map(without_seed, ensembles[0]))
        self.titles = member_titles(self.names)
        self.title = f"{task}, {' + '.join(self.names)}"
        examples = read_examples(folder, task)
        self.questions = evaluation_set(task, examples)
        self.documents = [document_of(example["cluster"]) for example in examples]
        self.num_bytes = np.array([len(item.continuations[item.right].encode()) for item in self.questions.items])
        self.known: dict[Any, Any] = {}
        found = [key.system for key in cells if key.members in ensembles and key.task == task]
        self.systems = [system for system in dict.fromkeys(found) if system != "alone"]

    def word(self, system: System) -> str:
        """What tables call a system."""
        if system == ORACLE:
            return "oracle over members"
        return in_words(system) if isinstance(system, str) else self.titles[system]

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

    def said(self, member: int) -> list[list[str]]:
        """The answers of a member alone, by seed."""
        keys = [Key((own[member],), "alone", self.task, "write") for own in self.ensembles]
        return [answers(self.questions, self.cells[key]) for key in keys]

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
        texts = np.array([self.said(n) for n in range(len(self.names))])  # (members, seeds, examples)
        return round(100 * float((texts != texts[0]).any(0).mean()), 1)

    def gain(self, system: System) -> Estimate:
        """Points of exact match above the better member, pooled."""
        if ("gain", system) not in self.known:
            difference = 100 * np.subtract(*self.values(system, self.marked))
            self.known["gain", system] = ratio(difference.mean(0), np.ones(len(self.documents)), self.documents)
        return self.known["gain", system]

    def values(self, system: System, marked: Callable[[dict], Any], work: str = "write") -> np.ndarray:
        """What a system's examples are worth, and the better member's, of shape `(2, num_seeds, num_examples)`."""
        if system == ORACLE:
            members = [self.values(n, marked, work) for n in range(len(self.names))]
            if len({of.shape for of in members}) > 1:
                return np.zeros((2, 0))
            best = np.max if work == "write" else np.min
            return np.array([best([of[0] for of in members], axis=0), members[0][1]])
        runs = self.runs(system, work)
        return np.array(
            [[marked(cell) for cell in of_seeds] for of_seeds in zip(*runs, strict=True)] or np.zeros((2, 0))
        )

    def marked(self, cell: dict) -> np.ndarray:
        """Exact match of each example, which is marked once."""
        return self._once("exact", cell, exact_matches)

    def f1(self, cell: dict) -> np.ndarray:
        """F1 of each example, which is marked once."""
        return self._once("F1", cell, f1_scores)

    def _once(self, name: str, cell: dict, mark: Callable[..., np.ndarray]) -> np.ndarray:
        if (name, id(cell)) not in self.known:
            self.known[name, id(cell)] = mark(self.questions, cell)
        return self.known[name, id(cell)]

    def row(self, system: System) -> list[str]:
        """A line of the table."""
        is_best = system == self.better
        cells = [self.word(system) + (", best member" if is_best else ""), *[""] * len(HEADS)]
        wrote, bits = self.values(system, self.marked), self.values(system, lambda cell: cell["bits"], "score")
        if wrote.size:
            cells[1] = f"{100 * wrote[0].mean():.1f}"
            if self.questions.marking == "text":
                cells[2] = f"{100 * self.values(system, self.f1)[0].mean():.1f}"
            if not is_best:
                cells[3] = written(self.gain(system), 1)
                cells[4] = ", ".join(signed(100 * (own - best).mean(), 1) for own, best in zip(*wrote, strict=True))
            if system != ORACLE:
                ran = [cell for cell, _ in self.runs(system)]
                cells[7] = f"{np.mean([cell['tokens'] for cell in ran]):.1f}"
                cells[8] = f"{np.mean([cell['seconds'] for cell in ran]):.0f}"
        if bits.size:
            pooled = bits.mean(1)
            cells[5] = f"{pooled[0].sum() / self.num_bytes.sum():.3f}"
            if not is_best:
                cells[6] = written(ratio(pooled[0] - pooled[1], self.num_bytes, self.documents), 3)
        return cells

    def table(self) -> str:
        """The ensemble's table, and what has to be known of it."""
        name = set_title(self.task)
        documents = len(set(self.documents))
        about = f"{name}, {len(self.documents)} questions"
        about += f" of {documents} documents" if documents < len(self.documents) else ""
        table = as_markdown([about, *HEADS], map(self.row, [*range(len(self.names)), ORACLE, *self.systems]))
        oracle = 100 * np.max([self.exact(n) for n in range(len(self.names))], axis=0).mean()
        text = (
            f"The members are {self.gap:.1f} points apart and give other answers to {self.disagreement:.0f} % of the "
        )
        text += f"questions; whoever picked the best answer every time would reach {oracle:.1f} %. "
        text += f"{len(self.ensembles)} seed{'s' * (len(self.ensembles) > 1)}."
        for system in self.systems:
            if ("@dev" in system or "tuned" in system) and self.runs(system):
                chosen = [in_words(cell["as"]) for cell, _ in self.runs(system)]
                text += f" {in_words(system)}: {'; '.join(chosen)}."
        return f"## {self.title}\n\n{table}\n\n{text}\n"


def as_markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    Args:
        heads: Its heads.
        rows: Its lines.
    """
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def set_title(task: str) -> str:
    return SETS[task.split("_")[0]] + ("" if "_test_" in task else ", development set")


def signed(number: float, digits: int) -> str:
    return f"{number:+.{digits}f}".replace("-", "−")


def written(estimate: Estimate, digits: int) -> str:
    low, high = (f"{number:.{digits}f}".replace("-", "−") for number in estimate[1:])
    star = " *" if estimate.low > 0 or estimate.high < 0 else ""
    return f"{signed(estimate.value, digits)} ({low}, {high}){star}"


def groups_of(cells: Cells, folder: Path) -> list[Group]:
    """Ensembles of which every member also ran alone, by task and names without seeds; what has most systems first."""
    found: dict[Any, dict[tuple[str, ...], None]] = {}
    for key in cells:
        alone = [Key((name,), "alone", key.task, "write") for name in key.members]
        if key.system != "alone" and all(own in cells for own in alone):
            found.setdefault((key.task, *map(without_seed, key.members)), {})[key.members] = None
    groups = [Group(cells, folder, list(ensembles), task) for (task, *_), ensembles in found.items()]
    return sorted(groups, key=lambda group: (*place_of(group.task), -len(group.systems)))


def place_of(task: str) -> tuple[bool, int, str]:
    """What tasks are sorted by: development sets last."""
    return "_test_" not in task, list(SETS).index(task.split("_")[0]), task


def by_option(groups: Sequence[Group], prefix: str) -> Points:
    """Gains against the value of an option, a line for each ensemble."""
    points: Points = {}
    for group in groups:
        values = sorted(int(s.removeprefix(prefix)) for s in group.systems if s.removeprefix(prefix).isdigit())
        for value in values:
            points.setdefault(" + ".join(group.names), []).append((value, group.gain(f"{prefix}{value}")))
    return points


def by_ensemble(groups: Sequence[Group], where: Callable[[Group], Any]) -> Points:
    """Gains against something of the ensemble, a line for each system."""
    points: Points = {}
    for group in sorted(groups, key=where):
        for system in group.systems:
            if group.runs(system):
                points.setdefault(in_words(system), []).append((where(group), group.gain(system)))
    return points


def plots_of(groups: Sequence[Group]) -> dict[str, tuple[str, Points]]:
    """What is drawn of the ensembles on one task: by the file's name, the label of the axis and the points."""
    pairs = [group for group in groups if len(group.names) == 2]
    # The pair of which most has run: what it is about is drawn of it alone.
    main = max(groups, key=lambda group: (len(group.systems), len(group.ensembles)))
    turned = [group for group in pairs if group.names in (main.names, main.names[::-1])]
    larger = [group for group in groups if group.names[: len(main.names)] == main.names]
    gains = [(in_words(system), main.gain(system)) for system in main.systems if main.runs(system)]
    return {
        "systems": ("", {" + ".join(main.titles): gains}),
        "gap": ("points between the members", by_ensemble(pairs, lambda group: group.gap)),
        "disagreement": ("% on which they disagree", by_ensemble(pairs, lambda group: group.disagreement)),
        "top_k": ("k of UniTE", by_option(groups, "unite:top_k=")),
        "span_length": ("words of a span", by_option(groups, "sweetspan:span_length=")),
        "order": ("place of the better member", by_ensemble(turned, lambda group: ("first", "second")[group.better])),
        "members": ("members", by_ensemble(larger, lambda group: str(len(group.names)))),
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

    kind = file.stem
    names = list(dict.fromkeys(name for task in tasks for name in lines[task]))
    is_tall, is_scattered = kind == "systems", kind in ("gap", "disagreement")
    most = max(len(points) for task in tasks for points in lines[task].values())
    size = (5.2 * len(tasks), 0.8 + 0.22 * most) if is_tall else (4.2 * len(tasks), 3.4)
    with matplotlib.rc_context({"svg.hashsalt": "study", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            axes.set_title(set_title(task))
            for name, points in lines[task].items():
                n = names.index(name)
                values = [gain.value for _, gain in points]
                errors = [[g.value - g.low for _, g in points], [g.high - g.value for _, g in points]]
                if is_tall:
                    axes.errorbar(values, [place for place, _ in points], xerr=errors, fmt="o", capsize=2)
                    continue
                # Of one ensemble several systems stand side by side.
                places = [place + 0.4 * n if is_scattered else place for place, _ in points]
                style = {"color": f"C{n}", "marker": "osD^v<>pP*"[n % 10], "capsize": 2, "label": name}
                axes.errorbar(places, values, errors, linestyle="none" if is_scattered else "-", **style)
            if is_tall:
                axes.axvline(0, color="gray", linestyle=":")
                axes.invert_yaxis()
                axes.set_xlabel("points above the best member")
                continue
            axes.axhline(0, color="gray", linestyle=":")
            axes.set(xlabel=panels[task][0], ylabel="points above the best member")
            if kind in ("top_k", "span_length"):
                ticks = sorted({place for points in lines[task].values() for place, _ in points})
                axes.set_xscale("log")
                axes.set_xticks(ticks, map(str, ticks))
                axes.minorticks_off()
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
        sys.exit(f"report.py: {args.folder / 'results'} holds no ensemble whose members ran alone too")
    folder = args.folder / "report"
    folder.mkdir(exist_ok=True)
    text = "\n".join(group.table() for group in groups)
    (folder / "tables.md").write_text(text, "utf-8")
    print(text)
    if not args.no_plots:
        tasks = sorted({group.task for group in groups if "_test_" in group.task}, key=place_of)
        plots = {task: plots_of([group for group in groups if group.task == task]) for task in tasks}
        for name in next(iter(plots.values()), {}):
            if draw(folder / f"{name}.svg", {task: plots[task][name] for task in tasks}):
                print(f"drawn: {folder / name}.svg")


if __name__ == "__main__":
    main()
