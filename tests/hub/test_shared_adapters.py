"""Several members that are adapters on one model: its weights are held once, and nothing else is different."""

import copy
import json
import threading
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, GacConfig, MemberConfig, VoteConfig
from hf_ensemble.members import repacked_cache
from hf_ensemble.members.adapted import wrapped_modules
from hf_ensemble.members.member_model import MemberModel
from tests.hub.test_adapters import KINDS as ADAPTERS
from tests.hub.test_adapters import adapted, logits_of, save_base, train

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

KINDS = ("LoRA", "LoRA of all", "LoRA and a whole head", "LoRA of embeddings", "LoRA of patterns")
"""Of five adapters that PEFT can use in one batch."""


@cache
def folders(root):
    """A model and five adapters on it, in folders."""
    base = save_base(root / "base")
    for number, kind in enumerate(KINDS):
        model = adapted(base, kind if kind in ADAPTERS else "LoRA")
        if kind == "LoRA of all":
            config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "up_proj"], lora_alpha=9)
            model = train(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
        if kind == "LoRA of patterns":
            options = {
                "rank_pattern": {"q_proj": 5},
                "alpha_pattern": {"v_proj": 64},
                "use_rslora": True,
                "lora_bias": True,
            }
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
            model = train(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.mul_(1 + number)
        model.save_pretrained(root / f"adapter-{number}")
    return base, [root / f"adapter-{number}" for number in range(len(KINDS))]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("shared"))


def members_of(places, plain=True):
    base, adapters = places
    items = [MemberConfig(path=base, adapter=adapter, name=adapter.name) for adapter in adapters]
    return [*items, MemberConfig(path=base)] if plain else items


@pytest.fixture(scope="module")
def shared(places):
    return EnsembleForCausalLM.from_pretrained(members_of(places))


@pytest.fixture(scope="module")
def separate(places):
    return separately(members_of(places))


def separately(items):
    """The same members, each with weights of its own."""
    alone = [EnsembleForCausalLM.from_pretrained([item]) for item in items]
    return EnsembleForCausalLM.from_members(
        [one.members[0] for one in alone],
        [one.tokenizer for one in alone],
        member_configs=[one.config.members[0] for one in alone],
    )


def storages(models):
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
    }


def sum_of_storages(*models):
    return sum(storages(models).values())


def mixed_model(ensemble):
    return ensemble.member_views[0].shared.mixed_model()


@pytest.fixture
def passes(monkeypatch):
    """The names of the models that ran, a forward pass each."""
    names = []
    stock = MemberModel.forward
    monkeypatch.setattr(MemberModel, "forward", lambda self, *args: names.append(self.name) or stock(self, *args))
    return names


# --- Weights --------------------------------------------------------------------------------------------------------


def test_weights_are_held_once(shared, separate, places):
    """At most the model's and the adapters': no tensor of the model is there twice, nor in what runs them together."""
    base = AutoModelForCausalLM.from_pretrained(places[0])
    of_base = sum(weight.nbytes for weight in base.parameters())
    of_adapters = sum(
        weight.nbytes for model in shared.members for name, weight in model.named_parameters() if is_of_adapter(name)
    )
    of_buffers = sum(buffer.nbytes for buffer in base.buffers())
    together = [*shared.members, mixed_model(shared).model]
    assert sum_of_storages(*together) <= of_base + of_adapters + of_buffers
    assert sum_of_storages(*separate.members) > 5 * of_base
    for one, other in zip(shared.members, separate.members, strict=True):
        torch.testing.assert_close(logits_of(one), logits_of(other), atol=0, rtol=0)
    assert len({id(model) for model in shared.members}) == 6


def is_of_adapter(name):
    return "lora_" in name or "modules_to_save" in name


def test_a_model_is_loaded_once(places, monkeypatch):
    loaded = []
    stock = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: loaded.append(args) or stock(*args, **kwargs)
    )
    EnsembleForCausalLM.from_pretrained(members_of(places))
    assert len(loaded) == 1
    EnsembleForCausalLM.from_pretrained(members_of(places), dtype=["float32"] * 5 + ["bfloat16"])
    assert len(loaded) == 3, "of another dtype is another model"


