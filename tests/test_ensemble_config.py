"""Configurations: what an ensemble's says of the primary (bug bank, J23), and what is refused in one that others wrote."""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen2Config

from hf_ensemble import ConfigurationError, EnsembleConfig, EnsembleForCausalLM, MemberConfig
from tests import tiny

READ = (
    "vocab_size",
    "eos_token_id",
    "max_position_embeddings",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
)

PRIMARIES = {
    "llama": LlamaConfig(num_hidden_layers=3, vocab_size=321, eos_token_id=[1, 2]),
    "gpt2, by other names": GPT2Config(n_layer=3, n_positions=77, vocab_size=321),
    "qwen, with windows": Qwen2Config(num_hidden_layers=3, vocab_size=321),
    "of a class that declares nothing": tiny.ScriptedConfig(vocab_size=321, eos_token_id=2),
}


@pytest.fixture(params=PRIMARIES)
def pair(request):
    """A primary's configuration and an ensemble's."""
    primary = copy.deepcopy(PRIMARIES[request.param])
    return primary, EnsembleConfig(members=[MemberConfig(path="a")], primary_config=primary)


def test_what_libraries_read_is_the_primarys(pair):
    """J23: Under all its names; what the primary lacks is lacking here, and nothing is made up."""
    primary, config = pair
    for name in READ:
        assert getattr(config, name) == getattr(primary, name)
    for name in (*vars(primary), *primary.attribute_map):
        if not name.startswith("_") and hasattr(config, name) and name not in vars(config):
            assert getattr(config, name) == getattr(primary, name)
    for name in ("num_experts_of_nobody", "quantization_config", "auto_map", "_secret", "__deepcopy__"):
        assert not hasattr(config, name)
        with pytest.raises(AttributeError, match="'EnsembleConfig' object has no attribute"):
            getattr(config, name)
    primary.vocab_size = 5
    assert config.vocab_size == 5
    assert config.get_text_config() is primary


def test_nothing_of_it_is_saved_twice(pair):
    """J23: In any form, and after copying and pickling."""
    primary, config = pair
    for one in (config, copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one == config
        assert one.vocab_size == primary.vocab_size
        for values in (one.to_dict(), one.to_diff_dict(), json.loads(one.to_json_string())):
            assert not set(values).intersection(READ)
            assert values["primary_config"]["vocab_size"] == primary.vocab_size


def test_what_a_checkpoint_adds_to_the_primary_is_its_own():
    """J23: Code to run, kinds of weights, and tasks are no options of the ensemble."""
    added = {
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "quantization_config": {"quant_method": "gptq"},
        "custom_pipelines": {"x": {}},
        "task_specific_params": {"text-generation": {"do_sample": True}},
    }
    config = EnsembleConfig(members=[MemberConfig(path="a")], primary_config=LlamaConfig(**added))
    for name in added:
        assert not hasattr(config, name)
        assert name not in config.to_dict()


def test_without_a_primary_nothing_is_known():
    assert not hasattr(EnsembleConfig(), "vocab_size")
    assert copy.deepcopy(EnsembleConfig()) == EnsembleConfig()


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
def test_an_ensemble_knows_where_it_was_loaded_from(tmp_path):
    """J23: A folder as it was given; never in what is saved."""
    paths = tiny.save_pair(tmp_path, "a", "b")
    listed = EnsembleForCausalLM.from_pretrained(paths)
    assert (listed.name_or_path, listed.config.name_or_path) == ("", "")
    listed.save_pretrained(tmp_path / "saved")
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    for one in (loaded, EnsembleForCausalLM.from_pretrained(paths[0])):
        where = paths[0] if len(one.members) == 1 else str(tmp_path / "saved")
        assert (one.name_or_path, one.config.name_or_path) == (where, where)
        one.save_pretrained(tmp_path / "again")
        assert str(tmp_path) not in (tmp_path / "again" / "config.json").read_text()
    assert loaded.config.vocab_size == loaded.members[0].config.vocab_size
    assert loaded.config.eos_token_id == loaded.members[0].config.eos_token_id


# --- What others may have written -----------------------------------------------------------------------------------

WRONG = {
    "members as a text": ({"members": "abc"}, "`members` has to be a list"),
    "members as an object": ({"members": {"path": "a"}}, "`members` has to be a list"),
    "a member as a text": ({"members": ["a"]}, "member 0 has to be"),
    "a member as a list": ({"members": [{"path": "a"}, ["a"]]}, "member 1 has to be"),
    "an unknown option": ({"members": [{"path": "a", "trust_remote_code": True}]}, "no option 'trust_remote_code'"),
    "a primary as a text": ({"primary_config": "llama"}, "`primary_config` has to be"),
    "a primary of no type": ({"primary_config": {"vocab_size": 3}}, "`primary_config` cannot be read"),
    "a primary of an unknown type": ({"primary_config": {"model_type": "nope"}}, "`primary_config` cannot be read"),
    "a primary whose type is a list": (
        {"primary_config": {"model_type": ["llama"]}},
        "`primary_config` cannot be read",
    ),
    "an ensemble as primary": ({"primary_config": {"model_type": "hf_ensemble"}}, "`primary_config` has to be"),
    "an unknown method": ({"method": "nope"}, "unknown method"),
    "a method that is a list": ({"method": ["unite"]}, "unknown method"),
    "a method whose name is a list": ({"method": {"name": ["unite"]}}, "unknown method"),
    "a method's option as an object": ({"method": {"name": "unite", "top_k": {}}}, "`top_k` has to be"),
    "weights as an object": ({"members": [{"path": "a"}], "weights": {"a": 1}}, "`weights` must be a list"),
    "an id of conversations that is a list": ({"chat_id": ["a"]}, "`chat_id` has to be a text"),
    "ids that are texts": ({"members": [{"eos_token_id": ["a"]}]}, "`eos_token_id` has to be"),
    "ids that are an object": ({"members": [{"eos_token_id": {"a": 1}}]}, "`eos_token_id` has to be"),
}
TEXTS = ("path", "name", "revision", "subfolder", "gguf_file", "dtype", "tokenizer", "chat_template", "system_prompt")
TEXTS += ("adapter", "adapter_revision", "adapter_subfolder")
for option in TEXTS:
    WRONG[f"{option} as an object"] = ({"members": [{option: {"a": 1}}]}, f"`{option}` has to be a text")
    WRONG[f"{option} as a list"] = ({"members": [{option: ["a"]}]}, f"`{option}` has to be a text")
    WRONG[f"{option} as a number"] = ({"members": [{option: 3}]}, f"`{option}` has to be a text")


@pytest.mark.parametrize("case", WRONG)
def test_a_configuration_that_makes_no_sense_is_refused(case, tmp_path):
    """Whoever wrote it, in a file or by hand."""
    values, message = WRONG[case]
    with pytest.raises(ConfigurationError, match=message):
        EnsembleConfig(**values)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hf_ensemble", **values}))
    for load in (AutoConfig.from_pretrained, EnsembleForCausalLM.from_pretrained):
        with pytest.raises(ConfigurationError, match=message):
            load(tmp_path)


def test_options_of_a_member_in_other_forms(tmp_path):
    """Paths as `Path`, dtypes of torch, one id; equal to what is saved of them."""
    item = MemberConfig(path=tmp_path, dtype=torch.bfloat16, eos_token_id=7, tokenizer=tmp_path / "t")
    assert item == MemberConfig(path=str(tmp_path), dtype="bfloat16", eos_token_id=[7], tokenizer=str(tmp_path / "t"))
    assert json.loads(json.dumps(item.to_dict()))["dtype"] == "bfloat16"
