"""Folders that somebody has made to do harm, or that are damaged: refused with the file, the rule and the value."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig, UniteConfig, VocabularyError
from hf_ensemble.hub import member_files
from tests import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a small member, and a saved ensemble of it."""
    base = tmp_path_factory.mktemp("good")
    tokenizer = tiny.byte_level_bpe(300)
    tiny.tiny_llama(tokenizer, num_hidden_layers=1).save_pretrained(base / "member")
    tokenizer.save_pretrained(base / "member")
    EnsembleForCausalLM.from_pretrained([base / "member"]).save_pretrained(base / "saved", include_members=True)
    return base


@pytest.fixture
def member(good, tmp_path):
    return shutil.copytree(good / "member", tmp_path / "member")


@pytest.fixture
def saved(good, tmp_path):
    return shutil.copytree(good / "saved", tmp_path / "saved")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret.txt"
    path.parent.mkdir()
    path.write_text("a secret")
    return path


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_member(saved, **changes):
    edit(saved / "config.json", members=[{**json.loads((saved / "config.json").read_text())["members"][0], **changes}])


def assert_refused(folder, match, kind=ConfigurationError):
    """Refused by its path alone, which may be a saved ensemble's, and as one of several members."""
    is_saved = "hf_ensemble" in (folder / "config.json").read_text("utf-8", "replace")
    for source in (folder,) if is_saved else (folder, [folder]):
        with pytest.raises(kind, match=match) as caught:
            EnsembleForCausalLM.from_pretrained(source)
        assert "a secret" not in str(caught.value)


JSON = {
    "nested by lists": ('{"x": ' + "[" * 99_999 + "]" * 99_999 + "}", "nested more than 64 levels deep"),
    "nested by objects": ('{"x": ' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
    "one key twice": (
        '{"vocab_size": 3, "vocab_size": 4}',
        "the key 'vocab_size' is there twice, with the values 3 and 4",
    ),
    "no object": ("[1]", r"has to hold a JSON object, but holds \[1\]"),
    "no JSON": ("{", "cannot be read as JSON"),
    "no text": (b"\xff\xfe", "cannot be read as JSON"),
    "a huge number": ('{"x": ' + "9" * 5000 + "}", "cannot be read as JSON.*5000 digits"),
    "a kind of a wrong type": ('{"model_type": ["llama"]}', "sets 'model_type' to .*has to be a text"),
    "many layers": (
        '{"text_config": {"num_hidden_layers": 1000000000}}',
        "'num_hidden_layers' to 1000000000; the limit is 10000",
    ),
    "a huge vocabulary": ('{"vocab_size": 1000000000000}', "'vocab_size' to 1000000000000; the limit is 2147483647"),
    "many members": (json.dumps({"members": [{}] * 1001}), "lists 1001 members; the limit is 1000"),
}


@pytest.mark.parametrize("case", JSON)
def test_files_that_would_do_harm_are_refused_before_they_are_used(case, tmp_path):
    data, match = JSON[case]
    file = tmp_path / "config.json"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ConfigurationError, match=f"'x' cannot be loaded: '{file}' .*{match}"):
        member_files.check_json("'x'", file)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(member_files, "_MOST_BYTES", 10)
    (tmp_path / "config.json").write_text(json.dumps({"x": "y" * 10}))
    with pytest.raises(ConfigurationError, match="has 19 bytes; the limit is 10"):
        member_files.check_folder("'x'", tmp_path)


