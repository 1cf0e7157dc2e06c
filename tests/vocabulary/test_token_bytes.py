import json
import random
import warnings

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf_ensemble.errors import EnsembleError, VocabularyError
from hf_ensemble.vocabulary.token_bytes import CONTROL, NO_TOKEN, TEXT, TokenBytes, flatten_component
from tests import tiny

from .material import FAMILIES, byte_level_tokenizer, family, ids_of, piece_tokenizer


def token_bytes(tokenizer, **options):
    return TokenBytes(tokenizer, cache=False, **options)


def written(tokenizer, *tokens, **options):
    """What each token writes, by its spelling in the vocabulary."""
    entries = token_bytes(tokenizer, **options).entries
    return [entries[i] for i in ids_of(tokenizer, *tokens)]


def metaspace_unigram(prepend_scheme, *more_pieces):
    """As XGLM and XLM-R: the decoder is Metaspace alone."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁the", -1.0), ("a", -2.0), *((piece, -3.0) for piece in more_pieces)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace("▁", prepend_scheme=prepend_scheme)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


# What tokens write


def test_a_byte_level_token_writes_the_bytes_that_its_characters_stand_for():
    assert written(tiny.byte_level_bpe(), "Ġis", "Ċ", "č", "Ġthe") == [b" is", b"\n", b"\r", b" the"]


def test_every_byte_has_its_character():
    by_byte = tiny.byte_alphabet()
    assert written(tiny.byte_level_bpe(), *by_byte) == [bytes([byte]) for byte in range(256)]


def test_a_byte_level_token_outside_of_the_byte_alphabet_writes_itself():
    alphabet = {char: i for i, char in enumerate(tiny.byte_alphabet())}
    tokenizer = byte_level_tokenizer({**alphabet, "你": 256, "a b": 257, "Ġ你": 258, "é": 259})
    assert written(tokenizer, "你", "a b", "Ġ你", "é") == ["你".encode(), b"a b", "Ġ你".encode(), b"\xe9"]
    for i in (256, 257, 258):
        assert tokenizer.backend_tokenizer.decode([i]).encode() == token_bytes(tokenizer).entries[i]


def test_fragments_of_characters_keep_their_own_bytes():
    tokenizer = tiny.byte_level_bpe(texts=tiny.THAI + tiny.HEBREW)
    entries = token_bytes(tokenizer).entries
    kept = [entry for entry in entries if entry]
    assert len(set(kept)) == len(kept)
    mixed = [entry for entry in kept if entry.startswith(b" ") and "\ufffd" in entry.decode(errors="replace")]
    assert mixed, "no token mixes a space with a part of a character"


def test_a_sentencepiece_token_writes_spaces_for_the_space_sign_and_a_byte_for_a_byte_token():
    tokenizer = tiny.gemma_like()
    assert written(tokenizer, "▁of", "▁", "<0xE0>", "<0x0A>", "\n", "\n\n") == [
        b" of",
        b" ",
        b"\xe0",
        b"\n",
        b"\n",
        b"\n\n",
    ]


def test_a_byte_token_in_lower_case_is_a_byte_too():
    tokenizer = piece_tokenizer("<unk>", "a", "<0x0a>", "<0xfF>", "<0xZZ>", "<0x0A", "<0x100>")
    assert written(tokenizer, "<0x0a>", "<0xfF>", "<0xZZ>", "<0x0A", "<0x100>") == [
        *(b"\n", b"\xff", b"<0xZZ>", b"<0x0A", b"<0x100>")
    ]


def test_without_byte_fallback_in_the_decoder_a_byte_token_is_literal_text():
    tokenizer = piece_tokenizer("<unk>", "a", "<0x0A>")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    assert written(tokenizer, "<0x0A>") == [b"<0x0A>"]


def test_a_wordpiece_token_writes_a_space_unless_it_goes_on_with_a_word():
    assert written(tiny.wordpiece(), "the", "##ing", "##s", ",") == [b" the", b"ing", b"s", b" ,"]


@pytest.mark.parametrize("clean_up", [True, False])
def test_the_clean_up_of_a_wordpiece_decoder_changes_nothing(clean_up):
    tokens = token_bytes(tiny.wordpiece(clean_up=clean_up))
    assert tokens.entries == token_bytes(tiny.wordpiece(clean_up=not clean_up)).entries
    ids = ids_of(tiny.wordpiece(), "paris", ",", "is", ".")
    assert tokens.write(ids) == b" paris , is ."


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_metaspace_decoder_strips_the_space_at_the_start(scheme):
    tokens = token_bytes(metaspace_unigram(scheme))
    assert tokens.strips_start
    assert tokens.entries[2] == b" the"
    assert tokens.write_from_start([2, 3]) == b"thea"
    assert tokens.write([2, 3]) == b" thea"


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_run_of_space_signs_is_a_run_of_spaces_under_a_metaspace_decoder(scheme):
    # That decoder drops all space signs of the first token, but writes them in the middle of a text.
    tokens = token_bytes(metaspace_unigram(scheme, "▁▁"))
    assert tokens.entries[4] == b"  "
    assert tokens.backend.decode([3, 4, 3]) == "a  a" == tokens.write([3, 4, 3]).decode()


def test_a_metaspace_decoder_that_never_prepends_strips_nothing():
    tokens = token_bytes(metaspace_unigram("never"))
    assert not tokens.strips_start
    assert tokens.write_from_start([2, 3]) == b" thea"


def test_added_tokens_of_a_byte_level_tokenizer_write_their_literal_text():
    tokenizer = tiny.odd_added_bpe()
    assert written(tokenizer, "čaj", "Ġra", "<tool_call>") == ["čaj".encode(), "Ġra".encode(), b"<tool_call>"]


def test_added_tokens_of_a_sentencepiece_tokenizer_write_what_its_decoder_writes():
    tokenizer = tiny.gemma_like(added=["a▁b", "<table>", "<0x0B>", " x"])
    expected = [tokenizer.backend_tokenizer.decode(ids_of(tokenizer, token)).encode() for token in ("a▁b", "<table>")]
    assert written(tokenizer, "a▁b", "<table>") == expected == [b"a b", b"<table>"]
    assert written(tokenizer, " x") == [b" x"]


def test_added_tokens_of_a_wordpiece_tokenizer_write_their_literal_text():
    assert written(tiny.wordpiece(added=["<tool_call>", "##x"]), "<tool_call>", "##x") == [b"<tool_call>", b"##x"]


# Control tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_and_only_they_are_control(name):
    tokenizer = family(name)
    tokens = token_bytes(tokenizer)
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert set(np.flatnonzero(tokens.kinds == CONTROL).tolist()) == flagged | set(tokenizer.all_special_ids)
    assert all(tokens.entries[i] == b"" for i in flagged)
    assert tokens.write([*flagged]) == b""


@pytest.mark.parametrize("name", FAMILIES)
def test_an_id_writes_text_exactly_if_it_is_of_that_kind(name):
    tokens = token_bytes(family(name))
    assert [bool(entry) for entry in tokens.entries] == (tokens.kinds == TEXT).tolist()


def test_template_words_that_are_not_flagged_are_text():
    assert written(tiny.qwen_like(), "<think>", "<tool_call>") == [b"<think>", b"<tool_call>"]


def test_a_token_that_is_special_by_its_role_alone_is_control():
    tokenizer = piece_tokenizer("<unk>", "a", "</s>", eos="</s>")
    end = tokenizer.eos_token_id
    assert token_bytes(tokenizer).kinds[end] == CONTROL
    assert token_bytes(piece_tokenizer("<unk>", "a", "</s>")).entries[end] == b"</s>"


def test_an_unflagged_end_marker_is_text_until_it_is_an_end_id():
    tokenizer = tiny.byte_level_bpe(added=["<|eot|>", "<|go|>"])
    marker, other = ids_of(tokenizer, "<|eot|>", "<|go|>")
    assert token_bytes(tokenizer).entries[marker] == b"<|eot|>"
    tokens = token_bytes(tokenizer, end_ids=[marker])
    assert tokens.kinds[marker] == CONTROL
    assert tokens.entries[marker] == b""
    assert tokens.entries[other] == b"<|go|>"


@pytest.mark.parametrize(
    ("make", "token", "text"),
    [
        (tiny.byte_level_bpe, "Ċ", b"\n"),
        (tiny.gemma_like, "\n", b"\n"),
        (tiny.gemma_like, "<0x0A>", b"\n"),
        (tiny.gemma_like, "\n\n", b"\n\n"),
        (tiny.byte_level_bpe, "Ġthe", b" the"),
    ],
    ids=["byte_level_newline", "piece", "byte_token", "added_newlines", "word"],
)
def test_an_end_id_that_writes_text_stays_text(make, token, text):
    tokenizer = make()
    end = ids_of(tokenizer, token)
    assert written(tokenizer, token, end_ids=end) == [text]
    assert token_bytes(tokenizer, end_ids=end).control == token_bytes(tokenizer).control


def test_end_ids_outside_of_the_vocabulary_do_no_harm():
    tokenizer = tiny.byte_level_bpe()
    assert token_bytes(tokenizer, end_ids=[5, 10_000]).entries == token_bytes(tokenizer).entries


# Ids without a token, and tokens without a row


def test_ids_that_the_vocabulary_leaves_out_have_no_token():
    tokens = token_bytes(tiny.byte_level_bpe(holes=[7, 300, 301]))
    assert tokens.kinds[[7, 300, 301]].tolist() == [NO_TOKEN] * 3
    assert (tokens.kinds == NO_TOKEN).sum() == 3
    assert tokens.write([7, 300, 301]) == b""


def test_padded_rows_have_no_token():
    tokenizer = tiny.byte_level_bpe()
    plain, padded = token_bytes(tokenizer), token_bytes(tokenizer, num_ids=448)
    assert len(padded.entries) == len(padded.kinds) == padded.num_ids == 448
    assert padded.entries[: plain.num_ids] == plain.entries
    assert padded.entries[plain.num_ids :] == [b""] * (448 - plain.num_ids)
    assert not padded.kinds[plain.num_ids :].any()
    assert padded.num_rowless == 0


def test_tokens_without_a_row_are_counted_and_left_out():
    tokenizer = tiny.byte_level_bpe(added=["<a>", "<b>", "<c>", "<d>"])
    size = len(tokenizer)
    tokens = token_bytes(tokenizer, num_ids=size - 4)
    assert tokens.num_rowless == 4
    assert len(tokens.entries) == len(tokens.kinds) == size - 4
    assert tokens.write([size - 1, *ids_of(tokenizer, "Ġis"), size - 4]) == b" is"
    assert token_bytes(tokenizer).num_rowless == 0


def test_a_control_token_without_a_row_is_left_out():
    backend_vocab = {char: i for i, char in enumerate(tiny.byte_alphabet())}
    tokenizer = byte_level_tokenizer(backend_vocab, eos="<|end|>")
    assert tokenizer.eos_token_id == 256
    tokens = token_bytes(tokenizer, num_ids=256, end_ids=[256])
    assert not (tokens.kinds == CONTROL).any()
    assert tokens.num_rowless == 1


# Single bytes


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (tiny.byte_level_bpe, []),
        (tiny.gemma_like, []),
        (tiny.unigram, []),
        (tiny.smol_like, [4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]),
    ],
    ids=["byte_level", "sentencepiece", "unigram", "smol"],
)
def test_missing_bytes_are_those_that_no_token_writes_alone(make, missing):
    assert list(token_bytes(make()).missing_bytes) == missing


def test_without_byte_tokens_all_bytes_of_longer_characters_are_missing():
    missing = token_bytes(tiny.sentencepiece_bpe(byte_fallback=False)).missing_bytes
    assert set(range(0x80, 0x100)) <= set(missing)
    assert ord("e") not in missing


# Agreement with the tokenizer's own decoder


@pytest.mark.parametrize("name", FAMILIES)
def test_any_ids_write_what_the_decoder_writes_where_that_is_text(name):
    # With its clean-up, the decoder of WordPiece takes out spaces, which is no part of what a token writes.
    tokenizer = tiny.wordpiece(clean_up=False) if name == "wordpiece" else family(name)
    tokens = token_bytes(tokenizer)
    literal = set(tokenizer.added_tokens_decoder) if "odd_added" in name else set()
    ids = [i for i in np.flatnonzero(tokens.kinds == TEXT).tolist() if i not in literal]
    if name == "wordpiece":
        # The decoder writes a piece that goes on with a word as it is spelled if it comes first.
        ids = [i for i in ids if not tokens.backend.id_to_token(i).startswith("##")]
    rng = random.Random(0)
    num_compared = 0
    for _ in range(600):
        chosen = rng.choices(ids, k=rng.randint(1, 12))
        data = tokens.write_from_start(chosen)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        num_compared += 1
        assert tokens.backend.decode(chosen, skip_special_tokens=False) == text
    assert num_compared > 20


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("wordpiece")])
def test_the_ids_of_a_text_write_the_text(name):
    tokenizer = family(name)
    tokens = token_bytes(tokenizer)
    for text in tiny.TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id not in ids:
            normalizer = tokenizer.backend_tokenizer.normalizer
            expected = normalizer.normalize_str(text).replace("▁", " ") if normalizer else text
            assert tokens.write_from_start(ids).decode() == expected.removeprefix(" ")


# Refusals


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (decoders.BPEDecoder("</w>"), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip("x", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)]), "Strip"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 0, 1)]), "Strip"),
        (None, "None"),
    ],
    ids=["suffix", "ctc", "strips_letters", "strips_two", "strips_the_end", "none"],
)
def test_an_unknown_decoder_is_refused_by_name(decoder, said):
    tokenizer = piece_tokenizer("<unk>", "a", "▁")
    if decoder is None:
        spec = json.loads(tokenizer.backend_tokenizer.to_str()) | {"decoder": None}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))
    else:
        tokenizer.backend_tokenizer.decoder = decoder
    with pytest.raises(VocabularyError, match=f"(?s)'my-model'.*{said}"):
        token_bytes(tokenizer, name="my-model")


def test_a_tokenizer_without_a_fast_backend_is_refused_by_name():
    with pytest.raises(VocabularyError, match=r"'my-model'.*ByT5Tokenizer has no fast backend.*tokenizer\.json"):
        token_bytes(ByT5Tokenizer(), name="my-model")


def test_a_decoder_that_writes_other_text_than_the_vocabulary_says_is_refused():
    tokenizer = tiny.byte_level_bpe()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("the", "THE")])
    with pytest.raises(VocabularyError, match=r"write .* but its decoder writes") as caught:
        token_bytes(tokenizer, name="my-model")
    assert "'my-model'" in str(caught.value)
    assert isinstance(caught.value, EnsembleError)
    assert isinstance(caught.value, ValueError)


def test_the_name_in_an_error_is_that_of_the_tokenizer_by_default():
    tokenizer = piece_tokenizer("<unk>", "a")
    tokenizer.backend_tokenizer.decoder = decoders.CTC()
    tokenizer.name_or_path = "org/model"
    with pytest.raises(VocabularyError, match="org/model"):
        token_bytes(tokenizer)


# The user's tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokenizer_is_left_as_it_is(name):
    tokenizer = FAMILIES[name]()
    before = tokenizer.backend_tokenizer.to_str()
    token_bytes(tokenizer, num_ids=1000, end_ids=[3])
    assert tokenizer.backend_tokenizer.to_str() == before


def test_padding_and_truncation_of_the_user_neither_act_nor_change():
    tokenizer = tiny.gemma_like()
    expected = token_bytes(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.backend_tokenizer.enable_padding(length=50, pad_id=2, pad_token="<bos>")
    before = tokenizer.backend_tokenizer.to_str()
    found = token_bytes(tokenizer)
    assert found.entries == expected.entries
    assert (found.kinds == expected.kinds).all()
    assert tokenizer.backend_tokenizer.to_str() == before


def test_clean_up_and_settings_of_the_wrapper_do_not_act():
    tokenizer = tiny.byte_level_bpe()
    expected = token_bytes(tokenizer).entries
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer.clean_up_tokenization_spaces = True
    tokenizer.split_special_tokens = True
    tokenizer.padding_side = "right"
    assert token_bytes(tokenizer).entries == expected


def test_a_token_added_later_is_there_when_asked_again():
    tokenizer = tiny.byte_level_bpe()
    size = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<new>", special=False), AddedToken("<newer>", special=True)])
    tokens = token_bytes(tokenizer)
    assert tokens.entries[size:] == [b"<new>", b""]
    assert tokens.kinds[size:].tolist() == [TEXT, CONTROL]


# Helpers


def test_sequences_of_components_are_spread_out():
    component = {
        "type": "Sequence",
        "decoders": [{"type": "A"}, {"type": "Sequence", "decoders": [{"type": "B"}, {"type": "C"}]}],
    }
    assert [part["type"] for part in flatten_component(component, "decoders")] == ["A", "B", "C"]
    assert flatten_component({"type": "A"}, "decoders") == [{"type": "A"}]
    assert flatten_component(None, "decoders") == []


def test_a_normalizer_changes_nothing_in_what_tokens_write():
    plain = token_bytes(tiny.byte_level_bpe())
    lowered = tiny.byte_level_bpe()
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert token_bytes(lowered).entries == plain.entries
