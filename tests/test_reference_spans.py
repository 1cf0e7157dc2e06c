"""Hand-computed values: what the reference of SweetSpan says has to be right without it."""

import math
from itertools import pairwise

import pytest

from tests import tiny
from tests.reference import EOS, ReferenceMember
from tests.reference_spans import Candidate, ReferenceSpans, compare_rounds, decide, word_ends

pytestmark = pytest.mark.slow

PROMPT = "The"


@pytest.fixture(scope="module")
def smol():
    return tiny.smol_like()


@pytest.fixture(scope="module")
def gemma():
    return tiny.gemma_like()


@pytest.fixture(scope="module")
def small():
    """Writes ` capital` as two tokens, `large` as one."""
    return tiny.byte_level_bpe(400)


@pytest.fixture(scope="module")
def large():
    return tiny.byte_level_bpe(500)


def spelling(tokenizer):
    return ReferenceMember(tiny.ScriptedModel(tokenizer), tokenizer)


def member(tokenizer, rows, end_ids=None):
    """A member whose next entries are given by the text so far, without the prompt.

    A row lists probabilities by entry (bytes, text, `EOS` or an id); after any other text, the words go on.
    """
    end_ids = end_ids or [tokenizer.eos_token_id]
    own = ReferenceMember(tiny.ScriptedModel(tokenizer), tokenizer, end_ids)

    def id_of(entry):
        if entry == EOS:
            return end_ids[0]
        return (
            entry
            if isinstance(entry, int)
            else own.canonical_id(entry if isinstance(entry, bytes) else entry.encode())
        )

    def script(context):
        seen = own.text_of_prompt(context).removeprefix(PROMPT.encode())
        row = next((row for text, row in rows.items() if seen in (text, str(text).encode())), {" a": 1.0})
        return {id_of(entry): probability for entry, probability in row.items()}

    own.model.script = script
    return own


def writer(tokenizer, *entries, end_ids=None):
    """A member that writes these entries one after the other, and words for ever after."""
    own, rows, seen = spelling(tokenizer), {}, b""
    for entry in entries:
        rows[seen] = {entry: 1.0}
        if isinstance(entry, int):
            seen += own.token_bytes[entry]
        elif entry != EOS:
            seen += entry if isinstance(entry, bytes) else entry.encode()
    return member(tokenizer, rows, end_ids)


def proposal(own, **options):
    context = [*own.prompt_prefix, *own.prompt_ids(PROMPT)]
    found = ReferenceSpans([own], **options).propose(own, context)
    return found.data.decode(errors="surrogateescape"), found.has_eos


def prompt_of(own):
    return [*own.prompt_prefix, *own.prompt_ids(PROMPT)]


def run(members, num_rounds=1, max_new_tokens=100, **options):
    return ReferenceSpans(members, **options).run(prompt_of(members[0]), num_rounds, max_new_tokens)


# Words


def words(text):
    data = text if isinstance(text, bytes) else text.encode()
    ends = [0, *word_ends(data)]
    parts = [data[a:b] for a, b in pairwise(ends)]
    return parts if isinstance(text, bytes) else [part.decode() for part in parts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" The cat  sat", [" The", " cat"]),
        (" The cat  sat ", [" The", " cat", "  sat"]),
        ('"Don\'t," he (42) said.\n', ['"Don\'t,"', " he", " (42)", " said."]),
        ("\n\n\tif x:\n", ["\n\n\tif", " x:"]),
        ("a\x1cb\x1c", ["a", "\x1cb"]),
        ("a\u00a0b\u3000c\u2028", ["a", "\u00a0b", "\u3000c"]),
        ("a\u200bb c", ["a\u200bb"]),
        (" ", []),
        ("", []),
    ],
)
def test_words_end_at_white_space(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("สวัสดี ครับ", ["ส", "วั", "ส", "ดี", " ค", "รั"]),
        ("น้ำดื่ม", ["น้ำ", "ดื่"]),
        ("巴黎。法国", ["巴", "黎", "。", "法"]),
        ("我用Python写 code吧", ["我", "用", "Python", "写", " code"]),
        ("カタカナ、ラーメンが", ["カ", "タ", "カ", "ナ", "、", "ラ", "ー", "メ", "ン"]),
        ("ひらがな漢字 ", ["ひ", "ら", "が", "な", "漢", "字"]),
        ("か\u3099き\u3099", ["か\u3099"]),
        ("ກຂ", ["ກ"]),
        ("កខ", ["ក"]),
        ("ကခ", ["က"]),
        ("e\u0301te\u0301 中\u0301文", ["e\u0301te\u0301", " 中\u0301"]),
        ("👩\u200d💻中", ["👩\u200d💻"]),
        ("한국어 말", ["한국어"]),
    ],
)
def test_graphemes_of_scripts_without_spaces_are_words(text, expected):
    assert words(text) == expected


