"""The benchmarks run, each of their paths once, on tiny members and a CPU; what they print is a table."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

import hf_ensemble
from hf_ensemble.decoding.speculation.draft_length import DraftLength
from tests import tiny
from tests.scripts import ROOT, load_script, options_of, run_script, tables

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:members of this ensemble are on"),
]
FOLDER = ROOT / "examples" / "benchmarks"
SHARED = {"measure", "members", "report", "texts", "turns", "versions_worker"}
TINY = ["--shapes", "tiny", "tiny-qwen", "--device", "cpu"]


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """Folders of two members."""
    return tiny.save_pair(tmp_path_factory.mktemp("members"), "a", "b")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark and gives the tables that it printed."""

    def run_benchmark(name, *arguments):
        run_script(f"examples/benchmarks/{name}.py", arguments, monkeypatch)
        found = tables(capsys.readouterr().out)
        assert all(rows for rows in found)
        return found

    return run_benchmark


def is_number(cell):
    return math.isfinite(float(cell.split(" ")[0]))


def test_every_benchmark_and_every_option_is_run_here():
    # What needs Ray is run where Ray is.
    sources = Path(__file__), ROOT / "tests" / "ray" / "test_benchmark.py"
    source = "".join(path.read_text("utf-8") for path in sources)
    for path in FOLDER.glob("*.py"):
        if path.stem not in SHARED:
            assert f"def test_{path.stem}" in source, path.name
        assert {option for option in options_of(path) if option not in source} == set(), path.name


@pytest.mark.slow
def test_decode(members, run):
    steps, batches = run("decode", "--models", *members, "--at", 8, "--repeats", 1)
    assert [row["method"] for row in steps] == ["unite", "gac"]
    assert [row["batch"] for row in batches] == ["1", "8"] * 2
    assert all(is_number(row["naive, ms"]) for row in steps)
    options = ["--at", 1, 9, "--methods", "mined", "--turns", 2, "--steps", 2, "--skip-naive", "--skip-batch"]
    (steps,) = run("decode", "--models", *members, *options)
    assert [(row["tokens before"], row["naive, ms"]) for row in steps] == [("1", ""), ("9", "")]
    assert all(is_number(row["ratio to sum, median (quartiles)"]) for row in steps)


@pytest.mark.slow
def test_serving(members, run):
    pytest.importorskip("openai")
    options = ["--clients", 3, "--new-tokens", 4]
    (rows,) = run("serving", "--models", *members, "--method", "gac", "--repeats", 1, *options)
    assert [row["clients at once"] for row in rows] == ["1", "3"]
    assert [row["same texts"] for row in rows] == ["3 of 3"] * 2
    assert is_number(rows[1]["times as many"])
    (rows,) = run("serving", "--tokenizers", *members, *TINY, *options)
    assert [row["requests"] for row in rows] == ["3", "3"]


@pytest.mark.slow
def test_json_answers(members, run, tmp_path, monkeypatch):
    for package in ("openai", "xgrammar", "jsonschema"):
        pytest.importorskip(package)
    monkeypatch.setattr(DraftLength, "choose", DraftLength.choose)  # the script puts its own there
    tokenizer = tiny.smol_like()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for part in (tokenizer, tiny.tiny_llama(tokenizer)):
        part.save_pretrained(tmp_path)
    options = ["--models", tmp_path, members[1], "--dtype", "float32", "--answers", 4, "--clients", 2]
    (rows,) = run("json_answers", *options, "--methods", "gac", "--draft-length", 2, "--cut", 3)
    assert [(row["method"], row["drafts"], row["cut and say so"]) for row in rows] == [
        ("gac", "no", "2 of 2"),
        ("gac", "yes", ""),
    ]
    for row in rows:
        assert row["answers"] == row["ended by themselves"] == row["parsed"] == row["fit"] == "4"


@pytest.mark.slow
def test_deepen(members, run):
    options = ["--models", *members, "--new-tokens", 1, "--rounds", 1, "--device", "cpu"]
    steps, average, support = run("deepen", *options)
    assert len(steps) == 3
    assert len(average) == 5
    assert [row["support"] for row in support] == ["the primary alone", "64", "512", "2048"]
    assert len(run("deepen", *options, "--skip-distances")) == 1


