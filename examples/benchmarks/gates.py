"""Time gated decoding: a small gate member decides alone where it is sure, and a large member runs only elsewhere.

The script replays a text, whatever the scores, with thresholds that leave different shares of its tokens to all
members. Between steps, each member takes a step alone, so all run under the same conditions. Next to the mean step,
the script prints the cost without any waste: the gate's own step, plus the share times the other member's own step.

    python examples/benchmarks/gates.py [--models SMALL LARGE]
    python examples/benchmarks/gates.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3

With `--tokenizers` the members are a 1.2B and a 7B with random weights in bfloat16 on a GPU (`--shapes`, `--device`).
"""

import argparse
import statistics

import torch
from members import add_arguments, load
from report import print_heads, print_row, setting
from texts import Replay, text_ids
from tqdm import tqdm
from turns import OwnLoop, TakeTurns

from hf_ensemble import EnsembleForCausalLM, GacConfig

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
NUM_WARM_UP = 8
"""Steps of every run that are not counted."""


def replay(ensemble: EnsembleForCausalLM, texts: list[torch.Tensor], prompt_length: int, num_new: int, **options):
    """Write the text with this method, and return the output."""
    ids = texts[0][None, :prompt_length]
    return ensemble.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, eos_token_id=[],
        pad_token_id=0, logits_processor=[Replay(texts[0])], return_dict_in_generate=True, **options,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "1B", "7B")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=88, help="that are counted in a run")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    ensemble = load(args)
    num_new = NUM_WARM_UP + args.new_tokens
    texts = [text_ids(tokenizer, args.prompt + num_new + 1).to(ensemble.device) for tokenizer in ensemble.tokenizers]
    lengths = f"prompt {args.prompt}", f"{args.new_tokens} new tokens", f"{args.repeats} repeats"
    print(setting(ensemble.device, ensemble.dtype, *lengths))
    alone = replay(ensemble, texts, args.prompt, num_new, method=GacConfig(threshold=0.0), output_logits=True)
    sureness = torch.cat([step.exp().amax(-1) for step in alone.logits]).cpu()
    print_heads(
        "ensembled", "forwards", "gate's own, ms", "other's own, ms", "a step, ms", "own + share × other's, ms", "ratio"
    )  # fmt: skip
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
                ensemble, texts, args.prompt, num_new, method=GacConfig(threshold=threshold),
                stopping_criteria=[turns],
            )  # fmt: skip
            if repeat > 0:
                fused, own = fused + turns.fused[NUM_WARM_UP:], own + turns.own[NUM_WARM_UP:]
        assert output is not None
        gate, other = (1e3 * statistics.mean(values) for values in zip(*own, strict=True))
        step, share = 1e3 * statistics.mean(fused), output.share_ensembled[0]
        ideal = gate + share * other
        forwards = " and ".join(map(str, output.num_forwards))
        times = (f"{value:.1f}" for value in (gate, other, step, ideal))
        print_row(f"{share:.0%}", forwards, *times, f"{step / ideal:.2f}")


if __name__ == "__main__":
    main()
