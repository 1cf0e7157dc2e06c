"""Bug bank, J14 and J25: members are found wherever the project goes, and what cannot be a member is refused at once."""

import json
import os
import subprocess
import sys
import time

import pytest
from transformers import AutoTokenizer

import tests.hub_server as hub_server
from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


@pytest.fixture
def project(tmp_path):
    """A folder with two models, as its user sees it: it is the current one."""
    folder = tmp_path / "ann" / "project"
    tiny.save_pair(folder, "a", "b")
    return folder


def members_of(saved):
    return json.loads((saved / "config.json").read_text())["members"]


def ids_of(ensemble):
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    return ensemble.generate(**inputs, max_new_tokens=3, do_sample=False).tolist()


# --- Paths in what is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["./a", "a", "whole"])
def test_a_project_that_has_moved_still_loads(given, project, monkeypatch, tmp_path):
    """J14: However the members were named, from wherever the ensemble is saved and loaded."""
    monkeypatch.chdir(project)
    paths = {"./a": ["./a", "./b"], "a": ["a", "b/"], "whole": [str(project / "a"), str(project / "b")]}[given]
    ensemble = EnsembleForCausalLM.from_pretrained(paths)
    expected = ids_of(ensemble)
    monkeypatch.chdir(tmp_path)
    ensemble.save_pretrained(project / "saved")
    ensemble.save_pretrained("ann/project/deep/er/saved")
    assert [member["path"] for member in members_of(project / "saved")] == ["../a", "../b"]
    assert members_of(project / "deep" / "er" / "saved")[0]["path"] == "../../../a"
    project.rename(tmp_path / "moved")
    for saved in ("moved/saved", "moved/deep/er/saved"):
        assert ids_of(EnsembleForCausalLM.from_pretrained(saved)) == expected


def test_loaded_objects_and_separate_tokenizers_move_too(project, tmp_path, monkeypatch):
    """J14: Paths that objects tell of themselves, relative to the folder that was the current one then."""
    (project / "tokenizer").mkdir()
    for file in (project / "b").glob("*token*"):
        file.rename(project / "tokenizer" / file.name)
    monkeypatch.chdir(project)
    listed = EnsembleForCausalLM.from_pretrained(["./a", MemberConfig(path="./b", tokenizer="./tokenizer")])
    tokenizers = [AutoTokenizer.from_pretrained("./a"), AutoTokenizer.from_pretrained("./tokenizer")]
    objects = EnsembleForCausalLM.from_members(list(listed.members), tokenizers)
    monkeypatch.chdir(tmp_path)
    for n, ensemble in enumerate((listed, objects)):
        saved = project / f"saved-{n}"
        ensemble.save_pretrained(saved)
        found = [(member["path"], member.get("tokenizer")) for member in members_of(saved)]
        assert found == [("../a", None), ("../b", "../tokenizer")]
    project.rename(tmp_path / "moved")
    for n in range(2):
        assert ids_of(EnsembleForCausalLM.from_pretrained(tmp_path / "moved" / f"saved-{n}")) == ids_of(listed)


def test_links_are_read_as_the_file_system_reads_them(project, tmp_path):
    """J14: A link among the members stays one; a link to the ensemble changes nothing."""
    (project / "link").symlink_to(tmp_path / "far")
    (project / "a").rename(tmp_path / "far")
    ensemble = EnsembleForCausalLM.from_pretrained([project / "link", project / "b"])
    ensemble.save_pretrained(project / "saved")
    assert [member["path"] for member in members_of(project / "saved")] == ["../link", "../b"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "saved").symlink_to(project / "saved")
    assert ids_of(EnsembleForCausalLM.from_pretrained(tmp_path / "other" / "saved")) == ids_of(ensemble)


