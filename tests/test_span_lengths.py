"""`examples/span_lengths.py` asks, marks, measures and resumes, on tiny members."""

import json

import pytest

from tests import tiny
from tests.scripts import load_script, run_script

SCRIPT = "examples/span_lengths.py"


@pytest.fixture
def script(monkeypatch):
    return load_script(SCRIPT, monkeypatch)


@pytest.fixture
def written(tmp_path):
    """Writes questions and worked examples to files and returns their paths."""

    def write(*items, worked="Question: zero?\nAnswer: zero\n\nQuestion: nine?\nAnswer: nine"):
        data, head = tmp_path / "set.jsonl", tmp_path / "prompt.txt"
        data.write_text("\n".join(map(json.dumps, items)), "utf-8")
        head.write_text(worked, "utf-8")
        return data, head

    return write


def test_short_answers_are_right_up_to_case_punctuation_and_articles(script, written):
    examples = script.SHORT.read(*written({"question": "Which?", "answer": ["Sunset Boulevard"]}), count=5)
    assert examples.is_right(" the Sunset Boulevard.\n\nQuestion", examples.items[0])
    assert not examples.is_right(" Sunset\nSunset Boulevard", examples.items[0])


def test_reasoned_answers_are_the_last_number(script, written):
    examples = script.REASONING.read(*written({"question": "How many?", "answer": "so 3 + 1197 = 1200"}), count=5)
    assert examples.is_right("It is 7.\nThe answer is \\boxed{1,200}.", examples.items[0])
    assert not examples.is_right("1200, no, 7", examples.items[0])
    assert not examples.is_right("none", examples.items[0])


def test_one_worked_example_is_enough(script, written):
    files = written({"question": "one?", "answer": "one"}, worked="Question: zero?\nAnswer: zero\n")
    examples = script.SHORT.read(*files, count=5)
    assert examples.items[0].prompt == "Question: zero?\nAnswer: zero\n\nQuestion: one?\nAnswer:"


@pytest.mark.slow
def test_points_are_measured_once_and_drawn(script, written, tmp_path, monkeypatch, capsys):
    members = tiny.save_pair(tmp_path, "a", "b")
    items = [{"question": "one?", "answer": ["one"]}, {"question": "two and two?", "answer": "four"}]
    data, head = written(*items)
    results = tmp_path / "results.jsonl"
    prompts = [item.prompt for item in script.SHORT.read(data, head, 5).items]
    assert prompts[1].endswith("Answer: nine\n\nQuestion: two and two?\nAnswer:")

    options = ["--results", results, "--short-answers", data, head, "--lengths", 1, 2, "--models", *members]
    monkeypatch.setattr(script, "NUM_TIMED_TOKENS", 4)
    monkeypatch.setattr("sys.argv", ["span_lengths.py", *map(str, options)])
    script.main()
    points = script.read_points(results)
    assert [point.get("member", point.get("span_length")) for point in points] == ["a", "b", 1, 2] * 2
    assert all(point["milliseconds"] > 0 for point in points[:4])
    assert all(point["of"] == 2 for point in points[4:])
    script.main()
    assert script.read_points(results) == points
    assert len(capsys.readouterr().out.splitlines()) == 16

    pytest.importorskip("matplotlib")
    run_script(SCRIPT, ["--results", results, "--plot", tmp_path / "plot.svg"], monkeypatch)
    assert "words of a span (L)" in (tmp_path / "plot.svg").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_reasoning_is_measured(script, written, tmp_path, monkeypatch, capsys):
    members = tiny.save_pair(tmp_path, "a", "b")
    data, head = written({"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"})
    monkeypatch.setattr(script, "REASONING", script.REASONING._replace(max_new_tokens=4))
    options = [
        "--results",
        tmp_path / "results.jsonl",
        "--reasoning",
        data,
        head,
        "--lengths",
        1,
        "--models",
        *members,
    ]
    options += ["--num-examples", 1, "--batch-size", 1, "--measures", "quality", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["span_lengths.py", *map(str, options)])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["reasoning, a", "reasoning, b", "reasoning, L = 1"]


def test_without_a_set_and_results_it_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="holds no points: give a set"):
        run_script(SCRIPT, ["--results", tmp_path / "none.jsonl", "--plot", tmp_path / "plot.svg"], monkeypatch)
