"""MinED and EVA beside plain loops over entries, the filter of members, and what they need."""

import sys

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, EvaConfig, GacConfig, MinedConfig, UnionVocabulary
from hf_ensemble.methods.eva import Eva
from hf_ensemble.methods.mined import Mined
from hf_ensemble.vocabulary import alignment
from tests import tiny
from tests.contracts import make_ensemble, run

CPU = torch.device("cpu")
TOKENIZERS = [tiny.smol_like(), tiny.gemma_like(), tiny.unigram()]
EOS = "EOS"


@pytest.fixture(scope="module")
def ensemble():
    models = [tiny.tiny_llama(tokenizer, seed=n) for n, tokenizer in enumerate(TOKENIZERS)]
    return make_ensemble(models, TOKENIZERS)


def method_of(ensemble, config):
    members = ensemble._members
    eos_ids = [member.eos_token_ids for member in members]
    return config.build(members, ensemble.union_vocabulary, eos_ids, CPU)


def entry_probs(union, member, eos_ids, row):
    """One member's distribution over entries: its canonical ids, its control tokens if it is the primary, and EOS."""
    encoder, probs = union.encoders[member], {}
    entries, control = encoder.token_bytes.entries, encoder.token_bytes.control
    for i, p in enumerate(row.double().exp().tolist()):
        if i in eos_ids:
            key = EOS
        elif i in control or not entries[i]:
            if member > 0 or i not in control:
                continue
            key = i
        else:
            key = encoder.id_of[entries[i]]
        probs[key] = probs.get(key, 0.0) + p
    total = sum(probs.values())
    return {key: p / total for key, p in probs.items()}


def best(probs, count):
    return sorted(probs, key=lambda key: (-probs[key], key if key != EOS else -1))[:count]


def plain(ensemble, rows, weights, targets, top_k=None, filter_top_k=None):
    """Fused probabilities of one step for one row; `targets` gives shares by member and canonical id."""
    union = ensemble.union_vocabulary
    eos_ids = [member.eos_token_ids for member in ensemble._members]
    moved = []
    for member, row in enumerate(rows):
        probs = entry_probs(union, member, eos_ids[member], row)
        if top_k is not None:
            kept = best(probs, top_k)
            total = sum(probs[key] for key in kept)
            probs = {key: probs[key] / total for key in kept}
        into: dict = {}
        for key, p in probs.items():
            shares = {key: 1.0} if member == 0 or key == EOS else targets[member][key]
            for target, share in shares.items():
                into[target] = into.get(target, 0.0) + p * share
        moved.append(into)
    if filter_top_k is not None:
        leading = [best(into, filter_top_k) for into in moved]
        takes_part = [m for m, weight in enumerate(weights) if weight > 0]
        agrees = [m for m in takes_part if any(leading[m][0] in leading[n] for n in takes_part if n != m)]
        weights = [weight if m in (agrees or takes_part) else 0.0 for m, weight in enumerate(weights)]
    fused = torch.zeros(union.primary_size, dtype=torch.float64)
    eos_id = max(eos_ids[0], key=lambda i: rows[0][i])
    for weight, into in zip(weights, moved, strict=True):
        for key, p in into.items():
            fused[eos_id if key == EOS else key] += weight * p
    return fused / fused.sum()


def random_rows(ensemble, batch_size, sharpness, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        sharpness * torch.randn(batch_size, member.vocab_size, generator=generator) for member in ensemble._members
    ]


WEIGHTS = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4], [0.0, 0.5, 0.5], [0.6, 0.0, 0.4]])


@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_mined_is_the_average_of_what_was_moved_to_the_nearest_entries(ensemble, sharpness):
    method = method_of(ensemble, MinedConfig())
    assert isinstance(method, Mined)
    union = ensemble.union_vocabulary
    targets = [None]
    for member in (1, 2):
        nearest = alignment.load_or_build_nearest(union, member)
        targets.append({i: {int(nearest[i]): 1.0} for i in union.encoders[member].id_of.values()})
    rows = random_rows(ensemble, 4, sharpness, seed=0)
    mixed = method.mix(rows, WEIGHTS)
    for n, weights in enumerate(WEIGHTS):
        expected = plain(ensemble, [row[n] for row in rows], weights.tolist(), targets)
        torch.testing.assert_close(mixed.logprobs[n].exp().double(), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.crossed
@pytest.mark.parametrize("config", [EvaConfig(), EvaConfig(3, 0.05, 20, 2), EvaConfig(top_k=1000)], ids=str)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_eva_is_the_average_of_what_agreeing_members_moved_to_similar_entries(ensemble, config, sharpness):
    method = method_of(ensemble, config)
    assert isinstance(method, Eva)
    union = ensemble.union_vocabulary
    heads = [model.get_output_embeddings().weight for model in ensemble.members]
    targets: list = [None]
    for member in (1, 2):
        pair = (heads[0], heads[member])
        table = alignment.load_or_build_similar(union, member, pair, config.neighbours, config.min_similarity, CPU)
        targets.append(
            {
                i: {int(j): float(s) for j, s in zip(*row, strict=True) if j >= 0}
                for i, row in enumerate(zip(*table, strict=True))
            }
        )
    for seed in range(3):
        rows = random_rows(ensemble, 4, sharpness, seed)
        for row in rows:
            row[:2, 40] += 8.0  # so that some agree
        mixed = method.mix(rows, WEIGHTS)
        for n, weights in enumerate(WEIGHTS):
            of_row = [row[n] for row in rows]
            expected = plain(ensemble, of_row, weights.tolist(), targets, config.top_k, config.filter_top_k)
            torch.testing.assert_close(mixed.logprobs[n].exp().double(), expected, atol=1e-6, rtol=1e-4)


# --- The filter -----------------------------------------------------------------------------------------------------


def voices(*scripts, method, weights=None):
    """Members of one vocabulary that say this, by text; the probabilities of the first new token by text."""
    tokenizer = tiny.byte_level_bpe()
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "abcdefgh"}
    models = [tiny.ScriptedModel(tokenizer, [{ids[text]: p for text, p in script.items()}]) for script in scripts]
    ensemble = make_ensemble(models, [tokenizer] * len(scripts), method=method, weights=weights)
    probs = run(ensemble, [[ids["h"]]], max_new_tokens=1).logits[0][0].exp()
    return {text: round(probs[i].item(), 4) for text, i in ids.items() if probs[i] > 1e-4}