def test_nothing_says_whose_machine_it_was(project, monkeypatch):
    """J14: Neither the home folder nor a user's name, in any file of a save, with or without members.

    Tokenizers and configurations of real checkpoints carry such paths along, also deep within.
    """
    monkeypatch.setenv("HOME", str(project.parent))
    private = str(project.parent / "models" / "secret")
    for name in ("a", "b"):
        for file, added in {
            "tokenizer_config.json": {"tokenizer_file": f"{private}/tokenizer.json", "init": {"vocab_file": private}},
            "config.json": {"_name_or_path": "./secret", "extra": {"_name_or_path": private, "path": private}},
            "generation_config.json": {"cache_folder": private},
        }.items():
            values = json.loads((project / name / file).read_text())
            (project / name / file).write_text(json.dumps(values | added))
    monkeypatch.chdir(project)
    ensemble = EnsembleForCausalLM.from_pretrained(["./a", "./b"])
    ensemble.tokenizers[0].chat_template = "/home/is/where/{{ messages[0].content }}"
    for options in ({}, {"include_members": True}):
        ensemble.save_pretrained(f"saved-{len(options)}", **options)
        for path, data in hub_server.read(project / f"saved-{len(options)}").items():
            for word in ("secret", str(project), "ann"):
                assert word.encode() not in data, (path, word)
    assert b"/home/is/where/" in (project / "saved-1" / "members" / "a" / "chat_template.jinja").read_bytes()
    loaded = EnsembleForCausalLM.from_pretrained("saved-1")
    assert ids_of(loaded) == ids_of(ensemble)


def test_a_model_is_not_overwritten_by_way_of_a_link(project):
    """J14: Nor a tokenizer that lies elsewhere."""
    (project / "link").symlink_to(project / "a")
    (project / "tokenizer").mkdir()
    AutoTokenizer.from_pretrained(project / "a").save_pretrained(project / "tokenizer")
    items = [MemberConfig(path=project / "link", tokenizer=project / "tokenizer")]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    for name in ("a", "link", "tokenizer"):
        with pytest.raises(ConfigurationError, match="Choose another folder"):
            ensemble.save_pretrained(project / name)


# --- Paths in what somebody else has saved --------------------------------------------------------------------------

