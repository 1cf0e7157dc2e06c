"""Fused distributions and greedy texts against the plain reference, on tiny members."""

import itertools

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM
from tests import tiny
from tests.reference import Reference, ReferenceMember

pytestmark = pytest.mark.slow

PROMPTS = {
    "english": "The capital of France is",
    "german": "Die Hauptstadt von Österreich heißt",
    "chinese": "今天天气很好",
    "thai": "สวัสดีครับ",
    "code": "def f(x):\n\treturn x  + 1\n",
    "emoji": "Family: 👩‍💻 🎉",
    "trailing_space": "The answer is ",
    "newlines": "One\n\n\nTwo\t\t",
}


def smol_llama():
    tokenizer = tiny.smol_like()
    return tiny.tiny_llama(tokenizer, seed=1), tokenizer


def gemma():
    tokenizer = tiny.gemma_like()
    return tiny.tiny_gemma3(tokenizer, seed=2), tokenizer


def unigram_gpt2():
    tokenizer = tiny.unigram()
    return tiny.tiny_gpt2(tokenizer, n_positions=256, seed=3), tokenizer


def qwen_mamba():
    tokenizer = tiny.qwen_like()
    return tiny.tiny_mamba(tokenizer, seed=4, extra_rows=5), tokenizer


def wordpiece_mixtral():
    tokenizer = tiny.wordpiece()
    return tiny.tiny_mixtral(tokenizer, seed=5), tokenizer


ENSEMBLES = {
    "two": (smol_llama, gemma),
    "three": (gemma, unigram_gpt2, smol_llama),
    "three_primary_unigram": (unigram_gpt2, smol_llama, gemma),
    "four": (qwen_mamba, gemma, smol_llama, unigram_gpt2),
    "wordpiece_assistant": (smol_llama, wordpiece_mixtral),
}
_built: dict = {}


def build(name, method, weights):
    key = (name, method, weights)
    if key not in _built:
        pairs = _built.setdefault(name, [make() for make in ENSEMBLES[name]])
        members = _built.setdefault((name, "reference"), [ReferenceMember(m, t) for m, t in pairs])
        ensemble = EnsembleForCausalLM.from_members(*zip(*pairs, strict=True), method=method, weights=weights)
        _built[key] = ensemble, Reference(members, method=method, weights=weights)
    return _built[key]


MIXED = [("two", None), ("two", (0.7, 0.3)), ("three", None), ("three_primary_unigram", (1, 2, 3)), ("four", None),
         ("wordpiece_assistant", None)]  # fmt: skip
CASES = [
    (name, method, weights, prompt)
    for (n, (name, weights)), method, (p, prompt) in itertools.product(
        enumerate(MIXED), ("gac", "unite"), enumerate(PROMPTS)
    )
    if (n + p) % 2 == 0
]
"""Every prompt with both methods and half of the ensembles."""


@pytest.mark.filterwarnings("ignore:the primary .* wrote the control token")
@pytest.mark.parametrize(("name", "method", "weights", "prompt"), CASES)
def test_greedy_text_and_distributions_equal_the_reference(name, method, weights, prompt):
    ensemble, reference = build(name, method, weights)
    inputs = ensemble.tokenizer(PROMPTS[prompt], return_tensors="pt")
    output = ensemble.generate(
        **inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    prompt_ids = inputs.input_ids[0].tolist()
    expected, margins = reference.greedy(prompt_ids, 8)
    found = output.sequences[0, len(prompt_ids) :].tolist()
    length = len(expected)
    decisions = 0
    while decisions < len(margins) and margins[decisions] >= 1e-4:
        decisions += 1
    if decisions == len(margins):
        assert found[:length] == expected
    columns = reference.distribution(reference.prompt_state(prompt_ids)).columns
    first = output.logits[0][0].exp()
    dense = torch.zeros_like(first)
    dense[list(columns)] = torch.tensor(list(columns.values()), dtype=dense.dtype)
    torch.testing.assert_close(first, dense, atol=1e-5, rtol=1e-3)