def test_a_begun_character_completes_nothing():
    whole = "กข".encode()
    assert words(whole[:3]) == words(whole[:4]) == words(whole[:5]) == []
    assert words(whole) == [whole[:3]]
    assert words("กั".encode()) == []
    assert words(whole[:5] + b"a") == [whole[:3]]


def test_invalid_bytes_are_characters_of_a_run():
    assert words(b"a\xff\xfeb c") == [b"a\xff\xfeb"]
    assert words(b"\xff" + "ัก".encode() + b" ") == [b"\xff" + "ั".encode(), "ก".encode()]


# Proposals


def test_a_proposal_ends_where_its_last_word_is_complete(smol):
    own = writer(smol, " the", " c", "at", " ", " ", "s")
    assert proposal(own, span_length=1) == (" the", False)
    assert proposal(own, span_length=2) == (" the cat", False)
    assert proposal(own, span_length=3) == (" the cat  s", False)


def test_eos_belongs_to_the_candidate(smol):
    assert proposal(writer(smol, " the", " c", EOS), span_length=2) == (" the c", True)
    assert proposal(writer(smol, " the", " c", EOS), span_length=4) == (" the c", True)
    assert proposal(writer(smol, " the", " ", EOS), span_length=2) == (" the ", True)
    assert proposal(writer(smol, " the", " ", EOS), span_length=1) == (" the", False)
    assert proposal(writer(smol, EOS)) == ("", True)


def test_an_end_id_that_writes_text_ends_the_candidate_without_eos(smol):
    newline = spelling(smol).canonical_id(b"\n")
    own = writer(smol, " the", "\n", " c", end_ids=[smol.eos_token_id, newline])
    assert proposal(own, span_length=3) == (" the\n", False)
    assert proposal(own, span_length=1) == (" the", False)
    assert proposal(writer(smol, " the", "\n", " c"), span_length=1) == (" the", False)


def test_the_bound_cuts_an_unfinished_character(smol):
    begins = [bytes([byte]) for byte in "กข".encode()]
    assert proposal(writer(smol, *begins), max_span_tokens=4) == ("ก", False)
    assert proposal(writer(smol, *begins), max_span_tokens=5) == ("ก", False)
    assert proposal(writer(smol, *begins), max_span_tokens=6) == ("กข", False)
    assert proposal(writer(smol, *begins), max_span_tokens=2) == ("", False)
    assert proposal(writer(smol, " ", " "), max_span_tokens=2) == ("  ", False)


def test_the_bound_counts_the_token_that_shows_completion(smol):
    assert proposal(writer(smol, *"ab", EOS), span_length=1, max_span_tokens=2) == ("ab", False)
    assert proposal(writer(smol, *"ab", EOS), span_length=1, max_span_tokens=3) == ("ab", True)
    assert proposal(writer(smol, *"ab" * 40), span_length=1) == ("ab" * 8, False)
    assert proposal(writer(smol, *"ab" * 40), span_length=2) == ("ab" * 16, False)


