"""Members whose weights are quantised while they are loaded: each by itself, saved, with adapters, or refused by name."""

import copy
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from hf_ensemble.hub import quantized
from hf_ensemble.members.cache_probe import distance_of_logits
from tests import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@register_quantization_config("rounding")
class Rounding(QuantizationConfigMixin):
    """Linear layers but the head have weights of few different values. Needs no package."""

    def __init__(self, steps=8, fails=False, **kwargs):
        self.quant_method = "rounding"
        self.steps = steps
        self.fails = fails


@register_quantizer("rounding")
class Rounder(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def is_serializable(self):
        return True

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.quantization_config.fails:
            raise RuntimeError("weights of an odd shape")
        if self.pre_quantized:
            return model
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                rounded(module.weight.data, self.quantization_config.steps)
        self.quantization_config.steps = -1  # as some do: what they were given is theirs
        return model


def rounded(weight, steps):
    scale = weight.abs().amax(-1, keepdim=True) / steps
    weight.copy_((weight / scale).round() * scale)


def num_values(model):
    """How many values one row of a weight has."""
    return len(model.model.layers[0].self_attn.q_proj.weight[0].unique())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [str(folder) for folder in tiny.save_pair(tmp_path_factory.mktemp("members"), "a", "b")]


def written(ensemble):
    inputs = ensemble.tokenizer(["The cat", "A dog sat on"], return_tensors="pt", padding=True)
    return ensemble.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()


def by_hand(folder, steps):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rounded(module.weight.data, steps)
    return model


# --- Whose ----------------------------------------------------------------------------------------------------------

WHOSE = {
    "of one member": (lambda a, b: [a, MemberConfig(path=b, quantization_config=Rounding(4))], None, [None, 4]),
    "a dictionary": (
        lambda a, b: [a, MemberConfig(path=b, quantization_config={"quant_method": "rounding", "steps": 4})],
        None,
        [None, 4],
    ),
    "one for all": (lambda a, b: [a, b], Rounding(2), [2, 2]),
    "one for those that have none": (lambda a, b: [a, MemberConfig(path=b, quantization_config=Rounding(4))], Rounding(2), [2, 4]),
    "a list": (lambda a, b: [a, MemberConfig(path=b, quantization_config=Rounding(4))], [Rounding(2), None], [2, None]),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOSE)
def test_each_member_is_quantised_as_is_said_of_it(case, folders):
    """By the same numbers as by hand; and nothing that was given is changed."""
    make, given, expected = WHOSE[case]
    items = make(*folders)
    before = copy.deepcopy((items, given))
    ensemble = EnsembleForCausalLM.from_pretrained(items, quantization_config=given)
    for model, folder, steps in zip(ensemble.members, folders, expected, strict=True):
        plain = AutoModelForCausalLM.from_pretrained(folder) if steps is None else by_hand(folder, steps)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
    assert [(item.quantization_config or {}).get("steps") for item in ensemble.config.members] == expected
    assert repr((items, given)) == repr(before)
    assert written(ensemble)


def test_texts_are_those_of_the_same_models_loaded_by_hand(folders):
    """Two members of one folder, of which one is quantised, are two models."""
    items = [folders[0], MemberConfig(path=folders[0], quantization_config=Rounding(2))]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    models = [AutoModelForCausalLM.from_pretrained(folders[0]), by_hand(folders[0], 2)]
    assert written(ensemble) == written(EnsembleForCausalLM.from_members(models, ensemble.tokenizers))
    assert [member.cache_mode for member in ensemble.member_views] == ["repack"] * 2


# --- Saved ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_members", [False, True])
def test_it_comes_back_when_loaded(include_members, folders, tmp_path):
    """By reference: quantised in the same way again. With the members: as the weights are."""
    items = [folders[0], MemberConfig(path=folders[1], quantization_config=Rounding(2))]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    ensemble.save_pretrained(tmp_path / "saved", include_members=include_members)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["members"]
    asked = {"quant_method": "rounding", "steps": 2, "fails": False}
    assert [item.get("quantization_config") for item in saved] == [None, None if include_members else asked]
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    assert num_values(loaded.members[1]) <= 5 < num_values(loaded.members[0])
    assert loaded.members[1].hf_quantizer.pre_quantized == include_members
    assert written(loaded) == written(ensemble)


def test_what_the_call_says_counts_more_than_what_was_saved(folders, tmp_path):
    ensemble = EnsembleForCausalLM.from_pretrained(folders, quantization_config=Rounding(2))
    ensemble.save_pretrained(tmp_path / "saved")
    found = []
    for given in (None, Rounding(4), [None, None]):
        loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=given)
        found.append(num_values(loaded.members[0]))
    assert 1 < found[0] <= 5 < found[1] <= 9 < found[2]


