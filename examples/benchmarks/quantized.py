"""What quantising members costs and saves: texts, bits per byte, time per token and memory, compared with float32.

The script loads all kinds, which continue each prompt greedily in turn; times are processor time. It compares the texts
with those of the first kind: how many are equal, and after how many tokens the others differ (median). Bits per byte are
those of the ensemble (GaC), for each text after its first words. Kinds whose package is missing are named and left out.
`int8` is that of `int8_members.py`.

    python examples/benchmarks/quantized.py [--models A B] [--kinds float32 bfloat16 int8 torchao-int8 bitsandbytes-int4]
"""

import argparse
import importlib.util
import math
import statistics
import time
from typing import Any

import torch
from members import int8_ensemble, models_or_demo
from report import milliseconds, print_heads, print_row, setting
from texts import PROMPT, QUESTIONS, TEXT

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.members.member_model import tensors_of

PLAIN = ("float32", "bfloat16", "int8")
"""They need no package."""

KINDS = (*PLAIN, "torchao-int8", "torchao-int4", "bitsandbytes-int8", "bitsandbytes-int4")
PROMPTS = (PROMPT, QUESTIONS, "The capital of France is", "Water boils at", "Once upon a time", "def add(a, b):")
"""Read one by one."""


def quantisation(kind: str, device: str = "cpu") -> Any:
    """Return the configuration of a kind for weights on a device; None for plain weights."""
    if kind == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig(version=2))
    if kind == "torchao-int4":
        from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
        from transformers import TorchAoConfig

        if device != "cpu":
            return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
        # Numbers of four bits, each kept in a byte: the one int4 of torchao that every CPU runs.
        return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    if kind.startswith("bitsandbytes"):
        from transformers import BitsAndBytesConfig

        if kind.endswith("int8"):
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return None


def quantise(model: Any, kind: str, device: str) -> None:
    """Quantise a loaded model in place by torchao."""
    from torchao.quantization import quantize_

    quantize_(model, quantisation(kind, device).quant_type)


def load(kind: str, models: list[str]) -> EnsembleForCausalLM:
    """An ensemble of members of one kind."""
    if kind == "int8":
        return int8_ensemble(models)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    return EnsembleForCausalLM.from_pretrained(models, dtype=dtype, quantization_config=quantisation(kind))


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
    packages = {kind: kind.split("-")[0] for kind in args.kinds if kind not in PLAIN}
    missing = [kind for kind, package in packages.items() if importlib.util.find_spec(package) is None]
    print(
        setting("cpu", args.method, f"{args.new_tokens} new tokens", f"not installed: {', '.join(missing) or 'none'}")
    )
    print_heads("weights", "equal texts", "first difference", "bits per byte", "ms a token", "weights, MB")
    ensembles = {kind: load(kind, models) for kind in args.kinds if kind not in missing}
    texts: dict[str, list[list[int]]] = {kind: [] for kind in ensembles}
    seconds: dict[str, list[float]] = {kind: [] for kind in ensembles}
    for prompt in ("To warm up", *PROMPTS):
        for kind, ensemble in ensembles.items():
            inputs = ensemble.tokenizer(prompt, return_tensors="pt")
            start = time.process_time()
            output = ensemble.generate(
                **inputs,
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
                do_sample=False,
                method=args.method,
            )
            seconds[kind].append((time.process_time() - start) / args.new_tokens)
            texts[kind].append(output[0, inputs.input_ids.shape[1] :].tolist())
    first = texts[next(iter(ensembles))][1:]
    for kind, ensemble in ensembles.items():
        differ = [
            next(n for n, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1])
            for text, other in zip(texts[kind][1:], first, strict=True)
            if text != other
        ]
        bits = statistics.mean(bits_per_byte(ensemble, text) for text in (TEXT, QUESTIONS))
        print_row(
            kind, f"{len(first) - len(differ)} of {len(first)}", statistics.median(differ) if differ else "none",
            f"{bits:.3f}", milliseconds(seconds[kind][1:]), f"{megabytes(ensemble):.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
