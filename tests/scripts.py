"""Runs the scripts of this repository as modules of one process: importing torch anew for each would take longer than they."""

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script, given by its path from the root, which finds what lies beside it."""
    for folder in ("examples", "examples/benchmarks", Path(path).parent):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(path: str, arguments: Iterable[object], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a script with these arguments, and return what its `main` does."""
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    return load_script(path, monkeypatch).main()


def tables(output: str) -> list[list[dict[str, str]]]:
    """The Markdown tables in an output, each as one dictionary a line, by the heads."""
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
            found.append([])
        elif not set(line) <= set("|-"):
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def options_of(path: Path) -> set[str]:
    """The options of a script's command line that can be seen in its help."""
    calls = re.findall(r"add_argument\((.*?)\n    (?:\w|$|\n)", path.read_text("utf-8"), re.DOTALL)
    return {name for call in calls if "SUPPRESS" not in call for name in re.findall(r'"(--[a-z-]+)"', call)}
