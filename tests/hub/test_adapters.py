"""Bug bank, J8 and J9: members that are or carry an adapter are loaded and saved with it, or refused with the remedy."""

import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    # Of peft: what it saves of embeddings, and what an adapter of tied weights means.
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

KINDS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "LoRA and a whole head": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, init_lora_weights=False),
    "LoRA of embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False),
    "single tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 5]}, init_lora_weights=False
    ),
    "IA3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
FROM_THE_MODEL = {
    init: lambda init=init: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    for init in ("pissa", "pissa_niter_2", "olora", "orthogonal")
}
"""They take their first weights out of the model's, which are other ones afterwards."""

each_kind = pytest.mark.parametrize("kind", KINDS)


def train(model):
    """Give what may be trained values of its own."""
    with torch.no_grad():
        for n, (name, weight) in enumerate(model.named_parameters()):
            if weight.requires_grad or "modules_to_save" in name:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(n)).to(weight) / 4)
    return model.eval()


def adapted(base, kind="LoRA", **options):
    return train(
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), {**KINDS, **FROM_THE_MODEL}[kind](), **options)
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model's folder, with its tokenizer."""
    return save_base(tmp_path_factory.mktemp("models") / "base")


def save_base(folder, dtype=torch.float32, **options):
    tokenizer = tiny.smol_like()
    tiny.tiny_llama(tokenizer, num_hidden_layers=1, **options).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    """The folder of an adapter of that model."""
    adapted(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits_of(model):
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        return model(input_ids=ids).logits


def assert_gives(ensemble, expected, tolerance=0.0):
    torch.testing.assert_close(logits_of(ensemble.members[0]), expected, atol=tolerance, rtol=0)


# --- Loading --------------------------------------------------------------------------------------------------------


@each_kind
def test_an_adapters_folder_is_the_model_with_it(kind, base, tmp_path):
    """J9: For a list, for a single path, and for both apart; equal to `peft`'s own loading."""
    model = adapted(base, kind)
    model.save_pretrained(tmp_path / "my-adapter")
    expected = logits_of(model)
    assert not torch.allclose(expected, logits_of(AutoModelForCausalLM.from_pretrained(base)))
    apart = MemberConfig(path=base, adapter=tmp_path / "my-adapter")
    for source in ([tmp_path / "my-adapter"], str(tmp_path / "my-adapter"), [apart]):
        ensemble = EnsembleForCausalLM.from_pretrained(source)
        assert_gives(ensemble, expected)
        item = ensemble.config.members[0]
        assert (item.path, item.adapter) == (str(base), str(tmp_path / "my-adapter"))
        assert ensemble.member_views[0].name == ("base" if source == [apart] else "my-adapter")
        assert not any(module.training for module in ensemble.members[0].modules())


def test_it_is_what_the_auto_class_loads(base, adapter):
    """J9: In half precision too, where the adapter takes the model's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        stock = AutoModelForCausalLM.from_pretrained(adapter, dtype=dtype).eval()
        ensemble = EnsembleForCausalLM.from_pretrained([adapter], dtype=dtype)
        assert type(ensemble.members[0]) is type(stock)
        assert {p.dtype for p in ensemble.parameters()} == {dtype}
        assert_gives(ensemble, logits_of(stock))


def test_an_ensemble_with_an_adapter_generates(base, adapter):
    """J9: Beside the same model without it."""
    ensemble = EnsembleForCausalLM.from_pretrained([adapter, base], method="gac", weights=[1, 0])
    alone = AutoModelForCausalLM.from_pretrained(adapter)
    inputs = ensemble.tokenizer("The cat", return_tensors="pt")
    options = {"max_new_tokens": 5, "do_sample": False}
    assert ensemble.generate(**inputs, **options).tolist() == alone.generate(**inputs, **options).tolist()
    assert ensemble.members[0] is not ensemble.members[1]


def test_model_and_adapter_may_lie_in_one_folder(base, tmp_path):
    """J9: Whatever model the adapter names."""
    folder = tmp_path / "both"
    shutil.copytree(base, folder)
    model = adapted(base, "LoRA and a whole head")
    model.save_pretrained(folder)
    ensemble = EnsembleForCausalLM.from_pretrained([folder])
    assert_gives(ensemble, logits_of(model))
    ensemble.save_pretrained(tmp_path / "saved")
    assert_gives(EnsembleForCausalLM.from_pretrained(tmp_path / "saved"), logits_of(model))


def test_an_adapter_may_lie_in_a_folder_within(base, tmp_path):
    """J9: `subfolder`, and `adapter_subfolder`."""
    model = adapted(base)
    model.save_pretrained(tmp_path / "run" / "checkpoint-7")
    for item in (
        MemberConfig(path=tmp_path / "run", subfolder="checkpoint-7"),
        MemberConfig(path=base, adapter=tmp_path / "run", adapter_subfolder="checkpoint-7"),
    ):
        assert_gives(EnsembleForCausalLM.from_pretrained([item]), logits_of(model))


def test_a_tokenizer_beside_the_adapter_is_the_members(base, adapter):
    """J9: It is what the adapter was trained with; else that of the model."""
    assert EnsembleForCausalLM.from_pretrained([adapter]).tokenizers[0].chat_template is None
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(adapter)
    ensemble = EnsembleForCausalLM.from_pretrained([adapter])
    assert ensemble.tokenizers[0].chat_template == "{{ messages[0].content }}"
    assert ensemble.config.members[0].tokenizer is None


def test_loading_an_adapter_draws_nothing(base, adapter):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    EnsembleForCausalLM.from_pretrained([adapter])
    assert torch.equal(torch.random.get_rng_state(), before)


def rewritten(adapter, **values):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return [adapter]


BROKEN = {
    "no model named": (lambda b, a: rewritten(a, base_model_name_or_path=None), "does not name its model"),
    "a relative path that is none": (
        lambda b, a: rewritten(a, base_model_name_or_path="./gone"),
        r"'.*adapter' is an adapter of the model './gone'.*no folder.*MemberConfig\(path=",
    ),
    "a whole path that is none": (lambda b, a: rewritten(a, base_model_name_or_path="/gone/far"), "'/gone/far'"),
    "an adapter of an adapter": (
        lambda b, a: rewritten(a, base_model_name_or_path=shutil.copytree(a, f"{a}-2")),
        "'.*adapter-2' is an adapter itself",
    ),
    "an adapter of itself": (lambda b, a: rewritten(a, base_model_name_or_path=str(a)), "cannot be loaded"),
    "another kind": (lambda b, a: rewritten(a, peft_type="NOVELTY"), "cannot be read.*NOVELTY"),
    "learned prompts": (lambda b, a: rewritten(a, peft_type="PROMPT_TUNING"), "PROMPT_TUNING.*Use LoRA"),
    "an adapter apart that is none": (lambda b, a: [MemberConfig(path=b, adapter=b)], "no adapter at"),
    "an adapter apart that is nowhere": (lambda b, a: [MemberConfig(path=b, adapter="./gone")], "no folder './gone'"),
    "two adapters": (lambda b, a: [MemberConfig(path=a, adapter=shutil.copytree(a, f"{a}-2"))], "an adapter itself"),
    "no weights": (
        lambda b, a: (a / "adapter_model.safetensors").unlink() or [a],
        "no adapter_model.safetensors beside",
    ),
    "weights as a pickle": (
        lambda b, a: torch.save({}, a / "adapter_model.bin") or (a / "adapter_model.safetensors").unlink() or [a],
        "no adapter_model.safetensors beside",
    ),
    "a configuration that is no object": (
        lambda b, a: [(a / "adapter_config.json").write_text("[]"), a][1:],
        "adapter_config.json' has to hold a JSON object",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_adapter_that_cannot_be_used_is_refused_by_name(case, base, adapter):
    """J9: Paths of a model that has moved, and whatever else is wrong."""
    make, message = BROKEN[case]
    with pytest.raises(ConfigurationError, match=message):
        EnsembleForCausalLM.from_pretrained(make(base, adapter))


@pytest.mark.parametrize("options", [{"num_hidden_layers": 2}, {"hidden_size": 64}], ids=str)
def test_an_adapter_of_another_model_is_refused(options, adapter, tmp_path):
    """J9: Where weights are missing or have another shape; never half an adapter."""
    sizes = {"num_hidden_layers": 1, **options}
    model = tiny.tiny_llama(tiny.smol_like(), **sizes)
    model.save_pretrained(tmp_path / "other")
    tiny.smol_like().save_pretrained(tmp_path / "other")
    remedy = "merge_and_unload" if "hidden_size" in options else "it belongs to another model"
    with pytest.raises(ConfigurationError, match=f"(?s)member 'x' cannot be loaded.*{remedy}"):
        EnsembleForCausalLM.from_pretrained([MemberConfig(path=tmp_path / "other", adapter=adapter, name="x")])


def test_without_peft_the_remedy_is_named(base, adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"adapter.*peft>=0.19.1"):
        EnsembleForCausalLM.from_pretrained([adapter])


# --- Saving the members too -----------------------------------------------------------------------------------------


def bundled(model, base, tmp_path, **options):
    """The ensemble of one model after it was saved as a whole, moved, and loaded."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer], **options)
    ensemble.save_pretrained(tmp_path / "here", include_members=True)
    (tmp_path / "here").rename(tmp_path / "there")
    return EnsembleForCausalLM.from_pretrained(tmp_path / "there")


@pytest.mark.parametrize("kind", [*KINDS, *FROM_THE_MODEL])
def test_a_member_with_an_adapter_is_saved_with_it(kind, base, tmp_path):
    """J8: An object of `peft`; neither the model nor the adapter is changed."""
    model = adapted(base, kind, adapter_name="mine")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = model.config.to_dict()
    loaded = bundled(model, base, tmp_path)
    assert_gives(loaded, logits_of(model))
    assert config == model.config.to_dict()
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert (tmp_path / "there" / "members").is_dir()


@pytest.mark.crossed
@pytest.mark.parametrize("kind", ["LoRA", "LoRA and a whole head"])
@pytest.mark.parametrize("how", ["peft", "stock", "ours"])
def test_it_comes_back_to_the_last_bit_in_half_precision(kind, how, tmp_path):
    """J8: Where `peft` keeps adapters in single precision, and where the auto class does not; tied weights."""
    base = save_base(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    model = adapted(base, kind)
    if how != "peft":
        model.save_pretrained(tmp_path / "adapter")
        model = (
            AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
            if how == "stock"
            else EnsembleForCausalLM.from_pretrained([tmp_path / "adapter"]).members[0]
        )
    loaded = bundled(model.eval(), base, tmp_path)
    assert_gives(loaded, logits_of(model))
    again = EnsembleForCausalLM.from_pretrained(tmp_path / "there", dtype=torch.float16)
    assert {p.dtype for p in again.parameters()} == {torch.float16}


def test_weights_that_changed_below_the_adapter_are_saved(base, tmp_path):
    """J8: Both are as they are now."""
    model = adapted(base)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.mul_(2)
    assert_gives(bundled(model, base, tmp_path), logits_of(model))


def test_an_adapter_loaded_by_the_models_own_method_is_saved(base, adapter, tmp_path):
    """J8: `model.load_adapter`, which leaves no wrapper around the model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(adapter)
    model.eval()
    assert_gives(bundled(model, base, tmp_path), logits_of(model))


def test_only_what_acts_is_saved(base, tmp_path):
    """J8: Of two adapters the active one; none where they are switched off, merged or taken off."""
    model = adapted(base)
    model.add_adapter("other", KINDS["LoRA"]())
    train(model)
    model.set_adapter("other")
    with_other = bundled(model, base, tmp_path)
    assert_gives(with_other, logits_of(model))
    with model.disable_adapter():
        plain = bundled(model, base, tmp_path / "plain")
        assert_gives(plain, logits_of(model))
    assert not plain.config.members[0].adapter
    merged = model.merge_and_unload()
    assert_gives(bundled(merged, base, tmp_path / "merged"), logits_of(merged))


REFUSED = {
    "two act": (
        lambda m: m.add_adapter("other", KINDS["LoRA"]()) or m.base_model.set_adapter(["default", "other"]),
        "other",
    ),
    "merged for a while": (lambda m: m.merge_adapter(), "merged"),
    "quantised": (lambda m: setattr(m.get_base_model(), "hf_quantizer", object()), "quantised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(case, base, tmp_path):
    """J8: Before anything is written."""
    model = adapted(base)
    change, message = REFUSED[case]
    change(model)
    with pytest.raises(ConfigurationError, match=f"member 'base' cannot be included.*{message}"):
        bundled(model, base, tmp_path)
    assert not (tmp_path / "here").exists()


# --- Saving references ----------------------------------------------------------------------------------------------


def test_an_adapter_without_a_reference_is_not_lost_silently(base, adapter, tmp_path):
    """J8: Of `peft` or loaded by the model's own method, also into a member of an ensemble that was loaded."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    own = AutoModelForCausalLM.from_pretrained(base)
    own.load_adapter(adapter)
    later = EnsembleForCausalLM.from_pretrained([base])
    later.members[0].load_adapter(adapter)
    ensembles = [EnsembleForCausalLM.from_members([model], [tokenizer]) for model in (adapted(base), own)]
    for ensemble in (*ensembles, later):
        with pytest.raises(
            ConfigurationError, match=r"'base' carries adapters.*include_members.*MemberConfig\(adapter"
        ):
            ensemble.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_an_adapter_is_part_of_the_reference(base, adapter, tmp_path):
    """J8 and J9: As it was listed, and as it is named for an object."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    items = [MemberConfig(path=base, adapter=adapter)]
    for ensemble in (
        EnsembleForCausalLM.from_pretrained([adapter]),
        EnsembleForCausalLM.from_members([model], [tokenizer], member_configs=items),
    ):
        ensemble.save_pretrained(tmp_path / "saved")
        loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
        assert_gives(loaded, logits_of(model))
        assert loaded.member_views[0].name == ensemble.member_views[0].name
        member = json.loads((tmp_path / "saved" / "config.json").read_text())["members"][0]
        assert member["adapter"] == "../adapter"


def test_an_adapter_and_its_model_move_with_the_ensemble(tmp_path):
    """J8 and J14: All that lies in one folder is found after that has moved."""
    project = tmp_path / "project"
    base = save_base(project / "models" / "base")
    model = adapted(base)
    model.save_pretrained(project / "runs" / "adapter")
    EnsembleForCausalLM.from_pretrained([project / "runs" / "adapter"]).save_pretrained(project / "saved")
    project.rename(tmp_path / "elsewhere")
    assert_gives(EnsembleForCausalLM.from_pretrained(tmp_path / "elsewhere" / "saved"), logits_of(model))


def test_an_adapter_whose_model_is_an_adapter_is_refused(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "own")
    file = tmp_path / "own" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(adapter)}))
    with pytest.raises(ConfigurationError, match="is an adapter itself"):
        EnsembleForCausalLM.from_pretrained([str(tmp_path / "own")])
