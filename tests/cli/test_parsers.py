"""Help and mistakes need no torch, and the help names what the library has."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hf_ensemble.cli import parsers
from hf_ensemble.dev_set import METRICS
from hf_ensemble.evaluation.measures import DEFAULT_MEASURES, MEASURES
from hf_ensemble.evaluation.results import PLOT_ENDINGS, RESPONSES_ENDINGS, TABLE_ENDINGS

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy")
COMMANDS = parsers.build_parser()._subparsers._group_actions[0].choices

# What pip writes, and then which heavy packages were imported.
SCRIPT = f"""\
    import re, sys
    from hf_ensemble.cli import main
    if __name__ == '__main__':
        sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
        try:
            sys.exit(main())
        finally:
            print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "hf-ensemble"
    path.write_text(textwrap.dedent(SCRIPT), "utf-8")
    return path


@pytest.mark.parametrize("line", ["--version", "--help", *(f"{name} --help" for name in COMMANDS), "nonsense", ""])
def test_the_command_needs_no_torch_for_help_and_mistakes(line, script):
    done = python(script, *line.split())
    assert done.returncode == (0 if line.startswith("-") or "--help" in line else 2), done.stderr
    assert done.stderr.splitlines()[-1] == ""
    assert "hf_ensemble " in done.stdout or "hf-ensemble" in done.stdout + done.stderr


def test_the_module_needs_no_torch_either():
    done = python("-X", "importtime", "-m", "hf_ensemble.cli", "--version")
    assert done.stdout.startswith("hf_ensemble ")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hf_ensemble" in imported
    assert imported.isdisjoint(HEAVY)


@pytest.mark.slow
def test_the_command_runs_without_the_names_of_the_package(script, here):
    done = python(script, "generate", "The cat", "--members", "my-ensemble", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "torch" in done.stderr.splitlines()[-1]


REGISTERS = """\
import sys, types
sys.modules["hf_ensemble.registration"] = types.ModuleType("registration")  # the real one takes seconds
import hf_ensemble
sys.exit("registration" not in vars(hf_ensemble))
"""


@pytest.mark.parametrize("name", ["hf-ensemble.py", "cli", "hf_ensemble.cli", "hf-ensemble"])
def test_every_other_program_registers_the_model_type(name, tmp_path):
    path = tmp_path / name
    path.write_text(REGISTERS)
    done = python(path, "-m", "hf_ensemble.cli", "--version")
    assert done.returncode == (name == "hf-ensemble"), done.stderr


def test_help_names_what_the_library_has():
    assert set(parsers.METRICS) == set(METRICS)
    assert [name.replace("_", " ") for name in parsers.MEASURES] == list(MEASURES)
    assert [name.replace("_", " ") for name in parsers.DEFAULT_MEASURES] == list(DEFAULT_MEASURES)
    text = COMMANDS["eval"].format_help()
    assert f"a table: {', '.join(TABLE_ENDINGS)}" in text
    assert f"a plot: {', '.join(PLOT_ENDINGS)}" in text
    assert f"all responses with their scores: {', '.join(RESPONSES_ENDINGS)}" in " ".join(text.split())
