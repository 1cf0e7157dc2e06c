"""Likelihoods: against the plain reference, in batches, and what is refused."""

import functools
import math

import pytest
import torch

from hf_ensemble import (
    ConfigurationError,
    DeepenConfig,
    EnsembleForCausalLM,
    EvaConfig,
    GacConfig,
    MemberError,
    MinedConfig,
    SweetSpanConfig,
    UniteConfig,
)
from hf_ensemble.decoding import teacher_forcing
from tests import tiny
from tests.contracts import make_ensemble
from tests.reference import Reference, ReferenceMember
from tests.reference_alignment import ReferenceEva, ReferenceMined
from tests.reference_deepen import ReferenceDeepen
from tests.reference_scores import score, score_by_spans, split

pytestmark = [
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # what DeePEn's published code does
]

PAIRS = [
    ("The capital of France is", " Paris, and the capital"),
    ("The cat sat on the ", "mat and the rat"),
    ("Die Hauptstadt", " von Österreich heißt Wien"),
    ("今天", "天气很好 ok"),
    ("The capital of France is", " unbelievably"),
    ("", "Once upon"),
]
ALL = 10**6


def smol(seed=1):
    tokenizer = tiny.smol_like()
    return tiny.tiny_llama(tokenizer, seed=seed), tokenizer


def gemma():
    tokenizer = tiny.gemma_like()
    return tiny.tiny_gemma3(tokenizer, seed=2), tokenizer


def unigram():
    tokenizer = tiny.unigram()
    return tiny.tiny_gpt2(tokenizer, n_positions=256, seed=3), tokenizer


def mamba():
    tokenizer = tiny.qwen_like()
    return tiny.tiny_mamba2(tokenizer, seed=4, extra_rows=5), tokenizer


ENSEMBLES = {
    "two": (smol, gemma),
    "three": (gemma, unigram, smol),
    "recurrent": (mamba, gemma),
    "last": (gemma, mamba),
}


@functools.cache
def built(name):
    pairs = [make() for make in ENSEMBLES[name]]
    ensemble = make_ensemble(*zip(*pairs, strict=True))
    return ensemble, [ReferenceMember(model, tokenizer) for model, tokenizer in pairs]


def compare(name, reference, pairs=PAIRS, tolerance=2e-4, ids=None, **options):
    ensemble, members = built(name)
    ids = ids or [split(members[0], *pair) for pair in pairs]
    found = ensemble.score(*zip(*pairs, strict=True), **options)
    for n, one in enumerate(ids):
        expected = score(reference, *one)
        assert found.log_probs[n].item() == pytest.approx(expected.log_prob, abs=tolerance), n
        if expected.margin > 1e-3:
            assert found.is_greedy[n].item() == expected.is_greedy, n
    return found


@pytest.mark.parametrize("name", ["two", *(pytest.param(name, marks=pytest.mark.slow) for name in [*ENSEMBLES][1:])])
@pytest.mark.parametrize("method", ["gac", "unite"])
def test_equals_the_reference(name, method):
    _, members = built(name)
    config = {"gac": GacConfig(), "unite": UniteConfig(top_k=ALL)}[method]
    pairs = PAIRS if name == "two" else PAIRS[1:4]
    compare(name, Reference(members, method, top_k=ALL), pairs, method=config, batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["gate", "gate_of_assistant", "log", "weights", "deepen", "paper", "mined", "eva", "by_step", "by_row"]
)
def test_options_equal_the_reference(case):
    name = "three"
    _, members = built(name)
    pairs = [PAIRS[n] for n in (1, 3)]
    three = [0.5, 0, 0.5]
    if case == "gate":
        reference, options = Reference(members, threshold=0.2), {"method": GacConfig(threshold=0.2)}
    elif case == "gate_of_assistant":
        reference = Reference(members, "unite", [1, 0, 1], top_k=ALL, threshold=0.2, gate=1)
        options = {"method": UniteConfig(top_k=ALL, threshold=0.2, gate=1), "weights": [1, 0, 1]}
    elif case == "log":
        weights = [1.5, -0.5, 0.25]
        reference = Reference(members, weights=weights, space="log", alpha=1e-4)
        options = {"method": GacConfig(space="log", alpha=1e-4), "weights": weights}
    elif case == "weights":
        reference, options = Reference(members, weights=three), {"method": "gac", "weights": three}
    elif case in ("deepen", "paper"):
        more = {"variant": "paper"} if case == "paper" else {"skip_on_agreement": True}
        reference = ReferenceDeepen(members, support=None, **more)
        options = {"method": DeepenConfig(support=None, **more)}
    elif case == "mined":
        reference, options = ReferenceMined(members), {"method": MinedConfig()}
    elif case == "eva":
        reference, options = ReferenceEva(members, top_k=ALL), {"method": EvaConfig(top_k=ALL)}
    elif case == "by_step":
        reference = Reference(members, weights=lambda _, state: [1, len(state.primary_ids) - state.prompt_length, 0])
        options = {"method": "gac", "weights": lambda step, ids: [1, step, 0]}
    else:
        reference, options = Reference(members, weights=three), {"method": "gac", "weights": [three, three]}
    compare(name, reference, pairs, **options)


