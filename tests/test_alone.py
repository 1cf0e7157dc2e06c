"""A member as an ensemble of one is that member: it writes what the stock `generate` does, and nothing is changed."""

import copy

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberConfig
from tests import tiny
from tests.contracts import Recipe

PROMPTS = ["The capital of France is", "The cat", "Once upon a time there was a king"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def ensemble():
    return Recipe((("llama", "smol"), ("gemma3", "gemma"), ("gpt2", "smol"))).ensemble


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"stop_strings": ["e"]},
    ],
    ids=lambda options: "+".join(options) or "greedy",
)
def test_it_writes_what_the_stock_generate_of_the_member_writes(ensemble, options):
    for index, view in enumerate(ensemble.member_views):
        tokenizer = copy.copy(view.tokenizer)
        tokenizer.padding_side = "left"
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
        own = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": view.eos_token_ids, **options}
        if "stop_strings" in own:
            own["tokenizer"] = tokenizer
        torch.manual_seed(0)
        expected = view.model.generate(**inputs, **own)
        torch.manual_seed(0)
        found = ensemble.alone(index).generate(**inputs, **{"do_sample": False, "max_new_tokens": 8, **options})
        assert torch.equal(found, expected)


def test_it_shares_model_and_tokenizer_and_changes_nothing(ensemble):
    before = [
        (copy.deepcopy(view.model.config), copy.deepcopy(view.model.generation_config), view.tokenizer.padding_side)
        for view in ensemble.member_views
    ]
    own_config, own_generation = ensemble.config.to_dict(), ensemble.generation_config.to_dict()
    for index, view in enumerate(ensemble.member_views):
        one = ensemble.alone(view.name)
        assert one.member_views == (view,)
        assert one.members[0] is ensemble.members[index]
        assert one.tokenizers == [view.tokenizer]
        assert one.union_vocabulary.encoders[0] is view.encoder
        one.config.members[0].name = "other"
        one.config.primary_config.vocab_size = 1
        one.generation_config.max_new_tokens = 1
    for view, (config, generation_config, side) in zip(ensemble.member_views, before, strict=True):
        assert view.model.config.to_dict() == config.to_dict()
        assert view.model.config._attn_implementation == config._attn_implementation
        assert view.model.generation_config.to_dict() == generation_config.to_dict()
        assert view.tokenizer.padding_side == side
    assert ensemble.config.to_dict() == own_config
    assert ensemble.generation_config.to_dict() == own_generation


def test_it_keeps_name_ends_and_chat_template():
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [tiny.tiny_llama(tokenizers[0]), tiny.tiny_gemma3(tokenizers[1])]
    configs = [MemberConfig(), MemberConfig(name="second", eos_token_id=[2], chat_template=TEMPLATE)]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers, member_configs=configs, weights=[0.9, 0.1])
    ensemble.generation_config.max_new_tokens = 3
    one = ensemble.alone("second")
    assert [view.name for view in one.member_views] == ["second"]
    assert one.generation_config.eos_token_id == ensemble.member_views[1].eos_token_ids == [1, 2]
    assert one.generation_config.max_new_tokens is None
    assert one.apply_chat_template([{"role": "user", "content": "The cat"}], tokenize=False) == "The cat"
    assert one.score(["The"], [" cat"]).log_probs.isfinite().all()


@pytest.mark.parametrize("member", [3, -1, True, None, "nobody", "twin"])
def test_it_is_refused_where_there_is_no_such_member_or_more_than_one(member):
    tokenizer = tiny.smol_like()
    models = [tiny.tiny_llama(tokenizer, seed=seed) for seed in range(3)]
    configs = [MemberConfig(name=name) for name in ("twin", "twin", "c")]
    ensemble = EnsembleForCausalLM.from_members(models, [tokenizer] * 3, member_configs=configs)
    with pytest.raises(
        ConfigurationError, match=r"number from 0 to 2 or the name of one member \('twin', 'twin', 'c'\)"
    ):
        ensemble.alone(member)
    assert ensemble.alone("c").member_views[0] is ensemble.member_views[2]
