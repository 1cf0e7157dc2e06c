"""Saved ensembles on the Hub, through the real client and a small Hub on the loopback interface."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import tests.hub_server as hub_server
from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    # Of the client, where it uploads without Xet.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]

TOKEN = "hf_secretsecretsecret"
OPTIONS = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two members' folders, with licences."""
    folder = tmp_path_factory.mktemp("pair")
    paths = []
    for name, tokenizer in (("left", tiny.smol_like()), ("right", tiny.gemma_like())):
        paths.append(folder / name)
        tiny.tiny_llama(tokenizer, seed=len(paths), num_hidden_layers=1).save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
        (paths[-1] / "README.md").write_text(f"---\nlicense: {'mit' if name == 'left' else 'apache-2.0'}\n---\n")
    return paths


@pytest.fixture
def server(pair, tmp_path, monkeypatch):
    """A Hub that holds the two members, in the repositories of someone else."""
    with hub_server.hub({TOKEN: "ann", "hf_of_bob": "bob"}) as running:
        hub_server.connect(monkeypatch, running, tmp_path / "cache")
        for path in pair:
            running.add(f"org/{path.name}", path)
        yield running


@pytest.fixture(scope="module")
def ensemble(pair, tmp_path_factory):
    """Loaded once, from a Hub that gave the same commits as every test's own."""
    with hub_server.hub({}) as running, pytest.MonkeyPatch.context() as patch:
        hub_server.connect(patch, running, tmp_path_factory.mktemp("cache"))
        for path in pair:
            running.add(f"org/{path.name}", path)
        return EnsembleForCausalLM.from_pretrained(["org/left", "org/right"], method="gac", weights=[0.25, 0.75])


def texts(ensemble):
    ids = ensemble.generate(**ensemble.tokenizer("The cat", return_tensors="pt"), **OPTIONS)
    return ids.tolist()


def assert_same(a, b):
    """Same weights, tokenizers, method and mixing weights."""
    assert (a.config.method, a.config.weights) == (b.config.method, b.config.weights)
    for one, other in zip(a.tokenizers, b.tokenizers, strict=True):
        assert one("The cat, 12 čaj").input_ids == other("The cat, 12 čaj").input_ids
    for one, other in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


def pushed_config(server, repo_id="ann/duo", revision="main"):
    return json.loads(server.repositories[repo_id].files(revision)["config.json"])


# --- References -----------------------------------------------------------------------------------------------------


def test_members_are_pushed_by_id_and_the_commit_that_was_loaded(server, ensemble):
    loaded = [server.repositories[f"org/{name}"].branches["main"] for name in ("left", "right")]
    for name in ("left", "right"):
        repository = server.repositories[f"org/{name}"]
        repository.commit({**repository.files(), "new": b""})
    commit = ensemble.push_to_hub("ann/duo", token=TOKEN)
    config = pushed_config(server)
    assert [(m["path"], m["revision"]) for m in config["members"]] == [
        ("org/left", loaded[0]),
        ("org/right", loaded[1]),
    ]
    assert commit.oid == server.repositories["ann/duo"].branches["main"]
    assert [member.revision for member in ensemble.config.members] == [None, None]
    assert not any(hub_server.is_large(path) for path in server.repositories["ann/duo"].files())
    assert_same(EnsembleForCausalLM.from_pretrained("ann/duo"), ensemble)


def test_auto_classes_and_the_pipeline_take_the_id(server, ensemble):
    ensemble.push_to_hub("ann/duo", token=TOKEN)
    assert AutoConfig.from_pretrained("ann/duo").method.name == "gac"
    assert_same(AutoModelForCausalLM.from_pretrained("ann/duo"), ensemble)
    assert AutoTokenizer.from_pretrained("ann/duo")("The cat").input_ids == ensemble.tokenizer("The cat").input_ids
    writer = pipeline("text-generation", model="ann/duo")
    written = writer("The cat", return_tensors=True, **OPTIONS)[0]["generated_token_ids"]
    assert written == texts(ensemble)[0]