AB, BA, C = {"a": 0.8, "b": 0.2}, {"b": 0.6, "a": 0.4}, {"c": 0.9, "d": 0.1}


def test_a_member_that_nobody_agrees_with_sits_out():
    assert voices(AB, BA, C, method=EvaConfig(filter_top_k=2)) == {"a": 0.6, "b": 0.4}
    assert voices(C, AB, BA, method=EvaConfig(filter_top_k=2), weights=[2, 1, 1]) == {"a": 0.6, "b": 0.4}


def test_a_member_agrees_with_what_is_among_anothers_best():
    assert voices(AB, BA, method=EvaConfig(filter_top_k=2)) == {"a": 0.6, "b": 0.4}
    narrow = {"a": 0.5, "b": 0.3, "e": 0.2}
    # `a` is the second best of the last one, whose own best is nobody's.
    assert voices(narrow, {"e": 0.7, "a": 0.3}, method=EvaConfig(filter_top_k=2)) == {"a": 0.5, "b": 0.3, "e": 0.2}


def test_where_all_would_sit_out_none_does():
    assert voices(AB, C, method=EvaConfig(filter_top_k=1)) == {"a": 0.4, "b": 0.1, "c": 0.45, "d": 0.05}


def test_a_member_of_weight_0_agrees_with_nobody():
    assert voices(AB, C, BA, method=EvaConfig(filter_top_k=2), weights=[0.5, 0.5, 0]) == {
        "a": 0.4,
        "b": 0.1,
        "c": 0.45,
        "d": 0.05,
    }


# --- What they need -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"neighbours": 0},
        {"top_k": 2.5},
        {"filter_top_k": True},
        *({"min_similarity": value} for value in (0, "0.1", float("nan"), -0.1)),
    ],
    ids=str,
)
def test_options_of_eva_are_checked(options):
    (name,) = options
    with pytest.raises(ConfigurationError, match=name):
        EvaConfig(**options)


def test_without_rapidfuzz_choosing_mined_says_how_to_get_it(monkeypatch, ensemble):
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    message = 'pip install "rapidfuzz>=3.14.6"'
    with pytest.raises(ConfigurationError, match=message):
        EnsembleForCausalLM.from_pretrained(["no-such-model", "no-such-model"], method="mined")
    with pytest.raises(ConfigurationError, match=message):
        ensemble.generate(torch.tensor([[5]]), method="mined")


def test_a_head_that_cannot_be_read_is_named(ensemble):
    model = tiny.tiny_llama(TOKENIZERS[1], seed=1)
    broken = make_ensemble([ensemble.members[0], model], TOKENIZERS[:2])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigurationError, match=r"member-1.*int8"):
        method_of(broken, EvaConfig())


def test_a_primary_without_an_end_takes_what_is_left():
    tokenizers = [tiny.byte_level_bpe(eos=None, pad=None), tiny.smol_like()]
    union = UnionVocabulary.from_tokenizers(tokenizers)
    sizes = [len(ids) for ids in union.member_to_union]
    eos = tokenizers[1].eos_token_id
    weights = [torch.randn(size, 8, generator=torch.Generator().manual_seed(0)) for size in sizes]
    rows = [torch.zeros(1, size) for size in sizes]
    rows[1][:, eos] = 9.0
    for method in (Mined(union, [[], [eos]], CPU), Eva(union, [[], [eos]], CPU, lambda: weights, EvaConfig())):
        probs = method.mix(rows, torch.tensor([[0.5, 0.5]])).logprobs.exp()
        assert probs.sum().item() == pytest.approx(1, abs=1e-5)


def change_in_place(model):
    model.lm_head.weight.copy_(model.lm_head.weight.flip(0))


def change_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def change_module(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))


@pytest.mark.parametrize("change", [change_in_place, change_data, change_module])
def test_eva_sees_a_changed_head(change):
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [
        tiny.tiny_llama(tokenizers[0], seed=1, tie_word_embeddings=False),
        tiny.tiny_gemma3(tokenizers[1], seed=2),
    ]
    ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
    inputs = ensemble.tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ensemble.generate(**inputs, **options, method="eva")
    with torch.no_grad():
        change(models[0])
    found = ensemble.generate(**inputs, **options, method="eva").logits[0]
    fresh = EnsembleForCausalLM.from_members(models, tokenizers)
    assert torch.equal(found, fresh.generate(**inputs, **options, method="eva").logits[0])


def test_a_saved_ensemble_may_be_used_with_another_method_without_rapidfuzz(tmp_path, monkeypatch):
    tokenizer = tiny.smol_like()
    tiny.tiny_llama(tokenizer).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    path = str(tmp_path / "a")
    EnsembleForCausalLM.from_pretrained([path, path], method="mined").save_pretrained(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    assert EnsembleForCausalLM.from_pretrained(tmp_path / "saved", method="gac").config.method == GacConfig()
    with pytest.raises(ConfigurationError, match='pip install "rapidfuzz>=3.14.6"'):
        EnsembleForCausalLM.from_pretrained(tmp_path / "saved")
