"""The comparisons in `tests/real` that take hours on the real models run, each of their paths once, on tiny ones."""

import contextlib
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny
from tests.completions_server import serving
from tests.scripts import ROOT, load_script, options_of, tables

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """Folders of two members."""
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "a", "b")


@pytest.fixture
def compare(members, monkeypatch, capsys, tmp_path):
    """Runs a comparison twice, of which the second finds everything done, and gives its table."""

    def run_comparison(name, *arguments, **constants):
        script = load_script(f"tests/real/compare_{name}.py", monkeypatch)
        for constant, value in constants.items():
            monkeypatch.setattr(script, constant, value)
        options = [*arguments, "--models", *members, "--state", tmp_path / f"{name}.jsonl", "--device", "cpu"]
        outputs = []
        for _ in range(2):
            monkeypatch.setattr("sys.argv", [f"compare_{name}.py", *map(str, options)])
            assert not script.main()
            outputs.append(capsys.readouterr().out)
        assert outputs[0] == outputs[1]
        (rows,) = tables(outputs[0])
        return rows

    return run_comparison


def test_every_comparison_and_every_option_is_run():
    source = (ROOT / "tests/test_comparisons.py").read_text("utf-8")
    for path in (ROOT / "tests/real").glob("compare_*.py"):
        assert f"def test_{path.stem}" in source, path.name
        assert {option for option in options_of(path) if option not in source} == set(), path.name


@pytest.mark.slow
def test_compare_reference(compare):
    rows = compare("reference", "--tokens", 1, "--only", "a first", "english")
    assert [(row["case"], row["equal"]) for row in rows] == [
        ("unite, a first, english, 1", "True"),
        ("gac, a first, english, 1", "True"),
    ]
    rows = compare("reference", "--tokens", 1, "--only", "gac, b first", "long", NUM_LONG_TOKENS=40)
    assert [(row["case"], row["equal"]) for row in rows[2:]] == [("gac, b first, long, 40", "True")]


@pytest.mark.slow
def test_compare_methods(compare):
    rows = compare("methods", "--tokens", 1, "--prompts", "english", "--only", "a first")
    assert len(rows) == 5
    assert {row["equal"] for row in rows} == {"True"}


@pytest.mark.slow
def test_compare_spans(compare):
    rows = compare("spans", "--words", 1, "--only", "english", "L = 2")
    assert len(rows) == 4
    assert {row["equal"] for row in rows} == {"True"}


@pytest.mark.slow
def test_compare_speculation(compare, tmp_path):
    record = {"question": "The capital?", "answer": ["Paris"]}
    (tmp_path / "nq_dev.jsonl").write_text(json.dumps(record), "utf-8")
    (tmp_path / "nq_prompt.txt").write_text("Question: The fox?\nAnswer: brown", "utf-8")
    options = ["--sets", "nq", "--prompts", 1, "--new-tokens", 4, "--dtype", "float32"]
    options += ["--methods", "gac", "unite", "--speculation", "ngram", "auto", "b"]
    rows = compare("speculation", tmp_path, *options)
    assert [(row["method"], row["drafts"]) for row in rows] == [
        (method, drafts) for method in ("gac", "unite") for drafts in ("ngram", "auto", "b")
    ]
    assert {row["equal"] for row in rows} == {"1"}
    assert len(compare("speculation", tmp_path, *options, "--only", "gac, nq 0")) == 6  # what is done stays


@pytest.mark.slow
def test_compare_served(members, monkeypatch, capsys):
    """Against two small servers in the place of real ones."""
    script = load_script("tests/real/compare_served.py", monkeypatch)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(script, "demo_model_paths", lambda: members)

    @contextlib.contextmanager
    def small_servers(python, folders, dtype):
        assert (python, folders) == ("python-with-vllm", members)
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    serving(
                        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
                        AutoTokenizer.from_pretrained(folder),
                        name=name,
                    )
                ).url
                for name, folder in zip(script.NAMES, folders, strict=True)
            ]

    monkeypatch.setattr(script, "vllm_servers", small_servers)
    options = ["--vllm-python", "python-with-vllm", "--tokens", "3", "--prompts", "1"]
    monkeypatch.setattr("sys.argv", ["compare_served.py", *options, "--dtype", "bfloat16", "--no-times"])
    script.main()
    texts = tables(capsys.readouterr().out)[0]
    assert [(row[""], row["texts"], row["differing, not tied"]) for row in texts] == [
        ("UniTE", "1", "0"),
        ("spans", "1", "0"),
        ("answer", "2", "0"),
    ]
    monkeypatch.setattr("sys.argv", ["compare_served.py", *options])
    script.main()
    times = tables(capsys.readouterr().out)[1]
    assert len(times) == 10
    assert all(float(row["ms a token"]) >= 0 for row in times)
