"""`hf-ensemble eval` on tiny members."""

import json
import re
import shlex

import pytest

from hf_ensemble import ConfigurationError, EnsembleError, SweetSpanConfig, UniteConfig
from hf_ensemble.cli import eval as command
from hf_ensemble.cli.arguments import read_configuration
from hf_ensemble.cli.parsers import UsageError, build_parser
from tests import tiny

MEMBERS = ["--members", "model-a", "model-b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    tiny.save_pair(folder, "model-a", "model-b")
    questions = [{"question": "The capital?", "answer": ["Paris"]}, {"question": "The answer?", "answer": "42"}]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)), "utf-8")
    choice = {"question": "The cat sat on", "A": "the mat", "B": "Berlin", "answer": "A"}
    (folder / "choices.jsonl").write_text(json.dumps(choice), "utf-8")
    (folder / "worked.txt").write_text("Question: The fox?\nAnswer: brown", "utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def parse(arguments):
    return build_parser().parse_args(["eval", *map(str, arguments)])


def run(arguments):
    command.run(parse(arguments))


def test_a_table_is_printed_and_written_and_work_goes_on(tmp_path, capsys):
    table, state = tmp_path / "table.md", tmp_path / "state.jsonl"
    arguments = [*MEMBERS, "--data", "questions.jsonl", "worked.txt", "--measures", "exact_match"]
    arguments += ["--max-new-tokens", 3, "--state-file", state, "--table", table]
    with pytest.raises(EnsembleError, match="run the same command again to continue"):
        run([*arguments, "--time-limit", 1e-9])
    assert not state.exists()
    run([*arguments, "--method", "gac", "--weights", 1, 0, "--also", "unite:top_k=5@0.7,0.3"])
    assert "| gac |" in table.read_text("utf-8")
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [row.split()[3] for row in rows] == ["model-a", "model-b", "gac", "unite:top_k=5@0.7,0.3"]
    assert len(state.read_text("utf-8").splitlines()) == 4


def test_responses_are_written_with_what_they_are_worth(tmp_path, capsys):
    pytest.importorskip("sacrebleu")
    responses = tmp_path / "responses.jsonl"
    arguments = [*MEMBERS, "--data", "questions.jsonl", "--data", "choices.jsonl", "--max-new-tokens", 3]
    run([*arguments, "--measures", "F1", "chrF", "BLEU", "accuracy", "--method", "gac", "--responses", responses])
    records = [json.loads(line) for line in responses.read_text("utf-8").splitlines()]
    assert [(record["system"], record["place"]) for record in records] == [
        (name, n) for name in ("model-a", "model-b", "gac") for n in range(2)
    ]
    assert all(list(record["values"]) == ["F1", "chrF", "BLEU"] for record in records)
    assert "chrF" in capsys.readouterr().out


@pytest.mark.slow
def test_the_examples_of_its_help_run(capsys):
    pytest.importorskip("matplotlib")
    epilog = build_parser()._subparsers._group_actions[0].choices["eval"].epilog
    lines = re.sub(r" \\\n +", " ", epilog).splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("  hf-ensemble eval")]
    assert len(commands) == 3
    for arguments in commands:
        run([*arguments, "--max-new-tokens", "2"])
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "method", "weights"),
    [
        ("unite", UniteConfig(), None),
        ("unite:top_k=5,threshold=0.5@0.7,0.3", UniteConfig(5, 0.5), [0.7, 0.3]),
        ("sweetspan:score=bits_per_byte", SweetSpanConfig(score="bits_per_byte"), None),
    ],
)
def test_configurations_are_read(text, method, weights):
    assert read_configuration(text) == (method, weights)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--also", "unit"], "unknown method 'unit'"),
        (["--also", "gac:eta=1"], "method 'gac' has no option 'eta'"),
        (["--also", "gac@x"], "the weights in 'gac@x' are not numbers"),
        (["--table", "table.doc"], "has to end in .md"),
        (["--plot", "plot.md"], "has to end in .svg"),
        (["--responses", "responses.txt"], "has to end in .jsonl"),
        (["--responses", "none/responses.jsonl"], "the folder does not exist"),
        (["--responses", "r.jsonl", "--measures", "accuracy"], "`--responses` needs a measure of written text"),
        (["--data", "none.jsonl"], "none.jsonl cannot be read"),
        (["--data", "a", "b", "c"], "takes one file or two, but got 3"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_loaded(arguments, message):
    with pytest.raises((ConfigurationError, UsageError), match=message):
        run(["--members", "none", "--data", "questions.jsonl", *arguments])


def test_the_ensemble_and_its_method_with_other_options_are_two_rows(capsys):
    run(
        [
            *MEMBERS,
            "--data",
            "choices.jsonl",
            "--method",
            "unite",
            "--option",
            "top_k=5",
            "--also",
            "unite",
            "--no-members",
        ]
    )
    names = {line.split("  ")[2].strip() for line in capsys.readouterr().out.splitlines()[1:]}
    assert {"unite", "unite:top_k=5, as loaded"} <= names
