"""Hand-computed values: what the reference of whole answers says has to be right without it."""

import math
import random
import re

import pytest
import sacrebleu

from tests.reference_answers import (
    Choice,
    Written,
    aggregated_chrf,
    answer_in,
    best_first,
    bits_per_byte,
    chrf,
    cut,
    encode,
    ids_of,
    ids_returned,
    in_order,
    is_empty,
    mbr,
    merge,
    places,
    rerank_by_likelihood,
    rerank_by_pairs,
    rerank_by_reward,
    seed_of,
    seeds,
    vote,
)


class Pieces:
    """A primary that writes the longest piece that fits; its ids are 10, 11, …, and 1 and 2 end a text."""

    def __init__(self, *pieces, control_eos=(1, 2)):
        data = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
        self.token_bytes = dict(enumerate(data, start=10))
        self.control_eos = list(control_eos)

    def encode(self, data):
        ids = []
        while data:
            fitting = [i for i, piece in self.token_bytes.items() if data.startswith(piece)]
            if not fitting:
                return None
            ids.append(max(fitting, key=lambda i: len(self.token_bytes[i])))
            data = data[len(self.token_bytes[ids[-1]]) :]
        return ids


ABC = Pieces("a", "b", "c", "ab")


def wrote(writer, text, end="eos", number=0, ids=()):
    data = text if isinstance(text, bytes) else text.encode()
    return Written(writer, number, data, end, tuple(ids))


def candidates(*texts, weights=None):
    """One a member, whose weights are uniform by default."""
    written = [wrote(index, text) for index, text in enumerate(texts)]
    return merge(written, weights or [1.0] * len(texts))


def winner(choice):
    return choice.ranking[0]


# Seeds


def test_a_seed_depends_on_each_of_its_parts():
    base = {"call_seed": 7, "name": "a", "index": 1, "prompt": b"p", "num_earlier": 0, "number": 0}
    others = {"call_seed": 8, "name": "b", "index": 2, "prompt": b"q", "num_earlier": 1, "number": 1}
    found = [seed_of(**base), *(seed_of(**{**base, key: value}) for key, value in others.items())]
    assert len(set(found)) == 7
    assert all(0 <= seed < 2**63 for seed in found)
    assert seed_of(**base) == found[0]


def test_parts_of_a_seed_are_told_apart():
    assert seed_of(7, "a1", 2, b"p", 0, 0) != seed_of(7, "a", 12, b"p", 0, 0)
    assert seed_of(7, "a", 1, b"2", 3, 0) != seed_of(7, "a", 1, b"23", 0, 0)


def test_seeds_depend_neither_on_other_rows_nor_on_other_writers():
    names = {0: "a", 1: "b"}
    together = seeds(7, names, [b"p", b"q", b"p"], num_candidates=2)
    assert len(set(together.values())) == len(together) == 3 * 2 * 2
    alone = seeds(7, {1: "b"}, [b"q"], num_candidates=1)
    assert alone == {(0, 1, 0): together[1, 1, 0]}
    assert seeds(7, names, [b"p", b"p"], 1)[1, 0, 0] == together[2, 0, 0]


# Order


def test_members_come_before_methods_and_samples_in_number_order():
    written = [
        wrote("gac", "1"),
        wrote(1, "2", number=1),
        wrote("deepen", "3"),
        wrote(1, "4"),
        wrote(0, "5", number=2),
    ]
    ordered = in_order(written, methods=("deepen", "gac"))
    assert [answer.data for answer in ordered] == [b"5", b"4", b"2", b"3", b"1"]


# The budget