@pytest.mark.slow
def test_deepen_mixing_alone(members, run):
    options = ["--tokenizers", *members, "--width", 16, "--dtype", "float32", "--repeats", 1, "--device", "cpu"]
    (rows,) = run("deepen", *options)
    assert [row["rows"] for row in rows] == ["new", *["new", "half", "kept"] * 2]


@pytest.mark.slow
def test_gates(members, run):
    options = ["--prompt", 8, "--new-tokens", 1, "--repeats", 1]
    for which in (["--models", *members], ["--tokenizers", *members, *TINY]):
        (rows,) = run("gates", *options, *which)
        assert rows[0]["ensembled"] == "0%"
        assert rows[0]["forwards"] == "9 and 0"
        assert rows[-1]["forwards"] == "9 and 9"


@pytest.mark.slow
def test_large_members(members, run, tmp_path):
    """Also after a prompt that is longer than the text which is repeated."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    options = ["--members", "tiny", "tiny-qwen", "--devices", "cpu", "--prompt", 8, "--new-tokens", 2, "--turns", 1]
    options += ["--batches", 2, "--lengths", 300, "--methods", "unite", "gac", "--plot", plot]
    rows, spans = run(
        "large_members", "--tokenizers", *members, *options, "--new-tokens", 12, "--spans", 1, "--beginning", 40
    )
    assert len(spans) == 1
    names = [row["one run, batch 1 unless named"] for row in rows]
    assert [name for name in names if "beginning of 40" in name] == [
        f"first token of 2 rows with one beginning of 40, read {how}" for how in ("once", "by every row")
    ]
    assert names[:2] == ["tiny alone, stock", "tiny, captured step of 1"]
    assert {"unite, batch 1", "gac, batch 2", "unite, prompt 300"} <= set(names)
    assert all(is_number(row["ms a token (quartiles)"]) for row in rows)
    assert plot.stat().st_size > 0


@pytest.mark.slow
def test_large_members_print_what_was_measured_in_time(members, monkeypatch, capsys):
    """Here nothing was. The weights are quantised before."""
    script, quantised = load_script("examples/benchmarks/large_members.py", monkeypatch), []
    monkeypatch.setattr(script, "quantise", lambda model, *args: quantised.append(args))
    options = ["--tokenizers", *members, "--members", "tiny", "tiny-qwen", "--devices", "cpu", "--methods", "gac"]
    options += ["--prompt", "8", "--new-tokens", "2", "--batches", "1", "--seconds", "-1", "--weights", "torchao-int8"]
    monkeypatch.setattr(sys, "argv", ["large_members.py", *map(str, options)])
    with pytest.raises(SystemExit, match="these failed: tiny alone, stock"):
        script.main()
    assert quantised == [("torchao-int8", "cpu")] * 2
    rows, *_ = tables(capsys.readouterr().out)
    assert {row["ms a token (quartiles)"] for row in rows[:-4]} == {"no time was left"}


def test_large_members_go_on_where_one_way_fails(monkeypatch):
    def fail():
        raise RuntimeError("no room\nfor this")

    script = load_script("examples/benchmarks/large_members.py", monkeypatch)
    seconds, failed = script.take_turns({"wide": fail, "narrow": lambda: 1.0}, turns=2)
    assert seconds == {"wide": [], "narrow": [1.0, 1.0]}
    assert failed == {"wide": "RuntimeError: no room"}
    seconds, failed = script.take_turns({"wide": fail, "narrow": lambda: 1.0}, turns=2, most_seconds=-1)
    assert failed == dict.fromkeys(seconds, "no time was left")


@pytest.mark.slow
def test_speculation_and_replayed_drafts(members, run, tmp_path, monkeypatch):
    for owner, name in ((DraftLength, "choose"), (hf_ensemble.modes.drafts, "SpeculativeDecoder")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the scripts put their own there
    options = ["--members", *members, "--prompts", "The cat", "--new-tokens", 8]
    (rows,) = run("speculation", *options, "--methods", "gac", "--device", "cpu", "--dtype", "bfloat16")
    assert [row["drafts"] for row in rows] == ["none", "ngram", "a", "b", "auto"]
    acceptance = tmp_path / "acceptance.json"
    (rows,) = run("speculation", *options, "--draft-length", 2, "--save-acceptance", acceptance)
    assert len(rows) == 10
    assert {row["same texts"] for row in rows} == {"", "1 of 1"}
    assert {record["speculation"] for record in json.loads(acceptance.read_text())} == {"ngram", "a", "b", "auto"}

    (rows,) = run("speculation", *options, "--methods", "gac", "--drafts", "auto", "--turns", 2)
    assert [(row["drafts"], row["same texts"]) for row in rows] == [("none", ""), ("auto", "2 of 2")]
    assert is_number(rows[1]["ratio of a call, median (quartiles)"])

    options = [acceptance, "--tokenizer", members[0], "--members", "tiny", "tiny-qwen", "--device", "cpu"]
    options += ["--prompt", 8, "--new-tokens", 4, "--turns", 1]
    (rows,) = run("replayed_drafts", *options)
    assert [row["method"] for row in rows] == ["unite", "gac"]
    (rows,) = run("replayed_drafts", *options, "--drafter", "b", "--methods", "gac")
    assert len(rows) == 1
    with pytest.raises(SystemExit, match="no kept draft of a member for 'mined'"):
        run("replayed_drafts", *options, "--methods", "mined")


def test_replayed_drafts_are_of_the_drafter_asked_for(monkeypatch, tmp_path):
    """What comes after a draft's first wrong entry was never judged; look-ups in the text are of no member."""
    rounds = [["a", 3, 1], ["a", 2, 2], ["ngram", 2, 2], [None, 0, 0]]
    records = [{"method": "gac", "speculation": name, "rounds": rounds} for name in ("a", "auto")]
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps(records), "utf-8")
    script = load_script("examples/benchmarks/replayed_drafts.py", monkeypatch)
    assert script.outcomes(path, "gac", "a") == script.outcomes(path, "gac", None) == [True, False, True, True]
    assert script.outcomes(path, "gac", "b") == script.outcomes(path, "unite", "a") == []


