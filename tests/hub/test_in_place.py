"""Bug bank, J21: a save that is stopped leaves the old ensemble whole, or the new one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import ConfigurationError, EnsembleForCausalLM
from tests import tiny

RENAMES = ("rename", "replace")


class Stopped(BaseException):
    """What no code catches by mistake."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An old and a new ensemble: other weights, another template, another number of files, another method."""
    folder = tmp_path_factory.mktemp("models")
    paths = tiny.save_pair(folder, "a", "b")
    old = EnsembleForCausalLM.from_pretrained(paths, method="gac", weights=[0.25, 0.75])
    old.tokenizer.chat_template = "{{ messages[0].content }}"
    old.generation_config.max_new_tokens = 7
    new = EnsembleForCausalLM.from_pretrained(paths, method="unite", weights=[0.5, 0.5])
    with torch.no_grad():
        new.members[0].get_output_embeddings().weight.mul_(-1)
    return old, new


def save(ensemble, folder, size="1GB", include_members=True):
    ensemble.save_pretrained(folder, include_members=include_members, max_shard_size=size)


def is_same(folder, ensemble, load=EnsembleForCausalLM.from_pretrained):
    """Whether all that lies in a folder is of this ensemble."""
    found = load(folder)
    weights = ((one, other) for one, other in zip(found.parameters(), ensemble.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [
        found.config.method == ensemble.config.method,
        all(torch.equal(one, other) for one, other in weights),
        tokenizer.chat_template == ensemble.tokenizer.chat_template,
        found.generation_config.to_dict() == ensemble.generation_config.to_dict(),
    ]
    AutoModelForCausalLM.from_pretrained(folder / "members" / "a")
    assert len(set(parts)) == 1, parts
    return parts[0]


@pytest.fixture
def stopping(monkeypatch):
    """Stops at one rename, counted from 1; counts them all where it is 0."""
    state = {"at": 0, "count": 0}

    def watched(rename):
        def act(*args, **kwargs):
            state["count"] += 1
            if state["count"] == state["at"]:
                raise Stopped
            return rename(*args, **kwargs)

        return act

    for name in RENAMES:
        monkeypatch.setattr(os, name, watched(getattr(os, name)))

    def start(at):
        state.update(at=at, count=0)
        return state

    return start


@pytest.mark.slow
@pytest.mark.parametrize("load", [EnsembleForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_stopped_at_any_rename_the_old_or_the_new_one_is_whole(load, pair, stopping, tmp_path):
    """J21: In the process that goes on; sometimes the old one, sometimes the new one; then it can be saved again."""
    old, new = pair
    save(old, tmp_path / "count")
    count = stopping(0)
    save(new, tmp_path / "count", "20KB")
    outcomes = []
    for at in range(1, count["count"] + 1):
        folder = tmp_path / str(at)
        stopping(0)
        save(old, folder)
        (folder / "notes.txt").write_text("mine")
        stopping(at)
        with pytest.raises(Stopped):
            save(new, folder, "20KB")
        stopping(0)
        is_new = is_same(folder, new, load)
        assert is_new or is_same(folder, old, load)
        outcomes.append(is_new)
        assert (folder / "notes.txt").read_text() == "mine"
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {True, False}


@pytest.mark.slow
def test_a_process_that_ends_at_any_rename_leaves_one_of_them_whole(pair, tmp_path):
    """J21: Without a chance to clean up; all renames in turn, each in a process of its own that is forked."""
    old, new = pair
    save(old, tmp_path / "old", include_members=False)
    save(new, tmp_path / "new")
    code = f"""
        import os, shutil, warnings
        warnings.simplefilter("ignore")
        from pathlib import Path
        from hf_ensemble import EnsembleForCausalLM

        folder = Path({str(tmp_path)!r})
        old, new = (EnsembleForCausalLM.from_pretrained(folder / name) for name in ("old", "new"))
        old.tokenizer.chat_template = {old.tokenizer.chat_template!r}
        state = [0, 0]

        def watched(rename):
            def act(*args, **kwargs):
                state[1] += 1
                if state[1] == state[0]:
                    os._exit(9)
                return rename(*args, **kwargs)
            return act

        for name in {RENAMES!r}:
            setattr(os, name, watched(getattr(os, name)))
        at = 0
        while True:
            at += 1
            place = folder / f"at-{{at}}"
            state[:] = [0, 0]
            old.save_pretrained(place, include_members=True)
            child = os.fork()
            if not child:
                state[:] = [at, 0]
                new.save_pretrained(place, include_members=True, max_shard_size="20KB")
                os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
                print(at)
                break
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    last = int(done.stdout.split()[-1])
    outcomes = []
    for at in range(1, last):
        is_new = is_same(tmp_path / f"at-{at}", new)
        assert is_new or is_same(tmp_path / f"at-{at}", old)
        outcomes.append(is_new)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {True, False}


@pytest.mark.slow
def test_a_first_save_that_is_stopped_leaves_nothing_or_all(pair, stopping, tmp_path):
    """J21: Where there was no folder."""
    _, new = pair
    count = stopping(0)
    save(new, tmp_path / "count")
    for at in range(1, count["count"] + 1):
        stopping(at)
        with pytest.raises(Stopped):
            save(new, tmp_path / str(at))
        stopping(0)
        assert at == 1 or is_same(tmp_path / str(at), new)
        assert (tmp_path / str(at)).exists() == (at > 1)


def test_the_next_save_finishes_the_one_before(pair, stopping, tmp_path):
    """J21: And then does its own work: the template of the third is there, the members of the second are gone."""
    old, new = pair
    save(old, tmp_path)
    stopping(3)
    with pytest.raises(Stopped):
        save(new, tmp_path, "20KB")
    assert (tmp_path / ".saved").is_dir()
    stopping(0)
    save(old, tmp_path)
    assert is_same(tmp_path, old)


def test_what_cannot_be_finished_is_said(pair, stopping, tmp_path, monkeypatch):
    """J21: Where the folder cannot be written."""
    old, new = pair
    save(old, tmp_path)
    stopping(3)
    with pytest.raises(Stopped):
        save(new, tmp_path)
    stopping(0)

    def refuse(*args):
        raise PermissionError("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(ConfigurationError, match="was interrupted before all files were in place.*Read-only"):
            EnsembleForCausalLM.from_pretrained(tmp_path)
    assert is_same(tmp_path, new)


@pytest.mark.parametrize(
    ("name", "is_folder"),
    [("members", False), ("config.json", True), ("tokenizer.json", True), ("chat_template.jinja", True)],
)
def test_what_stands_in_the_way_is_said_before_anything_takes_its_place(name, is_folder, pair, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    place = folder / name
    if is_folder:
        place.mkdir()
    else:
        place.write_text("mine")
    with pytest.raises(ConfigurationError, match=f"{name!r}.*choose another folder"):
        save(pair[1], folder)
    assert [path.name for path in folder.iterdir()] == [name]
    place.rmdir() if is_folder else place.unlink()
    save(pair[1], folder)
    assert is_same(folder, pair[1])
