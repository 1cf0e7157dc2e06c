"""`hf-ensemble advise` on tiny members."""

import json

import pytest

from hf_ensemble import EnsembleForCausalLM, cli
from tests import tiny

MEMBERS = ["--members", "model-a", "model-b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise")
    tiny.save_pair(folder, "model-a", "model-b")
    texts = [{"prompt": "The cat", "text": f" sat on {n} mats and a hat."} for n in range(24)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)), "utf-8")
    questions = [{"prompt": f"{n} + {n} =", "reference": f"{2 * n}"} for n in range(24)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)), "utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def run(*arguments):
    return cli.main(["advise", *map(str, arguments)])


def test_what_pays_is_saved(tmp_path, capsys):
    """Two random members, mixed, are nearer to random texts than either."""
    arguments = [*MEMBERS, "--data", "texts.jsonl", "--batch-size", 24, "--state-folder", tmp_path / "state"]
    assert run(*arguments, "--page", tmp_path / "page.html", "--save", tmp_path / "saved") == 0
    out, err = capsys.readouterr()
    assert out.startswith("Does it pay? Yes: ")
    assert f"saved: {tmp_path / 'saved'}" in err
    assert "Does an ensemble pay?" in (tmp_path / "page.html").read_text("utf-8")
    saved = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    assert len(saved.members) == 2
    assert saved.config.method.name in out.splitlines()[0]
    assert run(*arguments, "--save", tmp_path / "saved") == 2
    assert "exists already" in capsys.readouterr().err
    assert run(*arguments, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["pays"] is True


def test_what_does_not_pay_is_not_saved(tmp_path, capsys):
    arguments = [*MEMBERS, "--data", "questions.jsonl", "--max-new-tokens", 2, "--batch-size", 24]
    assert run(*arguments, "--methods", "gac", "unite:top_k=5", "--save", tmp_path / "saved") == 0
    out, err = capsys.readouterr()
    assert out.startswith("Does it pay? No: ")
    assert "unite:top_k=5@0.5,0.5" in out
    assert "nothing is saved" in err
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "texts.jsonl", "--methods", "gac@0.5,0.5"], "takes no weights"),
        (["--data", "texts.jsonl", "a.txt", "b.txt"], "one file or two"),
        (["--data", "texts.jsonl", "--page", "page.txt"], "has to end in .html"),
        (["--data", "texts.jsonl", "--limit", "2"], "2 examples, too few to compare anything"),
        (["--data", "texts.jsonl", "--save", "texts.jsonl/inside"], "is not a folder"),
        (["--data", "texts.jsonl", "--output", "nowhere/advice.json"], "the folder does not exist"),
        (["--data", "texts.jsonl", "--state-folder", "texts.jsonl"], "cannot be created"),
        (["--data", "texts.jsonl", "--minutes", "0"], "`minutes` has to be a positive number"),
    ],
)
def test_an_error_is_one_line(arguments, message, capsys):
    assert run(*MEMBERS, *arguments) in (1, 2)
    assert message in capsys.readouterr().err
