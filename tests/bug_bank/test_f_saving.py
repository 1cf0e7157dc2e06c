"""Bug bank, section F: composite save and load.

| case | where |
| --- | --- |
| F1 | here; `contracts.py` (saved and loaded is the same); thresholds and span lengths wait for their methods |
| F2 | here, in a process of its own; pushed ones in `test_hub.py` |
| F4 | here |
| F5 | here; `test_generate.py` (members may have unlike dtypes) |
| F6 | here; `test_conversations.py` (templates) |
| F7 | here; options of the Hub in `test_hub.py`; single fields of a member's model config cannot be overridden |
| E3 | here (generation configs of members); `test_e_options.py` |
"""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_ensemble import ConfigurationError, EnsembleConfig, EnsembleForCausalLM, GacConfig, MemberConfig, UniteConfig
from tests import tiny
from tests.contracts import make_ensemble

from .kit import control_tokens_may_be_chosen, gac_and_slowly_unite, output_ids, tokenizer_of

pytestmark = control_tokens_may_be_chosen


@pytest.fixture
def saved(tmp_path):
    """Two small members in folders of their own."""
    return save(tmp_path)


def save(folder, names=("smol", "gemma"), dtypes=(torch.float32, torch.float32), **options):
    paths = []
    for n, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        paths.append(folder / f"member-{n}")
        tiny.tiny_llama(tokenizer_of(name), seed=n, num_hidden_layers=1, **options).to(dtype).save_pretrained(
            paths[-1]
        )
        tokenizer_of(name).save_pretrained(paths[-1])
    return paths


def again(ensemble, folder):
    ensemble.save_pretrained(folder)
    return EnsembleForCausalLM.from_pretrained(folder)


# --- F1 -------------------------------------------------------------------------------------------------------------

MEMBERS = [
    MemberConfig(path="some/where", revision="abc", subfolder="deep/er", dtype="bfloat16", eos_token_id=[0, 7]),
    MemberConfig(path="else", gguf_file="x.gguf", tokenizer="other/tokenizer", name="the other"),
]


@pytest.mark.parametrize("method", [GacConfig(), UniteConfig(top_k=7), UniteConfig()])
@pytest.mark.parametrize("weights", [None, [0.25, 0.75], [0.0, 1.0]])
def test_every_setting_comes_back_from_json(method, weights, tmp_path):
    """F1: Members, method and weights, through a file, a dictionary and the difference to the defaults."""
    config = EnsembleConfig(members=MEMBERS, method=method, weights=weights)
    config.save_pretrained(tmp_path)
    found = [
        AutoConfig.from_pretrained(tmp_path),
        EnsembleConfig.from_dict(config.to_dict()),
        EnsembleConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        EnsembleConfig.from_dict(config.to_diff_dict()),
    ]
    for one in found:
        assert isinstance(one, EnsembleConfig)
        assert one.members == MEMBERS
        assert (one.method, one.weights) == (method, weights)
    assert EnsembleConfig().members == []
    assert EnsembleConfig().to_diff_dict()["model_type"] == "hf_ensemble"


ODD = {
    "equal to the class default, not to the derived value": {"head_dim": 128, "num_key_value_heads": 4},
    "false where true is the default": {"use_cache": False},
    "true where false is the default": {"attention_bias": True, "tie_word_embeddings": True},
    "no value where a number is the default": {"pad_token_id": None, "bos_token_id": None},
    "several end ids": {"eos_token_id": [2, 0]},
    "names of labels": {"id2label": {0: "x", 1: "y"}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (n % 2)) for n, case in enumerate(ODD)]
)
@pytest.mark.filterwarnings("ignore:member .* ends texts with ids")
def test_the_primarys_configuration_comes_back_as_it_was(case, tmp_path):
    """F1: Values that a rebuilt configuration would get wrong, in the ensemble's copy of the primary's."""
    paths = save(tmp_path, **ODD[case])
    ensemble = EnsembleForCausalLM.from_pretrained(paths, weights=[0.25, 0.75])
    loaded = again(ensemble, tmp_path / "ensemble")
    expected = ensemble.members[0].config.to_dict()
    for config in (loaded.config.primary_config, loaded.members[0].config):
        assert config.to_dict() == expected
    saved_config = AutoConfig.from_pretrained(tmp_path / "ensemble").primary_config.to_dict()
    for key in ODD[case]:
        assert saved_config[key] == expected[key], key
    assert loaded.config.weights == [0.25, 0.75]