@pytest.mark.parametrize(
    ("text", "end", "max_new_tokens", "expected"),
    [
        ("abc", "eos", 3, ("abc", "eos")),  # ab, c and EOS
        ("abc", "eos", 2, ("abc", None)),  # no place for the EOS
        ("abc", "text", 2, ("abc", "text")),  # which a stop string does not need
        ("abc", None, 2, ("abc", None)),
        ("abc", "eos", 1, ("ab", None)),
        ("abc", "text", 1, ("ab", None)),
        ("", "eos", 1, ("", "eos")),
        ("", "eos", 0, ("", None)),
        ("abc", "eos", 0, ("", None)),
    ],
)
def test_a_candidate_is_cut_to_the_primarys_ids(text, end, max_new_tokens, expected):
    found = cut(wrote(1, text, end), ABC, max_new_tokens)
    assert (found.data.decode(), found.end) == expected


def test_a_begun_character_is_cut_off_only_where_the_answer_has_not_ended():
    begun = "aé".encode()[:-1]
    primary = Pieces("a", "é", b"\xc3", b"\xa9")
    assert cut(wrote(1, begun, None), primary, 10).data == b"a"
    assert cut(wrote(1, begun), primary, 10).data == begun
    assert cut(wrote(1, begun), primary, 2).data == b"a"
    assert cut(wrote(1, b"a\xffa", None), Pieces("a", b"\xff"), 2).data == b"a\xff"


def test_a_cut_never_leaves_half_a_character():
    primary = Pieces("a", b"\xc3", b"\xa9")
    assert cut(wrote(1, "aéa"), primary, 2) == wrote(1, "a", None)
    assert cut(wrote(1, "aéa"), primary, 3) == wrote(1, "aé", None)


def test_what_is_left_fits_by_itself():
    """`aé` takes three ids; with the first byte of the next character in its last piece, it took two."""
    primary = Pieces("a", b"\xc3", b"\xa9", b"\xa9\xc3", b"a\xc3")
    assert len(encode("aéé".encode(), primary)) == 3
    assert encode("aé".encode(), primary) == [14, 12]
    assert cut(wrote(1, "aéé"), primary, 2) == wrote(1, "aé", None)
    joined = Pieces("a", b"\xc3", b"\xa9", b"a\xc3\xa9\xc3", b"\xa9a")
    assert encode("aéé".encode(), joined) == [13, 12]
    assert cut(wrote(1, "aéé"), joined, 1) == wrote(1, "a", None)


def test_unwritable_characters_count_as_what_stands_for_them():
    primary = Pieces("a", "\ufffd")
    assert cut(wrote(1, "aßß"), primary, 2) == wrote(1, "aß", None)
    assert cut(wrote(1, b"a\xff\xffa"), primary, 3) == wrote(1, b"a\xff\xff", None)


def test_the_primarys_own_ids_count_as_they_are():
    """Though another spelling of the text would fit, or not."""
    own = wrote(0, "ab", ids=(10, 11, 1))
    assert cut(own, ABC, 3) == own
    shorter = Pieces("b", "abab", control_eos=(1,))
    shorter.encode = lambda data: [10] * len(data)
    own = wrote(0, "abab", ids=(11, 1))
    assert cut(own, shorter, 2) == own
    own = wrote("gac", "abab", ids=(11, 1))
    assert cut(own, shorter, 2) == own
    assert cut(wrote(1, "bb"), shorter, 2) == wrote(1, "bb", None)


# Candidates


def test_equal_texts_are_one_candidate_if_they_agree_in_having_ended():
    written = [wrote(0, "a"), wrote(1, "a", None), wrote(2, "a", "text"), wrote(3, "b"), wrote(1, "a", None, number=1)]
    found = merge(written, [0.25] * 4)
    assert [(c.data, c.ended, [w.writer for w in c.writers]) for c in found] == [
        (b"a", True, [0, 2]),
        (b"a", False, [1, 1]),
        (b"b", True, [3]),
    ]
    assert found[0].has_eos


def test_the_earliest_writer_decides_whether_there_is_an_eos():
    assert merge([wrote(0, "a"), wrote(1, "a", "text")], [0.5, 0.5])[0].has_eos
    assert not merge([wrote(1, "a"), wrote(0, "a", "text")], [0.5, 0.5])[0].has_eos


