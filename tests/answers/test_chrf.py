"""chrF of texts against one another: `sacrebleu`, the plain reference, and cases worked out by hand."""

import random
import sys

import pytest

from hf_ensemble.answers.chrf import aggregated_chrf, pairwise_chrf
from tests import reference_answers as plain

sacrebleu = pytest.importorskip("sacrebleu")

SCRIPTS = {
    "Latin": "aaabcdeéßİǆ",
    "Cyrillic": "аабвгдеёйЖї",
    "Han": "的一是不了人我在𠀀😀。",
    "Arabic and Hebrew": "ااببتثשלוםּ،",
    "Thai and Devanagari": "กกาิ่้ำकक्िं",
}
ODD = "\0\x1b\u00ad\u200b\u200d\u0301\ufeff\ufffd\uffff\U0010ffff"
WHITE_SPACE = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
SETS_A_SCRIPT = 100


def candidate_sets(script):
    """Sets of three to six texts of up to some sixty characters, most of them one text with changes."""
    generator = random.Random(script)
    letters = list(SCRIPTS[script])
    for _ in range(SETS_A_SCRIPT):
        alphabet = generator.sample(letters, generator.randint(1, len(letters)))
        alphabet += generator.choice([[], [generator.choice(ODD)]])
        base = generator.choices([*alphabet, " "], k=generator.choice([0, 1, 4, 8, 20, 60]))
        yield [changed(base, alphabet, generator) for _ in range(generator.randint(3, 6))]


def changed(base, alphabet, generator):
    """A copy; one with other white space; one with characters changed or left out; another text; or an empty one."""
    kind = generator.choice(["copy", "spaced", "edited", "edited", "edited", "other", "empty"])
    if kind == "spaced":
        return "".join(char + generator.choice(["", "", generator.choice(WHITE_SPACE)]) for char in base)
    if kind == "edited":
        chars = [generator.choice(alphabet) if generator.random() < 0.15 else char for char in base]
        return "".join(char for char in chars if generator.random() < 0.9)
    if kind == "other":
        return "".join(generator.choices(alphabet, k=generator.randint(1, 30)))
    if kind == "empty":
        return generator.choice(["", " ", "".join(generator.choices(WHITE_SPACE, k=3))])
    return "".join(base)


def random_weights(count, generator):
    weights = [generator.random() + 0.01 for _ in range(count)]
    return [weight / sum(weights) for weight in weights]


# --- Against other programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_pairwise_equals_sacrebleu(script):
    for texts in candidate_sets(script):
        scores = pairwise_chrf(texts)
        for hypothesis, row in zip(texts, scores, strict=True):
            for reference, score in zip(texts, row, strict=True):
                both_empty = not hypothesis.split() and not reference.split()
                expected = 100.0 if both_empty else sacrebleu.sentence_chrf(hypothesis, [reference]).score
                assert score == pytest.approx(expected, abs=1e-6), (hypothesis, reference)


@pytest.mark.parametrize("script", SCRIPTS)
def test_aggregated_equals_the_plain_reference(script):
    generator = random.Random(0)
    for texts in candidate_sets(script):
        weights = random_weights(len(texts), generator)
        expected = [plain.aggregated_chrf(text, texts, weights) for text in texts]
        assert aggregated_chrf(texts, weights) == pytest.approx(expected, abs=1e-9), texts


def test_pairwise_equals_the_plain_reference():
    for texts in candidate_sets("Latin"):
        expected = [[plain.chrf(hypothesis, reference) for reference in texts] for hypothesis in texts]
        for row, expected_row in zip(pairwise_chrf(texts), expected, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-9), texts


def test_long_texts_agree_too():
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh", k=5_000)) for _ in range(3)]
    weights = random_weights(3, generator)
    for hypothesis, row in zip(texts, pairwise_chrf(texts), strict=True):
        assert row == pytest.approx([plain.chrf(hypothesis, reference) for reference in texts], abs=1e-9)
    expected = [plain.aggregated_chrf(text, texts, weights) for text in texts]
    assert aggregated_chrf(texts, weights) == pytest.approx(expected, abs=1e-9)


# --- By hand --------------------------------------------------------------------------------------------------------


def test_pairwise_by_hand():
    # "ab" against "abc": of orders 1 and 2, precisions 1 and 1, recalls 2/3 and 1/2, means 1 and 7/12. Back: exchanged.
    assert pairwise_chrf(["ab", "abc"])[0] == pytest.approx([100, 100 * 7 / 11])
    assert pairwise_chrf(["ab", "abc"])[1] == pytest.approx([100 * 7 / 8, 100])


def test_an_n_gram_matches_as_often_as_both_have_it():
    # Only order 1 is in both: precision 1/2, recall 1.
    assert pairwise_chrf(["aa", "a"])[0][1] == pytest.approx(100 * 5 * 0.5 / (4 * 0.5 + 1))


def test_aggregated_by_hand():
    # Averages: a 1, b 1, c 1/2; ab 1, bc 1/2; abc 1/2.
    # "ab": precisions 1 and 1, recalls 4/5 and 2/3. "abc": precisions 5/6, 3/4 and 1/2, recalls 1.
    assert aggregated_chrf(["ab", "abc"], [0.5, 0.5]) == pytest.approx([100 * 55 / 71, 100 * 125 / 136])


