"""Tokenizers and models made in memory: small, deterministic, nothing downloaded."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

ENGLISH = (
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "The quick brown fox jumps over the lazy dog.",
    "She sells sea shells by the sea shore, doesn't she?",
    "The answer is 42, but what was the question?",
    "There are 12 months in a year and 24 hours in a day.",
    "Once upon a time there was a king who had three daughters.",
    "I think that this is the best thing that they have ever done.",
    "The train from London to Paris takes about two hours and a half.",
    "Water boils at 100 degrees; ice melts at zero.",
    "The cat sat on the mat, and the rat sat on the hat.",
)
GERMAN = (
    "Die Hauptstadt von Frankreich ist Paris, die von Deutschland ist Berlin.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Größe, Straße und Übermut: schöne Wörter mit Umlauten.",
    "Es war einmal ein König, der hatte drei Töchter.",
    "Das Wasser kocht bei hundert Grad, und das Eis schmilzt bei null.",
)
CHINESE = ("法国的首都是巴黎。", "今天天气很好。我们去公园吧。", "他们在学校学习中文和数学。")
THAI = ("เมืองหลวงของฝรั่งเศสคือปารีส", "วันนี้อากาศดีมาก เราไปเที่ยวกันเถอะ", "ภาษาไทยไม่มีช่องว่างระหว่างคำ")
HEBREW = ("עיר הבירה של צרפת היא פריז.", "היום מזג האוויר נעים מאוד.", "שלום לכולם, מה שלומכם?")
CODE = (
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "for i in range(10):\n\tif i % 2 == 0:\n\t\tprint(i)\n",
    "https://example.org/index.html?q=1&r=2",
)
EMOJI = ("I love it 😀😀 👍🏽", "🎉 party 🎉 👩‍💻")
TEXTS = ENGLISH + GERMAN + CHINESE + THAI + HEBREW + CODE + EMOJI

SPACE_SIGN = "\u2581"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary, by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = count(256)
    return [chr(byte) if byte in kept else chr(next(shifted)) for byte in range(256)]


# --- Tokenizers -----------------------------------------------------------------------------------------------------


def byte_level_bpe(
    vocab_size: int = 400,
    *,
    texts: Sequence[str] = TEXTS,
    eos: str | None = "<|end|>",
    bos: str | None = None,
    pad: str | None = "<|pad|>",
    unk: str | None = None,
    add_bos: bool = False,
    specials: Sequence[str] = (),
    added: Sequence[str] = (),
    missing_bytes: Iterable[int] = (),
    holes: Sequence[int] = (),
    normalizer: normalizers.Normalizer | None = None,
    padding_side: str = "left",
) -> PreTrainedTokenizerFast:
    """GPT-2-like, of at most `vocab_size` tokens before `added`. `pad` may equal `eos`; `added` are ordinary, not special; no token has a byte of `missing_bytes`."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    by_byte = byte_alphabet()
    missing = {by_byte[byte] for byte in missing_bytes}
    alphabet = [char for char in by_byte if char not in missing]
    control = _distinct(unk, bos, eos, pad, *specials)
    merges = learn_merges(texts, split, normalizer, vocab_size)
    merges = [pair for pair in merges if not missing & set("".join(pair))]
    vocab, merges = assemble([*control, *alphabet], merges, vocab_size, holes)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    _add_bos(tokenizer, bos if add_bos else None)
    return _wrap(tokenizer, control, added, eos, bos, pad, unk=unk, padding_side=padding_side)


