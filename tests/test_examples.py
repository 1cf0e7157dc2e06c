"""The example scripts run, on tiny members."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests import tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def members(tmp_path):
    """Folders of two members."""
    return tiny.save_pair(tmp_path, "a", "b")


def run(name, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_contrastive_decoding(members, monkeypatch, capsys):
    """Without any contrast it is the expert."""
    options = ["--expert", members[0], "--amateur", members[1], "--new-tokens", "6"]
    run("contrastive_decoding", [*options, "--strength", "0"], monkeypatch)
    texts = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert texts[0] == texts[1]
    run("contrastive_decoding", [*options, "--strength", "3"], monkeypatch)
    moved = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert moved[0] == texts[0] != moved[1]


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_proxy_tuning(members, monkeypatch, capsys):
    """Without an untuned twin nothing moves."""
    run("proxy_tuning", ["--base", members[0], "--tuned", members[1], "--new-tokens", "6"], monkeypatch)
    texts = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert texts[0::2] == texts[1::2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_select_and_tune(members, monkeypatch, capsys, tmp_path):
    """Whoever writes an `e` has answered."""
    file, state = tmp_path / "dev.jsonl", tmp_path / "state.jsonl"
    lines = [{"prompt": prompt, "answers": ["e", "a", " "]} for prompt in ("The cat", "Once upon a time", "The king")]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    options = [str(file), "--models", *members, "--limit", "2", "--max-gap", "100", "--state-file", str(state)]
    run("select_and_tune", options, monkeypatch)
    output = capsys.readouterr().out
    assert "words cut like the primary" in output
    assert output.count("taken ") == 2
    assert "best: UniteConfig(top_k=" in output
    assert len(state.read_text("utf-8").splitlines()) in (2, 4)  # equal scores are uniform weights again


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_evaluation_sets(members, monkeypatch, capsys, tmp_path):
    """A row for each member and method; a run that goes on finds everything done."""
    question = {"question": "The capital?", "answer": ["Paris"]}
    choice = {"question": "The cat sat on", "A": "the mat", "B": "Berlin", "answer": "A"}
    for name, record in (("triviaqa_dev", question), ("piqa_dev_a", choice)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record), "utf-8")
    (tmp_path / "triviaqa_prompt.txt").write_text("Question: The fox?\nAnswer: brown", "utf-8")
    state = tmp_path / "state.jsonl"
    options = [str(tmp_path), "--models", *members, "--sets", "triviaqa", "piqa", "--max-new-tokens", "2"]
    options += ["--state-file", str(state), "--table", str(tmp_path / "table.md"), "--configurations", "GaC", "UniTE"]
    run("evaluation_sets", options, monkeypatch)
    lines = (tmp_path / "table.md").read_text("utf-8").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| a", "| b", "| GaC", "| UniTE"]
    done = state.read_bytes()
    run("evaluation_sets", options, monkeypatch)
    assert state.read_bytes() == done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_decisions(members, monkeypatch, capsys, tmp_path):
    """Every decision is somebody's, and the page holds the texts."""
    page = tmp_path / "page.html"
    run("decisions", ["--models", *members, "--new-tokens", "4", "--output", str(page)], monkeypatch)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["a:", "b:", "page:"]
    assert sum(int(line[2]) for line in lines[:2]) == int(lines[0][4].rstrip(","))
    assert "The capital of France is" in page.read_text("utf-8")
