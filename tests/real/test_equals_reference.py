"""The two real models against the plain reference: greedy texts, 48 tokens each in `compare_reference.py`; a score."""

import functools

import pytest

from tests.real.compare_reference import PROMPTS, TIE, Pair
from tests.reference_scores import score, split

pytestmark = [pytest.mark.real, pytest.mark.slow]

pair_of = functools.lru_cache(Pair)


@pytest.mark.parametrize(
    ("primary", "method", "prompt"),
    [(0, "unite", "thai"), (1, "gac", "english")],
    ids=["smollm2_first", "gemma_first"],
)
def test_greedy_text_equals_the_reference(primary, method, prompt):
    result = pair_of(primary).compare_text(method, PROMPTS[prompt], 8)
    assert result["equal"] or result["least margin"] < TIE, result


def test_scores_equal_the_reference():
    pair = pair_of(0)
    reference = pair.references["gac"]
    pairs = [("The capital of France is", " Paris."), ("The capital of France is", " Berlin"), ("今天天气", "很好")]
    found = pair.ensemble.score(*zip(*pairs, strict=True), method="gac")
    expected = score(reference, *split(reference.members[0], *pairs[2]))
    assert found.log_probs[2].item() == pytest.approx(expected.log_prob, abs=1e-3)
    assert found.is_greedy[2].item() == expected.is_greedy
    assert found.log_probs[0] > found.log_probs[1]
