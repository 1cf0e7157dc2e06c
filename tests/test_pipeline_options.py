"""The options of `generate` act through the stock pipeline as they do in `generate` itself, or are refused alike."""

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, pipeline

from hf_ensemble import ConfigurationError
from tests.contracts import CORE_RECIPES, PROMPTS

ENSEMBLE = CORE_RECIPES[0].ensemble
WRITER = pipeline("text-generation", model=ENSEMBLE, tokenizer=ENSEMBLE.tokenizer)

# With a temperature wherever texts are sampled, since the stock pipeline has a default of its own.
OPTIONS = {
    "nothing": {},
    "sampling": {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9},
    "other warpers": {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_p": 0.01, "typical_p": 0.9},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "beams that are sampled": {"num_beams": 2, "do_sample": True, "temperature": 1.0},
    "several sequences": {"do_sample": True, "temperature": 1.0, "num_return_sequences": 2},
    "a length in all": {"max_new_tokens": None, "max_length": 30},
    "a least length": {"min_new_tokens": 6},
    "an end": {"eos_token_id": [5, 17]},
    "stop strings": {"stop_strings": ["e", "a", "t"]},
    "penalties and bans": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
    "allowed ids": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3, 60))},
    "a processor": {"logits_processor": LogitsProcessorList([MinPLogitsWarper(0.2)])},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "a prompt in pieces": {"prefill_chunk_size": 2},
    "a method and weights": {"method": "gac", "weights": [0.7, 0.3]},
    "spans": {"method": "sweetspan"},
}
QUICK = ("sampling", "beams", "a length in all", "stop strings", "a processor", "a prompt in pieces", "spans")
REFUSED = {"guidance_scale": 2.0, "prompt_lookup_num_tokens": 2, "token_healing": True, "dola_layers": "high"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPTIONS]
)
def test_an_option_acts_as_in_generate(name):
    options = {"max_new_tokens": 8, "do_sample": False, "method": "gac", **OPTIONS[name]}
    torch.manual_seed(0)
    found = WRITER(PROMPTS[0], return_full_text=False, **options)
    inputs = ENSEMBLE.tokenizer(PROMPTS[0], return_tensors="pt")
    torch.manual_seed(0)
    ids = ENSEMBLE.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    assert [one["generated_text"] for one in found] == ENSEMBLE.tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_generate_refuses_is_refused(name):
    with pytest.raises(ConfigurationError, match=name):
        WRITER(PROMPTS[0], max_new_tokens=4, **{name: REFUSED[name]})