def test_a_loaded_model_that_was_quantised_is_saved_so(folders, tmp_path):
    """A reference to it would else be one to the model as it lies."""
    models = [AutoModelForCausalLM.from_pretrained(folder, quantization_config=Rounding(3)) for folder in folders]
    tokenizers = EnsembleForCausalLM.from_pretrained(folders).tokenizers
    EnsembleForCausalLM.from_members(models, tokenizers).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["members"]
    assert [item["quantization_config"]["quant_method"] for item in saved] == ["rounding"] * 2
    models[0].save_pretrained(tmp_path / "quantised")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    ensemble = EnsembleForCausalLM.from_members([again], tokenizers[:1])
    assert ensemble.config.members[0].quantization_config is None, "it lies quantised there"


# --- With adapters --------------------------------------------------------------------------------------------------


def test_adapters_share_a_quantised_model(folders, tmp_path):
    """It is loaded once, and quantised once."""
    peft = pytest.importorskip("peft")
    from tests.hub.test_adapters import logits_of, train

    for number in range(2):
        config = peft.LoraConfig(r=2 + number, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders[0]), config)
        train(model).save_pretrained(tmp_path / str(number))
    items = [
        MemberConfig(path=folders[0], adapter=tmp_path / str(number), quantization_config=Rounding(2))
        for number in range(2)
    ]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    bases = [model.model.layers[0].self_attn.q_proj.base_layer.weight for model in ensemble.members]
    assert bases[0] is bases[1]
    assert len(bases[0][0].unique()) <= 5
    for number, model in enumerate(ensemble.members):
        expected = peft.PeftModel.from_pretrained(by_hand(folders[0], 2), tmp_path / str(number))
        torch.testing.assert_close(logits_of(model), logits_of(expected), atol=1e-6, rtol=0)
    assert ensemble.member_views[0].shared.mixed_model() is not None
    ensemble.save_pretrained(tmp_path / "saved")
    assert written(EnsembleForCausalLM.from_pretrained(tmp_path / "saved")) == written(ensemble)
    with pytest.raises(ConfigurationError, match="carries adapters and is quantised"):
        ensemble.save_pretrained(tmp_path / "bundle", include_members=True)


# --- Refused --------------------------------------------------------------------------------------------------------

NO_CONFIGURATION = {
    "a name": ("int8", "has to be a configuration such as"),
    "no method": ({"bits": 4}, "names no `quant_method`"),
    "what JSON has not": ({"quant_method": "rounding", "steps": object()}, "cannot be written as JSON"),
}


@pytest.mark.parametrize("case", NO_CONFIGURATION)
def test_what_is_no_configuration_is_refused(case):
    given, message = NO_CONFIGURATION[case]
    with pytest.raises(ConfigurationError, match=f"quantization_config.*{message}"):
        MemberConfig(path="a", quantization_config=given)


