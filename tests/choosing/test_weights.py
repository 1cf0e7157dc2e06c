"""Weights from scores, and from how members read the prompt, against one plain call a prompt."""

import math

import pytest
import torch

from hf_ensemble import ConfigurationError, EnsembleForCausalLM, MemberError, packllm_weights, weights_from_scores
from hf_ensemble.decoding import teacher_forcing
from tests import tiny
from tests.contracts import PROMPTS, Recipe, make_ensemble, model_of, tokenizer_of

ENSEMBLE = Recipe((("llama", "smol"), ("gemma3", "gemma"), ("gpt2", "byte-level")))
EVERY_VIEW = Recipe((("llama", "llama2"), ("llama", "unigram"), ("llama", "wordpiece"), ("jamba", "qwen")))


def padded(ensemble, prompts):
    return ensemble.tokenizer(list(prompts), return_tensors="pt", padding=True)


def test_weights_are_in_proportion_to_scores_above_chance():
    assert weights_from_scores([75, 50]) == pytest.approx([0.6, 0.4])
    assert weights_from_scores([75, 50], chance=25) == pytest.approx([2 / 3, 1 / 3])
    assert weights_from_scores([0.5]) == [1.0]


def test_a_member_at_or_below_chance_gets_nothing():
    assert weights_from_scores([75, 25, 20, 50], chance=25) == pytest.approx([2 / 3, 0, 0, 1 / 3])


@pytest.mark.parametrize(
    ("scores", "chance", "message"),
    [
        ([20, 25], 25, "no score is above the chance level 25: the best is 25"),
        ([0.6, 0.5], 25, "no score is above the chance level 25: the best is 0.6"),
        ([], 0, "is empty"),
        ([60, math.inf], 0, "must be finite"),
        ([60, 50], math.nan, "must be finite"),
    ],
)
def test_scores_that_give_no_weights_are_named(scores, chance, message):
    with pytest.raises(ConfigurationError, match=message):
        weights_from_scores(scores, chance)


def plain_weights(ensemble, prompt, temperature=1.0):
    """The rule, with one call of each model on one prompt and the tokenizers' own output."""
    losses, bytes_per_token = [], None
    for model, tokenizer in zip(ensemble.members, ensemble.tokenizers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        special = set(tokenizer.all_special_ids)
        counted = [n for n in range(1, len(ids)) if ids[n] not in special]
        loss = -sum(float(logprobs[n - 1, ids[n]]) for n in counted)
        losses.append(loss / (len(texts[-1].encode()) - len(texts[1].encode())))
        if bytes_per_token is None:
            bytes_per_token = len(prompt.encode()) / sum(i not in special for i in ids)
    return torch.softmax(torch.tensor([-loss * bytes_per_token / temperature for loss in losses]), -1)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("recipe", [ENSEMBLE, EVERY_VIEW], ids=str)
def test_packllm_is_what_one_plain_call_a_prompt_gives(recipe, temperature):
    prompts = [prompt.lower() for prompt in PROMPTS]  # which the WordPiece tokenizer reads exactly
    found = packllm_weights(recipe.ensemble, **padded(recipe.ensemble, prompts), temperature=temperature)
    expected = torch.stack([plain_weights(recipe.ensemble, prompt, temperature) for prompt in prompts])
    assert found.shape == (3, len(recipe.members))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=0)
    assert (expected.max(-1).values > 1.5 / len(recipe.members)).any()


def test_a_prompt_in_pieces_gives_the_same(monkeypatch):
    inputs = padded(ENSEMBLE.ensemble, PROMPTS)
    whole = packllm_weights(ENSEMBLE.ensemble, **inputs)
    monkeypatch.setattr(teacher_forcing, "_MAX_LOGITS", 3 * 800)
    torch.testing.assert_close(packllm_weights(ENSEMBLE.ensemble, **inputs), whole, atol=1e-5, rtol=0)
    monkeypatch.setattr(teacher_forcing, "_MAX_LOGITS", 1)
    torch.testing.assert_close(packllm_weights(ENSEMBLE.ensemble, **inputs), whole, atol=1e-5, rtol=0)


def test_one_forward_a_member_for_the_whole_batch():
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    models = [tiny.ScriptedModel(tokenizer) for tokenizer in tokenizers]
    ensemble = make_ensemble(models, tokenizers)
    inputs = padded(ensemble, PROMPTS)
    packllm_weights(ensemble, **inputs)  # which tries the caches first
    for model in models:
        model.calls.clear()
    packllm_weights(ensemble, **inputs)
    assert [len(model.calls) for model in models] == [1, 1]


def test_members_alike_weigh_the_same_and_twice_the_same_prompt_too():
    model, tokenizer = model_of("llama", "smol"), tokenizer_of("smol")
    ensemble = make_ensemble([model, model], [tokenizer, tokenizer])
    found = packllm_weights(ensemble, **padded(ensemble, [PROMPTS[0], PROMPTS[0]]))
    torch.testing.assert_close(found, torch.full((2, 2), 0.5))


