"""Greedy texts of the two real models against the plain reference; 48 tokens each in `compare_reference.py`."""

import pytest

from tests.real.compare_reference import PROMPTS, TIE, Pair

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module", params=[0, 1], ids=["smollm2_first", "gemma_first"])
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize(("method", "prompt"), [("unite", "thai"), ("gac", "english")])
def test_greedy_text_equals_the_reference(pair, method, prompt):
    result = pair.compare_text(method, PROMPTS[prompt], 8)
    assert result["equal"] or result["least margin"] < TIE, result
