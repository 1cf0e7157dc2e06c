import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from examples.demo_models import sample_texts

pytestmark = pytest.mark.real


def test_smollm2_splits_digits_and_has_no_bos(tokenizers):
    tokenizer = tokenizers[0]
    assert tokenizer("Year 2024²").tokens() == ["Year", "Ġ", "2", "0", "2", "4", "Â²"]
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        0,
        1,
        2,
        2,
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>system"
    )


@pytest.mark.npm
def test_gemma_tokenizer_is_the_published_one(tokenizers):
    folder = Path(os.environ["HF_ENSEMBLE_NPM_TOKENIZERS"], "tokenizer-gemma3", "models")
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = tokenizers[1]
    literals = ["a▁▁b", "<unused5>x", "<mask>", "<start_of_turn>user\nHi<end_of_turn>", " " * 80, "\n" * 80, "<0x0A>"]
    for text in sample_texts(300) + literals:
        expected = published.encode(text).ids
        assert tokenizer(text).input_ids == expected, text
        assert tokenizer.decode(expected) == published.decode(expected, skip_special_tokens=False), text


@pytest.mark.parametrize("member", [0, 1])
def test_model_continues_a_pattern(models, tokenizers, member):
    model, tokenizer = models[member], tokenizers[member]
    assert model.dtype == torch.float32
    output_ids = model.generate(**tokenizer("1, 2, 3, 4,", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    assert " 5, 6, 7" in tokenizer.decode(output_ids[0])