def test_a_finer_cut_alone_changes_nothing():
    """Two members give every byte the same probability, but one cuts the text into twice as many tokens."""
    coarse, fine = tiny.byte_level_bpe(400), tiny.byte_level_bpe(260)
    prompt = "The cat sat on the mat, and the rat sat on the hat."

    def even(tokenizer):
        ids = tokenizer(prompt)["input_ids"]
        rows = {}
        for n in range(1, len(ids)):
            size = len(tokenizer.decode([ids[n]]))
            row = torch.full((tiny.rows_of(tokenizer),), -50.0)
            row[ids[n]] = size * math.log(0.5)
            row[0] = math.log(1 - 0.5**size)
            rows[tuple(ids[:n])] = row
        return tiny.ScriptedModel(tokenizer, rows)

    ensemble = make_ensemble([even(coarse), even(fine)], [coarse, fine])
    assert len(fine(prompt)["input_ids"]) > 1.5 * len(coarse(prompt)["input_ids"])
    found = packllm_weights(ensemble, **padded(ensemble, [prompt]))
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5]]), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:the prompt contains control tokens")
def test_control_tokens_of_a_template_are_read_but_not_counted():
    ensemble = Recipe((("llama", "smol"), ("gemma3", "gemma"))).ensemble
    plain = "The capital of France is"
    ids = ensemble.tokenizer(f"<|im_start|>{plain}", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == ensemble.tokenizer.bos_token_id
    expected = plain_weights(ensemble, plain)
    found = packllm_weights(ensemble, ids)[0]
    assert not torch.allclose(found, expected, atol=1e-3)  # the primary has one more token to predict, and a context
    with torch.no_grad():
        logprobs = ensemble.members[0](ids).logits[0].log_softmax(-1)
    loss = -logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]].sum() / len(plain)
    other = expected.log()[1] - expected.log()[0]  # loss_0 - loss_1 of the plain prompt, times b
    bytes_per_token = len(plain) / (ids.shape[1] - 1)
    with torch.no_grad():
        plain_logprobs = ensemble.members[0](ids[:, 1:]).logits[0].log_softmax(-1)
    text = len(plain) - len(ensemble.tokenizer.decode(ids[0, 1:2]))
    plain_loss = -plain_logprobs[torch.arange(ids.shape[1] - 2), ids[0, 2:]].sum() / text
    second = plain_loss - other / bytes_per_token
    wanted = torch.softmax(-torch.stack([loss, second]) * bytes_per_token, -1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_padding_on_the_right_is_moved_with_a_warning():
    ensemble = ENSEMBLE.ensemble
    left = padded(ensemble, PROMPTS[:2])
    tokenizer = tokenizer_of("smol")
    right = tokenizer(list(PROMPTS[:2]), return_tensors="pt", padding=True, padding_side="right")
    with pytest.warns(UserWarning, match="padded on the right"):
        found = packllm_weights(ensemble, right["input_ids"], right["attention_mask"])
    torch.testing.assert_close(found, packllm_weights(ensemble, **left))


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_generate_takes_them_row_by_row(method):
    ensemble = ENSEMBLE.ensemble
    inputs = padded(ensemble, PROMPTS)
    found = packllm_weights(ensemble, **inputs)
    together = ensemble.generate(**inputs, method=method, weights=found, max_new_tokens=4)
    for row, prompt in enumerate(PROMPTS):
        ids = padded(ensemble, [prompt])["input_ids"]
        alone = ensemble.generate(ids, method=method, weights=found[row].tolist(), max_new_tokens=4)
        assert alone[0, ids.shape[1] :].tolist() == together[row, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0, -1, math.inf, math.nan, "1", None, True])
def test_temperature_has_to_be_positive(temperature):
    inputs = padded(ENSEMBLE.ensemble, PROMPTS[:1])
    with pytest.raises(ConfigurationError, match="`temperature` has to be a positive number"):
        packllm_weights(ENSEMBLE.ensemble, **inputs, temperature=temperature)


def test_a_prompt_of_one_token_without_bos_is_refused():
    ensemble = ENSEMBLE.ensemble
    inputs = padded(ensemble, [PROMPTS[0], "a"])
    with pytest.raises(ConfigurationError, match="nothing to predict in prompt 1, which it reads as b'a'"):
        packllm_weights(ensemble, **inputs)


def test_a_member_that_gives_nan_is_named():
    tokenizers = [tokenizer_of("smol"), tokenizer_of("gemma")]
    good, bad = (tiny.ScriptedModel(tokenizer) for tokenizer in tokenizers)
    ensemble = EnsembleForCausalLM.from_members([good, bad], tokenizers)
    inputs = padded(ensemble, PROMPTS[:1])
    packllm_weights(ensemble, **inputs)
    bad.shift = math.nan
    with pytest.raises(MemberError, match="'ScriptedModel' returned NaN or infinite logits on the prompt"):
        packllm_weights(ensemble, **inputs)


def test_a_member_that_gives_a_prompt_no_probability_weighs_nothing_on_it():
    tokenizer = tokenizer_of("smol")
    ids = torch.tensor([tokenizer(PROMPTS[0])["input_ids"]])
    row = torch.zeros(tiny.rows_of(tokenizer))
    row[ids[0, -1]] = -torch.inf
    models = [tiny.ScriptedModel(tokenizer, lambda _: row), tiny.ScriptedModel(tokenizer)]
    ensemble = make_ensemble(models, [tokenizer] * 2)
    assert packllm_weights(ensemble, ids).tolist() == [[0, 1]]
    ensemble = make_ensemble(models[:1] * 2, [tokenizer] * 2)
    with pytest.raises(MemberError, match="no member gives prompt 0 any probability"):
        packllm_weights(ensemble, ids)
