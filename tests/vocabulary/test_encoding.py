import codecs
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ensemble.vocabulary.encoding import split_begun_character
from hf_ensemble.vocabulary.token_bytes import CONTROL, TEXT
from hf_ensemble.vocabulary.tokenizer_views import _CHUNK, SEPARATOR
from tests import tiny

from .material import (
    ALL_BYTES,
    FAMILIES,
    HARD,
    LOSSLESS,
    byte_level_tokenizer,
    data,
    encoder_of,
    family,
    family_encoder,
    ids_of,
    long_text,
    piece_tokenizer,
    quick,
    spelling,
    texts,
)

NO_BYTES = ("sentencepiece_no_bytes", "unigram_no_bytes", "wordpiece")
LOSSY = {
    "byte_level_nfc": "e\u0301",
    "byte_level_nfkc": "ﬁle ＡＢ ½ x²",
    "byte_level_lowercase": "ÄRGER in Paris",
    "sentencepiece_nfkc": "ﬁle ＡＢ ½ x²",
    "unigram_nfkc": "ﬁle ＡＢ ½ x²",
}


def control_of(encoder):
    return set((encoder.token_bytes.kinds == CONTROL).nonzero()[0].tolist())


def surfaces(name):
    """How the control tokens of a family are spelled."""
    return sorted(spelling(family_encoder(name), control_of(family_encoder(name))))


# One entry, one id


@pytest.mark.parametrize("name", FAMILIES)
def test_every_entry_is_one_id_that_writes_it(name):
    encoder = family_encoder(name)
    entries = encoder.token_bytes.entries
    assert set(encoder.id_of) == {entry for entry in entries if entry}
    for entry, i in encoder.id_of.items():
        assert entries[i] == entry
        assert encoder.encode(entry) == [i]


def test_the_canonical_id_is_the_one_that_the_tokenizer_gives():
    tokenizer = tiny.gemma_like()
    newline, byte_token, letter = ids_of(tokenizer, "\n", "<0x0A>", "a")
    assert byte_token < newline
    encoder = encoder_of(tokenizer)
    assert encoder.encode(b"\n") == [newline]
    assert encoder.encode(b"a") == [letter]


def test_the_canonical_id_is_the_lowest_where_the_tokenizer_gives_none():
    tokenizer = piece_tokenizer("<unk>", "a", "<0xE4>", "<0xe4>", "ab c", "ab▁c", "▁")
    encoder = encoder_of(tokenizer)
    assert encoder.id_of[b"\xe4"] == 2
    assert encoder.id_of[b"ab c"] == 4


def test_an_added_token_stands_for_the_same_bytes_if_the_tokenizer_gives_it():
    alphabet = {char: i for i, char in enumerate(tiny.byte_alphabet())}
    tokenizer = byte_level_tokenizer({**alphabet, "ab": 256}, [("a", "b")])
    assert tokenizer.add_tokens([AddedToken("a b", special=False), AddedToken("Ġ", special=False)]) == 2
    tokenizer.backend_tokenizer.add_tokens([AddedToken(" ", special=False)])
    encoder = encoder_of(tokenizer)
    space = tokenizer("a c", add_special_tokens=False)["input_ids"][1]
    assert encoder.id_of[b" "] == space


# Exact continuations


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=data)
def test_ids_write_exactly_the_bytes_or_there_are_none(name, data):
    encoder = family_encoder(name)
    ids = encoder.encode(data)
    if ids is None:
        assert name not in ALL_BYTES
    else:
        assert encoder.token_bytes.write(ids) == data
        assert control_of(encoder).isdisjoint(ids)


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(batch=st.lists(data, max_size=4))
def test_a_batch_is_encoded_as_each_of_it_alone(name, batch):
    encoder = family_encoder(name)
    assert encoder.encode_batch(batch) == [encoder.encode(one) for one in batch]


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_in_a_batch_do_not_act_on_one_another(name):
    encoder = family_encoder(name)
    spelled = [token.content for token in encoder.token_bytes.added.values()]
    texts = ["", " ", "the", "\u0301", "e", "\n", SEPARATOR, f"a{SEPARATOR}b", *spelled]
    batch = [one.encode() for text in texts for other in texts for one in (text, other + text)]
    assert len(batch) > _CHUNK // 2
    assert encoder.encode_batch(batch) == [encoder.encode(one) for one in batch]


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_no_ids(name):
    encoder = family_encoder(name)
    assert encoder.encode(b"") == []
    assert encoder.encode_batch([]) == []
    assert encoder.encode_batch([b""]) == [[]]
    assert encoder.encode_context("") == encoder.encode_context("", start=True) == []
    assert encoder.encode_context_bytes(b"") == []


