"""What the vocabulary tests share: one tokenizer of every family, made once, and texts that are hard to keep."""

import functools
import random
from collections.abc import Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ensemble.vocabulary.encoding import ByteEncoder
from hf_ensemble.vocabulary.token_bytes import TokenBytes
from tests import tiny

FAMILIES = {
    "byte_level": tiny.byte_level_bpe,
    "byte_level_missing_bytes": tiny.smol_like,
    "byte_level_nfc": tiny.qwen_like,
    "byte_level_nfkc": tiny.nfkc_bpe,
    "byte_level_lowercase": tiny.lowercasing_bpe,
    "byte_level_odd_added": tiny.odd_added_bpe,
    "sentencepiece": tiny.gemma_like,
    "sentencepiece_llama2": lambda: tiny.sentencepiece_bpe(style="llama2"),
    "sentencepiece_metaspace": lambda: tiny.sentencepiece_bpe(style="metaspace"),
    "sentencepiece_nfkc": lambda: tiny.sentencepiece_bpe(normalizer=normalizers.NFKC()),
    "sentencepiece_no_bytes": lambda: tiny.sentencepiece_bpe(byte_fallback=False),
    "unigram": tiny.unigram,
    "unigram_nfkc": lambda: tiny.unigram(normalizer=normalizers.NFKC()),
    "unigram_no_bytes": lambda: tiny.unigram(byte_fallback=False),
    "wordpiece": tiny.wordpiece,
}
ALL_BYTES = tuple(
    name for name in FAMILIES if not name.endswith(("no_bytes", "missing_bytes")) and name != "wordpiece"
)
"""Families with a token for every byte: they can write anything."""
LOSSLESS = ("byte_level", "byte_level_odd_added", "sentencepiece", "sentencepiece_metaspace", "unigram")
"""Families whose own view of a text without `▁` is the text."""

quick = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

HARD = (
    *(
        "the cat",
        " is",
        "  ",
        "   \n",
        "\t\t",
        "\n\n\n",
        "\r\n",
        "Paris,",
        "isn't",
        "42",
        "3.14",
        "x=y;",
        "/n",
        "\x00",
    ),
    *(
        "▁",
        "a▁b",
        "<0x0A>",
        "<0xe4>",
        "<unk>",
        "<s>",
        "</s>",
        "<|end|>",
        "<|im_end|>",
        "<eos>",
        "[SEP]",
        "<tool_call>",
    ),
    *("你好世界", "巴黎。", "ภาษาไทย", "שלום", "Größe", "ﬁ", "½", "ＡＢ", "e\u0301", "\u0301", "İ", "Σς", "가각"),
    *("😀", "👩‍💻", "👍🏽", "\u200b", "\ufeff", "\ufffd", "\U0010fffd", "\x01", "\x7f", "\xa0", "\u2028", "\u3000"),
)
texts = st.lists(st.sampled_from(HARD) | st.text(max_size=3), max_size=6).map("".join)
"""Texts of hard pieces and of any characters."""
data = st.lists(texts.map(str.encode) | st.binary(max_size=4), max_size=3).map(b"".join)
"""Bytes that are text, no text, or partly text."""


@functools.cache
def family(name: str) -> PreTrainedTokenizerFast:
    return FAMILIES[name]()


@functools.cache
def family_encoder(name: str) -> ByteEncoder:
    return encoder_of(family(name))


def encoder_of(tokenizer: PreTrainedTokenizerFast, **options) -> ByteEncoder:
    return ByteEncoder(tokenizer, TokenBytes(tokenizer, cache=False, **options))


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """The only id of each token, by its spelling in the vocabulary."""
    return [tokenizer.get_vocab()[token] for token in tokens]


def spelling(encoder: ByteEncoder, ids: list[int]) -> list[str]:
    """The spelling in the vocabulary of each id."""
    return [encoder.token_bytes.backend.id_to_token(i) for i in ids]


def piece_tokenizer(*pieces: str, unk: str = "<unk>", **named: str) -> PreTrainedTokenizerFast:
    """SentencePiece-style, with exactly these pieces in this order and no merges: text is cut into characters."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=unk if unk in vocab else None))
    backend.normalizer = normalizers.Replace(" ", tiny.SPACE_SIGN)
    backend.decoder = decoders.Sequence([decoders.Replace(tiny.SPACE_SIGN, " "), decoders.ByteFallback()])
    roles = {f"{role}_token": token for role, token in named.items()}
    if unk in vocab:
        roles["unk_token"] = unk
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def byte_level_tokenizer(vocab: dict[str, int], merges=(), **named: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly this vocabulary."""
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{role}_token": token for role, token in named.items()}
    )


def long_text(seed: int, num_pieces: int = 60) -> str:
    """Words, numbers, code, several scripts, emoji and white space of every kind."""
    rng = random.Random(seed)
    words = [word for text in tiny.TEXTS for word in text.split(" ")]
    pieces = (*words, *words, *HARD, *tiny.CHINESE, *tiny.THAI, *tiny.CODE)
    return "".join(
        rng.choice(pieces) + rng.choice((" ", " ", " ", "", "  ", "\n", "\n\n", "\t", " \n "))
        for _ in range(num_pieces)
    )


def byte_pieces(data: bytes, seed: int) -> Iterator[bytes]:
    """Cut bytes anywhere, inside characters too."""
    rng = random.Random(seed)
    at = 0
    while at < len(data):
        size = rng.choice((1, 1, 2, 3, 5, 8, 13))
        yield data[at : at + size]
        at += size