def test_the_model_itself_stays_as_it_is(shared, places):
    plain = AutoModelForCausalLM.from_pretrained(places[0])
    torch.testing.assert_close(logits_of(shared.members[-1]), logits_of(plain), atol=0, rtol=0)
    assert not hasattr(shared.members[-1], "peft_config")
    assert all(weight.requires_grad for weight in shared.members[-1].parameters())
    mixed_model(shared)
    assert all(weight.requires_grad for weight in shared.members[-1].parameters())


@pytest.mark.parametrize("change", ["pissa", "bias", "new embeddings"])
def test_an_adapter_that_changes_the_model_keeps_to_itself(change, places, tmp_path):
    """Weights that it takes something out of, or brings with it, are its own; all others stay as they are."""
    base, adapters = places
    if change == "pissa":
        model = adapted(base, "pissa")
    elif change == "bias":
        with_bias = save_base(tmp_path / "with-bias", attention_bias=True)
        base, adapters = with_bias, [tmp_path / "other"]
        adapted(base).save_pretrained(adapters[0])
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only", init_lora_weights=False)
        model = train(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    else:
        model = adapted(base, "LoRA of embeddings")
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path / "own")
    items = [
        MemberConfig(path=base, adapter=tmp_path / "own"),
        MemberConfig(path=base, adapter=adapters[0]),
        str(base),
    ]
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    for one, item in zip(ensemble.members, items, strict=True):
        expected = logits_of(EnsembleForCausalLM.from_pretrained([item]).members[0])
        torch.testing.assert_close(logits_of(one), expected, atol=0, rtol=0)
    torch.testing.assert_close(logits_of(ensemble.members[0]), logits_of(model), atol=1e-6, rtol=0)
    own, *others = [set(storages([one])) for one in ensemble.members]
    assert others[1] <= others[0]
    assert not others[1] <= own
    assert (change == "pissa") == own.isdisjoint(others[1])


# --- Texts ----------------------------------------------------------------------------------------------------------

PROMPTS = ["The cat sat on the", "A dog", "Some words that are more"]
GREEDY = {"do_sample": False, "max_new_tokens": 8}
CALLS = {
    "UniTE": {"method": "unite"},
    "GaC": {"method": "gac"},
    "GaC with a gate": {"method": "gac", "threshold": 0.2},
    "spans": {"method": "sweetspan"},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "drafts by a member": {"speculation": "adapter-2"},
    "drafts of n-grams": {"speculation": "ngram"},
    "sampled": {"do_sample": True, "top_k": 5, "method": "gac"},
    "weights": {"weights": [0.4, 0, 0.3, 0.1, 0.2, 0]},
    "a vote": {"method": VoteConfig()},
    "no cache": {"use_cache": False},
}


def written(ensemble, prompts=PROMPTS, **options):
    options = {**GREEDY, **options}
    if "threshold" in options:
        options["method"] = GacConfig(threshold=options.pop("threshold"))
    inputs = ensemble.tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(3)
    return ensemble.generate(**inputs, **options).tolist()


QUICK = ("UniTE", "beams", "sampled")
"""One of each way in which rows go on."""


@pytest.mark.parametrize("call", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CALLS])
def test_texts_are_those_of_separate_models(call, shared, separate):
    """In a batch of unequal rows, and of one row; a member by itself, too."""
    options = dict(CALLS[call])
    for prompts in (PROMPTS, PROMPTS[:1]):
        assert written(shared, prompts, **options) == written(separate, prompts, **options)


def test_prompts_of_their_own_may_be_of_any_length(shared, separate):
    """So the members' rows in one batch begin at different places."""
    own = [None, "A much longer prompt that only this one reads", "Hi", None, "One more of these", "The"]
    assert written(shared, PROMPTS[:1], member_prompts=own) == written(separate, PROMPTS[:1], member_prompts=own)