@pytest.mark.parametrize("name", ["byte_level", "byte_level_nfc", "byte_level_odd_added", "sentencepiece"])
def test_a_continuation_is_what_the_tokenizer_gives_if_it_inserts_nothing(name):
    tokenizer, encoder = family(name), family_encoder(name)
    for text in (*tiny.TEXTS, long_text(3)):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if encoder.token_bytes.write(own) == text.encode() and text.encode() not in encoder.id_of:
            assert encoder.encode(text.encode()) == own


@pytest.mark.parametrize("name", ["sentencepiece_llama2", "sentencepiece_metaspace", "unigram"])
def test_no_space_is_inserted_in_front_of_a_continuation(name):
    tokenizer, encoder = family(name), family_encoder(name)
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == ids_of(tokenizer, "▁the")
    assert encoder.encode(b" the") == ids_of(tokenizer, "▁the")
    assert spelling(encoder, encoder.encode(b"the cat")) != spelling(encoder, encoder.encode(b" the cat"))
    for text in tiny.TEXTS:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if encoder.token_bytes.write_from_start(own) == text.encode():
            assert encoder.encode(f" {text}".encode()) == own


def test_a_byte_level_tokenizer_that_puts_a_space_in_front_does_not_in_a_continuation():
    tokenizer = tiny.byte_level_bpe()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder = encoder_of(tokenizer)
    assert encoder.encode(b"the") == encoder_of(tiny.byte_level_bpe()).encode(b"the")
    assert encoder.encode_context("the", start=True) == ids_of(tokenizer, "Ġthe")
    assert encoder.encode_context("the") == encoder.encode(b"the")


def test_incomplete_characters_are_one_byte_token_a_byte():
    tokenizer = tiny.gemma_like()
    encoder = encoder_of(tokenizer)
    assert encoder.encode("你".encode()[:2]) == ids_of(tokenizer, "<0xE4>", "<0xBD>")
    assert encoder.encode(b"\xbd the\xff") == ids_of(tokenizer, "<0xBD>", "▁the", "<0xFF>")
    byte_level = tiny.byte_level_bpe()
    by_byte = tiny.byte_alphabet()
    assert encoder_of(byte_level).encode("🦆".encode()[:3]) == ids_of(
        byte_level, *(by_byte[b] for b in "🦆".encode()[:3])
    )


def test_a_fragment_that_is_an_entry_is_one_id_but_two_byte_tokens():
    tokenizer = tiny.byte_level_bpe(texts=tiny.THAI)
    encoder = encoder_of(tokenizer)
    thai = b"\xe0\xb8"
    assert encoder.encode(thai) == [encoder.token_bytes.entries.index(thai)]
    assert encoder.byte_tokens(thai) == ids_of(tokenizer, *(tiny.byte_alphabet()[b] for b in thai))


def test_a_byte_token_is_the_canonical_id_of_the_byte():
    tokenizer = tiny.gemma_like()
    encoder = encoder_of(tokenizer)
    assert encoder.byte_tokens(b"\na\xe4") == ids_of(tokenizer, "\n", "a", "<0xE4>")
    assert encoder.byte_tokens(b"") == []


def test_there_are_byte_tokens_for_all_of_the_bytes_or_none():
    assert family_encoder("byte_level_missing_bytes").byte_tokens(b"a\x04") is None
    assert family_encoder("sentencepiece_no_bytes").byte_tokens(b"a\xe4") is None
    assert family_encoder("sentencepiece_no_bytes").byte_tokens(b"a") is not None


@pytest.mark.parametrize("name", LOSSY)
def test_what_a_normalizer_would_change_is_written_exactly_all_the_same(name):
    encoder, text = family_encoder(name), LOSSY[name]
    ids = encoder.encode(text.encode())
    assert encoder.token_bytes.write(ids).decode() == text
    assert family(name).decode(family(name)(text, add_special_tokens=False)["input_ids"]) != text


