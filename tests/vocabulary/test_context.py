import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from hf_ensemble.vocabulary.context import MemberContext
from hf_ensemble.vocabulary.encoding import ByteEncoder, split_begun_character
from tests import tiny

from .material import (
    ALL_BYTES,
    FAMILIES,
    byte_pieces,
    data,
    encoder_of,
    family,
    family_encoder,
    ids_of,
    long_text,
    quick,
    spelling,
)

NO_BYTES = ("sentencepiece_no_bytes", "unigram_no_bytes", "wordpiece")


def retokenized(encoder: ByteEncoder, whole: bytes) -> list[int] | None:
    """The context after all of these bytes, encoded from scratch; None if the member sits out."""
    text, begun = split_begun_character(whole)
    begun_ids = encoder.byte_tokens(begun)
    if begun_ids is None:
        return None
    start = encoder.prefix_ids if whole else encoder.start_ids
    return [*start, *encoder.encode_context(text, start=True), *begun_ids]


# Append


@pytest.mark.parametrize("name", ALL_BYTES)
@pytest.mark.parametrize("seed", range(2))
def test_append_grows_by_the_encoding_of_every_step(name, seed):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "append", b"the cat")
    expected = [*encoder.prefix_ids, *encoder.encode_context("the cat", start=True)]
    assert context.ids == expected
    for piece in byte_pieces(long_text(seed).encode(), seed):
        context.write(piece)
        expected += encoder.encode(piece)
        assert context.ids == expected
        assert not context.sits_out


@pytest.mark.parametrize("name", ALL_BYTES)
def test_what_was_appended_writes_the_text(name):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "append", b"")
    written = long_text(11).encode()
    for piece in byte_pieces(written, 11):
        context.write(piece)
    assert encoder.token_bytes.write(context.ids) == written


def test_append_leaves_byte_tokens_where_a_character_came_in_pieces():
    tokenizer = tiny.gemma_like()
    context = MemberContext(encoder_of(tokenizer), "append", b"")
    start = list(context.ids)
    for piece in (b"\xe4", b"\xbd", b"\xa0", "国".encode()):
        context.write(piece)
    assert context.ids == [*start, *ids_of(tokenizer, "<0xE4>", "<0xBD>", "<0xA0>", "国")]


def test_append_never_touches_what_was_read():
    context = MemberContext(family_encoder("sentencepiece"), "append", b"the cat")
    for piece in byte_pieces(long_text(1).encode(), 1):
        before = list(context.ids)
        context.write(piece)
        assert context.ids[: len(before)] == before


@pytest.mark.parametrize("name", NO_BYTES)
def test_an_appending_member_without_byte_tokens_sits_out_inside_a_character(name):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "append", b"the")
    before = list(context.ids)
    for piece in (b"\xe4", b"\xbd"):
        context.write(piece)
        assert context.sits_out
        assert context.ids == before
    context.write(b"\xa0")
    assert not context.sits_out
    assert context.ids == [*before, *encoder.encode_context_bytes("你".encode())]


def test_an_appending_member_encodes_the_text_around_a_character_that_it_waits_for():
    encoder = family_encoder("sentencepiece_no_bytes")
    context = MemberContext(encoder, "append", b"the")
    context.write(b" cat\xe5")
    assert context.sits_out
    assert context.ids == [*MemberContext(encoder, "append", b"the").ids, *encoder.encode(b" cat")]
    whole = list(context.ids)
    context.write("国".encode()[1:] + b" is")
    assert not context.sits_out
    assert context.ids == [*whole, *encoder.encode("国 is".encode())]


def test_a_byte_that_cannot_be_written_is_a_replacement_character_when_appended():
    encoder = family_encoder("byte_level_missing_bytes")
    context = MemberContext(encoder, "append", b"the")
    expected = list(context.ids)
    for piece in (b"\x04", b" cat\x04", b"\xff", b" is"):
        context.write(piece)
        assert not context.sits_out
    stand_in = encoder.encode("\ufffd".encode())
    assert context.ids == [
        *expected,
        *stand_in,
        *encoder.encode(b" cat"),
        *stand_in,
        *stand_in,
        *encoder.encode(b" is"),
    ]


