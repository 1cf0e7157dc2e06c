"""The scripts of docs/reliability.md run in their smallest form, and see what is not as promised."""

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts import ROOT, options_of, run_script, tables

pytest.importorskip("uvicorn")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the scripts read /proc and use inotify"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
]
FOLDER = ROOT / "examples" / "reliability"


def run(name, monkeypatch, capsys, *options):
    """The exit code of a script and the rows of its table."""
    code = run_script(f"examples/reliability/{name}.py", options, monkeypatch)
    ((rows),) = tables(capsys.readouterr().out)
    return code, rows


@pytest.fixture
def hurried(monkeypatch):
    """Let the soak's server end its thread at once when it is idle."""
    from hf_ensemble.serving import engine

    monkeypatch.setattr(engine, "_PATIENCE", 0.1)
    for folder in (FOLDER, FOLDER.parent, FOLDER.parent / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(importlib.import_module("server_process"), "IDLE", 0.5)


def test_every_option_is_run_here():
    source = Path(__file__).read_text("utf-8")
    for path in FOLDER.glob("*.py"):
        assert {option for option in options_of(path) if option not in source} == set(), path.name


@pytest.mark.slow
def test_a_small_soak(hurried, monkeypatch, capsys):
    options = ["--models", "tiny", "--requests", 40, "--clients", 8, "--seed", 3, "--max-tokens", 4, "--sample", 10]
    code, rows = run("soak", monkeypatch, capsys, *options, "--timeout", 60)
    assert {row["as promised"] for row in rows} == {"yes"}
    assert code == 0
    assert len(rows) == 12
    assert "40 from 8 clients" in rows[0]["found"]


@pytest.mark.slow
def test_a_soak_sees_what_is_wrong(hurried, monkeypatch, capsys):
    """A server that answers a bad request, and counts tokens wrongly."""
    from hf_ensemble.serving import formats, grammar

    monkeypatch.setattr(grammar.Grammars, "processors", lambda self, response_format: tuple)
    monkeypatch.setattr(formats, "usage_of", lambda a, b: {"prompt_tokens": a, "completion_tokens": 10**6})
    monkeypatch.setattr("hf_ensemble.serving.handlers.usage_of", formats.usage_of)
    code, rows = run("soak", monkeypatch, capsys, "--requests", 40, "--clients", 8, "--max-tokens", 4, "--sample", 2)
    assert code == 1
    wrong = {row["what"] for row in rows if row["as promised"] == "NO"}
    assert wrong == {"bad ones get a 4xx with the reason", "metrics add up"}


@pytest.mark.slow
def test_some_faults(monkeypatch, capsys):
    before = os.environ.get("HF_ENSEMBLE_CACHE")
    options = ["--groups", "cache", "memory", "members", "ensembles", "--every", 9, "--device", "cpu"]
    code, rows = run("faults", monkeypatch, capsys, *options)
    assert [row["fault"] for row in rows if row["as promised"] != "yes"] == []
    assert code == 0
    kinds = {re.split(":| runs", row["fault"])[0] for row in rows}
    assert kinds == {"cache", "memory", "member", "saved ensemble"}
    assert os.environ.get("HF_ENSEMBLE_CACHE") == before


def reads(path):
    return path.read_text()


def links(path, target):
    target.symlink_to(path)
    return target.read_text()


def executes():
    subprocess.run(["true"], check=True)


def imports_code(folder):
    (folder / "own.py").write_text("x = 1\n")
    exec(compile((folder / "own.py").read_text(), str(folder / "own.py"), "exec"))


def exits():
    os._exit(3)


def test_a_child_is_seen_to_read_to_execute_and_to_die(tmp_path, monkeypatch):
    """What the table of faults rests on."""
    monkeypatch.syspath_prepend(str(FOLDER))
    child = importlib.import_module("child")
    canary = tmp_path / "canary"
    canary.mkdir()
    secret = canary / "secret.txt"
    secret.write_text("a secret")
    assert child.run(reads, secret, canary=canary).outside == ["secret.txt"]
    assert child.run(links, secret, tmp_path / "link", canary=canary).outside == ["secret.txt"]
    assert child.run(os.listdir, canary, canary=canary).outside == []
    assert child.run(executes, canary=canary).executed
    assert child.run(imports_code, tmp_path, canary=canary).executed
    assert child.run(reads, tmp_path / "own.py", canary=canary).executed == []
    assert "died (exit code 3)" in child.run(exits, canary=canary).error
    assert "hangs" in child.run(time.sleep, 60, canary=canary, timeout=0.2).error