def test_a_loaded_model_is_pinned_too(server, tmp_path):
    models = [AutoModelForCausalLM.from_pretrained(f"org/{name}") for name in ("left", "right")]
    tokenizers = [AutoTokenizer.from_pretrained(f"org/{name}") for name in ("left", "right")]
    EnsembleForCausalLM.from_members(models, tokenizers).push_to_hub("ann/duo", token=TOKEN)
    shas = [server.repositories[f"org/{name}"].branches["main"] for name in ("left", "right")]
    assert [member["revision"] for member in pushed_config(server)["members"]] == shas


def test_a_local_member_cannot_be_pushed_by_reference(server, pair):
    ensemble = EnsembleForCausalLM.from_pretrained([pair[0], "org/right"])
    with pytest.raises(ConfigurationError, match="'left' is in a folder of this machine.*include_members"):
        ensemble.push_to_hub("ann/duo", token=TOKEN)
    with pytest.raises(ConfigurationError, match="'left' is in a folder of this machine.*Push the ensemble itself"):
        ensemble.config.push_to_hub("ann/duo", token=TOKEN)
    assert "ann/duo" not in server.repositories


def test_a_configuration_can_be_pushed_by_itself(server, ensemble):
    ensemble.config.push_to_hub("ann/config", token=TOKEN)
    assert [member.path for member in AutoConfig.from_pretrained("ann/config").members] == ["org/left", "org/right"]


