"""The finished cells of an ensemble and its members on one set, over all seeds: the source of all tables."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cells, Key, read_examples
from marks import Estimate, answers, document_of, evaluation_set, exact_matches, f1_scores, ratio
from trained import without_seed

HEADS = ["exact match, %", "F1, %", "to the best member (95 %)", "each seed"]
HEADS += ["bits per byte", "to the best member (95 %)", "tokens", "seconds"]
SETS = {"qamr": "QAMR", "squad": "SQuAD", "gsm": "GSM8K", "triviaqa": "TriviaQA", "nq": "NQ", "qa": "QAMR"}
METHODS = {"gac": "GaC", "unite": "UniTE", "mined": "MinED", "eva": "EVA", "deepen": "DeePEn", "sweetspan": "spans"}
METHODS |= {"vote": "vote", "mbr": "MBR", "rerank": "rerank"}
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
    "num_candidates=": "{} samples each",
    "methods=gac+sweetspan": "GaC and spans of 4 words too",
    "methods=gac": "GaC too",
    "methods=sweetspan": "spans of 4 words too",
    "@1,0": "the first alone",
    "@0,1": "the second alone",
    "@dev": "weights from dev scores",
    "@tuned": "weights tuned on dev",
    "@": "weights {}",
}
"""How tables name parts of a system, by how the parts begin; the first match counts."""
ORACLE = -1

System = str | int
"""An ensemble's system, the index of a member alone, or `ORACLE`."""


def in_words(system: str) -> str:
    """Return a system's name in tables.

    Args:
        system: The system as in a cell's key.
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
    """Return the members' names in tables; equal names are numbered.

    Args:
        names: Names without seeds.
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
        self.num_bytes = np.array([item.num_bytes for item in self.questions.items])
        self.known: dict[Any, Any] = {}
        found = [key.system for key in cells if key.members in ensembles and key.task == task]
        # Samples written once for several systems are not a system themselves.
        self.systems = [name for name in dict.fromkeys(found) if name != "alone" and not name.startswith("samples:")]

    def word(self, system: System) -> str:
        """A system's name in tables."""
        if system == ORACLE:
            return "oracle over members"
        return in_words(system) if isinstance(system, str) else self.titles[system]

    def runs(self, system: System, work: str = "write") -> list[tuple[dict, dict]]:
        """The cells of a system and of the better member, for each seed that has both."""
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
        """Percentage of the examples to which the members give different answers."""
        texts = np.array([self.said(n) for n in range(len(self.names))])  # (members, seeds, examples)
        return round(100 * float((texts != texts[0]).any(0).mean()), 1)

    def gain(self, system: System) -> Estimate:
        """Points of exact match above the better member, pooled."""
        if ("gain", system) not in self.known:
            difference = 100 * np.subtract(*self.values(system, self.marked))
            self.known["gain", system] = ratio(difference.mean(0), np.ones(len(self.documents)), self.documents)
        return self.known["gain", system]

    def values(self, system: System, marked: Callable[[dict], Any], work: str = "write") -> np.ndarray:
        """Values of a system's examples and of the better member's, of shape `(2, num_seeds, num_examples)`."""
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
        """Exact match of each example; each is marked only once."""
        return self._once("exact", cell, exact_matches)

    def f1(self, cell: dict) -> np.ndarray:
        """F1 of each example; each is marked only once."""
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
        """The ensemble's table, with the facts needed to read it."""
        name = set_title(self.task)
        documents = len(set(self.documents))
        about = f"{name}, {len(self.documents)} questions"
        about += f" of {documents} documents" if documents < len(self.documents) else ""
        table = as_markdown([about, *HEADS], map(self.row, [*range(len(self.names)), ORACLE, *self.systems]))
        oracle = 100 * np.max([self.exact(n) for n in range(len(self.names))], axis=0).mean()
        text = f"The members are {self.gap:.1f} points apart and give different answers to {self.disagreement:.0f} % of the "
        text += f"questions; always picking the best answer would reach {oracle:.1f} %. "
        text += f"{len(self.ensembles)} seed{'s' * (len(self.ensembles) > 1)}."
        for system in self.systems:
            if ("@dev" in system or "tuned" in system) and self.runs(system):
                chosen = [in_words(cell["as"]) for cell, _ in self.runs(system)]
                text += f" {in_words(system)}: {'; '.join(chosen)}."
        return f"## {self.title}\n\n{table}\n\n{text}\n"


def as_markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        heads: The table's header.
        rows: The table's rows.
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
    """Group ensembles whose members all ran alone too, by task and names without seeds; most systems first."""
    found: dict[Any, dict[tuple[str, ...], None]] = {}
    for key in cells:
        alone = [Key((name,), "alone", key.task, "write") for name in key.members]
        if key.system != "alone" and all(own in cells for own in alone):
            found.setdefault((key.task, *map(without_seed, key.members)), {})[key.members] = None
    groups = [Group(cells, folder, list(ensembles), task) for (task, *_), ensembles in found.items()]
    return sorted(groups, key=lambda group: (*place_of(group.task), -len(group.systems)))


def place_of(task: str) -> tuple[bool, int, str]:
    """Return a task's sort key: development sets come last."""
    return "_test_" not in task, list(SETS).index(task.split("_")[0]), task
