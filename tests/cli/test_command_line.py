"""What every subcommand has: help with examples that run, errors in one line, results that are whole."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_ensemble import EnsembleForCausalLM, cli
from hf_ensemble.cli.parsers import build_parser
from hf_ensemble.config import METHODS

# Random members write anything.
pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")

SUBCOMMANDS = build_parser()._subparsers._group_actions[0].choices
ROOT = Path(__file__).resolve().parents[2]
OURS = [name for name in SUBCOMMANDS if name != "eval"]  # its tests run its examples
BOTH = ["--members", "model-a", "model-b"]


@pytest.fixture(scope="module")
def pair(member_folder):
    return EnsembleForCausalLM.from_pretrained([member_folder / "model-a", member_folder / "model-b"])


@pytest.fixture
def files(here, tmp_path, monkeypatch):
    """A working folder of links to the members, with the files that examples name."""
    for path in here.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "prompts.txt").write_text("The cat\n\nA dog runs\n", "utf-8")
    examples = [json.dumps({"prompt": f"The {n}", "reference": ["cat", "dog"]}) for n in range(20)]
    (tmp_path / "dev.jsonl").write_text("\n".join(examples), "utf-8")
    (tmp_path / "a.jsonl").write_text('{"prompt": "The", "text": "a cat"}\n', "utf-8")
    (tmp_path / "b.jsonl").write_text('"a dog"\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examples(name):
    lines = [line.strip() for line in SUBCOMMANDS[name].epilog.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("hf-ensemble ")]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_has_examples(name):
    assert len(examples(name)) > 1


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] * (n > 0 or name == "advise"))  # quick is the first of each
        for name in OURS
        for n, line in enumerate(examples(name))
    ],
)
def test_examples_of_the_help_run(line, files, monkeypatch, capsys):
    argv = shlex.split(line)[1:]
    served = []
    if argv[0] == "serve":
        serving = pytest.importorskip("hf_ensemble.serving")
        monkeypatch.setenv("MY_KEY", "secret")
        monkeypatch.setattr(serving, "serve", lambda *args, **options: served.append(args))
    if argv[0] == "chat":
        lines = iter(["Hi", "/exit"])
        monkeypatch.setattr("builtins.input", lambda _: next(lines))
    # Random members do not end their texts.
    if argv[0] in ("generate", "chat", "compare") and "--max-new-tokens" not in argv:
        argv = [*argv, "--max-new-tokens", "4"]
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert capsys.readouterr().out or served or "--output" in argv


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in SUBCOMMANDS)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("", 2, "COMMAND"),
        ("nonsense", 2, "'nonsense'"),
        ("generate Hi", 2, "--members.*see `hf-ensemble generate --help`"),
        (
            "generate Hi --members model-a model-b --method nonsense",
            2,
            "unknown method 'nonsense'. Known methods: deepen",
        ),
        ("generate Hi --members model-a model-b --option top_k=5", 2, "needs `--method`"),
        ("generate Hi --members model-a model-b --method unite --option top_k", 2, "has to be KEY=VALUE"),
        ("generate Hi --members model-a model-b --method unite --option k=5", 2, "no option 'k'. Options: top_k"),
        ("generate Hi --members model-a model-b --method unite --option top_k=x", 2, "an integer, but is 'x'"),
        ("generate Hi --members model-a model-b --method unite --option top_k=0", 2, "positive integer, but is 0"),
        ("generate Hi --members model-a model-b --method gac --option space=flat", 2, "linear or log, but is 'flat'"),
        ("generate Hi --members model-a model-b --dtype float32 float32 float32", 2, "got 3 for 2 members"),
        ("generate Hi --members model-a model-b --max-new-tokens 0", 2, "positive integer"),
        ("generate Hi --members model-a model-b --system Hello", 2, "needs `--chat`"),
        ("generate Hi --members model-a model-b --file prompts.txt", 2, "not both"),
        ("generate '' --members model-a model-b", 2, "empty"),
        ("generate --members model-a model-b --file nowhere.txt", 1, "nowhere.txt"),
        ("generate Hi --members model-a ./nowhere", 1, "there is no folder './nowhere'"),
        ("generate Hi --members model-a model-x", 1, "model-x.*no folder 'model-x' here"),
        ("generate Hi --members model-a model-b --weights 1", 1, "got 1 for 2 members"),
        ("generate Hi --members model-a model-b --output .", 1, "not the name of a file"),
        ("generate Hi --members model-a model-b --output ''", 1, "not the name of a file"),
        ("generate Hi --members model-a model-b --set guidance_scale=2", 1, "guidance_scale"),
        ("generate Hi --members model-a model-b --set nonsense=2", 1, "nonsense.*--traceback"),
        ("compare Hi --members model-a model-b --set eos_token_id=5", 1, "`eos_token_id` cannot be used here"),
        ("select --members model-a model-b", 2, "either `--scores`, or `--examples`"),
        ("select --members model-a model-b --examples dev.jsonl", 2, "need each other"),
        ("select --members model-a model-b --scores 1 2 --save model-a", 2, "exists already"),
        ("select --members model-a model-b --scores 50 40 --responses prompts.txt", 1, "line 1 of prompts.txt"),
        ("select --members model-a model-b --scores 50", 1, "got 1 for 2"),
    ],
)
def test_an_error_is_one_line_that_names_the_remedy(line, code, message, files, capsys):
    try:
        found = cli.main(shlex.split(line))
    except SystemExit as exit_:
        found = exit_.code
    lines = [text for text in capsys.readouterr().err.splitlines() if text.startswith("hf-ensemble")]
    assert found == code
    assert len(lines) == 1
    assert lines[0].startswith("hf-ensemble: error: ")
    assert re.search(message, lines[0])


def test_lines_end_at_newlines_only(files, capsys):
    """JSON and prompts may hold the other characters at which Python splits lines."""
    text = "a\u2028b\x85c\x0c"
    Path("a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", "utf-8")
    assert cli.main(["select", *BOTH, "--scores", "50", "45", "--responses", "a.jsonl", "a.jsonl"]) == 0
    Path("lines.txt").write_text(f"{text}\nThe\n", "utf-8")
    capsys.readouterr()
    assert cli.main(["generate", *BOTH, "--file", "lines.txt", "--lines", "--json", "--max-new-tokens", "1"]) == 0
    printed = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert [json.loads(line)["prompt"] for line in printed] == [text, "The"]


def test_what_is_no_plain_file_is_written_to_not_replaced(files):
    os.mkfifo("pipe")
    Path("real.txt").write_text("old", "utf-8")
    Path("link.txt").symlink_to("real.txt")
    end = os.open("pipe", os.O_RDWR | os.O_NONBLOCK)
    for name in ("pipe", "link.txt"):
        assert cli.main(["generate", "The", *BOTH, "--max-new-tokens", "1", "--output", name]) == 0
    assert Path("pipe").is_fifo()
    assert Path("link.txt").is_symlink()
    assert Path("real.txt").read_bytes() == os.read(end, 100) != b""
    os.close(end)


def test_traceback_shows_all(files, capsys):
    assert cli.main(["generate", "Hi", "--members", "./nowhere", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_texts_alone_are_on_stdout(here, pair, capsys, monkeypatch):
    inputs = pair.tokenizer("The cat", return_tensors="pt")
    ids = pair.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    text = pair.tokenizer.decode(ids, skip_special_tokens=True)
    assert cli.main(["generate", "The cat", *BOTH, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    with sys.stdin:
        assert cli.main(["generate", *BOTH]) == 2


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_prompt_after_the_members_is_none_and_the_error_says_where_it_stands(
    command, is_terminal, here, capsys, monkeypatch
):
    stdin = io.StringIO("")
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main([command, *BOTH, "The cat"]) == 2
    assert "there is no prompt: give one as an argument before `--members`" in capsys.readouterr().err


def test_a_saved_ensemble_keeps_its_method_unless_told_otherwise(files, capsys):
    def write(*arguments):
        assert cli.main(["generate", "--file", "prompts.txt", "--lines", "--max-new-tokens", "6", *arguments]) == 0
        return capsys.readouterr().out

    saved = write("--members", "my-ensemble")
    assert saved == write(*BOTH, "--method", "gac")
    assert len(saved.splitlines()) >= 2
    given = write("--members", "my-ensemble", "--method", "gac", "--weights", "0", "1")
    assert given != saved


def test_a_seed_repeats_and_leaves_the_random_state(here, capsys):
    import torch

    before = torch.random.get_rng_state()
    texts = []
    for seed in ("1", "1", "2"):
        argv = ["generate", "The cat", *BOTH, "--sample", "--seed", seed, "--max-new-tokens", "8"]
        assert cli.main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
def test_options_have_the_types_of_the_method(method):
    from hf_ensemble.cli.arguments import read_method

    given = {"threshold": "none", "top_k": "3", "space": "log", "alpha": "0.5", "skip_on_agreement": "true"}
    given |= {"num_candidates": "3", "methods": "gac+sweetspan", "extract": "x+", "model": "y"}
    given |= {"support": "none", "learning_rate": "0.1", "max_span_tokens": "64", "filter_ratio": "5"}
    fields = METHODS[method].__dataclass_fields__
    pairs = [f"{key}={value}" for key, value in given.items() if key in fields]
    args = SUBCOMMANDS["generate"].parse_args(
        ["x", *BOTH, "--method", method, *[p for x in pairs for p in ("--option", x)]]
    )
    values = {"none": None, "3": 3, "0.5": 0.5, "true": True, "0.1": 0.1, "64": 64, "5": 5.0, "log": "log"}
    values |= {"gac+sweetspan": ("gac", "sweetspan"), "x+": "x+", "y": "y"}
    expected = METHODS[method](**{key: values[value] for key, value in given.items() if key in fields})
    assert read_method(args) == expected


def test_compare_shows_each_alone_and_the_ensemble(here, pair, capsys):
    assert cli.main(["compare", "The cat", *BOTH, "--max-new-tokens", "6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for model, tokenizer, found in zip(
        [*pair.members, pair], [*pair.tokenizers, pair.tokenizer], result["texts"], strict=True
    ):
        inputs = tokenizer("The cat", return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert found["text"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert found["num_tokens"] == len(ids)
        assert found["seconds"] > 0
    assert [text["name"] for text in result["texts"]] == ["model-a", "model-b", "ensemble, unite"]


def test_inspect_gives_the_report(here, pair, capsys):
    report = pair.compatibility()
    assert cli.main(["inspect", *BOTH]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert cli.main(["inspect", *BOTH, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_dict()))


def test_select_saves_the_chosen_with_the_best_first(files, capsys):
    assert cli.main(["select", *BOTH, "--scores", "50", "55", "--save", "new"]) == 0
    assert [member.name for member in EnsembleForCausalLM.from_pretrained("new").member_views] == [
        "model-b",
        "model-a",
    ]
    assert 'from_pretrained("new")' in (files / "new" / "README.md").read_text("utf-8")
    argv = ["select", *BOTH, "--examples", "dev.jsonl", "--metric", "contains", "--max-new-tokens", "4", "--json"]
    assert cli.main([*argv, "--max-members", "1", "--save", "one"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["is_taken"] for row in rows] == [True, False]
    assert len(EnsembleForCausalLM.from_pretrained("one").member_views) == 1


def test_select_reads_texts_with_any_line_separator_in_them(files, capsys):
    (files / "a.jsonl").write_text('{"text": "a\u2028cat\u0085"}\n', "utf-8")
    assert cli.main(["select", *BOTH, "--scores", "50", "55", "--responses", "a.jsonl", "b.jsonl"]) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_is_stopped_leaves_nothing_half_written(error, files, capsys, monkeypatch):
    def stop(*args, **options):
        raise error

    (files / "texts.jsonl").write_text("old", "utf-8")
    before = sorted(path.name for path in files.iterdir())
    code = 130 if error is KeyboardInterrupt else 1
    with monkeypatch.context() as patch:
        patch.setattr(EnsembleForCausalLM, "generate", stop)
        assert cli.main(["generate", "The cat", *BOTH, "--output", "texts.jsonl"]) == code
    with monkeypatch.context() as patch:
        patch.setattr(EnsembleForCausalLM, "save_pretrained", stop)
        assert cli.main(["select", *BOTH, "--scores", "50", "55", "--save", "new"]) == code
    assert sorted(path.name for path in files.iterdir()) == before
    assert (files / "texts.jsonl").read_text("utf-8") == "old"


@pytest.mark.slow
def test_ctrl_c_ends_the_program_with_130(files):
    # One after the other, which takes minutes, wherever the texts end.
    (files / "many.txt").write_text("The cat\n" * 100_000, "utf-8")
    argv = [
        "generate",
        "--file",
        "many.txt",
        "--lines",
        "--batch-size",
        "1",
        "--members",
        "model-a",
        "--output",
        "texts.txt",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "hf_ensemble.cli", *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell runs in the background ignores the signal, and so would what is started from there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not list(files.glob(".texts.txt.*")) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert not list(files.glob("*texts.txt*"))
