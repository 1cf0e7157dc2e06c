"""How candidate spans are scored, filtered and chosen."""

import math

import pytest

from hf_ensemble import ConfigurationError, SweetSpanConfig
from hf_ensemble.decoding.spans.participant import Offer, Reading
from hf_ensemble.methods.sweetspan import SpanChoice, choose_span, span_score
from hf_ensemble.recording.spans import SpanCandidate

FIGURE = [[23.5, 1.4, 1.6], [1.1, 9.0, 9.5]]
"""The perplexities of the paper's figure 2 (the second candidate's as the issue gives them)."""


@pytest.mark.parametrize(
    ("filter_ratio", "winner", "filtered"),
    [(math.inf, 1, ((), ())), (10.0, 0, ((0, 1), ())), (8.0, 0, ((0, 1), (0, 2))), (0.0, 0, ((0, 1), (0, 2)))],
)
def test_the_papers_figure(filter_ratio, winner, filtered):
    choice = choose_span(FIGURE, filter_ratio, "perplexity")
    assert (choice.winner, choice.filtered) == (winner, filtered)


def test_bits_per_byte_are_filtered_by_their_perplexities():
    bits = [[math.log2(value) for value in row] for row in FIGURE]
    assert choose_span(bits, 10.0, "bits_per_byte").filtered == ((0, 1), ())
    assert choose_span(bits, 8.0, "bits_per_byte").filtered == ((0, 1), (0, 2))


def test_two_members_are_never_filtered():
    assert choose_span([[1.0, 1000.0], [2.0, 900.0]], 0.0, "perplexity").filtered == ((), ())


def test_of_equal_means_the_first_wins():
    assert choose_span([[2.0, 4.0], [3.0, 3.0]], 10.0, "perplexity").winner == 0


def test_one_highest_and_one_lowest_are_dropped_of_equal_ones():
    assert choose_span([[5.0, 5.0, 5.0]], 0.5, "perplexity").filtered == ((0, 2),)


def test_what_a_member_thinks_impossible_loses():
    assert choose_span([[math.inf, 1.0], [50.0, 60.0]], 10.0, "perplexity").winner == 1
    assert choose_span([[math.inf, math.inf, 2.0], [math.inf, 2.0, 2.0]], 10.0, "perplexity").winner == 1


def test_scores_follow_their_definitions():
    assert span_score(math.log(0.5) * 3, 3, 12, "perplexity") == pytest.approx(2.0)
    assert span_score(math.log(0.5) * 3, 3, 12, "bits_per_byte") == pytest.approx(0.25)
    assert span_score(-math.inf, 1, 1, "perplexity") == math.inf


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"span_length": 0}, "`span_length` has to be a positive integer, but is 0"),
        ({"span_length": 2.5}, "span_length.*2.5"),
        ({"span_length": True}, "span_length.*True"),
        ({"filter_ratio": -1}, "`filter_ratio` has to be a number of at least 0, but is -1"),
        ({"filter_ratio": math.nan}, "filter_ratio.*nan"),
        ({"score": "likelihood"}, "`score` has to be one of perplexity, bits_per_byte, but is 'likelihood'"),
        ({"max_span_tokens": 3}, "at least `span_length`, but is 3 for 4 words"),
        ({"max_span_tokens": 0}, "max_span_tokens.*0"),
    ],
)
def test_bad_options_are_refused_with_rule_and_value(options, match):
    with pytest.raises(ConfigurationError, match=match):
        SweetSpanConfig(**options)


def test_the_token_limit_grows_with_the_span():
    assert SweetSpanConfig(span_length=3).token_limit == 48
    assert SweetSpanConfig(span_length=3, max_span_tokens=7).token_limit == 7


@pytest.mark.parametrize("score", ["perplexity", "bits_per_byte"])
def test_a_member_that_reads_no_token_of_a_candidate_gives_it_no_score(score):
    """Its tokenizer drops what it does not know; a sum over nothing would make the candidate certain."""
    candidate = SpanCandidate("🦔".encode(), False, (0,))
    offer = Offer(candidate, {0: Reading(None, [7], 1, log_prob=-1.0), 1: Reading(None, [], 0, log_prob=0.0)})
    assert offer.score(0, score) > 0
    assert offer.score(1, score) is None


def test_a_candidate_without_a_score_is_the_last_choice():
    assert choose_span([[None, None], [90.0, None]], 10.0, "perplexity") == SpanChoice(1, ((), ()))
    assert choose_span([[None], [None]], 10.0, "bits_per_byte") == SpanChoice(0, ((), ()))
