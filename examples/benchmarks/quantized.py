"""What quantising members costs and saves: texts, bits per byte, time per token and memory, compared with bfloat16.

The script loads each kind by itself and continues the same prompts greedily. It compares the texts with those of the
first kind: how many are equal, and after how many tokens the others differ (median). Bits per byte are those of the
ensemble (GaC), for each text after its first words. Kinds whose package is missing are named and left out.

    python examples/benchmarks/quantized.py [--models A B] [--kinds bfloat16 torchao-int8 bitsandbytes-int4]
"""

import argparse
import importlib.util
import math
import statistics
import time
from typing import Any

import torch
from members import models_or_demo
from report import milliseconds, print_heads, print_row, setting
from texts import PROMPT, QUESTIONS, TEXT

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.members.member_model import tensors_of

KINDS = ("bfloat16", "torchao-int8", "torchao-int4", "bitsandbytes-int8", "bitsandbytes-int4")
PROMPTS = (PROMPT, QUESTIONS, "The capital of France is", "Water boils at", "Once upon a time", "def add(a, b):")
"""Read one by one."""


def quantisation(kind: str) -> Any:
    """Return the configuration of a kind; None for plain weights."""
    if kind == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    if kind == "torchao-int4":
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup
        from transformers import TorchAoConfig

        # Numbers of four bits, each kept in a byte: the one int4 of torchao that every CPU runs.
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    if kind.startswith("bitsandbytes"):
        from transformers import BitsAndBytesConfig

        if kind.endswith("int8"):
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return None


def megabytes(ensemble: EnsembleForCausalLM) -> float:
    """Return the size of all members' weights and buffers, counting shared ones once."""
    return sum(tensor.nbytes for tensor in tensors_of(ensemble.members)) / 1e6


def bits_per_byte(ensemble: EnsembleForCausalLM, text: str) -> float:
    """Of a text after its first 40 characters."""
    start = text.index(" ", 40)
    log_prob = ensemble.score([text[:start]], [text[start:]], method="gac").log_probs[0]
    return -float(log_prob) / math.log(2) / len(text[start:].encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="texts are compared with the first"
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--method", default="unite")
    args = parser.parse_args()
    models = models_or_demo(args.models)
    packages = {kind: kind.split("-")[0] for kind in args.kinds if kind != "bfloat16"}
    missing = [kind for kind, package in packages.items() if importlib.util.find_spec(package) is None]
    print(
        setting("cpu", args.method, f"{args.new_tokens} new tokens", f"not installed: {', '.join(missing) or 'none'}")
    )
    print_heads("weights", "equal texts", "first difference", "bits per byte", "ms a token", "weights, MB")
    first: list[list[int]] = []
    for kind in [kind for kind in args.kinds if kind not in missing]:
        ensemble = EnsembleForCausalLM.from_pretrained(
            models, dtype=torch.bfloat16, quantization_config=quantisation(kind)
        )
        texts, seconds = [], []
        for prompt in ("To warm up", *PROMPTS):
            inputs = ensemble.tokenizer(prompt, return_tensors="pt")
            start = time.perf_counter()
            output = ensemble.generate(
                **inputs,
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
                do_sample=False,
                method=args.method,
            )
            seconds.append((time.perf_counter() - start) / args.new_tokens)
            texts.append(output[0, inputs.input_ids.shape[1] :].tolist())
        texts = texts[1:]
        first = first or texts
        differ = [
            next(n for n, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1])
            for text, other in zip(texts, first, strict=True)
            if text != other
        ]
        bits = statistics.mean(bits_per_byte(ensemble, text) for text in (TEXT, QUESTIONS))
        print_row(
            kind, f"{len(texts) - len(differ)} of {len(texts)}", statistics.median(differ) if differ else "none",
            f"{bits:.3f}", milliseconds(seconds[1:]), f"{megabytes(ensemble):.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