def test_an_empty_answer_is_a_candidate_ended_or_not():
    found = merge([wrote(0, ""), wrote(1, "", None), wrote(2, "")], [1, 1, 1])
    assert [(c.data, c.ended, len(c.writers)) for c in found] == [(b"", True, 2), (b"", False, 1)]


def test_a_text_has_the_replacement_character_for_what_is_no_utf8():
    assert merge([wrote(0, b"a\xff\xc3")], [1])[0].text == "a\ufffd\ufffd"


def test_a_cut_answer_may_become_another():
    written = [cut(wrote(0, "ab", None, ids=(10, 11)), ABC, 2), cut(wrote(1, "ababc"), ABC, 1)]
    assert [len(c.writers) for c in merge(written, [1, 1])] == [2]


def test_weights_are_split_among_samples_and_normalised():
    written = [wrote(0, "a"), wrote(0, "b", number=1), wrote(1, "b"), wrote(1, "b", number=1)]
    found = merge(written, [3, 1], num_candidates=2)
    assert [c.weights for c in found] == [[0.375], [0.375, 0.125, 0.125]]
    assert [c.weight for c in found] == [0.375, 0.625]


def test_a_method_counts_as_one_of_all_members():
    written = [wrote("gac", "a"), wrote(0, "a"), wrote(1, "b")]
    found = merge(written, [0.75, 0.25], methods=("gac",))
    assert [c.weight for c in found] == pytest.approx([1.25 / 1.5, 0.25 / 1.5])
    assert [w.writer for w in found[0].writers] == [0, "gac"]
    found = merge([wrote(1, "b"), wrote(2, "c"), wrote("gac", "a")], [0, 0.5, 0.5], methods=("gac",))
    assert [c.weight for c in found] == pytest.approx([3 / 8, 3 / 8, 1 / 4])
    found = merge(
        [*written[1:], wrote(0, "c", number=1), wrote(1, "c", number=1), written[0]], [0.5, 0.5], 2, ("gac",)
    )
    assert [c.weight for c in found] == pytest.approx([0.75 / 1.5, 0.5 / 1.5, 0.25 / 1.5])


# Ids


def test_the_primarys_own_ids_are_returned():
    (found,) = merge([wrote(1, "ab"), wrote(0, "ab", ids=(10, 11, 2))], [1, 1])
    assert ids_returned(found, ABC) == [10, 11, 2]
    (found,) = merge([wrote(0, "ab", ids=(10, 11, 2)), wrote(0, "ab", number=1, ids=(13, 1))], [1])
    assert ids_returned(found, ABC) == [10, 11, 2]
    (found,) = merge([wrote(1, "ab"), wrote("gac", "ab", ids=(10, 11, 2))], [1, 1], methods=("gac",))
    assert ids_returned(found, ABC) == [10, 11, 2]


def test_other_answers_are_encoded_and_end_in_the_primarys_first_eos():
    assert ids_returned(merge([wrote(1, "ab", ids=(5, 6))], [1, 1])[0], ABC) == [13, 1]
    assert ids_returned(merge([wrote(1, "ab", "text")], [1, 1])[0], ABC) == [13]
    assert ids_returned(merge([wrote(1, "ab", None)], [1, 1])[0], ABC) == [13]
    assert ids_returned(merge([wrote(1, "")], [1, 1])[0], ABC) == [1]
    assert ids_returned(merge([wrote(1, "ab")], [1, 1])[0], Pieces("ab", control_eos=())) == [10]


def test_ids_of_a_begun_character_are_not_returned():
    primary = Pieces("a", b"\xc3", b"\xa9", b"a\xc3")
    assert ids_of(cut(wrote(0, b"aa\xc3", None, ids=(10, 10, 11)), primary, 3), primary) == [10, 10]
    assert ids_of(cut(wrote(0, b"aa\xc3", None, ids=(10, 13)), primary, 2), primary) == [10, 10]
    assert ids_of(cut(wrote(0, b"\xc3", None, ids=(11,)), primary, 1), primary) == []


