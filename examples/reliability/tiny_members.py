"""Two members with random weights that load in an instant: a Llama and a Qwen2 whose tokenizers have different merges."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = (
    ("the", " the", " city", " river", " of", " and", "ing", " with", " years", "The"),
    ("th", " th", "er", " and", " settlement", " it", "ed", " small", " in"),
)
"""What each tokenizer writes with one token, beside every byte."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def save_tiny_members(folder: Path) -> list[str]:
    """Write the members `one` and `two` to a folder, and return their paths."""
    paths = []
    kinds = ((LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM))
    for seed, (name, words, (config_class, model_class)) in enumerate(zip(("one", "two"), WORDS, kinds, strict=True)):
        tokenizer = _tokenizer(words)
        ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = model_class(config_class(vocab_size=len(tokenizer), **SIZES, **ends))
        with torch.no_grad():
            # Random weights hardly differ between ids; texts shall depend on what was read.
            model.lm_head.weight.mul_(20)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        paths.append(str(folder / name))
    return paths


def _tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    vocab = {token: number for number, token in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for word in words:
        letters = word.replace(" ", "Ġ")
        for length in range(2, len(letters) + 1):
            pair, token = (letters[: length - 1], letters[length - 1]), letters[:length]
            if token not in vocab:
                vocab[token] = len(vocab)
                merges.append(pair)
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
    )