def test_a_lossy_member_appends_the_exact_text():
    encoder = family_encoder("byte_level_nfkc")
    context = MemberContext(encoder, "append", b"")
    context.write("ﬁ½".encode())
    assert encoder.token_bytes.write(context.ids).decode() == "ﬁ½"


def test_a_member_sits_out_only_for_the_character_that_it_lacks():
    # SmolLM2 has no token for F1, which begins characters of planes 4 to 7.
    encoder = family_encoder("byte_level_missing_bytes")
    for resync in ("append", "retokenize"):
        context = MemberContext(encoder, resync, b"the")
        before = list(context.ids)
        context.write("😀".encode()[:2])
        assert not context.sits_out
        context.write("😀".encode()[2:])
        context.write(b"\xf1")
        assert context.sits_out
        context.write(b"\x90\x80\x80")
        assert not context.sits_out
        assert context.ids[: len(before)] == before
        assert "\ufffd".encode() in encoder.token_bytes.write(context.ids)


# Retokenize


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_retokenized_contexts_are_those_encoded_from_scratch(name, seed):
    encoder = family_encoder(name)
    prompt = ("", "the cat", "你好 the")[seed].encode()
    context = MemberContext(encoder, "retokenize", prompt)
    written = prompt
    for piece in byte_pieces(long_text(seed, 25).encode(), seed):
        context.write(piece)
        written += piece
        expected = retokenized(encoder, written) if prompt else None
        if expected is not None:
            assert context.ids == expected, written
        if prompt:
            assert context.sits_out == (expected is None)


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(prompt=data, pieces=st.lists(data, max_size=4))
def test_any_bytes_are_retokenized_as_from_scratch(name, prompt, pieces):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "retokenize", prompt)
    written = prompt
    for piece in pieces:
        context.write(piece)
        written += piece
        expected = retokenized(encoder, written)
        assert context.sits_out == (expected is None)
        if expected is not None and prompt:
            assert context.ids == expected


def test_added_tokens_do_not_bring_in_a_space_when_a_context_grows():
    encoder = encoder_of(tiny.sentencepiece_bpe(style="llama2", added=["<t>"]))
    grown = MemberContext(encoder, "retokenize", b"a ")
    for piece in (b"b", b"<t>", b"c"):
        grown.write(piece)
    assert grown.ids == MemberContext(encoder, "retokenize", b"a b<t>c").ids == retokenized(encoder, b"a b<t>c")


def test_an_added_token_that_swallows_the_space_behind_it_is_seen_the_same_however_the_text_comes():
    tokenizer = tiny.byte_level_bpe()
    tokenizer.add_tokens([AddedToken("<t>", special=False, rstrip=True)])
    encoder = encoder_of(tokenizer)
    grown = MemberContext(encoder, "retokenize", b"a b<t>")
    grown.write(b" cat")
    grown.write(b" is")
    assert grown.ids == retokenized(encoder, b"a b<t> cat is")


def test_a_word_that_grows_is_one_token_in_the_end():
    tokenizer = tiny.byte_level_bpe()
    context = MemberContext(encoder_of(tokenizer), "retokenize", b"It")
    prompt = list(context.ids)
    for letter in (b" ", b"t", b"h", b"e"):
        context.write(letter)
    assert context.ids == [*prompt, *ids_of(tokenizer, "Ġthe")]


@pytest.mark.parametrize("name", ALL_BYTES)
def test_a_begun_character_is_byte_tokens_until_it_is_complete(name):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "retokenize", b"the")
    whole = "国".encode()
    context.write(whole[:1])
    assert context.ids == [*MemberContext(encoder, "retokenize", b"the").ids, *encoder.encode(whole[:1])]
    context.write(whole[1:2])
    assert encoder.token_bytes.write(context.ids).endswith(whole[:2])
    context.write(whole[2:])
    assert context.ids == retokenized(encoder, b"the" + whole)
    assert not context.sits_out


@pytest.mark.parametrize("name", NO_BYTES)
def test_a_retokenizing_member_without_byte_tokens_sits_out_inside_a_character(name):
    encoder = family_encoder(name)
    context = MemberContext(encoder, "retokenize", b"the")
    before = list(context.ids)
    context.write(b"\xe5\x9b")
    assert context.sits_out
    assert context.ids == before
    context.write(b"\xbd")
    assert not context.sits_out
    assert context.ids == retokenized(encoder, "the国".encode())