REFUSED = {
    "a list of another length": ([Rounding()], "`quantization_config` .*2 members"),
    "an unknown method": ([None, {"quant_method": "of nobody"}], "member '.*b' cannot be loaded: .*of nobody"),
    "weights that cannot be": ([None, Rounding(fails=True)], "member '.*b' cannot be loaded: weights of an odd shape"),
    "a package that is missing": (
        [None, {"quant_method": "torchao"}],
        "member '.*b' is quantised by torchao, but `torchao` is not installed: `pip install torchao`",
    ),
    "the same by its options": (
        [None, BitsAndBytesConfig(load_in_4bit=True).to_dict() | {"quant_method": None}],
        "member '.*b' is quantised by bitsandbytes, but `bitsandbytes` is not installed: `pip install bitsandbytes`",
    ),
}


@pytest.fixture
def without_packages(monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_is_refused_by_name(case, folders, without_packages):
    given, message = REFUSED[case]
    with pytest.raises(ConfigurationError, match=message):
        EnsembleForCausalLM.from_pretrained(folders, quantization_config=given)


def test_a_missing_package_is_named_before_any_weight_is_read(folders, tmp_path, monkeypatch, without_packages):
    """Also where the weights lie quantised, and where they lie in a GGUF file."""
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights are read")
    )
    config = json.loads(Path(folders[1], "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "b").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "b" / name).symlink_to(f"{folders[1]}/{name}")
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    for item, package in (
        (str(tmp_path / "b"), "torchao"),
        (MemberConfig(path=folders[1], gguf_file="b.gguf"), "gguf"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"b' is quantised by {package}, but `{package}` is not installed: `pip"
        ):
            EnsembleForCausalLM.from_pretrained([folders[0], item])


def test_weights_that_would_be_written_wrongly_are_not_bundled(folders, tmp_path):
    """4-bit weights of bitsandbytes on a CPU, once they have run: the model itself would be another afterwards."""
    ensemble = EnsembleForCausalLM.from_pretrained(folders)
    weight = ensemble.members[1].model.layers[0].self_attn.q_proj.weight
    weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
    with pytest.raises(ConfigurationError, match="b' cannot be included: it has run on a CPU.*before it runs"):
        ensemble.save_pretrained(tmp_path / "saved", include_members=True)


# --- Real quantisers, where they are installed ----------------------------------------------------------------------


def real_quantisation(name):
    if importlib.util.find_spec(name.split()[0]) is None:
        pytest.skip(f"{name} is not installed")
    if name == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    if name.endswith("int8"):
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["torchao", "bitsandbytes int8", "bitsandbytes int4"])
@torch.no_grad()
def test_real_quantisers(name, tmp_path):
    """Members of them have caches, and come back from a reference and from a bundle."""
    quantization = real_quantisation(name)
    folders = [str(folder) for folder in save_wide_pair(tmp_path)]
    ensemble = EnsembleForCausalLM.from_pretrained(folders, quantization_config=[quantization, None])
    assert ensemble.members[0].is_quantized
    assert [member.description() for member in ensemble.member_views]  # what files for an ensemble are found by
    ensemble.save_pretrained(tmp_path / "saved-True", include_members=True)
    ids = torch.tensor([[3, 5, 7, 11], [4, 6, 8, 12]])
    expected = ensemble.members[0](ids).logits.float()
    for include_members in (False, True):
        if not include_members:
            ensemble.save_pretrained(tmp_path / "saved-False")
        loaded = EnsembleForCausalLM.from_pretrained(tmp_path / f"saved-{include_members}")
        assert loaded.members[0].is_quantized
        assert written(loaded)
        assert [member.cache_mode for member in loaded.member_views] == ["repack"] * 2
        # What is quantised already may be multiplied in another order.
        distance = distance_of_logits(loaded.members[0](ids).logits.float(), expected)
        assert distance < (0.05 if include_members else 1e-6)


def save_wide_pair(folder):
    """Two members whose layers are wide enough for the blocks of any quantiser."""
    tokenizer = tiny.smol_like()
    for seed, name in enumerate("ab"):
        model = tiny.tiny_llama(tokenizer, seed=seed, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        yield folder / name