def test_control_tokens_that_write_nothing_stay_among_own_ids():
    assert ids_of(wrote(0, "ab", None, ids=(10, 3, 11, 3)), ABC) == [10, 3, 11, 3]


def test_what_the_primary_cannot_write_is_the_replacement_character():
    primary = Pieces("a", "\ufffd", b"\xc3\xa4")
    assert encode("aßäa".encode(), primary) == [10, 11, 12, 10]
    assert encode(b"a\xff\xe2\x82", primary) == [10, 11, 11, 11]
    with pytest.raises(ValueError, match="cannot write"):
        encode("ß".encode(), ABC)


# Ranking


def test_ties_are_equal_up_to_rounding_and_go_to_the_earliest():
    assert best_first([0.3, 0.1 + 0.2, 0.4]) == [2, 0, 1]
    assert best_first([0.1 + 0.2, 0.3]) == [0, 1]
    assert best_first([0.0, 1e-17, 1e-6]) == [2, 0, 1]
    assert best_first([-math.inf, 1.0, -math.inf]) == [1, 0, 2]


def test_a_text_fills_as_many_places_as_it_has_writers():
    written = [wrote(0, "a"), wrote(1, "b"), wrote(2, "b"), wrote(0, "c", number=1), wrote(1, "b", number=1)]
    found = merge(written, [1, 1, 1], num_candidates=2)
    assert [c.data for c in found] == [b"a", b"c", b"b"]
    assert places(found, [2, 0, 1]) == [2]
    assert places(found, [2, 0, 1], 4) == [2, 2, 2, 0]
    assert places(found, [0, 2, 1], 5) == [0, 2, 2, 2, 1]
    with pytest.raises(ValueError, match="6 answers cannot be returned: 5 were written"):
        places(found, [0, 2, 1], 6)


# Vote


@pytest.mark.parametrize(
    ("text", "extract", "expected"),
    [
        (" a b\n", None, "a b"),
        ("", None, ""),
        (" \n", None, ""),
        ("3 and 45", r"\d+", "45"),
        ("x=3, x=45.", r"x=(\d)(\d)?", "4"),
        ("x=3, x=45.", re.compile(r"X=(\d+)", re.IGNORECASE), "45"),
        ("none", r"\d+", None),
        ("b", r"(a)?b", None),
        ("b", r"(a*)b", ""),
        (" a ", lambda text: text, " a "),
        ("a", lambda text: None, None),
        ("a", lambda text: "", ""),
    ],
)
def test_an_extractor_finds_the_answer(text, extract, expected):
    assert answer_in(text, extract) == expected


@pytest.mark.parametrize("wrong", [3, b"a", ["a"], False])
def test_other_types_are_refused(wrong):
    with pytest.raises(TypeError, match="a string or None"):
        answer_in("a", lambda text: wrong)


def test_the_weights_of_equal_answers_are_added():
    found = candidates("so 4", "it is 5", "5!", weights=[0.4, 0.35, 0.25])
    assert vote(found) == Choice([0, 1, 2], [0.4, 0.35, 0.25])
    choice = vote(found, r"\d")
    assert choice.ranking == [1, 2, 0]
    assert choice.scores == pytest.approx([0.4, 0.6, 0.6])


def test_answers_are_compared_ended_or_not():
    found = merge([wrote(0, "a"), wrote(1, "b"), wrote(2, "b", None)], [1, 1, 1])
    assert [c.data for c in found] == [b"a", b"b", b"b"]
    assert vote(found).ranking == [1, 2, 0]


def test_the_winners_earliest_candidate_is_returned_whatever_its_weight():
    assert vote(candidates("a", " b", "b", weights=[0.4, 0.1, 0.5])).ranking == [1, 2, 0]


def test_a_tie_goes_to_the_primary_and_else_to_the_earliest():
    assert winner(vote(candidates("a", "b"))) == 0
    assert vote(candidates("a", "b", "c", weights=[0.2, 0.4, 0.4])).ranking == [1, 2, 0]
    assert vote(candidates("a", "b", "b", "c", weights=[0.3, 0.1, 0.2, 0.4])).ranking == [2, 0, 1]
    later = list(reversed(candidates("a", "b", "c", weights=[0.4, 0.2, 0.4])))
    assert [c.data for c in later] == [b"c", b"b", b"a"]
    assert vote(later).ranking == [2, 0, 1]


