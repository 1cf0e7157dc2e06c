"""The members of a benchmark: models from folders, or random weights in the shapes of large models.

Imports only public names of `hf_ensemble`, so that `versions.py` can load older versions with it.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config

from hf_ensemble import EnsembleForCausalLM, MemberConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_models import models_or_demo
from int8_members import int8_ensemble as int8_ensemble

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "vocab_size": 8,
}  # fmt: skip
SHAPES: dict[str, PretrainedConfig] = {
    "8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192,
    ),
    "7B": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768,
    ),
    "1B": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(**TINY),
    "tiny-qwen": Qwen2Config(**TINY),
}  # fmt: skip
"""By name; `tiny` and `tiny-qwen` show on a CPU that a benchmark runs."""


def add_arguments(parser: argparse.ArgumentParser, *shapes: str) -> None:
    """Let the members be models in folders, or random weights.

    Args:
        parser: Gets the arguments that `load` reads.
        shapes: Shapes of the random weights, unless others are asked for.
    """
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument(
        "--tokenizers", nargs="+", help="random weights instead, in bfloat16, read by these tokenizers"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(shapes), help="of the random weights")
    parser.add_argument("--device", help="default: cpu for models, cuda for random weights")


def load(args: argparse.Namespace) -> EnsembleForCausalLM:
    """The members that the arguments ask for, in float32 if they are models.

    Args:
        args: What `add_arguments` has added.
    """
    if args.tokenizers:
        return random_members(args.shapes, args.tokenizers, [args.device or "cuda"])
    return EnsembleForCausalLM.from_pretrained(
        models_or_demo(args.models), dtype=torch.float32, device_map=args.device or "cpu"
    )


def random_members(
    shapes: Sequence[str],
    tokenizers: Sequence[str],
    devices: Sequence[str],
    ensemble_class: type[EnsembleForCausalLM] = EnsembleForCausalLM,
) -> EnsembleForCausalLM:
    """Members with random weights in bfloat16, named after their shapes.

    Args:
        shapes: Names in `SHAPES`, one for each member.
        tokenizers: Folders, one for each member.
        devices: Where the members are, in turn.
        ensemble_class: What they are put together to.
    """
    loaded = [AutoTokenizer.from_pretrained(folder) for folder in tokenizers]
    models = []
    for n, (shape, tokenizer) in enumerate(zip(shapes, loaded, strict=True)):
        config = copy.deepcopy(SHAPES[shape])
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        with torch.device(devices[n % len(devices)]):
            torch.manual_seed(n)
            models.append(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    names = [shape if shapes.count(shape) == 1 else f"{shape}, member {n}" for n, shape in enumerate(shapes)]
    return ensemble_class.from_members(models, loaded, member_configs=[MemberConfig(name=name) for name in names])


def push_along(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Make a model prefer, at every position, the next id of a text: random weights write byte garbage.

    Args:
        model: Changed in place, by a hook.
        ids: The text, of shape `(num_ids,)`, on the device of the model. Read at every forward, so it may be changed.
    """

    def hook(module, args, kwargs, output):
        positions = kwargs["position_ids"][:, -output.logits.shape[1] :]
        following = ids[(positions + 1) % len(ids)]
        output.logits.scatter_add_(-1, following[..., None], torch.full_like(output.logits[..., :1], 16.0))
        return output

    model.register_forward_hook(hook, with_kwargs=True)
