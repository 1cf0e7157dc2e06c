"""Drafts on the two real models: ten prompts, few tokens, in one batch; 200 prompts in `compare_speculation.py`."""

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.decoding.speculation.draft_length import DraftLength
from tests.contracts import assert_same_choices

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is Paris, the capital of",
    "Question: Who wrote Faust?\nAnswer:",
    "one two three one two three one",
    "a + b = b + a, c + d =",
    "Die Hauptstadt von Frankreich heißt",
    "Water boils at 100 degrees; ice",
    "天天天",
    "The cat sat on the mat. The cat sat",
    "- apples\n- pears\n- apples\n-",
    "2 + 2 = 4, 3 + 3 =",
]
NUM_NEW = 3


@pytest.fixture(scope="module")
def ensemble(demo_models):
    return EnsembleForCausalLM.from_pretrained(demo_models, dtype=torch.float32)


@pytest.mark.parametrize(("method", "drafter"), [("gac", "ngram"), ("unite", "SmolLM2-135M-Instruct")])
def test_ten_texts_are_those_of_the_plain_loop(method, drafter, ensemble, monkeypatch):
    monkeypatch.setattr(DraftLength, "choose", lambda self, drafters, share=1.0: (drafters[0], 2))
    inputs = ensemble.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    options = {
        "method": method,
        "max_new_tokens": NUM_NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "eos_token_id": [],
    }
    plain = ensemble.generate(**inputs, output_logits=True, pad_token_id=0, **options)
    found = ensemble.generate(**inputs, speculation=drafter, pad_token_id=0, **options)
    start = inputs.input_ids.shape[1]
    for row, (ids, expected) in enumerate(zip(found.sequences, plain.sequences, strict=True)):
        logits = [step[row] for step in plain.logits]
        assert_same_choices(ids[start:].tolist(), expected[start:].tolist(), logits)
    assert found.speculation.accepted[drafter] > 0