def test_samples_of_the_primary_that_tie_go_to_the_earliest():
    found = merge([wrote(0, "b"), wrote(0, "a", number=1), wrote(1, "a"), wrote(1, "b", number=1)], [1, 1], 2)
    assert vote(found).ranking == [0, 1]


def test_samples_count_a_part_of_their_member_each():
    written = [
        wrote(index, f"{text}{number}", number=number) for index, text in enumerate("ba") for number in range(3)
    ]
    choice = vote(merge(written, [1, 1], num_candidates=3), "[ab]")
    assert choice.scores == pytest.approx([0.5] * 6)
    assert choice.ranking == [0, 1, 2, 3, 4, 5]
    choice = vote(merge(written, [1, 2], num_candidates=3), "[ab]")
    assert choice.ranking == [3, 4, 5, 0, 1, 2]


def test_none_is_no_answer_and_an_empty_string_is_one():
    found = candidates("x", "", "y", "7", weights=[0.3, 0.25, 0.25, 0.2])
    choice = vote(found, lambda text: None if text in ("x", "y") else text)
    assert choice == Choice([1, 3, 0, 2], [None, 0.25, None, 0.2])
    choice = vote(found, lambda text: text if text == "7" else "")
    assert choice.ranking == [0, 1, 2, 3]
    assert choice.scores == pytest.approx([0.8, 0.8, 0.8, 0.2])


def test_no_answer_at_all_is_the_primarys_first_candidate():
    found = candidates("a", "b", "c", weights=[0.1, 0.5, 0.4])
    assert vote(found, r"\d") == Choice([0, 1, 2], [None, None, None])
    assert vote(list(reversed(found)), r"\d").ranking == [2, 0, 1]
    assert vote(merge([wrote(1, "b"), wrote(2, "c")], [0, 1, 1]), r"\d").ranking == [0, 1]


def test_places_of_a_vote_go_by_answers_and_then_by_order():
    written = [wrote(0, "4"), wrote(1, "=5"), wrote(2, "5"), wrote(1, "5", number=1), wrote(2, "4", number=1)]
    found = merge(written, [0.2, 0.4, 0.4], num_candidates=2)
    assert [c.text for c in found] == ["4", "=5", "5"]
    ranking = vote(found, r"\d").ranking
    assert [found[index].text for index in places(found, ranking, 5)] == ["=5", "5", "5", "4", "4"]


# ChrF


def test_chrf_by_hand():
    assert chrf("abc", "abc") == pytest.approx(100)
    assert chrf("ab", "abc") == pytest.approx(100 * 7 / 11)  # precisions 1, 1; recalls 2/3, 1/2
    assert chrf("abc", "ab") == pytest.approx(100 * 7 / 8)
    assert chrf("aa", "a") == pytest.approx(100 * 5 / 6)  # precision 1/2, recall 1; one order
    assert chrf("a b", "ab") == pytest.approx(100)
    assert chrf("abc", "xyz") == 0


def test_chrf_of_empty_texts():
    assert chrf("", "") == chrf(" ", "\n") == chrf("", "\t") == 100
    assert chrf("", "a") == chrf("a", "") == chrf(" ", "a") == chrf("a", " ") == 0


SCRIPTS = {
    "latin": "abcdeéßABC ,.",
    "cyrillic": "абвгдежз ,.",
    "arabic": "ابتثجحخ ،.",
    "chinese": "的一是不了人我在有他。",
    "devanagari": "कखगघािीु् ।",
}


def random_text(rng, alphabet):
    kind = rng.random()
    if kind < 0.05:
        return ""
    if kind < 0.1:
        return "".join(rng.choices(" \t\n\u3000", k=rng.randint(1, 3)))
    length = 1 if kind < 0.2 else rng.randint(2, 40)
    return "".join(rng.choices(alphabet, k=length))


