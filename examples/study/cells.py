"""Finished cells of the study: what was written or scored by whom on which set, one JSON line each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """What a cell is of."""

    members: tuple[str, ...]
    """The primary first; one for a member alone."""
    system: str
    """As `hf-ensemble eval --also` takes it, with `@dev` for weights from development scores, and `tuned` for a value that
    was chosen there; `"alone"`."""
    task: str
    """Name of the set, `NAME:COUNT` for its first examples."""
    work: str
    """`"write"` or `"score"`."""


Cells = dict[Key, dict[str, Any]]
"""Finished cells: `responses` and `tokens`, or `bits`, one entry an example, `seconds`, and what it ran with."""


def read_cells(folder: Path) -> Cells:
    """All finished cells; of two of one key, the one that was read first.

    Args:
        folder: The study's.
    """
    cells: Cells = {}
    for file in sorted((folder / "results").glob("*.jsonl")):
        for cell in _lines(file):
            cells.setdefault(Key(tuple(cell.pop("members")), *(cell.pop(part) for part in Key._fields[1:])), cell)
    return cells


def add_cell(folder: Path, members: Sequence[str], key: Key, cell: dict[str, Any]) -> None:
    """Add a cell to the file of an ensemble, whose runs alone write to it.

    Args:
        folder: The study's.
        members: Of the ensemble.
        key: What the cell is of.
        cell: What was found.
    """
    file = folder / "results" / f"{'+'.join(members)}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**key._asdict(), **cell}, ensure_ascii=False) + "\n")


def read_examples(folder: Path, task: str) -> list[dict]:
    """The examples of a set.

    Args:
        folder: The study's.
        task: Name of the set; `NAME:COUNT` are its first examples.
    """
    name, _, count = task.partition(":")
    return list(_lines(folder / "sets" / f"{name}.jsonl"))[: int(count) if count else None]


def _lines(file: Path) -> Iterator[dict]:
    # Not `splitlines`, which also splits at signs that JSON leaves as they are. What a killed run left is no whole line.
    for line in file.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)