def test_what_stock_files_hold_is_no_harm(tmp_path):
    """A key twice with one value, infinities, the length of a tokenizer without a limit, layers of a rope window."""
    text = '{"a": 1, "a": 1, "time_step_limit": [0.0, Infinity], "model_max_length": 1%s, "max_window_layers": 28}' % (
        "0" * 30
    )
    (tmp_path / "tokenizer_config.json").write_text(text)
    member_files.check_folder("'x'", tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 5000}, "describes 5000 layers, but its files hold 12 tensors"),
        ({"hidden_size": 2**16}, r"describes \d+ weights, but its files have \d+ bytes"),
        ({"hidden_size": "large"}, "Field 'hidden_size' expected int, got str"),
        ({"architectures": 3}, "`architectures` is 3, but it has to be a list|Field 'architectures'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "code of its own .*never run.*from_members"),
        ({"transformers_weights": "../elsewhere/w.safetensors"}, "inside the model directory|incorrect"),
    ],
)
def test_a_configuration_that_cannot_be_of_these_weights_is_refused(changes, match, member, monkeypatch):
    (member / "own.py").write_text("raise SystemExit('executed')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question was asked"))
    edit(member / "config.json", **changes)
    assert_refused(member, match)


def test_code_beside_a_known_model_type_does_not_run(member):
    (member / "own.py").write_text("raise SystemExit('executed')")
    edit(member / "config.json", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    EnsembleForCausalLM.from_pretrained([member])


def test_code_of_a_tokenizer_does_not_run(member, monkeypatch):
    (member / "own.py").write_text("raise SystemExit('executed')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question was asked"))
    edit(member / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.M", "own.M"]})
    assert_refused(member, "tokenizer of member .*code of its own.*never run.*tokenizers=", VocabularyError)


class Harmful:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("file", ["weights.bin", "../elsewhere/w.safetensors", "/etc/w.safetensors", 3])
def test_an_index_names_only_safetensors_beside_it(file, member, secret):
    shutil.move(member / "model.safetensors", secret.parent / "w.safetensors")
    torch.save({"model.norm.weight": Harmful()}, member / "weights.bin")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": file}}
    (member / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(member, "as a file of weights, but only safetensors files beside it")


@pytest.mark.parametrize("damage", ["cut", "head", "missing"])
def test_damaged_weights_are_named(damage, member):
    file = member / "model.safetensors"
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "head":
        file.write_bytes((2**60).to_bytes(8, "little"))
    else:
        weights = load_file(file)
        del weights["model.norm.weight"]
        save_file(weights, file, metadata={"format": "pt"})
    match = "would be random" if damage == "missing" else f"{file}' is damaged or not a safetensors file"
    assert_refused(member, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda t: t["model"]["vocab"].update({"<x>": 2**32 - 9}),
            "ids up to 4294967287. The limit is 1048576 ids without",
        ),
        (
            lambda t: t["model"]["vocab"].update({"<x>": 10**12}),
            "ids up to 1000000000000. The limit is 1048576 ids without",
        ),
        (lambda t: t.update(padding={**PADDING, "strategy": {"Fixed": 10**10}}), "pads every text to 10000000000 ids"),
        (
            lambda t: t.update(padding={**PADDING, "pad_to_multiple_of": 10**10}),
            "'pad_to_multiple_of'.*limit is 16777216",
        ),
    ],
)
def test_a_tokenizer_with_huge_counts_is_refused(change, match, member):
    values = json.loads((member / "tokenizer.json").read_text())
    change(values)
    (member / "tokenizer.json").write_text(json.dumps(values))
    assert_refused(member, match, VocabularyError)


PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "x",
}  # fmt: skip


@pytest.mark.parametrize("where", ["member", "saved"])
def test_a_generation_config_of_wrong_types_is_named(where, member, saved):
    folder = member if where == "member" else saved
    (folder / "generation_config.json").write_text('{"max_new_tokens": "x"}')
    assert_refused(folder, "its generation_config.json cannot be used")


def test_a_template_is_no_link_that_leads_elsewhere(member, secret):
    (member / "chat_template.jinja").symlink_to(secret)
    assert_refused(member, "chat_template.jinja', a link that leads out of ")
    (member / "chat_template.jinja").unlink()
    (member / "template").write_text("{{ messages }}")
    (member / "chat_template.jinja").symlink_to("template")
    EnsembleForCausalLM.from_pretrained([member])