def sentencepiece_bpe(
    vocab_size: int = 700,
    *,
    style: str = "gemma",
    texts: Sequence[str] = TEXTS,
    eos: str | None = "<eos>",
    bos: str | None = "<bos>",
    pad: str | None = "<pad>",
    add_bos: bool = True,
    specials: Sequence[str] = (),
    added: Sequence[str] = (),
    byte_fallback: bool = True,
    holes: Sequence[int] = (),
    normalizer: normalizers.Normalizer | None = None,
    padding_side: str = "left",
) -> PreTrainedTokenizerFast:
    """SentencePiece-like, with two newline tokens where the texts have one: `\\n` and `<0x0A>`.

    Styles: `gemma` inserts no space; `llama2` puts one in front of every text (normalizer); `metaspace` puts one in
    front of the first word (pre-tokenizer). The decoders of the last two strip it again.
    """
    to_space_sign = normalizers.Replace(" ", SPACE_SIGN)
    own = [normalizer] if normalizer is not None else []
    learner = normalizers.Sequence([*own, to_space_sign])
    merges = learn_merges(texts, pre_tokenizers.Split(SPACE_SIGN, "merged_with_next"), learner, vocab_size)
    control = _distinct(pad, eos, bos, "<unk>", *specials)
    chars = sorted({char for text in texts for char in learner.normalize_str(text)})
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocab, merges = assemble([*control, *fallback, *chars], merges, vocab_size, holes)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    strip = [decoders.Strip(" ", 1, 0)]
    if style == "gemma":
        tokenizer.normalizer = learner
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        strip = []
    elif style == "llama2":
        tokenizer.normalizer = normalizers.Sequence([*own, normalizers.Prepend(SPACE_SIGN), to_space_sign])
    elif style == "metaspace":
        if own:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_SIGN, prepend_scheme="first", split=False)
    else:
        raise ValueError(f"Unknown style {style!r}.")
    undo = [decoders.Replace(SPACE_SIGN, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, *strip])
    _add_bos(tokenizer, bos if add_bos else None)
    return _wrap(tokenizer, control, added, eos, bos, pad, unk="<unk>", padding_side=padding_side)


