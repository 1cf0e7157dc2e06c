"""The example scripts run, each of their paths once, on tiny members."""

import ast
import json
from pathlib import Path

import pytest

from tests import tiny
from tests.html_page import Page, check_loads_nothing, page_in_notebook
from tests.scripts import ROOT, load_script, options_of, run_script

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

ELSEWHERE = {"demo_models": "tests/run.sh", "span_lengths": "tests/test_span_lengths.py"}


@pytest.fixture
def members(tmp_path):
    """Folders of two members."""
    return tiny.save_pair(tmp_path, "a", "b")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example and gives the lines that it printed."""

    def run_example(name, *arguments):
        run_script(f"examples/{name}.py", arguments, monkeypatch)
        return capsys.readouterr().out.splitlines()

    return run_example


def texts_of(lines):
    """What stands after the names in indented lines."""
    return [line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")]


def test_every_example_and_every_option_is_run():
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]:
        source = (ROOT / ELSEWHERE.get(path.stem, "tests/test_examples.py")).read_text("utf-8")
        assert path.stem in ELSEWHERE or f"def test_{path.stem}" in source, path.name
        assert {option for option in options_of(path) if option not in source} == set(), path.name


@pytest.mark.slow
def test_quickstart(members, run):
    lines = run("quickstart", "--models", *members)
    names = [line[2:26].strip() for line in lines if line.startswith("  ")]
    assert names[:-2] == ["a", "b", "both, unite", "both, gac"] * 3
    assert [line.strip() for line in lines if line.strip() in members] == members


@pytest.mark.slow
def test_int8_members(members, run):
    (text,) = run("int8_members", "--models", *members, "--prompt", "The capital")
    assert text.startswith("The capital")


@pytest.mark.slow
def test_contrastive_decoding(members, run):
    """Without any contrast it is the expert."""
    options = ["--expert", members[0], "--amateur", members[1], "--new-tokens", 6]
    texts = texts_of(run("contrastive_decoding", *options, "--strength", 0))
    assert texts[0] == texts[1]
    moved = texts_of(run("contrastive_decoding", *options, "--strength", 3, "--alpha", 0.1))
    assert moved[0] == texts[0] != moved[1]


def test_proxy_tuning(members, run):
    """Without an untuned twin nothing moves, nor without strength."""
    options = ["--base", members[0], "--tuned", members[1], "--new-tokens", 6]
    for rest in ([], ["--untuned", members[0], "--strength", 0]):
        texts = texts_of(run("proxy_tuning", *options, *rest))
        assert texts[0::2] == texts[1::2]


@pytest.mark.slow
def test_select_and_tune(members, run, tmp_path):
    """Whoever writes an `e` has answered."""
    file, state = tmp_path / "dev.jsonl", tmp_path / "state.jsonl"
    lines = [{"prompt": prompt, "answers": ["e", "a", " "]} for prompt in ("The cat", "Once upon a time", "The king")]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    options = [file, "--models", *members, "--limit", 2]
    output = "\n".join(run("select_and_tune", *options, "--max-gap", 100, "--state-file", state))
    assert "words cut like the primary" in output
    assert output.count("taken ") == 2
    assert "best: UniteConfig(top_k=" in output
    assert len(state.read_text("utf-8").splitlines()) in (2, 4)  # equal scores are uniform weights again


@pytest.mark.slow
def test_select_and_tune_end_where_there_is_nothing_to_tune(members, run, tmp_path, monkeypatch):
    script = load_script("examples/select_and_tune.py", monkeypatch)
    options = {"max_new_tokens": 4, "stop_strings": ["\n"]}
    candidates = script.EnsembleForCausalLM.from_pretrained(members)
    table = script.select_members(candidates, [{"prompt": "The cat", "reference": "?"}], "contains", **options).table
    (own,) = next(row.responses for row in table if row.index == 0)
    file = tmp_path / "dev.jsonl"
    for answer, said in (
        (own, "Only the best candidate was selected"),
        ("none of them", "No member answered anything"),
    ):
        file.write_text(json.dumps({"prompt": "The cat", "answers": [answer]}), "utf-8")
        with pytest.raises(SystemExit, match=said):
            run("select_and_tune", file, "--models", *members, "--max-gap", 0, "--max-new-tokens", 4)


def test_own_utility(members, run):
    """The vectors of equal texts are alike, those of others less."""
    options = ["--models", *members, "--samples", 2, "--new-tokens", 3, "--reader", members[0]]
    lines = [line.split() for line in run("own_utility", *options) if line.startswith("  ")]
    assert [line[0] for line in lines] == ["chrF", "vectors"] * 2
    assert all(0 < float(line[1]) <= 1 + 1e-5 for line in lines[1::2])


@pytest.mark.slow
def test_evaluation_sets(members, run, tmp_path):
    """A row for each member and method; a run that goes on finds everything done."""
    question = {"question": "The capital?", "answer": ["Paris"]}
    choice = {"question": "The cat sat on", "A": "the mat", "B": "Berlin", "answer": "A"}
    for name, record in (("triviaqa_dev", question), ("piqa_dev_a", choice)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record), "utf-8")
    (tmp_path / "triviaqa_prompt.txt").write_text("Question: The fox?\nAnswer: brown", "utf-8")
    state = tmp_path / "state.jsonl"
    options = [tmp_path, "--models", *members, "--sets", "triviaqa", "piqa", "--max-new-tokens", 2]
    options += ["--state-file", state, "--table", tmp_path / "table.md", "--configurations", "GaC", "UniTE"]
    run("evaluation_sets", *options)
    lines = (tmp_path / "table.md").read_text("utf-8").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| a", "| b", "| GaC", "| UniTE"]
    done = state.read_bytes()
    run("evaluation_sets", *options)
    assert state.read_bytes() == done


@pytest.mark.slow
def test_evaluation_sets_stop_in_time_and_go_on(members, monkeypatch, capsys, tmp_path):
    """All configurations, on reasoned answers, whose limit is their own."""
    pytest.importorskip("matplotlib")
    records = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    (tmp_path / "gsm8k_train300.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")
    (tmp_path / "gsm8k_prompt.txt").write_text("Question: 0?\nLet's think step by step\n0", "utf-8")
    script = load_script("examples/evaluation_sets.py", monkeypatch)
    monkeypatch.setitem(script.MAX_NEW_TOKENS, "gsm8k", 2)
    options = [tmp_path, "--models", *members, "--sets", "gsm8k", "--num-examples", 1, "--batch-size", 1]
    options += ["--state-file", tmp_path / "state.jsonl", "--device", "cpu", "--dtype", "bfloat16"]
    monkeypatch.setattr("sys.argv", ["evaluation_sets.py", *map(str, options), "--time-limit", "0.001"])
    assert script.main() == 3
    assert "run the command again to resume" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["evaluation_sets.py", *map(str, options), "--plot", str(tmp_path / "plot.svg")])
    assert script.main() == 0
    output = capsys.readouterr().out
    assert all(name in output for name in script.CONFIGURATIONS)
    assert (tmp_path / "plot.svg").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--method", "sweetspan")])
def test_decisions(options, members, run, tmp_path):
    """Every decision is somebody's, and the page holds the texts."""
    page = tmp_path / "page.html"
    printed = run("decisions", "--models", *members, "--new-tokens", 4, "--output", page, *options)
    lines = [line.split() for line in printed]
    assert [line[0] for line in lines] == ["a:", "b:", "page:"]
    assert sum(int(line[2]) for line in lines[:2]) == int(lines[0][4].rstrip(","))
    assert "The capital of France is" in page.read_text("utf-8")