# --- Members within -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subfolder", [None, "deep"])
def test_bundled_members_are_read_from_the_same_commit(subfolder, server, pair, tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained([pair[0], pair[1], pair[0]], weights=[0.5, 0.25, 0.25])
    if subfolder is None:
        ensemble.push_to_hub("ann/duo", token=TOKEN, include_members=True, max_shard_size="20KB")
        options = {}
    else:
        ensemble.save_pretrained(tmp_path / "repo" / subfolder, include_members=True)
        server.add("ann/duo", tmp_path / "repo")
        options = {"subfolder": subfolder}
    repository = server.repositories["ann/duo"]
    sha = repository.branches["main"]
    inside = f"{subfolder}/" if subfolder else ""
    assert {path.split("members/")[1].split("/")[0] for path in repository.files() if "members/" in path} == {
        "left",
        "right",
    }
    if subfolder is None:
        assert f"{inside}members/left/model.safetensors.index.json" in repository.files()
    loaded = EnsembleForCausalLM.from_pretrained("ann/duo", **options)
    assert_same(loaded, ensemble)
    assert loaded.members[0] is loaded.members[2]
    assert [(m.path, m.revision, m.subfolder) for m in loaded.config.members[:2]] == [
        ("ann/duo", sha, f"{inside}members/left"),
        ("ann/duo", sha, f"{inside}members/right"),
    ]
    # Later pushes do not change what that commit is, nor what is saved of it.
    loaded.save_pretrained(tmp_path / "reference")
    repository.commit({})
    if subfolder is None:
        assert_same(EnsembleForCausalLM.from_pretrained(tmp_path / "reference"), ensemble)
    else:
        assert_same(EnsembleForCausalLM.from_pretrained("ann/duo", revision=sha, **options), ensemble)


def test_pushing_again_replaces_files_of_members_that_are_no_more(server, pair):
    ensemble = EnsembleForCausalLM.from_pretrained(pair)
    ensemble.push_to_hub("ann/duo", token=TOKEN, include_members=True)
    repository = server.repositories["ann/duo"]
    assert "members/left/model.safetensors" in repository.files()
    with torch.no_grad():
        ensemble.members[0].get_output_embeddings().weight.mul_(-1)
    ensemble.push_to_hub("ann/duo", token=TOKEN, include_members=True, max_shard_size="20KB")
    assert "members/left/model.safetensors" not in repository.files()
    assert_same(EnsembleForCausalLM.from_pretrained("ann/duo"), ensemble)


def test_nothing_of_this_machine_is_uploaded(server, pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("USER", "ann-on-her-machine")
    options = {"token": TOKEN, "cache_dir": str(tmp_path / "other-cache"), "trust_remote_code": True}
    for sources in ([str(pair[0]), str(pair[1])], ["org/left", "org/right"]):
        ensemble = EnsembleForCausalLM.from_pretrained(sources, device_map="cpu", **options)
        ensemble.push_to_hub("ann/duo", include_members=True)
        ensemble.save_pretrained(tmp_path / "here", include_members=True)
        for files in (server.repositories["ann/duo"].files(), hub_server.read(tmp_path / "here")):
            for path, data in files.items():
                words = (str(tmp_path), str(pair[0].parent), TOKEN, "ann-on-her-machine", "trust_remote_code")
                for word in (*words, "device_map", "cache_dir"):
                    assert word.encode() not in data, (path, word)


# --- Adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(server, tmp_path):
    """An adapter of `org/left`, in a repository of its own, at its root and in a folder; and the logits that it gives."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained("org/left")
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
        for place in ("tuned", "tuned/checkpoint-2"):
            model.save_pretrained(tmp_path / place)
    server.add("org/tuned", tmp_path / "tuned")
    return logits_of(model)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 5, 7]])).logits


def test_an_adapter_on_the_hub_is_pinned_with_its_model(server, adapted, monkeypatch):
    ensemble = EnsembleForCausalLM.from_pretrained(["org/tuned", "org/left"])
    shas = {name: server.repositories[f"org/{name}"].branches["main"] for name in ("tuned", "left")}
    for name in ("left", "tuned"):
        repository = server.repositories[f"org/{name}"]
        repository.commit({**repository.files(), "new": b""})
    assert torch.equal(logits_of(ensemble.members[0]), adapted)
    assert ensemble.member_views[0].name == "tuned"
    ensemble.push_to_hub("ann/duo", token=TOKEN)
    pinned = {"path": "org/left", "revision": shas["left"], "adapter": "org/tuned", "adapter_revision": shas["tuned"]}
    assert pinned.items() <= pushed_config(server)["members"][0].items()
    card = server.repositories["ann/duo"].files()["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == ["org/left", "org/tuned"]
    EnsembleForCausalLM.from_pretrained("ann/duo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(logits_of(EnsembleForCausalLM.from_pretrained("ann/duo").members[0]), adapted)


@pytest.mark.parametrize("where", ["as the member", "apart"])
def test_an_adapter_lies_in_a_folder_of_a_revision(where, server, adapted):
    repository = server.repositories["org/tuned"]
    first = repository.branches["main"]
    repository.commit({".gitattributes": b""})
    if where == "apart":
        item = MemberConfig("org/left", adapter="org/tuned", adapter_revision=first, adapter_subfolder="checkpoint-2")
    else:
        item = MemberConfig("org/tuned", revision=first, subfolder="checkpoint-2")
    ensemble = EnsembleForCausalLM.from_pretrained([item])
    assert torch.equal(logits_of(ensemble.members[0]), adapted)


def test_a_bundled_adapter_is_read_from_the_same_commit(server, adapted, tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained(["org/tuned", "org/right"])
    ensemble.push_to_hub("ann/duo", token=TOKEN, include_members=True)
    repository = server.repositories["ann/duo"]
    for path, data in repository.files().items():
        assert str(tmp_path).encode() not in data, path
    sha = repository.branches["main"]
    loaded = EnsembleForCausalLM.from_pretrained("ann/duo")
    assert torch.equal(logits_of(loaded.members[0]), adapted)
    repository.commit({})
    loaded.save_pretrained(tmp_path / "reference")
    again = EnsembleForCausalLM.from_pretrained(tmp_path / "reference")
    assert torch.equal(logits_of(again.members[0]), adapted)
    item = again.config.members[0]
    found = (item.adapter, item.adapter_revision, item.adapter_subfolder)
    assert found == ("ann/duo", sha, "members/tuned/adapter")


def test_a_local_adapter_cannot_be_pushed_by_reference(server, adapted, tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained([MemberConfig(path="org/left", adapter=tmp_path / "tuned")])
    with pytest.raises(ConfigurationError, match="the adapter of member 'left' is in a folder of this machine"):
        ensemble.push_to_hub("ann/duo", token=TOKEN)
    private = server.repositories["org/tuned"]
    private.private = True
    with pytest.raises(ConfigurationError, match="'org/left' cannot be loaded: there is no adapter at 'org/tuned'"):
        EnsembleForCausalLM.from_pretrained([MemberConfig(path="org/left", adapter="org/tuned")])


# --- Options of pushing ---------------------------------------------------------------------------------------------


def test_options_of_the_stock_method_work(server, ensemble):
    ensemble.push_to_hub(
        "ann/duo", token=TOKEN, private=True, commit_message="First", revision="try", tags="mine", max_shard_size="1GB"
    )
    repository = server.repositories["ann/duo"]
    assert repository.private
    assert repository.messages[repository.branches["try"]] == "First"
    assert "config.json" not in repository.files("main")
    assert "mine" in yaml.safe_load(repository.files("try")["README.md"].decode().split("---")[1])["tags"]
    with pytest.raises(ConfigurationError, match="ann/duo"):
        EnsembleForCausalLM.from_pretrained("ann/duo", revision="try")
    assert_same(EnsembleForCausalLM.from_pretrained("ann/duo", revision="try", token=TOKEN), ensemble)
    commit = ensemble.push_to_hub("ann/duo", token=TOKEN, create_pr=True)
    assert commit.pr_url.endswith("/ann/duo/discussions/1")
    assert "config.json" in repository.files("refs/pr/1")
    assert "config.json" not in repository.files("main")


def test_saving_may_push_as_well(server, ensemble, tmp_path):
    ensemble.save_pretrained(tmp_path / "duo", push_to_hub=True, token=TOKEN, commit_message="Both")
    repository = server.repositories["ann/duo"]
    assert repository.messages[repository.branches["main"]] == "Both"
    assert_same(EnsembleForCausalLM.from_pretrained("ann/duo"), ensemble)
    assert_same(EnsembleForCausalLM.from_pretrained(tmp_path / "duo"), ensemble)
    with pytest.raises(ConfigurationError, match="colour"):
        ensemble.save_pretrained(tmp_path / "duo", push_to_hub=True, colour="red")


@pytest.mark.parametrize("token", [None, "hf_unknown", "hf_of_bob"])
def test_who_may_not_push_is_told_without_the_token(token, server, ensemble):
    with pytest.raises(HfHubHTTPError) as raised:
        ensemble.push_to_hub("ann/duo", token=token)
    assert "hf_" not in str(raised.value).replace("hf_ensemble", "")
    assert "ann/duo" not in server.repositories


# --- The card -------------------------------------------------------------------------------------------------------


def test_the_card_names_members_method_weights_and_licences(server, ensemble, tmp_path, monkeypatch):
    ensemble.push_to_hub("ann/duo", token=TOKEN)
    card = server.repositories["ann/duo"].files()["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["library_name"] == "hf_ensemble"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["base_model"] == ["org/left", "org/right"]
    assert metadata["license"] == "other"
    assert {"ensemble", "gac"} <= set(metadata["tags"])
    sha = server.repositories["org/left"].branches["main"]
    row = next(line for line in card.splitlines() if line.startswith("| left"))
    for part in ("org/left", sha, "mit", f"{ensemble.members[0].num_parameters():,}", "0.25"):
        assert part in row
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


def test_one_licence_of_all_is_the_ensembles(server, tmp_path):
    repository = server.repositories["org/right"]
    repository.commit({**repository.files(), "README.md": b"---\nlicense: mit\n---\n"})
    EnsembleForCausalLM.from_pretrained(["org/left", "org/right"]).push_to_hub("ann/duo", token=TOKEN)
    card = server.repositories["ann/duo"].files()["README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["license"] == "mit"


def test_a_card_that_is_there_stays(server, ensemble):
    repository = server.add("ann/duo")
    repository.commit({"README.md": b"---\ntags:\n- old\n---\n# By hand\n"})
    ensemble.push_to_hub("ann/duo", token=TOKEN, tags=["new"])
    card = repository.files()["README.md"].decode()
    assert "# By hand" in card
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["old", "new"]


# --- Loading --------------------------------------------------------------------------------------------------------


def test_options_reach_every_call(server, ensemble, tmp_path):
    ensemble.push_to_hub("ann/duo", token=TOKEN)
    for repository in server.repositories.values():
        repository.private = True
    for name in ("left", "right"):
        server.repositories[f"ann/{name}"] = server.repositories.pop(f"org/{name}")
    server.requests.clear()
    items = ["ann/left", "ann/right"]
    loaded = EnsembleForCausalLM.from_pretrained(items, token=TOKEN, cache_dir=str(tmp_path / "mine"))
    # Storage is another host, and transformers looks for further chat templates without a token.
    assert {t for _, path, t in server.requests if not path.startswith("/lfs/") and "/tree/" not in path} == {TOKEN}
    assert not (tmp_path / "cache" / "models--ann--left").exists()
    server.requests.clear()
    options = {"cache_dir": str(tmp_path / "mine"), "local_files_only": True}
    assert_same(EnsembleForCausalLM.from_pretrained(items, **options), loaded)
    assert server.requests == []


def test_downloads_can_be_forced(server):
    EnsembleForCausalLM.from_pretrained(["org/left"])
    server.requests.clear()
    EnsembleForCausalLM.from_pretrained(["org/left"])
    assert not any(method == "GET" and path.startswith("/lfs/") for method, path, _ in server.requests)
    EnsembleForCausalLM.from_pretrained(["org/left"], force_download=True)
    assert any(method == "GET" and path.startswith("/lfs/") for method, path, _ in server.requests)


def test_offline_the_cache_is_enough(server, ensemble, monkeypatch):
    ensemble.push_to_hub("ann/duo", token=TOKEN, include_members=True)
    EnsembleForCausalLM.from_pretrained("ann/duo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert_same(EnsembleForCausalLM.from_pretrained("ann/duo"), ensemble)
    assert server.requests == []


def _no_weights(server):
    repository = server.repositories["org/right"]
    repository.commit({path: data for path, data in repository.files().items() if not hub_server.is_large(path)})


TROUBLES = {
    "no such repository": (MemberConfig(path="org/nowhere"), None, "org/nowhere.*token"),
    "no such revision": (MemberConfig(path="org/right", revision="v9"), None, "org/right.*v9"),
    "no such subfolder": (MemberConfig(path="org/right", subfolder="deep"), None, "org/right.*deep"),
    "private": ("org/right", lambda s: setattr(s.repositories["org/right"], "private", True), "org/right.*token"),
    "gated": ("org/right", lambda s: setattr(s.repositories["org/right"], "gated", True), "org/right.*gated"),
    "no weights": ("org/right", _no_weights, "org/right.*model.safetensors"),
}


@pytest.mark.crossed
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("token", [None, "hf_of_bob", "hf_unknown"])
def test_a_member_that_cannot_be_had_is_named_with_a_remedy(trouble, token, server):
    item, prepare, expected = TROUBLES[trouble]
    if trouble == "gated" and token == "hf_of_bob":
        pytest.skip("bob has access")
    if prepare:
        prepare(server)
    with pytest.raises(ConfigurationError) as raised:
        EnsembleForCausalLM.from_pretrained(["org/left", item], token=token)
    if token != "hf_unknown":
        assert re.search(expected, str(raised.value), re.DOTALL)
    assert "hf_of_bob" not in str(raised.value)
    assert "hf_unknown" not in str(raised.value)


@pytest.mark.parametrize("token", ["", "hf_a b", "hf_x\n"])
def test_a_token_that_cannot_be_sent_is_refused_unseen(token, server, ensemble):
    for act in (
        lambda: EnsembleForCausalLM.from_pretrained(["org/left"], token=token),
        lambda: ensemble.push_to_hub("ann/duo", token=token),
    ):
        with pytest.raises(ConfigurationError) as raised:
            act()
        assert "hf_" not in str(raised.value)


def test_blocks_of_the_docs_run(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    page = Path(__file__).parents[1] / "docs" / "how-to" / "save_and_share.md"
    (block,) = re.findall(r"```py\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    exec(compile(block, str(page), "exec"), {"EnsembleForCausalLM": EnsembleForCausalLM})
    assert server.repositories["ann/duo-whole"].private