@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_bytes_that_never_become_characters_are_replacement_characters_where_they_cannot_be_written(resync):
    encoder = family_encoder("unigram_no_bytes")
    for dead in (b"\xe4\xbdx", b"\xffx", b"\xf0\x9f\xe4x", b"\x80\x80x"):
        context = MemberContext(encoder, resync, b"the")
        prompt = list(context.ids)
        for byte in dead:
            context.write(bytes([byte]))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        steps = [decoder.decode(bytes([byte])) for byte in dead]
        if resync == "retokenize":
            steps = ["".join(steps)]
        assert context.ids[len(prompt) :] == [i for text in steps for i in encoder.encode_context(text)]
        assert not context.sits_out


def test_bytes_that_never_become_characters_are_replacement_characters_when_retokenized():
    encoder = family_encoder("sentencepiece")
    context = MemberContext(encoder, "retokenize", b"the")
    context.write(b"\xe4\xbd")
    context.write(b"a")
    context.write(b"\xff")
    assert encoder.token_bytes.write(context.ids).decode() == "the\ufffda\ufffd"


# Prompts


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_a_prompt_is_what_the_tokenizer_gives_for_it(name, resync):
    for text in tiny.TEXTS:
        context = MemberContext(family_encoder(name), resync, text.encode())
        assert context.ids == family(name)(text)["input_ids"]
        assert not context.sits_out


@pytest.mark.parametrize("resync", ["append", "retokenize"])
@pytest.mark.parametrize(
    ("make", "start"),
    [(tiny.gemma_like, ["<bos>"]), (tiny.smol_like, ["<|im_start|>"]), (tiny.byte_level_bpe, ["<|end|>"])],
    ids=["gemma", "smol", "byte_level"],
)
def test_without_a_prompt_a_member_starts_from_its_own_start_token(make, start, resync):
    encoder = encoder_of(make())
    context = MemberContext(encoder, resync, b"")
    assert spelling(encoder, context.ids) == start
    context.write(b" the")
    assert spelling(encoder, context.ids[:1]) == start
    assert encoder.token_bytes.write(context.ids) == b" the"


@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_without_any_control_token_an_empty_prompt_is_empty(resync):
    assert MemberContext(encoder_of(tiny.bare_bpe()), resync, b"").ids == []


@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_the_start_token_stands_there_once_however_often_the_text_grows(resync):
    encoder = encoder_of(tiny.gemma_like())
    context = MemberContext(encoder, resync, b"<bos> the <bos>")
    for piece in byte_pieces(long_text(6).encode(), 6):
        context.write(piece)
        assert context.ids.count(encoder.prefix_ids[0]) == 1


@pytest.mark.parametrize("resync", ["append", "retokenize"])
@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_are_never_read_from_a_prompt_or_a_text(name, resync):
    encoder, tokenizer = family_encoder(name), family(name)
    context = MemberContext(encoder, resync, f"a{tokenizer.eos_token} b".encode())
    for letter in f"the {tokenizer.eos_token}{tokenizer.pad_token or ''} is":
        context.write(letter.encode())
    assert tokenizer.eos_token_id not in context.ids[len(encoder.prefix_ids) :]


@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_a_prompt_may_end_inside_a_character(resync):
    tokenizer = tiny.gemma_like()
    encoder = encoder_of(tokenizer)
    context = MemberContext(encoder, resync, "the国".encode()[:-1])
    assert context.ids[-2:] == ids_of(tokenizer, "<0xE5>", "<0x9B>")
    context.write(b"\xbd")
    assert encoder.token_bytes.write_from_start(context.ids).decode() == "the国"
    waiting = MemberContext(family_encoder("sentencepiece_no_bytes"), resync, "the国".encode()[:-1])
    assert waiting.sits_out
    waiting.write(b"\xbd")
    assert waiting.ids == MemberContext(waiting.encoder, resync, "the国".encode()).ids


