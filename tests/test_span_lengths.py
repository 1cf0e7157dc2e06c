"""`examples/span_lengths.py` asks, marks, measures and resumes, on tiny members."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests import tiny

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "span_lengths.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("span_lengths", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_short_answers_are_right_up_to_case_punctuation_and_articles(script):
    assert script.is_exact(" the Sunset Boulevard.\n\nQuestion", ["Sunset Boulevard"])
    assert not script.is_exact(" Sunset\nSunset Boulevard", ["Sunset Boulevard"])


def test_reasoned_answers_are_the_last_number(script):
    assert script.has_number("It is 7.\nThe answer is \\boxed{1,200}.", ["so 3 + 1197 = 1200"])
    assert not script.has_number("1200, no, 7", ["1200"])
    assert not script.has_number("none", ["1200"])


@pytest.mark.slow
def test_points_are_measured_once_and_drawn(script, tmp_path, monkeypatch):
    members = tiny.save_pair(tmp_path, "a", "b")
    data, head, results = tmp_path / "set.jsonl", tmp_path / "prompt.txt", tmp_path / "results.jsonl"
    items = [{"question": "one?", "answer": ["one"]}, {"question": "two and two?", "answer": "four"}]
    data.write_text("\n".join(map(json.dumps, items)), "utf-8")
    head.write_text("Question: zero?\nAnswer: zero\n\nQuestion: nine?\nAnswer: nine", "utf-8")
    prompts = script.read_set(data, head, script.SHORT, 5)
    assert prompts[1][0].endswith("Answer: nine\n\nQuestion: two and two?\nAnswer:")

    options = ["--results", results, "--short-answers", data, head, "--lengths", 1, 2, "--models", *members]
    monkeypatch.setattr(script, "NUM_TIMED_TOKENS", 4)
    monkeypatch.setattr(sys, "argv", ["span_lengths.py", *map(str, options)])
    script.main()
    points = script.read_points(results)
    assert [point.get("member", point.get("span_length")) for point in points] == ["a", "b", 1, 2] * 2
    assert all(point["milliseconds"] > 0 for point in points[:4])
    assert all(point["of"] == 2 for point in points[4:])
    script.main()
    assert script.read_points(results) == points

    pytest.importorskip("matplotlib")
    script.draw(points, tmp_path / "plot.svg")
    assert "words of a span (L)" in (tmp_path / "plot.svg").read_text("utf-8")
