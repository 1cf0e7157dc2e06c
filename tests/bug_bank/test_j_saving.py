"""Siblings of J14 and J21: a save changes nothing that is not a saved ensemble, and keeps what only looks like a path."""

import json

import pytest
import torch
from torch import nn

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny
from tests.contracts import tokenizer_of


def saved(path, seed=0, tokenizer="smol"):
    tiny.tiny_llama(tokenizer_of(tokenizer), seed=seed).save_pretrained(path)
    tokenizer_of(tokenizer).save_pretrained(path)
    return str(path)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("include_members", [False, True])
def test_no_save_goes_over_a_member_or_another_model(tmp_path, include_members):
    ensemble = EnsembleForCausalLM.from_pretrained([saved(tmp_path / "a"), saved(tmp_path / "b", 1)])
    saved(tmp_path / "other", 2)
    before = files_of(tmp_path)
    for folder in ("a", "other"):
        with pytest.raises(ConfigurationError, match="would be overwritten"):
            ensemble.save_pretrained(tmp_path / folder, include_members=include_members)
    assert files_of(tmp_path) == before


def test_a_member_in_a_subfolder_is_not_written_over(tmp_path):
    saved(tmp_path / "repo" / "sub")
    ensemble = EnsembleForCausalLM.from_pretrained([MemberConfig(path=str(tmp_path / "repo"), subfolder="sub")])
    with pytest.raises(ConfigurationError, match="would be overwritten"):
        ensemble.save_pretrained(tmp_path / "repo" / "sub")


def test_a_users_own_folder_of_the_same_name_is_not_replaced(tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained([saved(tmp_path / "a")])
    mine = tmp_path / "project" / "members" / "a" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ConfigurationError, match="members/a"):
        ensemble.save_pretrained(tmp_path / "project", include_members=True)
    assert mine.read_text() == "mine"


def test_a_saved_ensemble_may_be_saved_over(tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained([saved(tmp_path / "a")])
    for _ in range(2):
        ensemble.save_pretrained(tmp_path / "out", include_members=True)
        ensemble = EnsembleForCausalLM.from_pretrained(tmp_path / "out")


def test_what_only_looks_like_a_path_is_kept_and_what_is_one_is_not(tmp_path):
    model = tiny.tiny_llama(tokenizer_of("smol"))
    model.generation_config.stop_strings = ["/end/of/text", "x"]
    secrets = ["file:///home/someone/x", "C:\\Users\\someone\\x", "~/x", "--data=/home/someone/x", str(tmp_path)]
    model.config.private = {**{str(n): text for n, text in enumerate(secrets)}, "/home/someone/key": "k"}
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer_of("smol")])
    ensemble.save_pretrained(tmp_path / "out", include_members=True)
    found = [json.loads(path.read_text("utf-8")) for path in (tmp_path / "out").rglob("*config.json")]
    assert all("/end/of/text" in str(one) for one in found if "stop_strings" in one)
    assert not any(word in str(one) for one in found for word in ("someone", "~/x", str(tmp_path)))


def test_what_came_from_the_hub_stays_an_id(tmp_path, monkeypatch):
    from hf_ensemble.hub.references import with_paths

    item = MemberConfig(path="org/left", commit="0" * 40)
    assert with_paths(item, lambda path: "changed").path == "org/left"
    assert with_paths(MemberConfig(path="org/left"), lambda path: "changed").path == "changed"


def test_a_head_wider_than_the_embeddings_works():
    tokenizer = tokenizer_of("smol")
    model = tiny.tiny_llama(tokenizer)
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size + 50, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[: model.config.vocab_size] = model.lm_head.weight
    wide = tiny.tiny_llama(tokenizer)
    wide.lm_head = head
    texts = []
    for member in (model, wide):
        ensemble = EnsembleForCausalLM.from_members([tiny.tiny_llama(tokenizer, seed=1), member], [tokenizer] * 2)
        inputs = ensemble.tokenizer("The cat", return_tensors="pt")
        texts.append(ensemble.generate(**inputs, max_new_tokens=6, do_sample=False).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("include_members", [False, True])
def test_members_that_were_cast_come_back_in_their_new_dtype(tmp_path, include_members):
    ensemble = EnsembleForCausalLM.from_pretrained([saved(tmp_path / "a"), saved(tmp_path / "b", 1)]).bfloat16()
    ensemble.save_pretrained(tmp_path / "out", include_members=include_members)
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "out")
    assert {model.dtype for model in loaded.members} == {torch.bfloat16}