@pytest.mark.slow
def test_score(members, run):
    options = ["--models", *members, "--tokens", 12, "--repeats", 1]
    (rows,) = run("score", *options, "--naive-tokens", 2)
    assert [row["method"] for row in rows] == ["gac", "unite"]
    (row,) = run("score", *options, "--methods", "gac")[0]
    assert float(row["difference"]) < 1e-3


@pytest.mark.slow
def test_spans(members, run):
    options = ["--lengths", 1, 2, "--new-tokens", 24, "--repeats", 1]
    (rows,) = run("spans", *options, "--models", *members, "--naive-tokens", 24)
    assert [row["L"] for row in rows] == ["1", "2"]
    assert all(is_number(row["naive, ms"]) for row in rows)
    (rows,) = run("spans", *options, "--tokenizers", *members, *TINY)
    assert [row["agreed"] for row in rows] == ["0%", "0%"]
    with pytest.raises(SystemExit, match="within the first span of 2 words"):
        run("spans", "--models", *members, "--new-tokens", 1)


@pytest.mark.slow
def test_vocabulary(members, run, monkeypatch, capsys):
    script = load_script("examples/benchmarks/vocabulary.py", monkeypatch)
    monkeypatch.setattr(script, "models_or_demo", lambda models: members)
    monkeypatch.delenv("HF_ENSEMBLE_NPM_TOKENIZERS", raising=False)
    assert len(script.default_members()) == 1
    monkeypatch.setenv("HF_ENSEMBLE_NPM_TOKENIZERS", "npm")
    assert len(script.default_members()) == 3
    measured = script.measure(members)
    assert measured["shared"] == 363

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for limit, end in ((math.inf, ""), (0.0, "over the limit")):
        monkeypatch.setattr(script, "MAX_DISK_SECONDS", limit)
        monkeypatch.setattr(script, "MAX_COLD_SECONDS", math.inf)
        monkeypatch.setattr("sys.argv", ["vocabulary.py", "--members", *members])
        capsys.readouterr()
        if end:
            monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: Answer(json.dumps(measured)))
            with pytest.raises(SystemExit, match="Limits"):
                script.main()
        else:
            script.main()
        ((row,),) = tables(capsys.readouterr().out)
        assert row["shared"] == "363"
        assert row[""] == end


class Answer:
    def __init__(self, stdout):
        self.stdout = stdout