def test_a_member_alone_is_that_member(shared, separate, places):
    for number in range(6):
        own = EnsembleForCausalLM.from_pretrained([members_of(places)[number]])
        assert written(shared.alone(number)) == written(own)
    pairs = [(["The cat"], [" sat on the mat"])]
    for prompts, texts in pairs:
        one, other = (ensemble.score(prompts, texts).log_probs for ensemble in (shared, separate))
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=1e-4, rtol=0)


OF_OTHERS = ("IA3", "single tokens", "LoRA of the head")

# --- One forward pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["unite", "gac"])
def test_a_step_is_one_forward_pass(method, shared, passes):
    """Of all members, the primary among them; none runs by itself."""
    inputs = shared.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"method": method, "min_new_tokens": 8, "return_dict_in_generate": True}
    shared.generate(**inputs, **GREEDY, **options)  # looks for the caches
    passes.clear()
    output = shared.generate(**inputs, **GREEDY, **options)
    assert passes == [mixed_model(shared).name] * 8
    assert output.num_forwards == (8,) * 6


def test_steps_grow_one_tensor_in_place(shared, monkeypatch):
    """What is cached is put together once, not copied at every step."""
    copies = []
    stock = repacked_cache._join_rows
    monkeypatch.setattr(repacked_cache, "_join_rows", lambda *args: copies.append(1) or stock(*args))
    for prompts in (PROMPTS[:1], PROMPTS):
        written(shared, prompts, method="gac", max_new_tokens=16, min_new_tokens=16)
        assert not copies


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DoRA", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OF_OTHERS)])
def test_adapters_of_other_kinds_share_weights_and_run_by_themselves(kind, places, tmp_path):
    """Others beside them go on together, unless what they wrap cannot be wrapped twice."""
    base, adapters = places
    if kind == "LoRA of the head":
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = train(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    else:
        model = adapted(base, kind)
    model.save_pretrained(tmp_path / "own")
    items = [
        MemberConfig(path=base, adapter=tmp_path / "own", name="own"),
        MemberConfig(path=base, adapter=adapters[0]),
        MemberConfig(path=base, adapter=adapters[2]),
        str(base),
    ]
    ensemble, separate = EnsembleForCausalLM.from_pretrained(items), separately(items)
    assert len(set(storages([ensemble.members[0]])) & set(storages([ensemble.members[2]]))) >= 10
    mixed = mixed_model(ensemble)
    assert (mixed is None) == (kind == "LoRA of the head")
    assert mixed is None or ("own" in mixed.name) == (kind == "single tokens")
    for options in ({}, {"num_beams": 2}, {"method": "sweetspan"}):
        assert written(ensemble, **options) == written(separate, **options)


@pytest.mark.slow
def test_what_changes_later_is_seen(places):
    """An adapter that is switched off, and one in training mode; both as with separate models."""
    ensemble = EnsembleForCausalLM.from_pretrained(members_of(places))
    written(ensemble)
    before = mixed_model(ensemble)
    for module in wrapped_modules(ensemble.members[1]).values():
        module.enable_adapters(False)
    assert mixed_model(ensemble) is not before
    items = members_of(places)
    items[1] = items[5]
    other = EnsembleForCausalLM.from_pretrained(items)
    assert written(ensemble) == written(other)
    ensemble.members[2].train()
    assert "adapter-2" not in mixed_model(ensemble).name


@pytest.mark.slow
def test_threads_do_not_disturb_one_another(shared):
    """Each runs its own rows; no adapter is switched."""
    prompts = [[prompt] for prompt in PROMPTS]
    expected = [written_in_thread_free(shared, one) for one in prompts]
    found = {}

    def write(number):
        found[number] = [written_in_thread_free(shared, prompts[number]) for _ in range(3)]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [expected[number]] * 3 for number in range(3)}


def written_in_thread_free(ensemble, prompts):
    inputs = ensemble.tokenizer(prompts, return_tensors="pt", padding=True)
    return ensemble.generate(**inputs, **GREEDY).tolist()