def test_only_text_and_eos_are_proposed(smol):
    own = member(smol, {"": {smol.bos_token_id: 0.5, smol.unk_token_id: 0.3, " the": 0.2}})
    assert proposal(own, span_length=1) == (" the", False)
    ends = [smol.eos_token_id, smol.bos_token_id]
    own = member(smol, {"": {smol.bos_token_id: 0.8, " the": 0.2}}, end_ids=ends)
    assert proposal(own, span_length=1) == ("", True)
    wide = tiny.ScriptedModel(smol, lambda context: {len(smol) + 1: 0.8, smol.get_vocab()["Ġthe"]: 0.2}, extra_rows=5)
    assert proposal(ReferenceMember(wide, smol), span_length=2) == (" the the", False)


# Scores


def two_opinions(small, large):
    """` capital` by the first member, which writes it as two tokens, ` is` by the second."""
    pieces = spelling(small).encode(b" capital")
    start = spelling(small).token_bytes[pieces[0]].decode()
    assert len(pieces) == 2
    first = {"": {pieces[0]: 0.6, " is": 0.4}, start: {pieces[1]: 0.7, " a": 0.3}}
    return member(small, first), member(large, {"": {" is": 0.75, " capital": 0.25}})


def test_perplexity_is_per_token(small, large):
    _, (found,) = run(two_opinions(small, large), span_length=1)
    assert found.candidates == [Candidate(b" capital", False, (0,)), Candidate(b" is", False, (1,))]
    assert found.scores[0] == pytest.approx([(0.6 * 0.7) ** -0.5, 4])
    assert found.scores[1] == pytest.approx([2.5, 4 / 3])
    assert found.winner == 1
    assert found.filtered == [(), ()]
    assert found.proposal_margin == pytest.approx(math.log(0.6 / 0.4))
    means = [((0.6 * 0.7) ** -0.5 + 4) / 2, (2.5 + 4 / 3) / 2]
    assert found.choice_margin == pytest.approx(means[0] / means[1] - 1)


def test_bits_per_byte_are_per_byte(small, large):
    _, (found,) = run(two_opinions(small, large), span_length=1, score="bits_per_byte")
    assert found.scores[0] == pytest.approx([-math.log2(0.6 * 0.7) / 8, 2 / 8])
    assert found.scores[1] == pytest.approx([-math.log2(0.4) / 3, -math.log2(0.75) / 3])
    assert found.winner == 0


def test_a_score_is_a_probability_among_all_ids_that_have_a_token(smol, gemma):
    first = member(smol, {"": {" the": 0.6, smol.bos_token_id: 0.4}})
    second = member(gemma, {"": {" is": 1.0}})
    _, (found,) = run([first, second], span_length=1)
    assert found.scores[0][0] == pytest.approx(1 / 0.6)
    wide = tiny.ScriptedModel(smol, lambda context: {len(smol) + 1: 0.8, smol.get_vocab()["Ġthe"]: 0.2}, extra_rows=5)
    _, (found,) = run([ReferenceMember(wide, smol), second], span_length=1)
    assert found.scores[0][0] == pytest.approx(1)


def test_eos_is_one_token_and_one_byte_and_all_end_ids_together(smol, gemma):
    ends = [smol.eos_token_id, smol.unk_token_id]
    rows = {"": {" the": 1.0}, " the": {ends[0]: 0.5, ends[1]: 0.25, " a": 0.25}}
    members = member(smol, rows, end_ids=ends), member(gemma, {"": {" is": 1.0}})
    _, (found,) = run(members)
    assert found.candidates[0] == Candidate(b" the", True, (0,))
    assert found.scores[0][0] == pytest.approx(0.75**-0.5)
    _, (found,) = run(members, score="bits_per_byte")
    assert found.scores[0][0] == pytest.approx(-math.log2(0.75) / 5)


def test_scores_follow_the_text_and_not_the_ids_that_were_generated(smol, gemma):
    """` the` is written as two tokens here, and scored as one."""
    first = member(smol, {"": {" t": 0.6, " the": 0.4}, " t": {"he": 1.0}})
    _, (found,) = run([first, member(gemma, {"": {" is": 1.0}})], span_length=1)
    assert found.candidates[0].data == b" the"
    assert found.scores[0][0] == pytest.approx(2.5)