@gac_and_slowly_unite
def test_weights_stay_with_their_members(method, saved, tmp_path):
    """F1: Of three members with unlike weights; also when other weights are asked for while loading."""
    ensemble = EnsembleForCausalLM.from_pretrained([*saved, saved[0]], method=method, weights=[0.2, 0.7, 0.1])
    expected = output_ids(ensemble, "The cat", max_new_tokens=4)
    loaded = again(ensemble, tmp_path / "ensemble")
    assert loaded.config.weights == pytest.approx([0.2, 0.7, 0.1])
    assert output_ids(loaded, "The cat", max_new_tokens=4) == expected
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble", weights=[1, 0, 0])
    assert loaded.config.weights == [1, 0, 0]


def test_generation_defaults_come_back(saved, tmp_path):
    """F1 and D7: Stop strings, lengths and sampling options set on the ensemble."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    for name, value in {"stop_strings": ["king"], "do_sample": True, "temperature": 0.7, "max_new_tokens": 9}.items():
        setattr(ensemble.generation_config, name, value)
    loaded = again(ensemble, tmp_path / "ensemble")
    assert loaded.generation_config.to_dict() == ensemble.generation_config.to_dict()
    assert output_ids(loaded, "The cat", max_new_tokens=3)


def test_a_moved_folder_with_its_members_inside_still_loads(tmp_path):
    """F1: Members inside the ensemble's folder are saved by their path within it."""
    folder = tmp_path / "here"
    ensemble = EnsembleForCausalLM.from_pretrained(save(folder))
    ensemble.save_pretrained(folder)
    expected = output_ids(ensemble, "The cat", max_new_tokens=3)
    folder.rename(tmp_path / "there")
    for cls in (EnsembleForCausalLM, AutoModelForCausalLM):
        assert output_ids(cls.from_pretrained(tmp_path / "there"), "The cat", max_new_tokens=3) == expected
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert [member["path"] for member in config["members"]] == ["./member-0", "./member-1"]


