"""The two real models against the plain references: two greedy texts, a score, and two rounds of spans each way.

Longer texts: `compare_reference.py`, 48 tokens each; `compare_spans.py`, 24 words each.
"""

import pytest

from tests.real.compare_reference import PROMPTS, TIE, pair_of
from tests.real.compare_spans import compare_spans
from tests.reference_scores import score, split

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize(
    ("primary", "method", "prompt"),
    [(0, "unite", "thai"), (1, "gac", "english")],
    ids=["smollm2_first", "gemma_first"],
)
def test_greedy_text_equals_the_reference(primary, method, prompt):
    result = pair_of(primary).compare_text(method, PROMPTS[prompt], 5)
    assert result["equal"] or result["least margin"] < TIE, result


def test_scores_equal_the_reference():
    # With the larger vocabulary first, since the reference spells what the primary lacks entry by entry.
    pair = pair_of(1)
    reference = pair.references["gac"]
    pairs = [("The capital of France is", " Paris."), ("The capital of France is", " Berlin"), ("今天天气", "很好")]
    found = pair.ensemble.score(*zip(*pairs, strict=True), method="gac")
    expected = score(reference, *split(reference.members[0], *pairs[2]))
    assert found.log_probs[2].item() == pytest.approx(expected.log_prob, abs=1e-3)
    assert found.is_greedy[2].item() == expected.is_greedy
    assert found.log_probs[0] > found.log_probs[1]


@pytest.mark.parametrize(
    ("primary", "prompt", "score"),
    [(0, "english", "perplexity"), (1, "thai", "bits_per_byte")],
    ids=["smollm2_first", "gemma_first"],
)
def test_rounds_equal_the_reference(primary, prompt, score):
    result = compare_spans(pair_of(primary), PROMPTS[prompt], 2, score, 10.0, num_rounds=2)
    assert result["equal"], result