def changed(rng, text, alphabet):
    chars = list(text)
    for _ in range(rng.randint(0, 5)):
        at = rng.randint(0, len(chars))
        chars[at : at + rng.randint(0, 2)] = rng.choices(alphabet, k=rng.randint(0, 2))
    return "".join(chars)


@pytest.mark.parametrize("script", SCRIPTS)
def test_chrf_is_that_of_sacrebleu(script):
    """But for two empty texts, which sacrebleu gives 0."""
    rng, alphabet = random.Random(script), SCRIPTS[script]
    num_empty = 0
    for _ in range(200):
        text = random_text(rng, alphabet)
        for other in (changed(rng, text, alphabet), random_text(rng, alphabet), text):
            expected = sacrebleu.sentence_chrf(text, [other]).score
            if is_empty(text) and is_empty(other):
                num_empty += 1
                expected += 100
            assert chrf(text, other) == pytest.approx(expected, abs=1e-9)
            assert aggregated_chrf(text, [other], [1.0]) == pytest.approx(expected, abs=1e-9)
    assert num_empty > 5


def test_aggregated_chrf_by_hand():
    """Counts are a: 0.5, b: 1, ab: 0.5; so precisions are 3/4 and 1/2, recalls 1."""
    assert aggregated_chrf("ab", ["ab", "b"], [0.5, 0.5]) == pytest.approx(100 * 5 * 0.625 / 3.5)
    assert aggregated_chrf("aab", ["aab"] * 3, [0.2, 0.3, 0.5]) == pytest.approx(100)
    assert aggregated_chrf("x", ["ab", "b"], [0.5, 0.5]) == 0


def test_aggregated_weights_are_repetitions():
    references = ["the cat sat", "a cat sat", "dogs"]
    repeated = [references[0]] * 3 + [references[1]] * 2 + [references[2]]
    for text in references:
        weighted = aggregated_chrf(text, references, [3 / 6, 2 / 6, 1 / 6])
        assert weighted == pytest.approx(aggregated_chrf(text, repeated, [1 / 6] * 6))


def test_aggregated_chrf_of_empty_texts():
    references, weights = ["", "abc", " "], [0.5, 0.1, 0.4]
    assert aggregated_chrf("", references, weights) == pytest.approx(90)
    assert aggregated_chrf("abc", references, weights) == pytest.approx(100 * 5 * 0.1 / 1.4)
    assert aggregated_chrf("", ["abc"], [1.0]) == aggregated_chrf("abc", [""], [1.0]) == 0


# Minimum Bayes risk


def test_mbr_takes_the_highest_expected_chrf():
    choice = mbr(candidates("ab", "abc", "x", weights=[0.4, 0.35, 0.25]))
    assert choice.scores == pytest.approx([40 + 35 * 7 / 11, 35 + 40 * 7 / 8, 25])
    assert choice.ranking == [1, 0, 2]


def test_mbr_against_aggregated_references():
    choice = mbr(candidates("ab", "b"), aggregate=True)
    assert choice.scores[0] == pytest.approx(100 * 5 * 0.625 / 3.5)
    assert choice.scores[1] == pytest.approx(100 * 5 * 1 * (2 / 3) / (4 + 2 / 3))
    with pytest.raises(ValueError, match="Only chrF"):
        mbr(candidates("a", "b"), utility=lambda h, r: [1.0] * 4, aggregate=True)


def test_mbr_of_empty_answers():
    assert mbr(candidates("", "abc", " ", weights=[0.3, 0.4, 0.3])).ranking == [0, 2, 1]
    assert mbr(candidates("", "abc", weights=[0.4, 0.6])).scores == pytest.approx([40, 60])


def test_equal_texts_that_ended_and_did_not_support_each_other():
    found = merge([wrote(0, "xyz"), wrote(1, "abc", None), wrote(2, "abc")], [0.4, 0.3, 0.3])
    choice = mbr(found)
    assert choice.scores == pytest.approx([40, 60, 60])
    assert choice.ranking == [1, 2, 0]


