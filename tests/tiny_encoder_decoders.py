"""Encoder-decoder members made in memory: one like NLLB, with language codes, and one like T5, with a Unigram tokenizer."""

from collections.abc import Sequence

from tokenizers import pre_tokenizers
from transformers import (
    M2M100ForConditionalGeneration,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from tests.tiny import ENGLISH, GERMAN, SPACE_SIGN, assemble, build, learn_merges, tiny_m2m100

LANGUAGES = ("eng_Latn", "deu_Latn", "fra_Latn")
_METASPACE = pre_tokenizers.Metaspace(SPACE_SIGN, prepend_scheme="always", split=True)


def nllb_like(
    vocab_size: int = 400,
    *,
    texts: Sequence[str] = ENGLISH + GERMAN,
    src_lang: str | None = "eng_Latn",
    tgt_lang: str | None = "deu_Latn",
) -> PreTrainedTokenizerBase:
    """NLLB's habits: a BPE of pieces without byte tokens, a space before every text, languages as control tokens."""
    merges = learn_merges(texts, _METASPACE, None, vocab_size)
    chars = sorted({char for text in texts for char in text.replace(" ", SPACE_SIGN)})
    vocab, merges = assemble(["<s>", "<pad>", "</s>", "<unk>", *chars], merges, vocab_size, ())
    return NllbTokenizer(
        vocab, merges, src_lang=src_lang, tgt_lang=tgt_lang, additional_special_tokens=list(LANGUAGES)
    )


def t5_like(
    vocab_size: int = 400, *, texts: Sequence[str] = ENGLISH + GERMAN, extra_ids: int = 2
) -> PreTrainedTokenizerBase:
    """T5's habits: Unigram, white space is one space before a word, an end token behind every text, no BOS."""
    merges = learn_merges(texts, _METASPACE, None, vocab_size)
    control = ["<pad>", "</s>", "<unk>"]
    chars = sorted({char for text in texts for char in text.replace(" ", SPACE_SIGN) if not char.isspace()})
    vocab, _ = assemble([*control, *chars], merges, vocab_size, ())
    scores = [(piece, 0.0 if rank < 3 else -10.0 - rank / vocab_size) for piece, rank in vocab.items()]
    return T5Tokenizer(vocab=scores, extra_ids=extra_ids)


def tiny_nllb(tokenizer: PreTrainedTokenizerBase, **options) -> M2M100ForConditionalGeneration:
    """A model for `nllb_like`, which begins with its end id and then the language."""
    sizes = {"decoder_start_token_id": tokenizer.eos_token_id, "max_position_embeddings": 256}
    return tiny_m2m100(tokenizer, **{**sizes, "tie_word_embeddings": False, "scale_embedding": False, **options})


def tiny_t5(tokenizer: PreTrainedTokenizerBase, **options) -> T5ForConditionalGeneration:
    """A model for `t5_like`, which begins with its pad id."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    own = {"decoder_start_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False, **sizes, **options}
    return build(T5ForConditionalGeneration, T5Config, tokenizer, own)
