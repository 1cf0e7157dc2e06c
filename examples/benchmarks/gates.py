"""Time gated decoding: a small gate member that decides alone where it is sure, and a large one that runs elsewhere.

A text is replayed, whatever the scores, with thresholds that leave several shares of its tokens to all members. Between
steps the members take one of their own, so that all meet the same machine. Printed beside the mean step: the gate's own
plus the share times the other's own, which is what it would cost if nothing were wasted.

    python examples/benchmarks/gates.py [--models SMALL LARGE]
    python examples/benchmarks/gates.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3

With `--tokenizers` the members are a 1.2B and a 7B with random weights in bfloat16 on a GPU.
"""

import argparse
import platform
import statistics
import sys
from pathlib import Path

import torch
import transformers
from large_members import SHAPES, TEXT, Replay
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import OwnLoop, TakeTurns

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM, GacConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
NUM_WARM_UP = 8


def large_members(folders: list[str]) -> EnsembleForCausalLM:
    """A small and a large member with random weights on a GPU."""
    models = []
    for config in (SHAPES["1B"], SHAPES["7B"]):
        with torch.device("cuda"):
            torch.manual_seed(0)
            models.append(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    return EnsembleForCausalLM.from_members(models, [AutoTokenizer.from_pretrained(folder) for folder in folders])


def replay(ensemble: EnsembleForCausalLM, texts: list[torch.Tensor], prompt_length: int, num_new: int, **options):
    """Write the text with this method, and return the output."""
    ids = texts[0][None, :prompt_length]
    return ensemble.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=[],
        pad_token_id=0, logits_processor=[Replay(texts[0], prompt_length)], return_dict_in_generate=True, **options,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs=2, help="the gate and the other; default: the two demo models")
    parser.add_argument("--tokenizers", nargs=2, help="measure large members with random weights and these tokenizers")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.tokenizers:
        ensemble = large_members(args.tokenizers)
    else:
        if args.models is None:
            from demo_models import demo_model_paths

            args.models = [str(path) for path in demo_model_paths()]
        ensemble = EnsembleForCausalLM.from_pretrained(args.models, dtype=torch.float32)
    texts = [t(TEXT, return_tensors="pt").input_ids[0].to(ensemble.device) for t in ensemble.tokenizers]
    device = ensemble.device
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"{where}, {platform.machine()}, hf_ensemble {hf_ensemble.__version__}, transformers "
        f"{transformers.__version__}, torch {torch.__version__}, {ensemble.dtype}, prompt {args.prompt}, "
        f"{args.new_tokens} new tokens, {args.repeats} repeats"
    )
    alone = replay(ensemble, texts, args.prompt, args.new_tokens, method=GacConfig(threshold=0.0), output_logits=True)
    sureness = torch.cat([step.exp().amax(-1) for step in alone.logits]).cpu()
    print(
        "\n| ensembled | forwards | gate's own, ms | other's own, ms | a step, ms | own + share × other's, ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for share in tqdm(SHARES):
        threshold = {0.0: 0.0, 1.0: 1.0}.get(share, sureness.quantile(share).item())
        fused, own, output = [], [], None
        # The first time serves as a warm-up: forward passes over several tokens use kernels of their own.
        for repeat in range(args.repeats + 1):
            pairs = zip(ensemble.members, texts, strict=True)
            loops = [OwnLoop(model, ids[None, : args.prompt], ids) for model, ids in pairs]
            for loop in loops:
                loop.step()
            turns = TakeTurns(loops)
            output = replay(
                ensemble, texts, args.prompt, args.new_tokens, method=GacConfig(threshold=threshold),
                stopping_criteria=[turns],
            )  # fmt: skip
            if repeat > 0:
                fused, own = fused + turns.fused[NUM_WARM_UP:], own + turns.own[NUM_WARM_UP:]
        assert output is not None
        gate, other = (1e3 * statistics.mean(values) for values in zip(*own, strict=True))
        step, share = 1e3 * statistics.mean(fused), output.share_ensembled[0]
        ideal = gate + share * other
        print(
            f"| {share:.0%} | {output.num_forwards[0]} and {output.num_forwards[1]} | {gate:.1f} | {other:.1f} | "
            f"{step:.1f} | {ideal:.1f} | {step / ideal:.2f} |"
        )


if __name__ == "__main__":
    main()
