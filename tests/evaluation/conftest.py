"""A slow stand-in for `score`, from the distributions of `generate`."""

import pytest
import torch

from hf_ensemble import EnsembleForCausalLM


class Scores:
    def __init__(self, log_probs):
        self.log_probs = torch.tensor(log_probs)


def score(self, prompts, continuations, *, method=None, weights=None, batch_size=8):
    log_probs = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        ids = torch.tensor([self.tokenizer(prompt + continuation)["input_ids"]])
        total = 0.0
        for at in range(len(self.tokenizer(prompt)["input_ids"]), ids.shape[1]):
            options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            row = self.generate(input_ids=ids[:, :at], method=method, weights=weights, **options).logits[0]
            total += float(row.log_softmax(-1)[0, ids[0, at]])
        log_probs.append(total)
    return Scores(log_probs)


@pytest.fixture(scope="session", autouse=True)
def scores():
    if not hasattr(EnsembleForCausalLM, "score"):
        EnsembleForCausalLM.score = score