def test_n_grams_do_not_reach_into_the_next_text():
    assert aggregated_chrf(["ab", "cd", "bc"], [0.5, 0.25, 0.25]) == pytest.approx(
        [plain.aggregated_chrf(text, ["ab", "cd", "bc"], [0.5, 0.25, 0.25]) for text in ["ab", "cd", "bc"]]
    )
    # Orders 1 and 2 of one text and nothing of the other: precision and recall are the weight.
    assert aggregated_chrf(["ab", "cd"], [0.75, 0.25]) == pytest.approx([75, 25])


# --- Weights and ties -----------------------------------------------------------------------------------------------


def test_a_text_alone_is_like_itself():
    assert pairwise_chrf(["some text"]) == [[pytest.approx(100)]]
    assert aggregated_chrf(["some text"], [1.0]) == [pytest.approx(100)]


def test_copies_share_a_weight():
    once = aggregated_chrf(["one text", "one test", "another"], [0.5, 0.3, 0.2])
    twice = aggregated_chrf(["one text", "one test", "another", "one text"], [0.4, 0.3, 0.2, 0.1])
    assert twice == pytest.approx([*once, once[0]])


def test_the_order_of_texts_is_irrelevant():
    texts, weights = ["one text", "one test", "", "another"], [0.4, 0.3, 0.2, 0.1]
    assert aggregated_chrf(texts[::-1], weights[::-1])[::-1] == pytest.approx(aggregated_chrf(texts, weights))
    there = [row[::-1] for row in pairwise_chrf(texts[::-1])][::-1]
    assert [pytest.approx(row) for row in there] == pairwise_chrf(texts)


def test_more_weight_on_a_text_raises_those_like_it():
    texts = ["one text", "one test", "другой"]
    little, much = aggregated_chrf(texts, [0.2, 0.4, 0.4]), aggregated_chrf(texts, [0.6, 0.2, 0.2])
    assert much[0] > little[0]
    assert much[2] < little[2]


def test_equal_texts_and_mirrored_ones_tie():
    aggregated = aggregated_chrf(["ab", "cd", "a b", "dc"], [0.25] * 4)
    assert plain.is_tie(aggregated[0], aggregated[2])
    assert plain.is_tie(aggregated[1], aggregated[3])
    pairwise = pairwise_chrf(["ab", "cd", "a b"])
    assert pairwise[0] == pairwise[2]
    assert pairwise[0][0] == pairwise[0][2]


def test_texts_without_a_common_character_have_zero():
    assert pairwise_chrf(["ab", "cd"])[0][1] == 0.0


# --- Empty texts and odd characters ---------------------------------------------------------------------------------


def test_empty_is_like_empty_and_like_nothing_else():
    assert pairwise_chrf(["", "a", " \n"]) == [[100, 0, 100], [0, pytest.approx(100), 0], [100, 0, 100]]
    # The empty ones count as references without n-grams.
    assert aggregated_chrf(["", "a", " \n"], [0.25, 0.5, 0.25]) == pytest.approx(
        [50, 100 * 5 * 0.5 / (4 * 0.5 + 1), 50]
    )


def test_nothing_but_empty_texts():
    assert pairwise_chrf(["", "\t"]) == [[100, 100], [100, 100]]
    assert aggregated_chrf(["", "\t"], [0.25, 0.75]) == pytest.approx([100, 100])


def test_no_text_at_all():
    assert pairwise_chrf([]) == []
    assert aggregated_chrf([], []) == []


def test_white_space_of_every_kind_is_left_out():
    texts = ["some text", *(f"{space}so{space}{space}metext{space}" for space in WHITE_SPACE)]
    assert "\x1c" in WHITE_SPACE
    assert all(row == pytest.approx([100.0] * len(texts)) for row in pairwise_chrf(texts))
    assert aggregated_chrf(texts, [1 / len(texts)] * len(texts)) == pytest.approx([100.0] * len(texts))
    assert pairwise_chrf(["", *WHITE_SPACE])[0] == [100.0] * (len(WHITE_SPACE) + 1)


@pytest.mark.parametrize("char", ODD, ids=ascii)
def test_no_other_character_is_left_out_or_ends_a_text(char):
    texts = ["some text", f"some{char} text", f"{char}some text{char}"]
    for hypothesis, row in zip(texts, pairwise_chrf(texts), strict=True):
        assert row == pytest.approx([plain.chrf(hypothesis, reference) for reference in texts])
    expected = [plain.aggregated_chrf(text, texts, [0.5, 0.3, 0.2]) for text in texts]
    assert aggregated_chrf(texts, [0.5, 0.3, 0.2]) == pytest.approx(expected)
    assert expected[0] < 99


def test_composed_and_decomposed_letters_differ():
    assert pairwise_chrf(["\u00e9", "e\u0301"])[0][1] == 0.0
    assert aggregated_chrf(["\u00e9", "e\u0301"], [0.5, 0.5])[0] < 60