@pytest.mark.slow
def test_a_copy_is_as_good(shared):
    twin = copy.deepcopy(shared)
    assert written(twin) == written(shared)
    assert set(storages(twin.members)).isdisjoint(storages(shared.members))
    assert sum_of_storages(*twin.members) == sum_of_storages(*shared.members)
    assert mixed_model(twin) is not None


def test_weights_stay_one_when_all_are_moved(places):
    ensemble = EnsembleForCausalLM.from_pretrained(members_of(places))
    ensemble.to(torch.bfloat16)
    assert sum_of_storages(*ensemble.members) < 3 * sum_of_storages(ensemble.members[-1])
    assert {weight.dtype for weight in ensemble.parameters()} == {torch.bfloat16}
    assert mixed_model(ensemble) is not None


# --- Loaded objects -------------------------------------------------------------------------------------------------


def test_one_object_that_holds_several_adapters_is_refused(places):
    """Nothing says which is meant where: whatever is active now would be all of them."""
    base, adapters = places
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters[0], adapter_name="a")
    inner = model.get_base_model()
    for models in ([model, inner], [inner, model]):
        with pytest.raises(ConfigurationError, match=r"one model that holds several adapters \(a\) more than once"):
            EnsembleForCausalLM.from_members(models, [tokenizer] * 2)
    EnsembleForCausalLM.from_members([model, model], [tokenizer] * 2)
    model.load_adapter(adapters[1], adapter_name="b")
    with pytest.raises(ConfigurationError, match=r"\(a, b\).*from_pretrained\(\[MemberConfig\(path="):
        EnsembleForCausalLM.from_members([model, model], [tokenizer] * 2)
    EnsembleForCausalLM.from_members([model], [tokenizer])


# --- Saving ---------------------------------------------------------------------------------------------------------


def test_references_load_shared_again(shared, tmp_path):
    shared.save_pretrained(tmp_path / "saved")
    assert_is_shared(EnsembleForCausalLM.from_pretrained(tmp_path / "saved"), shared)


def test_a_bundle_holds_the_model_once(shared, tmp_path):
    """And every adapter in a folder of its own; it may be moved."""
    shared.save_pretrained(tmp_path / "here", include_members=True)
    (tmp_path / "here").rename(tmp_path / "there")
    weights = sorted(
        path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*.safetensors")
    )
    own = [f"members/adapter-{number}/adapter/adapter_model.safetensors" for number in range(5)]
    assert weights == sorted(["members/adapter-0/model.safetensors", *own])
    members = json.loads((tmp_path / "there" / "config.json").read_text())["members"]
    assert {member["path"] for member in members} == {"./members/adapter-0"}
    assert_is_shared(EnsembleForCausalLM.from_pretrained(tmp_path / "there"), shared)


@pytest.mark.slow
def test_a_tokenizer_that_came_with_an_adapter_is_bundled_with_it(places, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(places[0])
    tokenizer.chat_template = "{{ messages[0].content }}"
    items = members_of(places, plain=False)
    items[1].tokenizer = tmp_path / "own"
    tokenizer.save_pretrained(tmp_path / "own")
    ensemble = EnsembleForCausalLM.from_pretrained(items)
    assert ensemble.tokenizers[0] is ensemble.tokenizers[2]
    ensemble.save_pretrained(tmp_path / "saved", include_members=True)
    loaded = EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
    assert [t.chat_template for t in loaded.tokenizers] == [None, tokenizer.chat_template, None, None, None]
    assert_is_shared(loaded, ensemble)


def assert_is_shared(loaded, expected):
    assert sum_of_storages(*loaded.members) == sum_of_storages(*expected.members)
    for one, other in zip(loaded.members, expected.members, strict=True):
        torch.testing.assert_close(logits_of(one), logits_of(other), atol=0, rtol=0)
    assert mixed_model(loaded) is not None
    assert written(loaded) == written(expected)