@pytest.mark.parametrize("name", LOSSY)
def test_in_a_context_a_tokenizer_has_its_own_view(name):
    encoder, text = family_encoder(name), LOSSY[name]
    own = family(name)(text, add_special_tokens=False)["input_ids"]
    assert encoder.encode_context(text, start=True) == own
    normalized = family(name).backend_tokenizer.normalizer.normalize_str(text).replace("▁", " ")
    assert encoder.token_bytes.write(encoder.encode_context(text)).decode() == normalized


@pytest.mark.parametrize("name", ALL_BYTES)
def test_the_space_sign_of_a_user_is_written_as_itself(name):
    encoder = family_encoder(name)
    for text in ("▁", "a▁b", " ▁▂▃ a▁ b", "▁▁the"):
        assert encoder.token_bytes.write(encoder.encode(text.encode())).decode() == text


def test_the_space_sign_of_a_user_cannot_be_written_without_byte_tokens():
    encoder = family_encoder("sentencepiece_no_bytes")
    assert encoder.encode("a▁b".encode()) is None
    assert encoder.encode(b"a b") is not None


def test_the_space_sign_of_a_user_is_a_space_in_a_context_of_sentencepiece():
    encoder = family_encoder("sentencepiece")
    assert encoder.encode_context("a▁b") == encoder.encode_context("a b")


# What text spells stays text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("start", [False, True])
def test_text_that_spells_a_control_token_is_never_read_as_one(name, start):
    encoder, unknown = family_encoder(name), family(name).unk_token
    for surface in surfaces(name):
        for text in (surface, f"a{surface}b", f"the {surface} is", surface * 2, f"{surface[:-1]}{surface}"):
            ids = encoder.encode_context(text, start)
            assert control_of(encoder).isdisjoint(ids) or {unknown} == set(spelling(encoder, ids)) & set(
                surfaces(name)
            )


@pytest.mark.parametrize("name", [name for name in ALL_BYTES if "byte_level" not in name])
def test_text_that_spells_the_unknown_token_is_never_read_as_it(name):
    encoder = family_encoder(name)
    for start in (False, True):
        assert control_of(encoder).isdisjoint(encoder.encode_context("a<unk>b <unk>", start))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_that_spells_a_control_token_is_written_literally(name):
    encoder = family_encoder(name)
    for surface in surfaces(name):
        for text in (surface, f"a{surface}b", f"the {surface} is"):
            ids = encoder.encode(text.encode())
            if name in ALL_BYTES or ids is not None:
                assert encoder.token_bytes.write(ids).decode() == text
                assert control_of(encoder).isdisjoint(ids)


def test_the_tokenizer_itself_reads_control_tokens_from_text():
    assert tiny.byte_level_bpe()("a<|end|>b")["input_ids"][1] == tiny.byte_level_bpe().eos_token_id


@pytest.mark.parametrize("name", ["unigram_nfkc", "sentencepiece_nfkc", "byte_level_nfkc"])
@pytest.mark.parametrize("text", ["＜s＞", "＜/s＞", "＜eos＞", "＜|end|＞", "a ＜s＞ b", "<ｓ>", "＜unk＞"])
def test_text_that_a_normalizer_makes_spell_a_control_token_is_never_read_as_one(name, text):
    encoder = family_encoder(name)
    for start in (False, True):
        ids = encoder.encode_context(text, start)
        assert control_of(encoder).isdisjoint(ids), spelling(encoder, ids)


def test_text_in_capitals_that_spells_a_control_token_is_never_read_as_one():
    encoder = encoder_of(tiny.unigram(normalizer=normalizers.Lowercase()))
    assert control_of(encoder).isdisjoint(encoder.encode_context("a <S> b"))


def test_an_end_id_that_is_a_marker_is_never_read_from_text():
    tokenizer = tiny.byte_level_bpe(added=["<|eot|>"])
    marker = ids_of(tokenizer, "<|eot|>")
    assert encoder_of(tokenizer).encode(b"<|eot|>") == marker
    encoder = encoder_of(tokenizer, end_ids=marker)
    assert encoder.token_bytes.write(encoder.encode(b"a<|eot|>")) == b"a<|eot|>"
    assert set(marker).isdisjoint([*encoder.encode(b"a<|eot|>"), *encoder.encode_context("a<|eot|> b", start=True)])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_literal_byte_token_or_escape_is_never_a_newline(name):
    encoder = family_encoder(name)
    entries = encoder.token_bytes.entries
    for text in ("<0x0A>", "a<0x0A>b", "the <0x0A> is", "/n", "a/n", "\\n", "<0x0a>", "<<0x0A>0x0A>"):
        for start in (False, True):
            ids = encoder.encode_context(text, start)
            assert b"\n" not in [entries[i] for i in ids], (text, spelling(encoder, ids))
        exact = encoder.encode(text.encode())
        if exact is not None:
            assert b"\n" not in encoder.token_bytes.write(exact)


