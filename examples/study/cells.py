"""Finished cells of the study: what a member or ensemble wrote or scored on a set, one JSON line each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Identifies a cell."""

    members: tuple[str, ...]
    """Names, the primary first; a single name for a member alone."""
    system: str
    """The system as `hf-ensemble eval --also` takes it, or `"alone"`.

    `@dev` stands for weights from development scores, `tuned` for a value chosen on the development set.
    """
    task: str
    """Name of the set; `NAME:COUNT` for its first examples."""
    work: str
    """`"write"` or `"score"`."""


Cells = dict[Key, dict[str, Any]]
"""Finished cells: `responses` and `tokens`, or `bits`, one entry per example; `seconds`; and the run's settings."""


def read_cells(folder: Path) -> Cells:
    """Return all finished cells; if two have the same key, the one read first.

    Args:
        folder: The study's folder.
    """
    cells: Cells = {}
    for file in sorted((folder / "results").glob("*.jsonl")):
        for cell in _lines(file):
            cells.setdefault(Key(tuple(cell.pop("members")), *(cell.pop(part) for part in Key._fields[1:])), cell)
    return cells


def add_cell(folder: Path, members: Sequence[str], key: Key, cell: dict[str, Any]) -> None:
    """Add a cell to the file of an ensemble; only runs of this ensemble write to it.

    Args:
        folder: The study's folder.
        members: Members of the ensemble.
        key: Identifies the cell.
        cell: The results.
    """
    file = folder / "results" / f"{'+'.join(members)}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**key._asdict(), **cell}, ensure_ascii=False) + "\n")


def read_examples(folder: Path, task: str) -> list[dict]:
    """Return the examples of a set.

    Args:
        folder: The study's folder.
        task: Name of the set; `NAME:COUNT` for its first examples.
    """
    name, _, count = task.partition(":")
    return list(_lines(folder / "sets" / f"{name}.jsonl"))[: int(count) if count else None]


def _lines(file: Path) -> Iterator[dict]:
    # Not `splitlines`, which also splits at characters that JSON does not escape. A killed run leaves an incomplete
    # line.
    for line in file.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)