def unigram(
    vocab_size: int = 600,
    *,
    texts: Sequence[str] = TEXTS,
    eos: str | None = "</s>",
    bos: str | None = "<s>",
    pad: str | None = "<pad>",
    add_bos: bool = False,
    added: Sequence[str] = (),
    byte_fallback: bool = True,
    normalizer: normalizers.Normalizer | None = None,
    padding_side: str = "left",
) -> PreTrainedTokenizerFast:
    """SentencePiece unigram-like, Metaspace with a space in front of the first word.

    The pieces are the characters and the frequent BPE tokens, scored so that few pieces win over many.
    """
    split = pre_tokenizers.Metaspace(SPACE_SIGN, prepend_scheme="first")
    control = _distinct(pad, eos, bos, "<unk>")
    merges = learn_merges(texts, split, normalizer, vocab_size)
    normalized = [normalizer.normalize_str(text) if normalizer else text for text in texts]
    chars = sorted({char for text in normalized for char in text.replace(" ", SPACE_SIGN)})
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    vocab, _ = assemble([*control, *fallback, *chars], merges, vocab_size, ())
    scores = [(piece, -100.0 if piece in fallback else -10.0 - rank / vocab_size) for piece, rank in vocab.items()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=vocab["<unk>"], byte_fallback=byte_fallback))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    undo = [decoders.Replace(SPACE_SIGN, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(undo)
    _add_bos(tokenizer, bos if add_bos else None)
    return _wrap(tokenizer, control, added, eos, bos, pad, unk="<unk>", padding_side=padding_side)


def pieces(*tokens: str, specials: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Exactly these pieces (spelled with `▁` and `<0xNN>`), from id 2 on; `</s>` is 0, `<unk>` 1, `specials` follow."""
    control = ["</s>", "<unk>"]
    scores = [(piece, -1.0) for piece in [*control, *tokens, *specials]]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_SIGN)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_SIGN, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrap(tokenizer, [*control, *specials], (), "</s>", None, None, unk="<unk>", padding_side="left")


def wordpiece(
    vocab_size: int = 500,
    *,
    texts: Sequence[str] = TEXTS,
    lowercase: bool = True,
    eos: str | None = "[SEP]",
    bos: str | None = "[CLS]",
    pad: str | None = "[PAD]",
    add_bos: bool = False,
    added: Sequence[str] = (),
    clean_up: bool = True,
    padding_side: str = "left",
) -> PreTrainedTokenizerFast:
    """BERT-like: no white space but single spaces, no byte tokens, unknown characters become `[UNK]`."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    split = pre_tokenizers.BertPreTokenizer()
    control = _distinct(pad, "[UNK]", bos, eos)
    words = [word for text in texts for word, _ in split.pre_tokenize_str(normalizer.normalize_str(text))]
    chars = sorted({char for word in words for char in word})
    vocab, _ = assemble([*control, *chars, *(f"##{char}" for char in chars)], (), vocab_size, ())
    for word in sorted(set(words), key=lambda word: (-words.count(word), word)):
        if len(vocab) >= vocab_size:
            break
        vocab.setdefault(word, len(vocab))
        for suffix in ("##ing", "##er", "##s", "##en"):
            vocab.setdefault(suffix, len(vocab))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.WordPiece("##", cleanup=clean_up)
    _add_bos(tokenizer, bos if add_bos else None)
    unk = "[UNK]"
    return _wrap(tokenizer, control, added, eos, bos, pad, unk=unk, padding_side=padding_side, clean_up=clean_up)


def smol_like(**options) -> PreTrainedTokenizerFast:
    """SmolLM2's habits: no BOS is added, unk is id 0, pad is EOS, padding at the right, the same 21 byte values missing."""
    missing = (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100))
    defaults = {
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "pad": "<|im_end|>",
        "unk": "<|endoftext|>",
        "padding_side": "right",
    }
    return byte_level_bpe(**{**defaults, "missing_bytes": missing, **options})


def gemma_like(**options) -> PreTrainedTokenizerFast:
    """Gemma's habits: BOS is added, runs of newlines and tabs and HTML tags are added tokens but not special."""
    return sentencepiece_bpe(**{"added": ["\n\n", "\n\n\n", "\t\t", "<table>"], **options})


def qwen_like(**options) -> PreTrainedTokenizerFast:
    """Qwen's habits: NFC normalizer, neither BOS nor a special pad, template words that are ordinary text."""
    defaults = {"eos": "<|im_end|>", "pad": None, "normalizer": normalizers.NFC(), "added": ["<tool_call>", "<think>"]}
    return byte_level_bpe(**{**defaults, **options})


def nfkc_bpe(**options) -> PreTrainedTokenizerFast:
    """Rewrites `ﬁ` to `fi` and `½` to three characters."""
    return byte_level_bpe(**{"normalizer": normalizers.NFKC(), **options})


def lowercasing_bpe(**options) -> PreTrainedTokenizerFast:
    return byte_level_bpe(**{"normalizer": normalizers.Lowercase(), **options})


def odd_added_bpe(**options) -> PreTrainedTokenizerFast:
    """Added tokens that look like the GPT-2 spelling of something else."""
    return byte_level_bpe(**{"added": ["čaj", "Ġra", "<tool_call>"], **options})


def bare_bpe(**options) -> PreTrainedTokenizerFast:
    """Neither a pad nor an EOS token."""
    return byte_level_bpe(**{"eos": None, "pad": None, **options})


def disjoint_pair() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Two tokenizers without a common text entry (no space, no byte tokens)."""
    latin = [text.replace(" ", "").replace(",", "").replace(".", "") for text in ENGLISH[:3]]
    hebrew = ["שלוםלכולם", "מהשלומכם", "עירהבירה"]
    return tuple(sentencepiece_bpe(80, texts=texts, byte_fallback=False) for texts in (latin, hebrew))


def _distinct(*names: str | None) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def learn_merges(
    texts: Sequence[str],
    split: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None,
    max_merges: int,
) -> tuple[tuple[str, str], ...]:
    normalized = [normalizer.normalize_str(text) if normalizer else text for text in texts]
    return _bpe_merges(tuple(word for text in normalized for word, _ in split.pre_tokenize_str(text)), max_merges)


def _bpe_merges(words: tuple[str, ...], max_merges: int) -> tuple[tuple[str, str], ...]:
    """The textbook algorithm, because the trainers of `tokenizers` are not the same in every run and version."""
    learned, learning = _learner(words)
    learned.extend(islice(learning, max(0, max_merges - len(learned))))
    return tuple(learned[:max_merges])


@functools.cache
def _learner(words: tuple[str, ...]) -> tuple[list[tuple[str, str]], Iterator[tuple[str, str]]]:
    """The merges that were learned so far, and those to come: few merges are the first of many."""
    return [], _merges(words)


def _merges(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    times = Counter(words)
    symbols = {word: list(word) for word in times}
    pairs: Counter = Counter()
    for word, n in times.items():
        for pair in pairwise(word):
            pairs[pair] += n
    while pairs:
        most = max(pairs.values())
        if most < 2:
            return
        best = min(pair for pair, n in pairs.items() if n == most)
        yield best
        for word, parts in symbols.items():
            places = [at for at in range(len(parts) - 2, -1, -1) if parts[at] == best[0] and parts[at + 1] == best[1]]
            if not places:
                continue
            for pair in pairwise(parts):
                pairs[pair] -= times[word]
            for at in places:
                if tuple(parts[at : at + 2]) == best:
                    parts[at : at + 2] = ["".join(best)]
            for pair in pairwise(parts):
                pairs[pair] += times[word]


def assemble(base: Sequence[str], merges: Iterable[tuple[str, str]], vocab_size: int, holes: Sequence[int]):
    free_ids = (i for i in count() if i not in holes)
    vocab = {token: next(free_ids) for token in base}
    kept = []
    for left, right in merges:
        if len(vocab) >= vocab_size:
            break
        if left in vocab and right in vocab:
            kept.append((left, right))
            if left + right not in vocab:
                vocab[left + right] = next(free_ids)
    return vocab, kept


def _add_bos(tokenizer: Tokenizer, bos: str | None) -> None:
    if bos is not None:
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos}:1 $B:1", ids)


def _wrap(
    tokenizer: Tokenizer,
    control: Sequence[str],
    added: Sequence[str],
    eos: str | None,
    bos: str | None,
    pad: str | None,
    *,
    padding_side: str,
    unk: str | None = None,
    clean_up: bool = False,
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    named = {"eos_token": eos, "bos_token": bos, "pad_token": pad, "unk_token": unk}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side=padding_side,
        clean_up_tokenization_spaces=clean_up,
        **{role: name for role, name in named.items() if name is not None},
    )


# --- Models ---------------------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def tiny_llama(vocab: PreTrainedTokenizerBase | int, **options) -> LlamaForCausalLM:
    return build(LlamaForCausalLM, LlamaConfig, vocab, {**SIZES, **options})


def tiny_gpt2(vocab: PreTrainedTokenizerBase | int, *, n_positions: int = 64, **options) -> GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": n_positions, "tie_word_embeddings": False}
    return build(GPT2LMHeadModel, GPT2Config, vocab, {**sizes, **options})


def tiny_gemma3(vocab: PreTrainedTokenizerBase | int, *, window: int = 8, **options) -> Gemma3ForCausalLM:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    own = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
    return build(Gemma3ForCausalLM, Gemma3TextConfig, vocab, {**SIZES, **layers, **own, **options})


def tiny_mistral(vocab: PreTrainedTokenizerBase | int, *, window: int = 8, **options) -> MistralForCausalLM:
    return build(MistralForCausalLM, MistralConfig, vocab, {**SIZES, "sliding_window": window, **options})


def tiny_mixtral(vocab: PreTrainedTokenizerBase | int, **options) -> MixtralForCausalLM:
    return build(MixtralForCausalLM, MixtralConfig, vocab, {**SIZES, "num_local_experts": 4, **options})


def tiny_mamba(vocab: PreTrainedTokenizerBase | int, **options) -> MambaForCausalLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False}
    return build(MambaForCausalLM, MambaConfig, vocab, {**sizes, **options})


def tiny_mamba2(vocab: PreTrainedTokenizerBase | int, **options) -> Mamba2ForCausalLM:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    }
    return build(Mamba2ForCausalLM, Mamba2Config, vocab, {**sizes, **options})


def tiny_falcon_h1(vocab: PreTrainedTokenizerBase | int, **options) -> FalconH1ForCausalLM:
    """Attention and Mamba-2 side by side; chunks on a warm cache are exact."""
    own = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
    return build(FalconH1ForCausalLM, FalconH1Config, vocab, {**SIZES, **own, **options})


def tiny_lfm2(vocab: PreTrainedTokenizerBase | int, **options) -> Lfm2ForCausalLM:
    """Short convolutions and attention; chunks on a warm cache are exact."""
    own = {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False}
    return build(Lfm2ForCausalLM, Lfm2Config, vocab, {**SIZES, **own, **options})


def tiny_jamba(vocab: PreTrainedTokenizerBase | int, **options) -> JambaForCausalLM:
    """Mamba and attention by turns; chunks on a warm cache are silently wrong, single tokens are exact."""
    own = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    return build(JambaForCausalLM, JambaConfig, vocab, {**SIZES, "num_experts": 2, **own, **options})


def tiny_m2m100(vocab: PreTrainedTokenizerBase | int, **options) -> M2M100ForConditionalGeneration:
    halves = {"layers": 1, "ffn_dim": 64, "attention_heads": 4}
    sizes = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in halves.items()}
    return build(M2M100ForConditionalGeneration, M2M100Config, vocab, {"d_model": 32, **sizes, **options})


def tiny_bert(vocab: PreTrainedTokenizerBase | int, **options) -> BertModel:
    """Encoder only: no causal language model."""
    return build(BertModel, BertConfig, vocab, {**SIZES, **options})


def save_pair(folder: Path, *names: str) -> list[str]:
    """Save two small models with unlike tokenizers in folders of these names, and return their paths."""
    for name, files in zip(names, _saved_pair(), strict=True):
        (folder / name).mkdir(parents=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
    return [str(folder / name) for name in names]


@functools.cache
def _saved_pair() -> list[dict[str, bytes]]:
    found = []
    for tokenizer, make in ((smol_like(), tiny_llama), (gemma_like(), tiny_gemma3)):
        with TemporaryDirectory() as folder:
            make(tokenizer).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            found.append({path.name: path.read_bytes() for path in Path(folder).iterdir()})
    return found


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _vocab_options(vocab: PreTrainedTokenizerBase | int, extra_rows: int) -> dict:
    if isinstance(vocab, int):
        return {"vocab_size": vocab + extra_rows, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    ids = {f"{role}_token_id": getattr(vocab, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    return dict(vocab_size=rows_of(vocab) + extra_rows, **ids)


def build(model_class, config_class, vocab, options: dict) -> PreTrainedModel:
    """Build a float32 model in eval mode.

    `seed`, `extra_rows` (beyond the tokenizer) and `sharpness` (times the output embeddings) are ours, the rest of
    the options goes to the config. Weights are drawn wider than any architecture does, so that the context matters
    and the best two logits differ.
    """
    options = dict(options)
    seed, sharpness = options.pop("seed", 0), options.pop("sharpness", 1.0)
    vocab_options = _vocab_options(vocab, options.pop("extra_rows", 0))
    config = config_class(**{**vocab_options, "dtype": "float32", **options})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                if weight.ndim == 2 and "norm" not in name and not name.endswith("A_log"):
                    weight.normal_(0, 1 if "embed" in name or "wte" in name else weight.shape[-1] ** -0.5)
            head = model.get_output_embeddings()
            if head is not None:
                head.weight.normal_(0, 0.5 * sharpness)
    return model


# --- A model with a script ------------------------------------------------------------------------------------------

Row = Mapping[int, float] | Tensor
"""Probabilities by id (what is not listed has next to none), or raw logits."""

UNLISTED = -40.0
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class Call:
    """What one forward got, and per row the real ids that its last real token could see, itself included."""

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    contexts: list[tuple[int, ...]]


class ScriptedConfig(PreTrainedConfig):
    model_type = "scripted"

    def __init__(self, vocab_size: int = 16, hidden_size: int = 8, max_position_embeddings: int = 4096, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = True
        self.num_hidden_layers = self.num_attention_heads = self.num_key_value_heads = 1
        super().__init__(**kwargs)


class ScriptedModel(PreTrainedModel, GenerationMixin):
    """A causal language model whose next-token logits are given.

    Args:
        vocab: A tokenizer (for the size and the bos, eos and pad ids) or a size.
        script: One of
            - a function from the context's ids to a row;
            - a mapping from contexts (tuples of ids) to rows, with the uniform row for all others;
            - a list of rows by step: row k follows a context of `prompt_length + k` ids; shorter contexts get the
              first row, longer ones the last.
        prompt_length: Length of the prompt in this model's own ids, BOS included, for a list of rows.
        shift: Added to all logits.
        extra_rows: Rows beyond the tokenizer.
        hidden_size: Width of the embeddings, which are random and serve nothing but methods that read them.

    The cache holds the ids themselves as keys and their positions as values. So the context is what the cache says,
    whatever was cropped, gathered or reordered, and a wrong position, a hole in a context or a stale entry raises.
    """

    config_class = ScriptedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False

    def __init__(
        self,
        vocab: PreTrainedTokenizerBase | int | ScriptedConfig,
        script: Callable[[tuple[int, ...]], Row] | Mapping[tuple[int, ...], Row] | Sequence[Row] = (),
        *,
        prompt_length: int = 1,
        shift: float = 0.0,
        extra_rows: int = 0,
        hidden_size: int = 8,
        **options,
    ):
        config = vocab
        if not isinstance(vocab, ScriptedConfig):
            config = ScriptedConfig(**{**_vocab_options(vocab, extra_rows), "hidden_size": hidden_size, **options})
        super().__init__(config)
        self.script, self.prompt_length, self.shift = script, prompt_length, shift
        self.calls: list[Call] = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.vocab_size)
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.eval()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def row(self, context: tuple[int, ...]) -> Tensor:
        """The logits after these ids, of shape `(vocab_size,)`."""
        if callable(self.script):
            row = self.script(context)
        elif isinstance(self.script, Mapping):
            row = self.script.get(context, torch.zeros(self.config.vocab_size))
        elif len(self.script):
            row = self.script[min(max(len(context) - self.prompt_length, 0), len(self.script) - 1)]
        else:
            row = torch.zeros(self.config.vocab_size)
        if isinstance(row, Mapping):
            logits = torch.full((self.config.vocab_size,), UNLISTED)
            for token, probability in row.items():
                logits[token] = max(torch.tensor(float(probability)).log().item(), UNLISTED)
            row = logits
        return row.to(torch.float32) + self.shift

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values=None,
        cache=None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache is not False and self.config.use_cache:
            cache = DynamicCache()
        batch, length = input_ids.shape
        past = int(cache.get_seq_length()) if cache is not None else 0
        visible = self._visible(attention_mask, batch, past, length)  # (B, T, past + T)
        seen = visible.sum(-1) - 1
        own = visible[:, range(length), range(past, past + length)]  # (B, T): which of the new ids are real
        positions = seen.clamp(min=0) if position_ids is None else position_ids.expand(batch, length)
        if not torch.equal(positions[own], seen[own]):
            raise ValueError(f"Positions {positions.tolist()} are not the count of real ids before: {seen.tolist()}.")

        ids, all_positions = input_ids, positions
        if cache is not None:
            states = (tensor.to(torch.float32).view(batch, 1, length, 1) for tensor in (input_ids, positions))
            keys, values = cache.update(*states, 0)
            ids, all_positions = (tensor[:, 0, : past + length, 0].long() for tensor in (keys, values))

        holes = visible & own[..., None] & (all_positions[:, None] != visible.cumsum(-1) - 1)  # (B, T, past + T)
        if holes.any():
            row = int(holes.any(-1).any(-1).nonzero()[0])
            raise ValueError(f"The cache of row {row} has a hole: {all_positions[row].tolist()}.")

        kept = list(range(length))
        if isinstance(logits_to_keep, Tensor):
            kept = logits_to_keep.tolist()
        elif logits_to_keep:
            kept = kept[-logits_to_keep:]
        logits = torch.zeros(batch, len(kept), self.config.vocab_size)
        contexts = []
        for b in range(batch):
            real = own[b].nonzero().flatten().tolist()
            read = {t: tuple(ids[b, visible[b, t]].tolist()) for t in real if t in kept or t == real[-1]}
            contexts.append(read[real[-1]] if real else ())
            for place, t in enumerate(kept):
                if t in read:
                    logits[b, place] = self.row(read[t])
        self.calls.append(Call(input_ids.clone(), attention_mask, position_ids, contexts))
        return CausalLMOutputWithPast(logits=logits.to(self.lm_head.weight), **{CACHE_NAME: cache})

    @staticmethod
    def _visible(attention_mask: Tensor | None, batch: int, past: int, length: int) -> Tensor:
        causal = torch.arange(past + length) <= torch.arange(past, past + length)[:, None]
        if attention_mask is None:
            return causal.expand(batch, -1, -1)
        attention_mask = attention_mask[..., : past + length].cpu()
        if attention_mask.ndim == 4:
            mask = attention_mask[:, 0]
            return causal & (mask if mask.dtype == torch.bool else mask == 0)
        if attention_mask.shape[-1] != past + length:
            raise ValueError(f"The mask covers {attention_mask.shape[-1]} of {past + length} ids.")
        return causal & attention_mask.bool()[:, None]