def test_mbr_ties_go_to_the_earliest():
    assert mbr(candidates("abc", "xyz")).ranking == [0, 1]
    assert mbr(candidates("abd", "abc", "abe")).ranking == [0, 1, 2]


def test_a_utility_gets_two_lists_of_texts():
    seen = []

    def utility(hypotheses, references):
        seen.append((hypotheses, references))
        return [len(h) - 2 * len(r) for h, r in zip(hypotheses, references, strict=True)]

    choice = mbr(candidates("a", "bb", weights=[0.25, 0.75]), utility)
    assert seen == [(["a", "a", "bb", "bb"], ["a", "bb", "a", "bb"])]
    assert choice.scores == [1 - 3.5, 2 - 3.5]
    assert choice.ranking == [1, 0]


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0, math.nan]])
def test_a_utility_gives_one_number_a_pair(values):
    with pytest.raises(ValueError, match="one number for each pair"):
        mbr(candidates("a", "b"), lambda h, r: values)


# Rerank


def test_bits_per_byte_count_the_eos_as_one_byte():
    ended, open_, stopped = merge([wrote(0, "é", "eos"), wrote(1, "é", None), wrote(2, "c", "text")], [1, 1, 1])
    assert bits_per_byte(ended, math.log(0.125)) == pytest.approx(1)
    assert bits_per_byte(open_, math.log(0.125)) == pytest.approx(1.5)
    assert bits_per_byte(stopped, math.log(0.125)) == pytest.approx(3)
    empty, nothing = merge([wrote(0, ""), wrote(1, "", None)], [1, 1])
    assert bits_per_byte(empty, math.log(0.25)) == pytest.approx(2)
    assert bits_per_byte(nothing, 0.0) == math.inf


def test_likelihood_is_a_plain_mean_over_members_of_weight_above_0():
    found = merge([wrote(0, "a"), wrote(1, "abc")], [0.9, 0.1, 0])
    log_probs = [[-2 * math.log(2), -8 * math.log(2), None], [-8 * math.log(2), -4 * math.log(2), None]]
    choice = rerank_by_likelihood(found, log_probs, [0.9, 0.1, 0])
    assert choice.scores == pytest.approx([(1 + 4) / 2, (2 + 1) / 2])
    assert choice.ranking == [1, 0]
    choice = rerank_by_likelihood(found, log_probs, [1, 0, 0])
    assert choice.scores == pytest.approx([1, 2])
    assert choice.ranking == [0, 1]


def test_nothing_is_filtered_and_what_cannot_be_written_ranks_last():
    found = merge([wrote(0, "", None), wrote(1, "b"), wrote(2, "c")], [1, 1, 1])
    log_probs = [[0.0] * 3, [-1.0, -1.0, -100.0], [-30.0] * 3]
    choice = rerank_by_likelihood(found, log_probs, [1, 1, 1])
    assert choice.ranking == [2, 1, 0]
    log_probs[2][0] = -math.inf
    assert rerank_by_likelihood(found, log_probs, [1, 1, 1]).ranking == [1, 0, 2]


def test_rewards_are_ranked_as_they_are():
    assert rerank_by_reward([0.5, -1.0, 2.0, 0.5]) == Choice([2, 0, 3, 1], [0.5, -1.0, 2.0, 0.5])


def test_max_logits_count_for_the_first_of_a_pair_and_against_the_second():
    """By what they get when read first, the second would win."""
    choice = rerank_by_pairs([[9.0, 1.0, 1.0], [-1.0, 9.0, 4.0], [-1.0, 3.0, 9.0]])
    assert choice.scores == pytest.approx([2 + 2, 3 - 4, 2 - 5])
    assert choice.ranking == [0, 1, 2]
    assert rerank_by_pairs([[0.0, 1.0], [1.0, 0.0]]).ranking == [0, 1]
    assert rerank_by_pairs([[0.0]]).ranking == [0]