@pytest.mark.slow
def test_versions(members, run, monkeypatch, capsys):
    """This version beside itself: whatever the times are, the texts are equal."""
    script = load_script("examples/benchmarks/versions.py", monkeypatch)
    monkeypatch.setattr(script, "LIMIT", math.inf)
    options = ["--pairs", 2, "--new-tokens", 2, "--threads", 1, "--old", ROOT, "--new", ROOT]
    cases = ["gac", "ngram", "spans"]
    options += ["--tokenizers", *members, *TINY, "--cases", *cases]
    monkeypatch.setattr("sys.argv", ["versions.py", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    output = capsys.readouterr().out
    (rows,) = tables(output)
    assert [row["case"] for row in rows] == cases
    assert {row["texts"] for row in rows} == {"equal"}
    assert {row[""] for row in rows} == {"passes"}
    assert "all cases pass" in output


@pytest.mark.slow
def test_versions_count_no_kernels_on_a_cpu(members, monkeypatch):
    script = load_script("examples/benchmarks/versions_worker.py", monkeypatch)
    runner = script.Runner(argparse.Namespace(models=members, tokenizers=None, shapes=[], device="cpu"))
    assert runner.run("gac", new_tokens=2, profile=True) == {"seconds": {"kernels": 0.0}, "num_kernels": 0}


class Recorded:
    """A version whose calls cost what a list says."""

    has_gpu = False

    def __init__(self, seconds, ids=(1, 2), mib=100.0):
        self.seconds, self.ids, self.mib = iter([0.0, 0.0, *seconds]), list(ids), mib

    def run(self, **asked):
        return {"ids": self.ids, "seconds": {"processor": next(self.seconds)}, "mib": self.mib}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (Recorded([1.01] * 20), "passes"),
        (Recorded([1.1] * 14 + [1.0] * 6), "passes"),  # the sixth of 20 is within the interval of the median
        (Recorded([1.1] * 15 + [1.0] * 5), "fails: slower"),
        (Recorded([1.0] * 20, ids=[1, 3]), "fails: unequal"),
        (Recorded([1.0] * 20, mib=103.0), "fails: more memory"),
        (Recorded([1.1] * 20, ids=[1, 3], mib=103.0), "fails: slower, more memory, unequal"),
    ],
)
def test_versions_pass_by_time_memory_and_texts(new, verdict, monkeypatch, capsys):
    script = load_script("examples/benchmarks/versions.py", monkeypatch)
    print("| case | measure | ratio | old | new | old, MiB | new, MiB | texts | verdict |")
    passes = script.compare(Recorded([1.0] * 20), new, "gac", new_tokens=2, pairs=20, progress=lambda: None)
    ((row,),) = tables(capsys.readouterr().out)
    assert row["verdict"] == verdict
    assert passes == (verdict == "passes")


@pytest.mark.parametrize(("count", "lowest"), [(20, 5), (12, 2), (6, 0), (5, 0), (1, 0)])
def test_versions_give_the_interval_of_a_median_by_order(count, lowest, monkeypatch):
    script = load_script("examples/benchmarks/versions.py", monkeypatch)
    assert script.median_interval(range(count)) == (lowest, count - 1 - lowest)


def test_answers(members, run):
    options = [
        "--models",
        *members,
        "--prompts",
        2,
        "--samples",
        2,
        "--tokens",
        3,
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    writing, choosing = run("answers", *options)
    assert [row["writing"] for row in writing] == ["a", "b"]
    assert len(choosing) == 4
    assert all(is_number(row["share, %"]) and row["candidates a prompt"] == "4" for row in choosing)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(members, run):
    pytest.importorskip("peft")
    options = ["--models", members[0], "--adapters", 2, "--prompt", 8, "--new-tokens", 4, "--repeats", 1]
    (rows,) = run("adapters", *options, "--batches", 1)
    assert [row["members"] for row in rows] == ["weights shared", "weights of their own"]
    assert all(row["same text"] == "yes" and is_number(row["ms a token"]) for row in rows)
    shared, own = (float(row["weights, MB"]) for row in rows)
    assert shared < 0.8 * own


@pytest.mark.slow
def test_quantized(members, run):
    (rows,) = run(
        "quantized", "--models", *members, "--kinds", "float32", "int8", "--new-tokens", 4, "--method", "gac"
    )
    assert [row["weights"] for row in rows] == ["float32", "int8"]
    assert rows[0]["equal texts"] == "6 of 6"
    assert float(rows[1]["weights, MB"]) <= float(rows[0]["weights, MB"])
    assert is_number(rows[0]["bits per byte"])
