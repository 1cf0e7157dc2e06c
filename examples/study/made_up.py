"""A made-up world to try the stages: small originals, and two tiny members with different tokenizers."""

import json
import random
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
PLACES = ("Rome", "Oslo", "Lima", "Bonn")
SIZES = (24, 16, 60, 20)
"""How much to hold out, as `prepare.Sizes`."""


def write_originals(folder: Path) -> Path:
    """Write files in the format of all three originals, with questions that tiny members can learn to answer.

    Args:
        folder: Where to write them; created if it does not exist.

    Returns:
        The folder.
    """
    rng = random.Random(0)
    for part in ("data/filtered", "grade_school_math/data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    sentences, questions = [], {"dev": [], "test": []}
    for number in range(240):
        name, place = f"Wiki1k:wikinews:{number // 6}:0:{number % 6}", rng.choice(PLACES)
        sentences.append(f"{name}\t{rng.choice(NAMES)} lives in {place} .")
        fields = [name, "0", "0", "0", "0", "Where ?", "3", "w1:3", "w2:2 3"]
        questions["dev" if number % 12 < 6 else "test"].append("\t".join(fields))
    (folder / "data/wiki-sentences.tsv").write_text("\n".join(sentences) + "\n", "utf-8")
    for part, lines in questions.items():
        (folder / f"data/filtered/{part}.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    articles = []
    for number in range(8):
        place = rng.choice(PLACES)
        asked = {"question": "Where?", "answers": [{"text": place}]}
        paragraphs = [{"context": f"{rng.choice(NAMES)} lives in {place}.", "qas": [asked] * 3}] * 2
        articles.append({"title": f"Article {number}", "paragraphs": paragraphs})
    (folder / "xquad.en.json").write_text(json.dumps({"data": articles}), "utf-8")
    for part, count in (("train", 120), ("test", 24)):
        sums = [(rng.randint(0, 4), rng.randint(0, 4)) for _ in range(count)]
        lines = [{"question": f"{a} + {b}?", "answer": f"<<{a}+{b}={a + b}>>\n#### {a + b}"} for a, b in sums]
        (folder / f"grade_school_math/data/{part}.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return folder


def make_bases(folder: Path, texts: list[str]) -> None:
    """Save two tiny untrained models, each with its own tokenizer.

    Args:
        folder: Gets one folder per model, named like the study's two base models.
        texts: The texts to train the tokenizers on.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    for seed, (name, vocab_size) in enumerate((("smollm2", 300), ("gemma", 340))):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator(texts, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
