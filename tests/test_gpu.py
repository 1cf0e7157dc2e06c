"""The same texts on a GPU as on the CPU, with members together or apart, captured or not."""

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.methods.captured import CapturedMix
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:the primary .* wrote the control token"),
]

PROMPTS = ["The capital of France is", "今天天气很好", "def f(x):\n\treturn x"]


def make(method, devices):
    tokenizers = [tiny.smol_like(), tiny.gemma_like()]
    models = [tiny.tiny_llama(tokenizers[0], seed=1), tiny.tiny_gemma3(tokenizers[1], seed=2)]
    models = [model.to(device) for model, device in zip(models, devices, strict=True)]
    return EnsembleForCausalLM.from_members(models, tokenizers, method=method)


def generate(ensemble, **options):
    inputs = ensemble.tokenizer(PROMPTS, return_tensors="pt", padding=True).to(ensemble.device)
    return ensemble.generate(**inputs, max_new_tokens=16, **options).tolist()


@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("method", ["gac", "unite"])
def test_text_is_the_same_on_every_placement(method, devices):
    expected = make(method, ("cpu", "cpu"))
    found = make(method, devices)
    assert generate(found, do_sample=False) == generate(expected, do_sample=False)
    assert generate(found, do_sample=False, num_beams=3) == generate(expected, do_sample=False, num_beams=3)


@pytest.mark.parametrize("method", ["gac", "unite"])
def test_captured_mixing_equals_uncaptured_with_ties_and_changing_inputs(method):
    ensemble = make(method, ("cuda", "cuda"))
    plain = ensemble._method(ensemble.config.method, list(ensemble._members[0].eos_token_ids))
    captured = CapturedMix(plain)
    for step in range(6):
        torch.manual_seed(step)
        logits = [torch.randn(3, m.config.vocab_size, device="cuda").mul(2).round() for m in ensemble.members]
        weights = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.9, 0.1]], device="cuda")
        found, expected = captured(logits, weights), plain.mix(logits, weights)
        torch.testing.assert_close(found.logprobs, expected.logprobs)
        torch.testing.assert_close(found.normalizers, expected.normalizers)
    assert len(captured._graphs) == 1