def test_the_distribution_is_that_of_generate():
    ensemble, _ = built("two")
    inputs = ensemble.tokenizer(PAIRS[0][0], return_tensors="pt")
    for config in (GacConfig(), UniteConfig(), DeepenConfig(support=32)):
        output = ensemble.generate(
            **inputs,
            method=config,
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            prefix_allowed_tokens_fn=lambda *_: list(range(len(ensemble.tokenizer))),
        )
        new = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
        expected = sum(output.logits[n][0, i].item() for n, i in enumerate(new))
        found = ensemble.score([inputs.input_ids[0].tolist()], [new], method=config)
        assert found.log_probs.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", ["unite", "deepen"])
def test_greedy_texts_are_greedy(method):
    ensemble, _ = built("two")
    inputs = ensemble.tokenizer(PAIRS[0][0], return_tensors="pt")
    prompt = inputs.input_ids[0].tolist()
    ids = ensemble.generate(**inputs, method=method, max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
    other = [*ids[:-1], ids[-1] + 1 if ids[-1] < 100 else ids[-1] - 1]
    assert ensemble.score([prompt] * 2, [ids, other], method=method).is_greedy.tolist() == [True, False]


@pytest.mark.crossed
@pytest.mark.parametrize("name", ["two", "last"])
@pytest.mark.parametrize("cut", [1, 2])
def test_prompts_that_end_inside_a_character(name, cut):
    """Ids of the primary may be cut anywhere."""
    ensemble, members = built(name)
    ids = ensemble.tokenizer("Hello 漢字 and 😀 there", add_special_tokens=True)["input_ids"]
    data = [members[0].text_of_prompt(ids[:n]) for n in range(len(ids))]
    places = [n for n, text in enumerate(data) if text.decode(errors="ignore").encode() != text]
    at = places[:: len(places) - 1] if len(places) > 1 else places
    pairs = [(ids[:n], ids[n:]) for n in (at[0], at[-1])]
    for method in ("gac", "unite"):
        config = {"gac": GacConfig(), "unite": UniteConfig(top_k=ALL)}[method]
        compare(name, Reference(members, method, top_k=ALL), pairs, ids=pairs[:: cut or 1], method=config)


def test_members_without_byte_tokens_sit_out():
    pairs = [smol(), unigram()]
    ensemble = make_ensemble(*zip(*pairs, strict=True))
    members = [ReferenceMember(*pair) for pair in pairs]
    texts = [("Hi ", "漢字 ok"), ("The cat", " 😀 sat")]
    for weights in ([1, 1], [0, 1]):
        found = ensemble.score(*zip(*texts, strict=True), method="gac", weights=weights)
        for n, text in enumerate(texts):
            expected = score(Reference(members, weights=weights), *split(members[0], *text)).log_prob
            assert found.log_probs[n].item() == pytest.approx(expected, abs=2e-4)


def test_long_texts_go_in_blocks(monkeypatch):
    """Past a sliding window, and whatever the blocks are."""
    ensemble, members = built("two")
    text = "Once upon a time there was a king, unbelievably doesn't she? Österreich 今天天气很好! " * 2
    pairs = [(text[:30], text[30:]), ("The cat", text[:40])]
    config = UniteConfig(top_k=ALL)
    whole = ensemble.score(*zip(*pairs, strict=True), method=config)
    expected = score(Reference(members, "unite", top_k=ALL), *split(members[0], *pairs[1])).log_prob
    assert whole.log_probs[1].item() == pytest.approx(expected, abs=2e-4)
    monkeypatch.setattr(teacher_forcing, "_MAX_LOGITS", 10_000)
    monkeypatch.setattr(teacher_forcing, "_MAX_MIXED", 3_000)
    monkeypatch.setattr(teacher_forcing, "_MAX_BRANCH_IDS", 600)
    for batch_size in (1, 2):
        found = ensemble.score(*zip(*pairs, strict=True), method=config, batch_size=batch_size)
        torch.testing.assert_close(found.log_probs, whole.log_probs, atol=1e-3, rtol=0)


def test_a_text_is_one_forward_where_boundaries_allow():
    ensemble, _ = built("two")
    pair = [("The capital of France is", " Paris, and the capital of Germany is Berlin.")]
    ensemble.score(*zip(*pair, strict=True), method="gac")
    counts = [0, 0]
    hooks = [
        model.register_forward_hook(lambda *_, n=n: counts.__setitem__(n, counts[n] + 1))
        for n, model in enumerate(ensemble.members)
    ]
    ensemble.score(*zip(*pair, strict=True), method="gac")
    assert counts == [1, 1]
    ensemble.score(*zip(*pair, strict=True), method="unite")
    assert counts == [2, 3]
    ensemble.score([pair[0][0]] * 3, [" Paris", " Berlin", " the"], method="gac")
    # The prompt, once; what follows each of its copies needs no more than that.
    assert counts == [3, 4]
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_give_what_rows_give_alone(batch_size):
    ensemble, _ = built("three")
    config = UniteConfig(top_k=ALL)
    found = ensemble.score(*zip(*PAIRS, strict=True), method=config, batch_size=batch_size)
    alone = [ensemble.score([prompt], [continuation], method=config).log_probs for prompt, continuation in PAIRS]
    torch.testing.assert_close(found.log_probs, torch.cat(alone), atol=1e-4, rtol=0)


def test_one_member_is_itself():
    model, tokenizer = smol()
    ensemble = EnsembleForCausalLM.from_members([model], [tokenizer])
    found = ensemble.score(["The cat"], [" sat on the mat"])
    before, after = (tokenizer(text, return_tensors="pt").input_ids for text in ("The cat", "The cat sat on the mat"))
    logprobs = model(after).logits[0].log_softmax(-1)
    num_before = before.shape[1]
    expected = sum(logprobs[n - 1, after[0, n]].item() for n in range(num_before, after.shape[1]))
    assert found.log_probs.item() == pytest.approx(expected, abs=1e-5)
    assert found.num_bytes.tolist() == [15]
    assert found.bits_per_byte.item() == pytest.approx(-expected / math.log(2) / 15, abs=1e-5)


@pytest.mark.parametrize("method", ["gac", "unite", "sweetspan"])
def test_all_weight_on_the_primary_is_the_primary(method):
    ensemble, _ = built("two")
    single = EnsembleForCausalLM.from_members([ensemble.members[0]], [ensemble.tokenizers[0]])
    found = ensemble.score(*zip(*PAIRS, strict=True), method=method, weights=[1, 0])
    torch.testing.assert_close(found.log_probs, single.score(*zip(*PAIRS, strict=True)).log_probs, atol=1e-5, rtol=0)


def test_mixture_sampling_is_the_mixture():
    ensemble, _ = built("two")
    drawn = ensemble.score(*zip(*PAIRS, strict=True), method=GacConfig(strategy="mixture_sampling"))
    mixed = ensemble.score(*zip(*PAIRS, strict=True), method="gac")
    assert drawn.log_probs.tolist() == mixed.log_probs.tolist()


@pytest.mark.parametrize("weights", [None, [1, 0, 1]])
def test_spans_are_the_mean_over_the_members(weights):
    ensemble, members = built("three")
    found = ensemble.score(*zip(*PAIRS, strict=True), method=SweetSpanConfig(), weights=weights)
    for n, pair in enumerate(PAIRS):
        expected = score_by_spans(members, weights or [1, 1, 1], *split(members[0], *pair))
        assert found.log_probs[n].item() == pytest.approx(expected, abs=2e-4)


def test_the_empty_continuation_has_probability_one():
    ensemble, _ = built("two")
    for method in ("gac", "sweetspan"):
        found = ensemble.score(["The cat ", "", "The"], ["", "", " cat"], method=method)
        assert found.log_probs[:2].tolist() == found.bits_per_byte[:2].tolist() == [0, 0]
        assert found.num_bytes.tolist() == [0, 0, 4]
        assert found.is_greedy[:2].tolist() == [True, True]
        assert found.log_probs[2] < 0


def test_types_are_as_documented():
    ensemble, _ = built("two")
    found = ensemble.score(["The cat", "A"], [" sat", " dog"])
    assert [tuple(getattr(found, name).shape) for name in vars(found)] == [(2,)] * 4
    types = torch.float32, torch.int64, torch.float32, torch.bool
    assert [getattr(found, name).dtype for name in vars(found)] == list(types)
    assert ensemble.score([], []).log_probs.shape == (0,)


def test_what_makes_no_sense_is_refused():
    ensemble, _ = built("two")
    for prompts, continuations, message in (
        ("The", [" cat"], "`prompts` has to be a list"),
        (["The"], [" cat", " dog"], "one entry per prompt: got 2 for 1"),
        (["The"], [[1, 2]], "both texts or both ids"),
        ([[1]], [[10**6]], "ids of the primary .* go from 0 to"),
        ([[1]], [["a"]], "texts or lists of ids"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ensemble.score(prompts, continuations)
    with pytest.raises(ConfigurationError, match="`batch_size` has to be a positive integer"):
        ensemble.score(["The"], [" cat"], batch_size=0)
    with pytest.raises(ConfigurationError, match="one row per prompt: got 3 rows for 2"):
        ensemble.score(["The", "A"], [" cat", " dog"], weights=[[1, 1]] * 3)


def test_texts_beyond_a_members_positions_name_it():
    tokenizer = tiny.smol_like()
    models = [tiny.tiny_llama(tokenizer), tiny.tiny_gpt2(tokenizer, n_positions=16)]
    ensemble = make_ensemble(models, [tokenizer] * 2)
    for method in ("gac", "unite", "sweetspan"):
        with pytest.raises(
            ConfigurationError, match="'member-1' has positions for 16 ids, but .* continuation 1 take"
        ):
            ensemble.score(["The", "The"], [" cat", " quick brown fox jumps over the lazy dog" * 3], method=method)
    ensemble.score(["The"], [" quick brown fox jumps over the lazy dog" * 3], weights=[1, 0])


def test_nan_names_the_member():
    for place in (0, 1):
        pairs = [smol(), gemma()]
        ensemble = make_ensemble(*zip(*pairs, strict=True))
        ensemble.score(["The"], [" cat"], method="gac")
        with torch.no_grad():
            pairs[place][0].get_output_embeddings().weight[5] = torch.nan
        for method in ("gac", "unite", "sweetspan"):
            with pytest.raises(
                MemberError, match=f"'member-{place}' returned NaN or infinite logits in continuation 1"
            ):
                ensemble.score(["The", "The"], ["", " cat"], method=method)
        with pytest.raises(MemberError, match=f"'member-{place}'"):
            ensemble.score(["The"], [" cat"], method=GacConfig(threshold=0.1, gate=place))
        weights = [float(place == 1), float(place == 0)]
        assert ensemble.score(["The"], [" cat"], method="gac", weights=weights).log_probs.isfinite().all()


def test_nothing_of_the_users_changes():
    ensemble, _ = built("two")
    before = torch.get_rng_state(), [t.padding_side for t in ensemble.tokenizers], ensemble.config.to_dict()
    ensemble.score(["The"], [" cat"])
    after = torch.get_rng_state(), [t.padding_side for t in ensemble.tokenizers], ensemble.config.to_dict()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_every_member_reads_a_conversation_by_its_own_template(method):
    template = "{% for m in messages %}MARK {{ m['content'] }}\n{% endfor %}"
    pairs = [smol(), gemma()]
    for (_, tokenizer), mark in zip(pairs, ("Human:", "Question:"), strict=True):
        tokenizer.chat_template = template.replace("MARK", mark)
    ensemble = make_ensemble(*zip(*pairs, strict=True))
    inputs = ensemble.apply_chat_template(
        [{"role": "user", "content": "The cat"}], return_tensors="pt", return_dict=True
    )
    config = UniteConfig(top_k=ALL) if method == "unite" else GacConfig()
    output = ensemble.generate(
        **inputs, method=config, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    prompt = inputs["input_ids"][0].tolist()
    found = ensemble.score([prompt] * 3, [[40], [50], [60]], method=config)
    torch.testing.assert_close(found.log_probs, output.logits[0][0, [40, 50, 60]], atol=1e-4, rtol=0)