# --- F2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_process_loads_it_with_the_library_and_says_what_is_missing_without(saved, tmp_path):
    """F2: Never another class; the message without the library names it, with and without trusting remote code.

    Nor does importing the library change anything global.
    """
    ensemble = EnsembleForCausalLM.from_pretrained(saved, method="gac", weights=[0.25, 0.75])
    ensemble.save_pretrained(tmp_path / "ensemble")
    expected = output_ids(ensemble, "The cat", max_new_tokens=3)
    code = f"""
        import logging, os, sys, torch, transformers, warnings
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        def state():
            return (dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
                    torch.random.get_rng_state().tolist(), logging.getLogger().level,
                    transformers.logging.get_verbosity(), list(warnings.filters))

        transformers.GenerationMixin, transformers.PreTrainedModel, transformers.DynamicCache
        folder = {str(tmp_path / "ensemble")!r}
        for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
            for options in ({{}}, {{"trust_remote_code": True}}):
                try:
                    load(folder, **options)
                except ValueError as error:
                    assert "hf_ensemble" in str(error), error
                else:
                    sys.exit("loaded as something else")
        before = state()
        import hf_ensemble
        assert state() == before
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is hf_ensemble.EnsembleForCausalLM
        inputs = AutoTokenizer.from_pretrained(folder)("The cat", return_tensors="pt")
        print(model.generate(**inputs, max_new_tokens=3, do_sample=False).tolist())
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected


# --- F4 -------------------------------------------------------------------------------------------------------------


@gac_and_slowly_unite
def test_tied_weights_are_saved_and_come_back(method, tmp_path):
    """F4: No shared-memory error, and the logits are equal to the last bit."""
    ensemble = EnsembleForCausalLM.from_pretrained(save(tmp_path, tie_word_embeddings=True), method=method)
    primary = ensemble.members[0]
    assert primary.get_input_embeddings().weight.data_ptr() == primary.get_output_embeddings().weight.data_ptr()
    loaded = again(ensemble, tmp_path / "ensemble")
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    ids = ensemble.tokenizer("The cat", return_tensors="pt")
    for a, b in zip(ensemble.generate(**ids, **options).logits, loaded.generate(**ids, **options).logits, strict=True):
        assert torch.equal(a, b)


@gac_and_slowly_unite
def test_a_model_listed_twice_is_loaded_once_and_is_that_model(method, saved, tmp_path):
    """F4: As two paths, as a path and a configuration, after saving, and as one object twice."""
    tokenizer = AutoTokenizer.from_pretrained(saved[0])
    alone = AutoModelForCausalLM.from_pretrained(saved[0])
    bare = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    options = {"max_new_tokens": 2, "suppress_tokens": bare}
    expected = output_ids(EnsembleForCausalLM.from_members([alone], [tokenizer]), "The cat", **options)
    for items in ([saved[0]] * 2, [str(saved[0]), MemberConfig(path=str(saved[0]), name="again")]):
        twice = EnsembleForCausalLM.from_pretrained(items, method=method)
        assert twice.members[0] is twice.members[1]
        assert output_ids(twice, "The cat", **options) == expected
    loaded = again(twice, tmp_path / "ensemble")
    assert loaded.members[0] is loaded.members[1]
    assert output_ids(loaded, "The cat", **options) == expected
    twice = EnsembleForCausalLM.from_members([alone, alone], [tokenizer, tokenizer], method=method)
    assert output_ids(twice, "The cat", **options) == expected
    assert len({id(p) for p in twice.parameters()}) == len(list(alone.parameters()))


# --- F5 -------------------------------------------------------------------------------------------------------------


def dtypes_of(ensemble):
    return [sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}) for model in ensemble.members]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", ("bfloat16", "float32")),
        pytest.param(None, ("bfloat16", "float32"), marks=pytest.mark.slow),
        pytest.param("float32", ("float32", "float32"), marks=pytest.mark.slow),
        (torch.float16, ("float16", "float16")),
        pytest.param(["float32", torch.bfloat16], ("float32", "bfloat16"), marks=pytest.mark.slow),
        (["auto", "float16"], ("bfloat16", "float16")),
    ],
    ids=str,
)
def test_every_member_has_the_dtype_asked_for(asked, expected, tmp_path):
    """F5: Over checkpoints of unlike dtypes; all parameters; after saving and loading too."""
    paths = save(tmp_path, dtypes=(torch.bfloat16, torch.float32))
    ensemble = EnsembleForCausalLM.from_pretrained(paths, dtype=asked)
    expected = [[dtype] for dtype in expected]
    assert dtypes_of(ensemble) == expected
    assert dtypes_of(again(ensemble, tmp_path / "ensemble")) == expected
    assert dtypes_of(AutoModelForCausalLM.from_pretrained(tmp_path / "ensemble")) == expected


def test_a_dtype_that_torch_has_not_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="member .* cannot be loaded: .*float99"):
        EnsembleForCausalLM.from_pretrained(save(tmp_path), dtype="float99")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), torch.bfloat16, "float16"])
def test_a_dtype_reaches_every_member_through_auto_classes_and_pipelines(dtype, tmp_path):
    """F5: Over what was saved."""
    EnsembleForCausalLM.from_pretrained(save(tmp_path, dtypes=(torch.bfloat16, torch.float32))).save_pretrained(
        tmp_path / "ensemble"
    )
    expected = [[str(dtype).removeprefix("torch.")]] * 2
    assert dtypes_of(AutoModelForCausalLM.from_pretrained(tmp_path / "ensemble", dtype=dtype)) == expected
    assert dtypes_of(pipeline("text-generation", model=str(tmp_path / "ensemble"), dtype=dtype).model) == expected


def test_a_members_own_dtype_wins_over_a_common_one_while_listed(tmp_path):
    """F5: `MemberConfig(dtype=...)` for one member, one value for the others."""
    paths = save(tmp_path)
    items = [MemberConfig(path=str(paths[0]), dtype="bfloat16"), paths[1]]
    ensemble = EnsembleForCausalLM.from_pretrained(items, dtype="float16")
    assert dtypes_of(ensemble) == [["bfloat16"], ["float16"]]
    assert dtypes_of(again(ensemble, tmp_path / "ensemble")) == [["bfloat16"], ["float16"]]


# --- F6 -------------------------------------------------------------------------------------------------------------

TEXTS = [*tiny.TEXTS, "", " ", "\n\n\n", "<|im_end|> x", "čaj Ġra<tool_call>", "a▁b", "ﬁ ½", "\t\t <table>", "  two"]


def test_tokenizers_come_back_as_they_were_given(tmp_path):
    """F6: Added tokens, padding side, and a BOS rule that was switched on: ids of all texts, for every member."""
    first, second = tiny.smol_like(added=["čaj", "Ġra"]), tiny.gemma_like(padding_side="right")
    first.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", 1)]
    )
    for n, tokenizer in enumerate((first, second)):
        tiny.tiny_llama(tokenizer, num_hidden_layers=1).save_pretrained(tmp_path / f"member-{n}")
        tokenizer.save_pretrained(tmp_path / f"member-{n}")
    ensemble = EnsembleForCausalLM.from_pretrained([tmp_path / "member-0", tmp_path / "member-1"])
    loaded = again(ensemble, tmp_path / "ensemble")
    assert [t.padding_side for t in loaded.tokenizers] == [first.padding_side, "right"]
    for given, *found in (
        (first, ensemble.tokenizers[0], loaded.tokenizers[0], loaded.tokenizer),
        (first, AutoTokenizer.from_pretrained(tmp_path / "ensemble")),
        (second, ensemble.tokenizers[1], loaded.tokenizers[1]),
    ):
        expected = given(TEXTS)["input_ids"]
        for one in found:
            assert one(TEXTS)["input_ids"] == expected
            assert one.special_tokens_map == given.special_tokens_map
    assert loaded.tokenizer.padding_side == "left"
    assert AutoTokenizer.from_pretrained(tmp_path / "ensemble").padding_side == "left"


def test_a_tokenizer_from_elsewhere_is_remembered(saved, tmp_path):
    """F6 and F7: Named in the member's configuration, since the model's folder has none."""
    other = tmp_path / "tokenizer"
    tokenizer_of("gemma").save_pretrained(other)
    for file in saved[1].glob("*token*"):
        file.unlink()
    items = [saved[0], MemberConfig(path=str(saved[1]), tokenizer=str(other))]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    loaded = again(ensemble, tmp_path / "ensemble")
    assert loaded.tokenizers[1].get_vocab() == tokenizer_of("gemma").get_vocab()


def test_a_tokenizer_given_while_loading_is_not_forgotten_silently(saved, tmp_path):
    """F6: `tokenizers=[None, path]`: the saved ensemble finds it again, or saving says that it cannot."""
    other = tmp_path / "tokenizer"
    tokenizer_of("gemma").save_pretrained(other)
    for file in saved[1].glob("*token*"):
        file.unlink()
    ensemble = EnsembleForCausalLM.from_pretrained(saved, tokenizers=[None, str(other)])
    expected = output_ids(ensemble, "The cat", max_new_tokens=3)
    try:
        ensemble.save_pretrained(tmp_path / "ensemble")
    except ValueError as error:
        assert "member-1" in str(error)  # noqa: PT017
    else:
        loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
        assert output_ids(loaded, "The cat", max_new_tokens=3) == expected


# --- F7 -------------------------------------------------------------------------------------------------------------


def test_options_of_one_member_go_to_it_alone(tmp_path, monkeypatch):
    """F7: A subfolder, a dtype, end ids and a name for one; the other is loaded as it stands."""
    paths = save(tmp_path / "repository" / "deep")
    paths[0].rename(tmp_path / "plain")
    items = [
        tmp_path / "plain",
        MemberConfig(
            path=str(tmp_path / "repository"),
            subfolder="deep/member-1",
            dtype="bfloat16",
            eos_token_id=[3],
            name="second",
        ),
    ]
    calls = []
    load = AutoModelForCausalLM.from_pretrained.__func__

    def watch(cls, path, *args, **kwargs):
        calls.append({key: kwargs[key] for key in ("subfolder", "dtype", "revision", "gguf_file") if key in kwargs})
        return load(cls, path, *args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(watch))
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    assert calls == [{"dtype": "auto"}, {"subfolder": "deep/member-1", "dtype": "bfloat16"}]
    monkeypatch.undo()
    loaded = again(ensemble, tmp_path / "ensemble")
    for one in (ensemble, loaded):
        assert dtypes_of(one) == [["float32"], ["bfloat16"]]
        assert [member.name for member in one.config.members] == [None, "second"]
        assert [member.eos_token_id for member in one.config.members] == [[], [3]]
        assert one.config.members[1].subfolder == "deep/member-1"


def test_a_revision_is_kept(tmp_path):
    """F7: What was asked for stands in the saved configuration."""
    config = EnsembleConfig(members=[MemberConfig(path="a/b", revision="v1.2"), MemberConfig(path="c/d")])
    config.save_pretrained(tmp_path)
    members = json.loads((tmp_path / "config.json").read_text())["members"]
    assert members == [{"path": "a/b", "revision": "v1.2"}, {"path": "c/d"}]


def test_trust_in_remote_code_is_never_stored(saved, tmp_path):
    """F7: Nor are a token or a place on one machine's devices."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved, trust_remote_code=True, token="hf_secret", device_map="cpu")
    ensemble.save_pretrained(tmp_path / "ensemble")
    for file in (tmp_path / "ensemble").glob("*.json"):
        text = file.read_text()
        for word in ("trust_remote_code", "hf_secret", "device_map"):
            assert word not in text, file.name