@pytest.mark.parametrize("text", ["＜0x0A＞", "a＜0x0A＞b", "<０x0A>"])
def test_a_literal_byte_token_made_by_a_normalizer_is_never_a_newline(text):
    encoder = family_encoder("unigram_nfkc")
    ids = encoder.encode_context(text)
    assert encoder.token_bytes.write(ids).decode() == normalizers.NFKC().normalize_str(text)


def test_a_literal_byte_token_is_no_byte_for_a_model_that_skips_merges():
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"<>0x9ABCDEFab▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    encoder = encoder_of(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert encoder.token_bytes.write(encoder.encode(b"<0x0A>")) == b"<0x0A>"
    assert encoder.token_bytes.write(encoder.encode_context("<0x0A>")) == b"<0x0A>"
    assert encoder.token_bytes.write(encoder.encode_context("<unk>")) == b"<unk>"


def test_a_flagged_end_token_that_is_a_newline_is_never_read_from_text():
    tokenizer = tiny.sentencepiece_bpe(eos="\n")
    encoder = encoder_of(tokenizer)
    assert encoder.encode(b"\n") == ids_of(tokenizer, "<0x0A>")
    assert encoder.encode_context("a\nb") == ids_of(tokenizer, "a", "<0x0A>", "b")


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_newline_that_is_an_end_id_is_written_as_that_id(name):
    newline = encoder_of(family(name)).encode(b"\n")
    encoder = encoder_of(family(name), end_ids=newline)
    assert encoder.encode(b"\n") == newline
    assert encoder.encode_context("a\nb")[1:2] == newline


# The start of a text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_at_the_start_is_what_the_tokenizer_gives(name):
    tokenizer, encoder = family(name), family_encoder(name)
    for text in tiny.TEXTS:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encoder.encode_context(text, start=True) == own
        assert [*encoder.prefix_ids, *own] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", LOSSLESS)
@quick
@given(text=texts)
def test_a_text_at_the_start_keeps_its_spaces(name, text):
    encoder = family_encoder(name)
    # Metaspace puts no space in front of a text that has one there already.
    text = "a" + text.replace("▁", "_")
    ids = encoder.encode_context(text, start=True)
    assert encoder.token_bytes.write_from_start(ids).decode() == text


@pytest.mark.parametrize("name", LOSSLESS)
@quick
@given(text=texts)
def test_a_text_in_the_middle_keeps_its_spaces(name, text):
    encoder = family_encoder(name)
    text = text.replace("▁", "_")
    assert encoder.token_bytes.write(encoder.encode_context(text)).decode() == text


@pytest.mark.parametrize(
    ("make", "prefix", "start"),
    [
        (tiny.gemma_like, ["<bos>"], ["<bos>"]),
        (tiny.smol_like, [], ["<|im_start|>"]),
        (tiny.byte_level_bpe, [], ["<|end|>"]),
        (lambda: tiny.byte_level_bpe(bos="<|s|>", add_bos=True), ["<|s|>"], ["<|s|>"]),
        (tiny.bare_bpe, [], []),
        (lambda: tiny.unigram(add_bos=True), ["<s>"], ["<s>"]),
        (lambda: tiny.wordpiece(add_bos=True), ["[CLS]"], ["[CLS]"]),
    ],
    ids=["gemma", "smol", "no_bos", "byte_level_bos", "bare", "unigram", "wordpiece"],
)
def test_the_start_token_is_put_there_by_the_tokenizers_own_rule(make, prefix, start):
    encoder = encoder_of(make())
    assert spelling(encoder, encoder.prefix_ids) == prefix
    assert spelling(encoder, encoder.start_ids) == start


# What cannot be written