def test_links_of_the_hubs_cache_are_followed(member, tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (member / "chat_template.jinja").write_text("{{ messages }}")
    for file in member.iterdir():
        shutil.move(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    EnsembleForCausalLM.from_pretrained([snapshot])


ENSEMBLES = {
    "itself": ({"path": "."}, "is an ensemble itself"),
    "a subfolder above": (
        {"subfolder": "../../elsewhere"},
        "names the subfolder .*'../../elsewhere', which leads out",
    ),
    "an adapter's subfolder": ({"adapter_subfolder": "/etc"}, "names the adapter_subfolder .*'/etc', which leads out"),
    "a file above": ({"gguf_file": "../../elsewhere/secret.txt"}, "names the gguf_file .*which leads out"),
    "a tokenizer's subfolder": (
        {"tokenizer_kwargs": {"subfolder": "../x"}},
        "tokenizer's subfolder .*which leads out",
    ),
    "a tokenizer's file": ({"tokenizer_kwargs": {"vocab_file": "/etc/passwd"}}, "cannot hold 'vocab_file'"),
    "a tokenizer's code": ({"tokenizer_kwargs": {"trust_remote_code": True}}, "cannot hold 'trust_remote_code'"),
}


@pytest.mark.parametrize("case", ENSEMBLES)
def test_a_saved_ensemble_reads_nothing_elsewhere_and_runs_nothing(case, saved):
    changes, match = ENSEMBLES[case]
    edit_member(saved, **changes)
    assert_refused(saved, match)


@pytest.mark.parametrize("linked", ["folder", "tokenizer.json", "config.json"])
def test_a_bundled_member_is_no_link_that_leads_elsewhere(linked, saved, secret):
    place = saved / "members" / "member"
    if linked == "folder":
        shutil.move(place, secret.parent / "member")
        place.symlink_to(secret.parent / "member")
    else:
        (place / linked).unlink()
        (place / linked).symlink_to(secret)
    assert_refused(saved, "a link that leads out of")


@pytest.mark.parametrize("linked", [".saved", ".saved/members", ".saved/stale", "members"])
def test_an_unfinished_save_moves_nothing_of_elsewhere(linked, saved, secret):
    """What a save has left to do is done when the folder is loaded: by a link, files of others would be moved."""
    shutil.copytree(saved / "members", saved / ".saved" / "members")
    (saved / ".saved" / "stale").mkdir()
    (secret.parent / "member").mkdir()
    shutil.rmtree(saved / linked)
    (saved / linked).symlink_to(secret.parent)
    with pytest.raises(ConfigurationError, match=f"{linked}' is a link, so files outside the folder would be moved"):
        EnsembleForCausalLM.from_pretrained(saved)
    assert sorted(path.name for path in secret.parent.iterdir()) == ["member", "secret.txt"]
    assert list((secret.parent / "member").iterdir()) == []


def test_a_mistyped_option_of_a_tokenizer_is_named(good):
    with pytest.raises(
        ConfigurationError, match=r"member.*'paddingside'.*has no such option. Did you mean 'padding_side'"
    ):
        EnsembleForCausalLM.from_pretrained(
            [MemberConfig(str(good / "member"), tokenizer_kwargs={"paddingside": "left"})]
        )
    for options in ({"padding_side": "left"}, {"use_fast": True}, {"bos_token": "<|end|>"}):
        EnsembleForCausalLM.from_pretrained([MemberConfig(str(good / "member"), tokenizer_kwargs=options)])


@pytest.mark.parametrize(
    ("method", "given", "match"),
    [
        (None, {"top_k": 5}, r"`top_k` is an option of the method 'unite'.*`method=UniteConfig\(top_k=...\)`"),
        ("eva", {"top_k": 5}, r"`method=EvaConfig\(top_k=...\)`"),
        (UniteConfig(top_k=3), {"span_length": 2}, r"`method=SweetSpanConfig\(span_length=...\)`"),
    ],
)
def test_an_option_of_a_method_is_named_where_members_are_loaded(method, given, match, good):
    with pytest.raises(ConfigurationError, match=match):
        EnsembleForCausalLM.from_pretrained([good / "member"], method=method, **given)