HOSTILE = {
    "above": {"path": "./../../secret"},
    "above, by the subfolder": {"path": "./members/a", "subfolder": "../../../secret"},
    "above, in another repository": {"path": "org/a", "subfolder": "../secret"},
    "a whole path": {"path": "/etc"},
    "a whole path of another system": {"path": "C:\\secret"},
    "a tokenizer above": {"path": "org/a", "tokenizer": "./../secret"},
    "a tokenizer by a whole path": {"path": "org/a", "tokenizer": "/etc"},
    "an adapter above": {"path": "org/a", "adapter": "./../secret"},
    "an adapter by a whole path": {"path": "org/a", "adapter": "/etc"},
    "an adapter's subfolder": {"path": "org/a", "adapter": "org/b", "adapter_subfolder": "../secret"},
    "a file above": {"path": "org/a", "gguf_file": "../../secret.gguf"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pushed_ensemble_names_nothing_outside_its_repository(case, tmp_path, monkeypatch):
    """J14: Before any member is looked for."""
    with hub_server.hub({}) as server:
        hub_server.connect(monkeypatch, server, tmp_path / "cache")
        config = {"model_type": "hf_ensemble", "method": {"name": "gac"}, "members": [HOSTILE[case]]}
        server.add("eve/duo").commit({"config.json": json.dumps(config).encode()})
        with pytest.raises(ConfigurationError, match="'eve/duo' names a (member outside|tokenizer by the path)"):
            EnsembleForCausalLM.from_pretrained("eve/duo")
        assert {path.split("/")[1] for _, path, _ in server.requests if "/resolve/" in path} == {"eve"}


def test_a_path_above_the_root_is_refused(tmp_path):
    """J14: The file system would take it for the root."""
    config = {"model_type": "hf_ensemble", "members": [{"path": "../" * 40 + "etc"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="above the root"):
        EnsembleForCausalLM.from_pretrained(tmp_path)


# --- What cannot be a member ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["models", "one model", "pairs", "a dictionary", "a number", "none"])
def test_loaded_objects_are_refused_with_the_remedy(what, project):
    """J25: Whatever holds them."""
    model, tokenizer = tiny.tiny_llama(tiny.smol_like()), tiny.smol_like()
    given = {
        "models": [str(project / "a"), model],
        "one model": model,
        "pairs": [(model, tokenizer)],
        "a dictionary": {"path": str(project / "a")},
        "a number": 3,
        "none": None,
    }[what]
    with pytest.raises(
        ConfigurationError, match="entry 1 is of type Llama" if what == "models" else "is of type"
    ) as raised:
        EnsembleForCausalLM.from_pretrained(given)
    assert "from_members(models, tokenizers)" in str(raised.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("org/repo/model-Q4.gguf", r"MemberConfig\(path='org/repo', gguf_file='model-Q4.gguf'\)"),
        ("model.GGUF", r"MemberConfig\(path='.', gguf_file='model.GGUF'\)"),
        ("a/config.json", "Name the folder that contains it"),
        ("models/llama/7b", "no folder 'models/llama/7b', and it is not a Hub id"),
        ("my model", "no folder 'my model', and it is not a Hub id"),
        ("./nope", "no folder './nope'"),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_what_is_no_folder_and_no_id_is_refused_without_asking(
    path, message, is_listed, project, tmp_path, monkeypatch
):
    """J25: In a list, and by itself."""
    monkeypatch.chdir(project)
    with hub_server.hub({}) as server:
        hub_server.connect(monkeypatch, server, tmp_path / "cache")
        with pytest.raises(ConfigurationError, match=message):
            EnsembleForCausalLM.from_pretrained(["a", path] if is_listed else path)
        assert server.requests == []


@pytest.mark.parametrize("path", ["nope", "b/nope"])
@pytest.mark.parametrize("is_listed", [True, False])
def test_what_looks_like_a_folder_is_asked_for_once_where_the_hub_cannot_be_reached(
    path, is_listed, project, tmp_path, monkeypatch
):
    """J25: The client would try again for a minute."""
    monkeypatch.chdir(project)
    with hub_server.hub({}) as server:
        hub_server.connect(monkeypatch, server, tmp_path / "cache")
    start = time.monotonic()
    with pytest.raises(ConfigurationError, match=f"no folder '{path}', and the Hub cannot be reached"):
        EnsembleForCausalLM.from_pretrained(["a", path] if is_listed else path)
    assert time.monotonic() - start < 2


def test_offline_and_where_the_hub_answers_the_error_says_so(project, tmp_path, monkeypatch):
    """J25: A name without an owner may be on the Hub, or in the cache."""
    monkeypatch.chdir(project)
    for options in ({"local_files_only": True}, {}):
        with pytest.raises(
            ConfigurationError, match=r"(?s)'nope' cannot be loaded: .*And there is no folder 'nope' here"
        ):
            EnsembleForCausalLM.from_pretrained(["a", "nope"], **options)
    with hub_server.hub({}) as server:
        hub_server.connect(monkeypatch, server, tmp_path / "cache")
        with pytest.raises(
            ConfigurationError, match="(?s)'org/nope' cannot be loaded: .*not a valid model identifier"
        ):
            EnsembleForCausalLM.from_pretrained(["a", "org/nope"])


@pytest.mark.slow
def test_the_command_line_fails_at_once(project):
    """J25: One member that is there and one that is not."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "hf_ensemble.cli", "generate", "The cat", "--members", "a", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project, env=environment)
    assert done.returncode == 1
    assert "member 'nope' cannot be loaded: there is no folder 'nope'" in done.stderr
    assert "Retrying" not in done.stderr