def test_bytes_without_a_token_cannot_be_written():
    encoder = family_encoder("byte_level_missing_bytes")
    for lost in (b"\x04", b"a\x04b", b"\xc0", b"the \xff", b" \x1d ", "\U00050000".encode()):
        assert encoder.encode(lost) is None
    assert encoder.encode_batch([b"a\x04b", b"the"]) == [None, encoder.encode(b"the")]
    assert encoder.encode(b"\x00\x09") is not None


def test_bytes_without_a_token_are_replacement_characters_in_a_context():
    encoder = family_encoder("byte_level_missing_bytes")
    stand_in = encoder.encode("\ufffd".encode())
    assert encoder.encode_context("\x04") == stand_in
    expected = [*encoder.encode_context("the cat"), *stand_in, *stand_in, *encoder.encode_context(" is")]
    assert encoder.encode_context("the cat\x04\x06 is") == expected
    assert encoder.encode_context_bytes(b"the cat\x04\x06 is") == expected
    assert encoder.encode_context_bytes(b"a\xffb") == [*encoder.encode(b"a"), *stand_in, *encoder.encode(b"b")]


@pytest.mark.parametrize("name", NO_BYTES)
def test_characters_without_a_token_are_unknown_in_a_context(name):
    tokenizer, encoder = family(name), family_encoder(name)
    assert encoder.encode("a🦆b".encode()) is None
    assert tokenizer.unk_token_id in encoder.encode_context("the 🦆 is")
    assert tokenizer.unk_token_id in encoder.encode_context_bytes("the 🦆 is".encode())


def test_without_byte_tokens_bytes_that_are_no_text_are_as_python_decodes_them():
    encoder = family_encoder("sentencepiece_no_bytes")
    for lost in (b"\xff", b"a\x80\x80b", b"the \xe4\xbd is", b"\xf0\x9f\xe4x"):
        assert encoder.encode_context_bytes(lost) == encoder.encode_context(lost.decode("utf-8", "replace"))


def test_characters_without_a_row_and_without_byte_tokens_are_replacement_characters():
    whole = family_encoder("sentencepiece_no_bytes")
    (last,) = whole.encode(b"z")
    encoder = encoder_of(family("sentencepiece_no_bytes"), num_ids=last)
    assert encoder.encode(b"z") is None
    assert encoder.encode_context("z") == encoder.encode_context("\ufffd")


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=data)
def test_any_bytes_have_a_context(name, data):
    encoder = family_encoder(name)
    ids = encoder.encode_context_bytes(data)
    exact = encoder.encode(data)
    assert ids == exact if exact is not None else all(0 <= i < encoder.token_bytes.num_ids for i in ids)
    allowed = {family(name).unk_token_id} if exact is None else set()
    assert (control_of(encoder) - allowed).isdisjoint(ids)


# WordPiece


def test_words_of_wordpiece_are_written_with_their_space():
    tokenizer = tiny.wordpiece()
    encoder = encoder_of(tokenizer)
    assert encoder.encode(b" the cat") == ids_of(tokenizer, "the", "cat")
    assert encoder.encode(b"ing") == ids_of(tokenizer, "##ing")
    assert encoder.encode(b" sing") == ids_of(tokenizer, "s", "##ing")


def test_text_that_wordpiece_would_change_is_written_exactly_or_not_at_all():
    encoder = encoder_of(tiny.wordpiece())
    assert encoder.encode(b" The") is None
    assert encoder.encode(b" the\n") is None
    assert encoder.encode(b" the,") is None  # the tokenizer's ids write " the ,"
    ids = encoder.encode(b" the , cat .")
    assert encoder.token_bytes.write(ids) == b" the , cat ."


# Rows and ids


def shortened(name, num_ids):
    return encoder_of(family(name), num_ids=num_ids)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("byte_level", 0.99), ("byte_level", 0.75), ("byte_level_nfkc", 0.9), ("sentencepiece", 0.75)),
        *(("sentencepiece_llama2", 0.9), ("unigram", 0.99), ("unigram", 0.75)),
    ],
)
def test_a_token_without_a_row_is_spelled_out(name, share):
    whole = family_encoder(name)
    num_ids = max(int(whole.token_bytes.num_ids * share), max(whole.byte_tokens(bytes(range(256)))) + 1)
    encoder = shortened(name, num_ids)
    assert encoder.token_bytes.num_rowless > 0
    for text in (*tiny.TEXTS, *HARD, long_text(5)):
        exact = encoder.encode(text.encode())
        assert max(exact, default=0) < num_ids
        assert encoder.token_bytes.write(exact).decode() == text
        for start in (False, True):
            view = encoder.encode_context(text, start)
            assert max(view, default=0) < num_ids
            assert encoder.token_bytes.write(view) == whole.token_bytes.write(whole.encode_context(text, start))