def test_the_users_member_configurations_are_left_as_they_are(saved, tmp_path):
    """F7: One description may serve several ensembles."""
    items = [MemberConfig(path=str(path)) for path in saved]
    EnsembleForCausalLM.from_pretrained(items, dtype="bfloat16").save_pretrained(tmp_path / "ensemble")
    assert items == [MemberConfig(path=str(path)) for path in saved]
    assert dtypes_of(EnsembleForCausalLM.from_pretrained(items)) == [["float32"]] * 2


def test_a_member_without_an_origin_cannot_be_saved_and_says_so(tmp_path):
    """F7: Before anything is written, by name."""
    tokenizer = tokenizer_of("smol")
    ensemble = make_ensemble([tiny.ScriptedModel(tokenizer)] * 2, [tokenizer] * 2)
    with pytest.raises(ValueError, match="member-0"):
        ensemble.save_pretrained(tmp_path / "ensemble")
    assert not (tmp_path / "ensemble").exists()


# --- Members within, and saves that fail ------------------------------------------------------------------------------


def files_of(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_members_within_come_back_as_they_are_now_wherever_the_folder_is(dtype, tmp_path):
    """F1, F4, F5, F6: Changed and tied weights, added tokens, a template, generation defaults, one model twice."""
    paths = save(tmp_path, dtypes=(dtype, torch.float32), tie_word_embeddings=True)
    items = [MemberConfig(path=str(paths[0]), name="a/b: c"), paths[1], MemberConfig(path=str(paths[0]), name="again")]
    items[1] = MemberConfig(path=str(paths[1]), chat_template="{{ messages[0].content }}?", system_prompt="Be brief.")
    ensemble = EnsembleForCausalLM.from_pretrained(items, weights=[0.5, 0.25, 0.25])
    with torch.no_grad():
        ensemble.members[0].get_output_embeddings().weight.mul_(-1)
    ensemble.tokenizers[1].chat_template = "{{ messages[0].content }}!"
    ensemble.members[1].generation_config.max_new_tokens = 7
    before = [(model.config.to_dict(), model.config.architectures) for model in ensemble.members]
    expected = output_ids(ensemble, "The cat", max_new_tokens=3)
    ensemble.save_pretrained(tmp_path / "here", include_members=True)
    assert [(model.config.to_dict(), model.config.architectures) for model in ensemble.members] == before
    assert [member.path for member in ensemble.config.members] == [str(paths[0]), str(paths[1]), str(paths[0])]
    for path in paths:
        shutil.rmtree(path)
    (tmp_path / "here").rename(tmp_path / "there")
    assert sorted(path.name for path in (tmp_path / "there" / "members").iterdir()) == ["a-b-c", "member-1"]
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "there")
    assert loaded.members[0] is loaded.members[2]
    assert dtypes_of(loaded) == dtypes_of(ensemble)
    primary = loaded.members[0]
    assert primary.get_input_embeddings().weight.data_ptr() == primary.get_output_embeddings().weight.data_ptr()
    for one, other in zip(ensemble.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
    assert loaded.tokenizers[1].chat_template == ensemble.tokenizers[1].chat_template
    assert loaded.members[1].generation_config.max_new_tokens == 7
    asked = ("{{ messages[0].content }}?", "Be brief.")
    assert (loaded.config.members[1].chat_template, loaded.config.members[1].system_prompt) == asked
    assert output_ids(loaded, "The cat", max_new_tokens=3) == expected
    # References to members that lie within another saved ensemble hold too.
    assert output_ids(again(loaded, tmp_path / "reference"), "The cat", max_new_tokens=3) == expected


def test_members_within_are_cut_into_files_of_the_size_asked_for(saved, tmp_path):
    """F2: With an index that loads; written over an older save whose file was whole."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    folder = tmp_path / "ensemble"
    ensemble.save_pretrained(folder, include_members=True)
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("by hand")
    ensemble.save_pretrained(folder, include_members=True, max_shard_size="20KB")
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "README.md").read_text() == "by hand"
    assert len(list((folder / "members" / "member-0").glob("model-*.safetensors"))) > 2
    assert not (folder / "members" / "member-0" / "model.safetensors").exists()
    assert not list(folder.glob(".saving-*"))
    loaded = EnsembleForCausalLM.from_pretrained(folder)
    assert dtypes_of(loaded) == dtypes_of(ensemble)


def test_members_of_one_name_lie_apart(saved, tmp_path):
    """F4: Also where a name is what another would be given."""
    items = [MemberConfig(path=str(saved[0]), name="a-2")]
    items += [MemberConfig(path=str(path), name="a") for path in (saved[1], saved[0])]
    tokenizers = [None, None, tokenizer_of("smol")]
    ensemble = EnsembleForCausalLM.from_pretrained(items, tokenizers=tokenizers)
    ensemble.save_pretrained(tmp_path / "ensemble", include_members=True)
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert [m.path.rsplit("/", 1)[1] for m in loaded.config.members] == ["a-2", "a", "a-3"]
    assert [len(t) for t in loaded.tokenizers] == [len(t) for t in ensemble.tokenizers]


def test_members_whose_names_differ_in_case_lie_apart(saved, tmp_path):
    """F4: Some file systems take such names for the same."""
    items = [MemberConfig(path=str(path), name=name) for path, name in zip(saved[:2], ("m", "M"), strict=True)]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    ensemble.save_pretrained(tmp_path / "ensemble", include_members=True)
    assert sorted(path.name for path in (tmp_path / "ensemble" / "members").iterdir()) == ["M-2", "m"]


def test_objects_that_came_from_nowhere_are_saved_within(tmp_path):
    """F7: And need no path then."""
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    ensemble = make_ensemble([tiny.tiny_llama(t, num_hidden_layers=1) for t in tokenizers], tokenizers)
    ensemble.save_pretrained(tmp_path / "ensemble", include_members=True)
    names = sorted(path.name for path in (tmp_path / "ensemble" / "members").iterdir())
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert sorted(member.name for member in loaded._members) == names
    assert output_ids(loaded, "The cat", max_new_tokens=3) == output_ids(ensemble, "The cat", max_new_tokens=3)


class _Quantizer:
    quantization_config = None

    def is_serializable(self):
        return False


FAILURES = {
    "a member's generation config": lambda e: setattr(e.members[1].generation_config, "temperature", 0.7),
    "the ensemble's generation config": lambda e: setattr(e.generation_config, "temperature", 0.7),
    "a quantised member": lambda e: setattr(e.members[1], "hf_quantizer", _Quantizer()),
    "a member with adapters": lambda e: setattr(e.members[1], "_hf_peft_config_loaded", True),
    "a disk that is full": lambda e: setattr(e.members[1], "save_pretrained", _full),
}


def _full(*args, **kwargs):
    raise OSError("No space left on device")


@pytest.mark.crossed
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_save_that_fails_leaves_what_was_there(failure, is_there, saved, tmp_path):
    """E3 and F2: Nothing if nothing was there, else every file as it was; the error names the member."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    folder = tmp_path / "ensemble"
    if is_there:
        ensemble.save_pretrained(folder, include_members=True)
    before = files_of(folder) if is_there else None
    FAILURES[failure](ensemble)
    with pytest.raises((ConfigurationError, OSError)) as raised:
        ensemble.save_pretrained(folder, include_members=True)
    if "member" in failure:
        assert "member-1" in str(raised.value)
    assert folder.exists() == is_there
    if is_there:
        assert files_of(folder) == before


def test_a_member_is_not_overwritten_by_the_ensemble_that_refers_to_it(saved):
    """F2: Saved into the folder of a member."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    before = files_of(saved[0])
    with pytest.raises(ConfigurationError, match="member-0"):
        ensemble.save_pretrained(saved[0])
    assert files_of(saved[0]) == before


def test_a_template_that_is_gone_does_not_come_back(saved, tmp_path):
    """F6: Saved again without it, into the same folder."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    ensemble.tokenizer.chat_template = "{{ messages[0].content }}"
    ensemble.save_pretrained(tmp_path / "ensemble")
    assert AutoTokenizer.from_pretrained(tmp_path / "ensemble").chat_template
    ensemble.tokenizer.chat_template = None
    ensemble.save_pretrained(tmp_path / "ensemble")
    assert not AutoTokenizer.from_pretrained(tmp_path / "ensemble").chat_template


def test_options_of_the_stock_signature_mean_something_or_are_refused(saved, tmp_path):
    """F2: None is swallowed."""
    ensemble = EnsembleForCausalLM.from_pretrained(saved)
    folder = tmp_path / "ensemble"
    ensemble.save_pretrained(folder, is_main_process=False)
    assert not folder.exists()
    for options in (
        {"state_dict": {}},
        {"safe_serialization": False},
        {"variant": "fp16"},
        {"repo_id": "a/b"},
        {"commit_message": "x"},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            ensemble.save_pretrained(folder, **options)
    assert not folder.exists()
    ensemble.save_pretrained(folder, True, None, False, "1GB", safe_serialization=True)
    assert (folder / "config.json").is_file()


def write_gguf(model, tokenizer, file):
    """A tiny Llama as a GGUF file of 16-bit floats."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        kind = torch.float32 if tensor.dim() == 1 else torch.float16
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.to(kind).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_member_from_gguf_is_saved_within(tmp_path):
    """F4, F6, F7: With its unpacked weights, and another tokenizer than the file's."""
    tokenizer = tokenizer_of("smol")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "gguf").mkdir()
    model = tiny.tiny_llama(tokenizer, num_hidden_layers=1)
    write_gguf(model, tokenizer, tmp_path / "gguf" / "x.gguf")
    item = MemberConfig(path=str(tmp_path / "gguf"), gguf_file="x.gguf", tokenizer=str(tmp_path / "tokenizer"))
    ensemble = EnsembleForCausalLM.from_pretrained([item], dtype=torch.float32)
    ensemble.save_pretrained(tmp_path / "ensemble", include_members=True)
    assert ensemble.members[0].config.quantization_config is not None
    (tmp_path / "gguf").rename(tmp_path / "gone")
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
    assert not hasattr(loaded.members[0].config, "quantization_config")
    assert loaded.config.members[0].gguf_file is None
    for one, other in zip(ensemble.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert output_ids(loaded, "The cat", max_new_tokens=3) == output_ids(ensemble, "The cat", max_new_tokens=3)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_a_member_that_is_partly_on_the_disk_is_saved_within(saved, tmp_path):
    """F4 and H1: Its weights come back from there."""
    places = {"model.layers.0": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    item = MemberConfig(path=str(saved[0]), device_map=places)
    ensemble = EnsembleForCausalLM.from_pretrained([item, saved[1]], offload_folder=str(tmp_path / "offloaded"))
    assert "meta" in {p.device.type for p in ensemble.members[0].parameters()}
    ensemble.save_pretrained(tmp_path / "ensemble", include_members=True)
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "ensemble")
    whole = AutoModelForCausalLM.from_pretrained(saved[0])
    for one, other in zip(whole.state_dict().values(), loaded.members[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)
