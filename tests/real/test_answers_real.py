"""Whole answers of the two real models: the plain reference, and samples."""

import pytest

from hf_ensemble import MbrConfig, VoteConfig
from tests.answers.test_equals_reference import EACH, compare
from tests.contracts import padded

pytestmark = [pytest.mark.real]

PROMPTS = ["The capital of France is", "เมืองหลวงของฝรั่งเศสคือ", "Q: What is 2 + 2?\nA:"]


def rows_of(ensemble, prompts):
    rows = [ensemble.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return padded(rows, fill=lambda n: ensemble.tokenizer.pad_token_id), rows


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["smollm2_first", "gemma_first"])
def test_answers_equal_the_reference(made, order):
    """With an end by a stop string, by length, and inside a character."""
    ensemble = made(*order)
    inputs, rows = rows_of(ensemble, PROMPTS)
    compare(ensemble, inputs, rows, EACH, None, 2, None, max_new_tokens=7, stop_strings=["."])


@pytest.mark.parametrize("config", [VoteConfig(r"\d+", num_candidates=2), MbrConfig(num_candidates=2)])
def test_samples_of_a_row_alone_are_those_in_a_batch(ensemble, config):
    options = {"method": config, "do_sample": True, "temperature": 0.7, "seed": 3, "max_new_tokens": 6}
    inputs, _ = rows_of(ensemble, PROMPTS[::2])
    together = ensemble.generate(**inputs, return_dict_in_generate=True, **options)
    for n, prompt in enumerate(PROMPTS[::2]):
        inputs, _ = rows_of(ensemble, [prompt])
        alone = ensemble.generate(**inputs, return_dict_in_generate=True, **options)
        assert [answer.data for answer in alone.answers[0]] == [answer.data for answer in together.answers[n]]
        assert [answer.rank for answer in alone.answers[0]] == [answer.rank for answer in together.answers[n]]
