"""Two rounds of SweetSpan on the two real models against the plain reference; 24 words each in `compare_spans.py`."""

import pytest

from tests.real.compare_reference import PROMPTS, Pair
from tests.real.compare_spans import compare_spans

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize(
    ("primary", "prompt", "score"), [(0, "english", "perplexity"), (1, "thai", "bits_per_byte")],
    ids=["smollm2_first", "gemma_first"],
)  # fmt: skip
def test_rounds_equal_the_reference(primary, prompt, score):
    result = compare_spans(Pair(primary), PROMPTS[prompt], 4, score, 10.0, num_rounds=2)
    assert result["equal"], result