def test_a_batch_where_the_vocabulary_has_holes_and_the_model_fewer_rows_is_encoded_as_each_of_it_alone():
    encoder = encoder_of(tiny.byte_level_bpe(holes=(5, 300, 301)), num_ids=350)
    batch = [text.encode() for text in tiny.TEXTS]
    assert encoder.encode_batch(batch) == [encoder.encode(one) for one in batch]


def test_an_added_token_without_a_row_is_spelled_out():
    tokenizer = tiny.gemma_like(added=["<table>", "\n\n"])
    encoder = encoder_of(tokenizer, num_ids=len(tokenizer) - 2)
    assert encoder.token_bytes.num_rowless == 2
    for text in (b"<table>", b"a<table>b\n\n"):
        ids = encoder.encode(text)
        assert encoder.token_bytes.write(ids) == text
        assert encoder.encode_context(text.decode()) == ids


def test_padded_rows_change_no_ids():
    tokenizer = tiny.gemma_like()
    padded = encoder_of(tokenizer, num_ids=700)
    whole = family_encoder("sentencepiece")
    for text in tiny.TEXTS:
        assert padded.encode(text.encode()) == whole.encode(text.encode())
        assert padded.encode_context(text, start=True) == whole.encode_context(text, start=True)
    assert padded.id_of == whole.id_of


def test_added_tokens_keep_their_ids_beside_holes():
    tokenizer = tiny.byte_level_bpe(holes=[5, 300], added=["<x>", "<y>"])
    encoder = encoder_of(tokenizer)
    for text in ("a<x>b<y>", "the cat is"):
        assert encoder.encode(text.encode()) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_piece_under_the_id_of_an_added_token_is_never_written():
    # Added tokens are numbered from the count of the others, so beside holes they can take the id of a piece.
    tokenizer = tiny.byte_level_bpe(holes=[5, 300], added=["<x>", "<y>"])
    encoder = encoder_of(tokenizer)
    (double,) = ids_of(tokenizer, "<y>")
    piece = next(p for p, i in tokenizer.get_vocab().items() if i == double and p != "<y>")
    assert encoder.token_bytes.entries[double] == b"<y>"
    data = encoder.token_bytes.writer.pieces([piece])[0]
    assert data not in encoder.id_of
    assert encoder.token_bytes.write(encoder.encode(data)) == data


def test_added_tokens_keep_their_ids_where_control_tokens_end_a_vocabulary_with_holes():
    vocab = {char: i + 10 for i, char in enumerate(tiny.byte_alphabet())} | {"<|end|>": 270}
    tokenizer = byte_level_tokenizer(vocab, eos="<|end|>")
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<x>", "<y>")])
    encoder = encoder_of(tokenizer)
    every_byte = "".join(map(chr, range(128))) + "äöü你"
    for text in ("<x>", "a<y>b", every_byte):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(own) == text
        assert encoder.encode_context(text) == own


# Added tokens


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}])
@pytest.mark.parametrize("make", [tiny.byte_level_bpe, tiny.gemma_like, tiny.lowercasing_bpe])
def test_added_tokens_with_habits_write_no_more_and_no_less(make, options):
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("<Mask>", special=False, **options)])
    encoder = encoder_of(tokenizer)
    for text in ("<Mask>", "a <Mask> b", "a<Mask>b", "  <Mask>  ", "<mask> <MASK>"):
        assert encoder.token_bytes.write(encoder.encode(text.encode())).decode() == text


def test_runs_of_white_space_that_are_added_tokens_are_used():
    tokenizer = tiny.gemma_like()
    encoder = encoder_of(tokenizer)
    assert encoder.encode(b"\n\n\n") == ids_of(tokenizer, "\n\n\n")
    for text in (b"\n\n\n\n", b"\t\t\t", b"        ", b"\r\n", b"a\n\n\n  b\t\t\tc"):
        assert encoder.token_bytes.write(encoder.encode(text)) == text