def test_a_member_scores_what_it_reads_where_it_cannot_write():
    words, smol = tiny.wordpiece(), tiny.smol_like()
    first = writer(smol, " the", "\n", "c", " ")
    _, (found,) = run([first, member(words, {})], span_length=2)
    assert found.candidates[0].data == b" the\nc"
    assert found.scores[0][1] == pytest.approx(math.exp(40), rel=1e-3)
    _, (found,) = run([writer(smol, "\n", "\n"), member(words, {})], max_span_tokens=2)
    assert found.candidates[0].data == b"\n\n"
    assert found.scores[0][1] is None


# The filter

PAPER = [[23.5, 1.4, 1.6], [1.1, 9.0, 9.5]]
"""` by Bobby Scott` and ` by Robert Williams`."""


@pytest.mark.parametrize(
    ("ratio", "winner", "filtered"),
    [
        (math.inf, 1, [(), ()]),
        (10, 0, [(0, 1), ()]),
        (8, 0, [(0, 1), (0, 2)]),
        (0, 0, [(0, 1), (0, 2)]),
    ],
)
def test_the_filter_on_the_papers_figure(ratio, winner, filtered):
    decision = decide(PAPER, "perplexity", ratio)
    assert (decision.winner, decision.filtered) == (winner, filtered)


def test_the_filter_of_bits_compares_perplexities_per_byte():
    bits = [[math.log2(value) for value in of_one] for of_one in PAPER]
    assert decide(bits, "bits_per_byte", 10).filtered == [(0, 1), ()]
    assert decide(bits, "bits_per_byte", 8).filtered == [(0, 1), (0, 2)]
    assert decide([[1.0, 2.0, 4.4]], "bits_per_byte", 10).filtered == [(0, 2)]
    assert decide([[1.0, 2.0, 4.3]], "bits_per_byte", 10).filtered == [()]


def test_the_filter_needs_three_scores_and_drops_two():
    assert decide([[1.0, 100.0], [40.0, 30.0]], "perplexity", 10)[:2] == (1, [(), ()])
    assert decide([[1.0, None, 100.0], [40.0, None, 30.0]], "perplexity", 10)[:2] == (1, [(), ()])
    assert decide([[1.0, 1.0, 50.0, 50.0]], "perplexity", 10).filtered == [(0, 3)]
    assert decide([[50.0, 1.0, 2.0, 1.0]], "perplexity", 10).filtered == [(0, 1)]


def test_ties_go_to_the_first_candidate():
    assert decide([[2.0, 1.0], [1.0, 2.0]], "perplexity", 10) == (0, [(), ()], 0.0)


# Rounds


def test_equal_texts_are_one_candidate_and_agreement_needs_no_scores(smol, gemma, small):
    members = writer(smol, " the", " "), writer(gemma, " the", " "), writer(small, " the", " ")
    ids, (found,) = run(members, span_length=1)
    assert found.candidates == [Candidate(b" the", False, (0, 1, 2))]
    assert found.scores is None
    assert found.winner == 0
    assert ids == members[0].encode(b" the")
    members = writer(smol, " the", " "), writer(gemma, " is", " "), writer(small, " the", " ")
    _, (found,) = run(members, span_length=1)
    assert found.candidates == [Candidate(b" the", False, (0, 2)), Candidate(b" is", False, (1,))]
    assert len(found.scores[0]) == 3


def test_a_text_with_and_without_eos_are_two(smol, gemma):
    _, (found,) = run([writer(smol, " the", EOS), writer(gemma, " the", " ")], span_length=1)
    assert found.candidates == [Candidate(b" the", True, (0,)), Candidate(b" the", False, (1,))]


def test_what_is_no_candidate(smol, gemma):
    """Nothing without EOS, and what the primary cannot write."""
    begun = writer(smol, b"\xe0")
    _, (found,) = run([begun, writer(gemma, " the")], max_span_tokens=1)
    assert found.candidates == [Candidate(b" the", False, (1,))]
    _, (found,) = run([writer(smol, " the"), writer(gemma, b"\xff", " ")], span_length=1)
    assert found.candidates == [Candidate(b" the", False, (0,))]
    with pytest.raises(ValueError, match="No member proposed"):
        run([begun, writer(gemma, b"\xe0")], max_span_tokens=1)


