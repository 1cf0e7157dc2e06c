"""The text of an answer as its ids come."""

import json

import pytest

from tests import tiny

pytest.importorskip("fastapi")

from hf_ensemble.serving.formats import event
from hf_ensemble.serving.texts import RowText

TOKENIZER = tiny.byte_level_bpe(300)


def pieces_of(text, stops=()):
    row = RowText(TOKENIZER, stops)
    return [*(row.take(i) for i in TOKENIZER(text)["input_ids"]), row.end()], row


@pytest.mark.parametrize("text", ["The cat sat.", "größer 😀 ja", "今天天气"])
def test_pieces_make_the_text(text):
    pieces, row = pieces_of(text)
    assert "".join(pieces) == row.text == text
    assert not row.is_stopped


@pytest.mark.parametrize("stop", ["END", "t sa", ".", "cat sat. END now"])
def test_no_part_of_a_stop_string_comes_out(stop):
    text = "The cat sat. END now"
    pieces, row = pieces_of(text, ["other", stop])
    assert "".join(pieces) == text[: text.index(stop)]
    assert row.is_stopped


def test_what_may_begin_a_stop_string_comes_when_it_is_none():
    pieces, row = pieces_of("one EN", ["END"])
    assert pieces[-1] == "EN"
    assert row.text == "one EN"


def test_a_character_that_is_never_finished_comes_at_the_end():
    ids = TOKENIZER("a😀")["input_ids"][:-1]
    row = RowText(TOKENIZER)
    pieces = [row.take(i) for i in ids]
    assert "".join(pieces) == "a"
    assert row.end() == TOKENIZER.decode(ids)[1:]


def test_an_event_is_one_line_for_every_client():
    text = "a\u2028b\u2029c\x85d\ne \U0001f600 é"
    line = event({"text": text})
    assert line.endswith("\n\n")
    assert len(line.strip().splitlines()) == 1
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
    assert "é" in line