@pytest.mark.slow
def test_tour(members, monkeypatch):
    """Each cell of the notebook runs, and what it ends with is shown."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names, titles, texts = {}, [], []
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        *lines, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr):
            exec("".join(cell["source"]), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names["models"] = members
            continue
        exec(compile(ast.Module(lines, []), cell["id"], "exec"), names)
        value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
        if not hasattr(value, "_repr_html_"):
            texts.append(str(value))
            continue
        source, _ = page_in_notebook(value._repr_html_())
        check_loads_nothing(source)
        titles.append(next(text for text in Page(source).texts if text.strip()))
    assert titles == ["Ensemble of 2 members", "Decisions", "Answers", "Evaluation"]
    assert texts[0].startswith("The capital of France is")
    assert texts[1].startswith("{' Paris': -")


def test_demo_models_stand_in_for_what_is_not_named(monkeypatch, capsys):
    script = load_script("examples/demo_models.py", monkeypatch)
    monkeypatch.setattr(script, "demo_model_paths", lambda: (Path("smol"), Path("gemma")))
    assert script.models_or_demo(["x", "y", "z"]) == ["x", "y", "z"]
    assert script.models_or_demo(None) == ["smol", "gemma"]
    assert script.models_or_demo([None, "y"]) == ["smol", "y"]
    assert script.models_or_demo(["x", None]) == ["x", "gemma"]


def test_without_demo_models_a_script_ends_with_one_line(monkeypatch):
    script = load_script("examples/demo_models.py", monkeypatch)

    def fail():
        raise script.DemoModelError("not here")

    monkeypatch.setattr(script, "demo_model_paths", fail)
    monkeypatch.setattr("sys.argv", ["folder/quickstart.py"])
    assert script.models_or_demo(["x", "y"]) == ["x", "y"]
    with pytest.raises(SystemExit, match=r"^quickstart.py: not here$"):
        script.models_or_demo(None)