@pytest.mark.parametrize("text", ["The answer is ", "see http:", "Hello\n", "a "])
@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_nothing_is_lost_or_doubled_at_the_end_of_a_prompt(text, resync):
    for name in ("byte_level", "sentencepiece", "sentencepiece_llama2", "sentencepiece_metaspace", "unigram"):
        encoder = family_encoder(name)
        context = MemberContext(encoder, resync, text.encode())
        for piece in (b"//", b"x", b" y", b"\n", b" z"):
            context.write(piece)
        assert encoder.token_bytes.write_from_start(context.ids).decode() == f"{text}//x y\n z"


# Both


@pytest.mark.parametrize("resync", ["append", "retokenize"])
def test_writing_nothing_changes_nothing(resync):
    context = MemberContext(family_encoder("sentencepiece"), resync, b"the \xe5")
    before = dict(context.__dict__, ids=list(context.ids))
    context.write(b"")
    assert context.__dict__ == before


@pytest.mark.parametrize("resync", ["append", "retokenize"])
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_no_bytes"])
def test_a_copy_goes_its_own_way(name, resync):
    encoder = family_encoder(name)
    one = MemberContext(encoder, resync, b"the cat\xe5")
    two = one.copy()
    before = list(one.ids)
    two.write("国".encode()[1:])
    two.write(b" sat")
    assert one.ids == before
    assert one.sits_out == (name == "sentencepiece_no_bytes")
    one.write("国".encode()[1:])
    one.write(b" sat")
    assert one.ids == two.ids


@pytest.mark.parametrize("resync", ["append", "retokenize"])
@quick
@given(prompt=data, pieces=st.lists(data, max_size=4))
def test_no_bytes_break_a_context(resync, prompt, pieces):
    for name in ("byte_level_missing_bytes", "sentencepiece_no_bytes", "unigram_nfkc", "wordpiece"):
        encoder = family_encoder(name)
        context = MemberContext(encoder, resync, prompt)
        for piece in pieces:
            context.write(piece)
        assert all(0 <= i < encoder.token_bytes.num_ids for i in context.ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "unigram"])
def test_a_long_text_costs_the_same_at_every_step(name, monkeypatch):
    encoder = encoder_of(family(name))
    context = MemberContext(encoder, "retokenize", b"the cat")
    sizes = []
    encode = encoder.encode_context
    monkeypatch.setattr(
        encoder, "encode_context", lambda text, start=False: sizes.append(len(text)) or encode(text, start)
    )
    for word in " ".join(tiny.ENGLISH * 5).split(" "):
        context.write(f" {word}".encode())
    assert max(sizes) < 60


# Long texts without a hard boundary

UNBROKEN = {
    "Chinese": "".join("的一是在不了有和人这中大为上个国"[n * n % 16] for n in range(500)),
    "letters": "".join("thecatsonmr"[n * n % 11] for n in range(1500)),
    "digits": "".join(str(n * n % 97) for n in range(800)),
    "one character": "." * 1500,
    "code": "x=[i*2+1for(i)in(range(10))];return{}//" * 40,
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(text, name, id=f"{text}-{name}", marks=[pytest.mark.slow] * ((n + turn) % 4 > 0))
        for n, text in enumerate(UNBROKEN)
        for turn, name in enumerate(name for name in FAMILIES if not name.startswith(("unigram", "wordpiece")))
    ],
)
def test_a_long_text_without_spaces_is_encoded_as_a_whole_would_be(name, text, monkeypatch):
    encoder = family_encoder(name)
    longest = 0
    original = ByteEncoder.encode_context

    def counting(self, text, start=False):
        nonlocal longest
        longest = max(longest, len(text))
        return original(self, text, start)

    whole = UNBROKEN[text].encode()
    half = len(whole) // 2
    context = MemberContext(encoder, "retokenize", whole[:half])
    pieces = list(byte_pieces(whole[half:], 3))
    written = whole[:half]
    for n, piece in enumerate(pieces):
        monkeypatch.setattr(ByteEncoder, "encode_context", counting)
        context.write(piece)
        monkeypatch.undo()
        written += piece
        if not context.sits_out and (n % 40 == 0 or n == len(pieces) - 1):
            assert context.ids == retokenized(encoder, written)
    if name in ("byte_level", "sentencepiece", "sentencepiece_llama2", "sentencepiece_metaspace"):
        assert longest < 560
