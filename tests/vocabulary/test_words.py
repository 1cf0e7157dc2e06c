"""Where words end, and what text of some ids makes a span."""

import itertools
import sys

import pytest
import regex

from hf_ensemble.vocabulary.token_bytes import TokenBytes
from hf_ensemble.vocabulary.words import _SPACE, end_of_words, read_span, word_ends
from tests import tiny


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat sat", ["The", " cat", " sat"]),
        ("  The\n\tcat ", ["  The", "\n\tcat"]),
        ("a-b, (c) 3.14", ["a-b,", " (c)", " 3.14"]),
        ("你好 world", ["你", "好", " world"]),
        ("GPT模型is", ["GPT", "模", "型", "is"]),
        ("今天天气，很好", ["今", "天", "天", "气", "，", "很", "好"]),
        ("コーヒー。", ["コ", "ー", "ヒ", "ー。"]),
        ("ภาษาไทย", ["ภ", "า", "ษ", "า", "ไ", "ท", "ย"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("がぎ", ["か\u3099", "ぎ"]),
        ("ខ្មែរ", ["ខ្មែ", "រ"]),
        ("한국어 말", ["한국어", " 말"]),
        ("😀👩‍💻 x", ["😀👩‍💻", " x"]),
        ("a\x1cb\u3000c\u00a0d", ["a", "\x1cb", "\u3000c", "\u00a0d"]),
        ("", []),
        (" \n", []),
    ],
)
def test_words_are_runs_and_graphemes_of_scripts_without_spaces(text, words):
    text = text.replace("が", "か\u3099")
    bounds = [0, *word_ends(text)]
    assert [text[a:b] for a, b in itertools.pairwise(bounds)] == words


def test_white_space_is_that_of_python():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert regex.findall(f"[{_SPACE}]", every) == [c for c in every if c.isspace()]


def test_a_word_is_complete_when_something_follows():
    assert end_of_words("one two", 2) is None
    assert end_of_words("one two ", 2) == 7
    assert end_of_words("one two three", 2) == 7
    assert end_of_words("one 你", 1) == 3
    assert end_of_words("one 你", 2) is None
    assert end_of_words("one 你好", 2) == 5
    assert end_of_words("one你", 1) == 3


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_level_bpe(400)


def read(tokenizer, text, length, *, eos=False, begun=b"", limit=100):
    ids = tokenizer(text)["input_ids"] if isinstance(text, str) else [tokenizer.convert_tokens_to_ids(t) for t in text]
    ids += [tokenizer.eos_token_id] * eos
    token_bytes = TokenBytes(tokenizer, end_ids=[tokenizer.eos_token_id])
    return read_span(ids, token_bytes, {tokenizer.eos_token_id}, length, limit, begun)


def test_what_shows_that_a_span_is_complete_is_no_part_of_it(tokenizer):
    span = read(tokenizer, " one two three", 2)
    assert (span.data, span.has_eos, span.is_complete) == (b" one two", False, True)


def test_the_end_of_a_text_belongs_to_a_span_right_after_its_last_word(tokenizer):
    for length in (2, 3, 9):
        span = read(tokenizer, " one two", length, eos=True)
        assert (span.data, span.has_eos, span.is_complete) == (b" one two", True, True)
    assert read(tokenizer, " one two", 1, eos=True).has_eos is False


def test_white_space_before_the_end_stays_if_words_were_missing(tokenizer):
    span = read(tokenizer, " one \n", 2, eos=True)
    assert (span.data, span.has_eos) == (b" one \n", True)
    span = read(tokenizer, " one \n", 1, eos=True)
    assert (span.data, span.has_eos) == (b" one", False)


def test_at_the_bound_text_stays_and_an_unfinished_character_does_not(tokenizer):
    whole = tokenizer("one 학")["input_ids"]
    assert len(tokenizer("학")["input_ids"]) > 1
    span = read(tokenizer, "one 학", 5, limit=len(whole) - 1)
    assert (span.data, span.has_eos, span.is_complete) == (b"one ", False, True)
    assert read(tokenizer, "one 학", 5).is_complete is False


def test_bytes_that_are_no_text_stay_as_they_are(tokenizer):
    alphabet = dict(zip(range(256), tiny.byte_alphabet(), strict=True))
    span = read(tokenizer, [alphabet[b] for b in b"a\xff\xe4b c"], 1)
    assert (span.data, span.is_complete) == (b"a\xff\xe4b", True)


def test_a_character_begun_before_the_span_counts_for_its_first_word(tokenizer):
    alphabet = dict(zip(range(256), tiny.byte_alphabet(), strict=True))
    first, rest = "学".encode()[:1], "学a".encode()[1:]
    span = read(tokenizer, [alphabet[b] for b in rest], 1, begun=first)
    assert (span.data, span.is_complete) == ("学".encode()[1:], True)