def test_a_member_of_weight_0_takes_no_part(smol, gemma, small):
    members = writer(smol, " the", " "), writer(gemma, " is", " "), writer(small, " a", " ")
    _, (found,) = run(members, span_length=1, weights=[1, 0, 1])
    assert [candidate.proposers for candidate in found.candidates] == [(0,), (2,)]
    assert [[score is None for score in of_one] for of_one in found.scores] == [[False, True, False]] * 2


def test_eos_is_written_as_the_primarys_likeliest_end_id(smol, gemma):
    first, second = sorted([smol.eos_token_id, smol.unk_token_id])
    rows = {"": {" the": 1.0}, " the": {first: 0.1, second: 0.3, " a": 0.6}}
    members = member(smol, rows, end_ids=[second, first]), writer(gemma, " the", EOS)
    _, (found,) = run(members)
    assert found.candidates[1] == Candidate(b" the", True, (1,))
    ids, _ = run(members, weights=[0, 1], num_rounds=None)
    assert ids == [*members[0].encode(b" the"), first]
    members[0].model.script = lambda context: {first: 0.4, second: 0.6}
    ids, _ = run(members, num_rounds=None)
    assert ids == [*members[0].encode(b" the"), second]


def test_the_winner_is_appended_for_everyone_and_the_output_is_cut(smol, gemma):
    sure = member(smol, {"": {" the": 0.9, " is": 0.1}, " the": {" ": 1.0}, " the ": {"c": 1.0}, " the c": {EOS: 1.0}})
    other_rows = {"": {" is": 0.6, " the": 0.4}, " the": {" c": 1.0}, " the c": {EOS: 1.0}}
    other = member(gemma, other_rows)
    ids, rounds = run([sure, other], num_rounds=None, span_length=1)
    assert [[candidate.data for candidate in found.candidates] for found in rounds] == [[b" the", b" is"], [b" c"]]
    assert [found.winner for found in rounds] == [0, 0]
    assert rounds[1].candidates[0] == Candidate(b" c", True, (0, 1))
    assert ids == [*sure.encode(b" the"), *sure.encode(b" c"), smol.eos_token_id]
    assert run([sure, other], num_rounds=None, max_new_tokens=1, span_length=1)[0] == ids[:1]
    assert run([sure, other], num_rounds=1, span_length=1)[0] == ids[:1]


def test_a_written_end_id_ends_the_row(smol, gemma):
    newline = spelling(smol).canonical_id(b"\n")
    members = writer(smol, " t", end_ids=[smol.eos_token_id, newline]), writer(gemma, " the", "\n", "c", " ")
    ids, rounds = run(members, num_rounds=None, weights=[0, 1], span_length=2)
    assert rounds[0].candidates[0].data == b" the\nc"
    assert ids == [*members[0].encode(b" the"), newline]


# Comparing


def test_rounds_are_compared_up_to_the_first_tie(small, large):
    _, rounds = run(two_opinions(small, large), num_rounds=2, span_length=1)

    class Found:
        def __init__(self, round, **changes):
            self.winner = round.winner
            scores = round.scores or [None] * len(round.candidates)
            self.candidates = []
            for candidate, of_one, filtered in zip(round.candidates, scores, round.filtered, strict=True):
                given = {**candidate._asdict(), "scores": of_one and tuple(of_one), "filtered": filtered, **changes}
                self.candidates.append(type("Found", (), given))

    found = [Found(round) for round in rounds]
    assert compare_rounds(found, rounds) == (2, None)
    assert compare_rounds(found[:1], rounds) == (1, "there are 1 rounds")
    found[0].winner = 0
    number, difference = compare_rounds(found, rounds)
    assert number == 0
    assert difference.startswith("the winner is 0, not 1")
    rounds[0].choice_margin = 1e-5
    assert compare_rounds(found, rounds) == (0, None)
    number, difference = compare_rounds([Found(rounds[0], scores=(1.0, 1.0)), found[1]], rounds)
    assert difference.startswith("scores")
    number, difference = compare_rounds([Found(rounds[0], has_eos=True), found[1]], rounds)
    assert difference.startswith("candidates")