# Boundaries


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(text=texts)
def test_at_a_hard_boundary_both_sides_are_encoded_alone(name, text):
    encoder = family_encoder(name)
    for position in range(1, len(text)):
        if encoder.is_hard_boundary(text, position):
            for start in (False, True):
                both = encoder.encode_context(text[:position], start) + encoder.encode_context(text[position:])
                assert encoder.encode_context(text, start) == both


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "wordpiece"])
def test_long_texts_have_hard_boundaries(name):
    encoder, text = family_encoder(name), tiny.ENGLISH[0]
    found = [position for position in range(1, len(text)) if encoder.is_hard_boundary(text, position)]
    assert len(found) >= 8
    assert all(text[position] == " " for position in found)


def test_there_is_no_hard_boundary_where_a_token_crosses_it():
    tokenizer = piece_tokenizer("<unk>", "a", "b", "▁", "▁b", "a▁b", "c")
    encoder = encoder_of(tokenizer)
    assert not encoder.is_hard_boundary("a b", 1)
    assert encoder.is_hard_boundary("b b", 1)
    assert not encoder.is_hard_boundary("b  b", 2)


def test_there_is_no_hard_boundary_where_a_normalizer_looks_further():
    tokenizer = tiny.byte_level_bpe(normalizer=normalizers.Replace("cat sat", "dog"))
    encoder = encoder_of(tokenizer)
    assert not encoder.is_hard_boundary("the cat sat", 7)


def test_unknown_characters_that_are_fused_are_no_boundary():
    # No space in this vocabulary: a character, a space and another are one unknown token.
    encoder = encoder_of(tiny.disjoint_pair()[1])
    text = "עA B"
    both = encoder.encode_context(text[:2]) + encoder.encode_context(text[2:])
    assert not encoder.is_hard_boundary(text, 2) or encoder.encode_context(text) == both


# The user's tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokenizer_is_left_as_it_is(name):
    tokenizer = FAMILIES[name]()
    before = tokenizer.backend_tokenizer.to_str()
    encoder = encoder_of(tokenizer)
    for text in (*HARD, tiny.ENGLISH[0]):
        encoder.encode(text.encode())
        encoder.encode_context(text, start=True)
        encoder.encode_context_bytes(text.encode() + b"\xff")
    assert encoder.prefix_ids is not None
    assert tokenizer.backend_tokenizer.to_str() == before


def test_padding_and_truncation_of_the_user_neither_act_nor_change():
    tokenizer = tiny.gemma_like()
    tokenizer.backend_tokenizer.enable_truncation(max_length=2)
    tokenizer.backend_tokenizer.enable_padding(length=30)
    before = tokenizer.backend_tokenizer.to_str()
    encoder, expected = encoder_of(tokenizer), family_encoder("sentencepiece")
    batch = [text.encode() for text in tiny.TEXTS]
    assert encoder.encode_batch(batch) == expected.encode_batch(batch)
    assert encoder.encode_context(tiny.ENGLISH[0], start=True) == expected.encode_context(tiny.ENGLISH[0], start=True)
    assert encoder.prefix_ids == expected.prefix_ids
    assert tokenizer.backend_tokenizer.to_str() == before


# Begun characters


@quick
@given(data=data)
def test_the_begun_character_is_split_off_as_pythons_incremental_decoder_does(data):
    text, begun = split_begun_character(data)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert text == decoder.decode(data)
    assert begun == decoder.getstate()[0]
    assert len(begun) < 4
    assert text + ("\ufffd" if begun else "") == data.decode(errors="replace")


def test_begun_characters_by_hand():
    assert split_begun_character("a你".encode()[:-1]) == ("a", b"\xe4\xbd")
    assert split_begun_character(b"\xe4\xbda") == ("\ufffda", b"")
    assert split_begun_character(b"\xff\xf0\x9f") == ("\ufffd", b"\xf0\x9f")
    assert split_begun_character(b"") == ("", b"")


def test_no_seed_of_random_text_is_lost():
    """Many texts through every family that has all bytes."""
    rng = random.Random(7)
    for name in ALL_BYTES:
        encoder = family_encoder(name)
        lines = re.findall(".{1,9}", long_text(rng.randrange(1000)), flags=re.DOTALL)
        for line, ids in zip(lines, encoder.encode_batch([line.encode() for line in lines]), strict=True):
            assert encoder.token_bytes.write(ids).decode() == line
            assert all(encoder.token_bytes.kinds[i] == TEXT for i in ids)
