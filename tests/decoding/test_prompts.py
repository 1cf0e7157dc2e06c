"""Prompts: batches of a primary without a padding token, what is refused, and whom warnings point at."""

import functools

import pytest
import torch

from hf_ensemble import ConfigurationError, DeepenConfig, packllm_weights, select_members, tune_method
from hf_ensemble.evaluation import evaluate, read_set
from tests import tiny
from tests.contracts import SPANS, make_ensemble, padded, prompt_rows, tokenizer_of

TEXTS = ["The cat", "Once upon a time", "A"]
EXAMPLES = [{"prompt": text, "reference": text} for text in TEXTS]
MODES = {
    "gac": {"method": "gac"},
    "unite": {"method": "unite"},
    "deepen": {"method": DeepenConfig(support=32)},
    "primary alone": {"method": "gac", "weights": [1, 0]},
    "assistant alone": {"method": "gac", "weights": [0, 1]},
    "spans": {"method": SPANS},
    "drafts": {"method": "gac", "speculation": "ngram"},
    "beams": {"method": "gac", "num_beams": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")


@functools.cache
def without_pad(name):
    """An ensemble whose primary has no padding token, and, if bare, no EOS either."""
    primary = {"bare": tiny.bare_bpe, "with an end": tiny.qwen_like}[name]()
    assert primary.pad_token_id is None
    tokenizers = [primary, tokenizer_of("smol")]
    return make_ensemble([tiny.tiny_llama(t, seed=n) for n, t in enumerate(tokenizers)], tokenizers)


def written(output, length, ends):
    """The ids after a prompt, up to the end."""
    ids = output.tolist()[length:]
    return ids[: next((n for n, i in enumerate(ids) if i in ends), len(ids))]


@pytest.mark.crossed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bare", "with an end"])
def test_prompts_of_members_need_no_padding_token(name, mode):
    """J20."""
    ensemble = without_pad(name)
    tokenizer = ensemble.tokenizers[0]
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.padding_side
    options = {"max_new_tokens": 5, "do_sample": False, **MODES[mode]}
    together = ensemble.generate(member_prompts=[TEXTS, [None, "Go: ", None]], **options)
    ends = {tokenizer.eos_token_id}
    rows = prompt_rows(ensemble, TEXTS)
    for row, output, own in zip(rows, together, (None, "Go: ", None), strict=True):
        alone = ensemble.generate(torch.tensor([row]), member_prompts=[None, own], **options)[0]
        assert written(output, max(map(len, rows)), ends) == written(alone, len(row), ends)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.padding_side) == before
    assert ensemble.tokenizer.pad_token_id is None


@pytest.mark.parametrize("name", ["bare", pytest.param("with an end", marks=pytest.mark.slow)])
def test_nor_does_what_scores_selects_and_evaluates(name):
    """J20's siblings: results are those of single rows."""
    ensemble = without_pad(name)
    for method in ("gac", "unite", "sweetspan"):
        one, all_ = (ensemble.score(TEXTS, [" a", " bit", " c"], method=method, batch_size=n) for n in (1, 3))
        torch.testing.assert_close(all_.log_probs, one.log_probs, atol=1e-4, rtol=0)
    inputs = padded(prompt_rows(ensemble, TEXTS[:2]), fill=lambda n: n)
    alone = torch.cat([packllm_weights(ensemble, torch.tensor([row])) for row in prompt_rows(ensemble, TEXTS[:2])])
    torch.testing.assert_close(packllm_weights(ensemble, **inputs), alone, atol=1e-4, rtol=0)
    sets = [
        read_set([{"question": text, "answer": "a"} for text in TEXTS], name="questions"),
        read_set([{"question": text, "A": "a", "B": "b", "answer": "A"} for text in TEXTS], name="choices"),
    ]

    def results(batch_size):
        options = {"max_new_tokens": 3, "batch_size": batch_size}
        tuned = tune_method(ensemble, EXAMPLES, "exact_match", {"weights": [[0.5, 0.5], [1, 0]]}, **options)
        selection = select_members(ensemble, EXAMPLES, "exact_match", **options)
        report = ensemble.compatibility(prompts=TEXTS, **options)
        lengths = [member.mean_length for member in report.members]
        measured = [result.estimate.value for result in evaluate(ensemble, sets, **options).results]
        return [*tuned.table[0].responses, *(row.responses for row in selection.table)], lengths + measured

    (texts, figures), (expected_texts, expected) = results(3), results(1)
    assert texts == expected_texts
    assert figures == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("own", [5, b"Hi", [], ["Hi", None], ["Hi", 3], [["Hi"]], {"Hi": 1}], ids=repr)
def test_a_prompt_of_the_primary_that_is_no_text_is_refused(own):
    ensemble = without_pad("bare")
    with pytest.raises(ConfigurationError, match="primary 'member-0' must be a text or a list of texts, .* but is"):
        ensemble.generate(member_prompts=[own, None], max_new_tokens=1)


@pytest.mark.parametrize("call", ["generate", "packllm_weights"])
def test_the_warning_of_padding_points_at_the_line_of_the_call(call):
    ensemble = without_pad("bare")
    inputs = padded(prompt_rows(ensemble, TEXTS[:2]), side="right", fill=lambda n: 0)
    before = {name: value.clone() for name, value in inputs.items()}
    with pytest.warns(UserWarning, match="padded on the right: its padding is moved to the left") as seen:
        if call == "generate":
            ensemble.generate(**inputs, max_new_tokens=1)
        else:
            packllm_weights(ensemble, **inputs)
    assert [warning.filename for warning in seen] == [__file__]
    for name, value in before.items():
        assert torch.equal(inputs[name], value)


def test_an_empty_row_gets_a_start_and_the_tensors_of_the_call_stay():
    tokenizer = tokenizer_of("gemma")
    ensemble = make_ensemble([tiny.tiny_llama(tokenizer)], [tokenizer])
    ids, mask = torch.tensor([[7, 7], [0, 0]]), torch.tensor([[1, 1], [0, 0]])
    output = ensemble.generate(ids, attention_mask=mask, max_new_tokens=2)
    assert output[1, 1] == tokenizer.bos_token_id
    assert ids.tolist() == [[7, 7], [0, 0]]
    assert mask.tolist() == [[1, 1], [0, 0]]
