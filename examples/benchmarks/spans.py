"""Time spans and the members' own cached steps, in one process, for several span lengths.

For every span length, the script prints the time per token of the primary, how much more that is than the slowest
member takes alone (medians and quartiles over repeats, with the members' own steps in between), the share of rounds in
which all members agreed, and the forward passes per round. On a CPU it also prints the naive way: the same rounds
without any cache.

    python examples/benchmarks/spans.py [--models A B] [--lengths 1 2 4 8]
    python examples/benchmarks/spans.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 --lengths 1 4 8 16

With `--tokenizers` the members are an 8B and a 7B with random weights in bfloat16 on a GPU (`--shapes`, `--device`).
Random weights write byte garbage, so each member is pushed along its own text: the two never agree, and every round is
scored.
"""

import argparse
import statistics
import sys
import time

import torch
from measure import synchronize
from members import add_arguments, load, push_along
from report import medians, milliseconds, print_heads, print_row, setting
from texts import PROMPT, text_ids
from tqdm import tqdm
from transformers import StoppingCriteria
from turns import OwnLoop

from hf_ensemble import EnsembleForCausalLM, SweetSpanConfig

NUM_OWN_STEPS = 12
NUM_PUSHED_IDS = 4096
WORDS_APART = 7
"""Offset in words between the texts that random weights are pushed along."""


def own_steps(ensemble: EnsembleForCausalLM, num_steps: int) -> list[float]:
    """Seconds of each member's own cached step, members in turn."""
    loops = []
    for model, tokenizer in zip(ensemble.members, ensemble.tokenizers, strict=True):
        loops.append(OwnLoop(model, tokenizer(PROMPT, return_tensors="pt").input_ids))
        loops[-1].step()
    steps = [[loop.step() for loop in loops] for _ in range(num_steps)]
    return [statistics.median(values) for values in zip(*steps, strict=True)]


class Clock(StoppingCriteria):
    """Notes when each id is written; never stops."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def timed(ensemble: EnsembleForCausalLM, length: int, new_tokens: int, **options):
    """Seconds of one of the primary's tokens, and the rounds; the first, with the prompt, is no part of it."""
    inputs = ensemble.tokenizer(PROMPT, return_tensors="pt").to(ensemble.device)
    clock = Clock()
    output = ensemble.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        return_dict_in_generate=True,
        pad_token_id=0,
        stopping_criteria=[clock],
        method=SweetSpanConfig(span_length=length),
        **options,
    )
    rounds = output.rounds[0][1:]
    if not rounds:
        sys.exit(f"spans.py: {new_tokens} new tokens are within the first span of {length} words: ask for more")
    texts = [item.candidates[item.winner].text for item in rounds]
    num_ids = sum(len(ensemble.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    return (clock.times[-1] - clock.times[0]) / num_ids, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "8B", "7B")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive-tokens", type=int, default=0, help="tokens to time without caches")
    args = parser.parse_args()
    ensemble = load(args)
    if args.tokenizers:
        for n, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
            push_along(model, text_ids(tokenizer, NUM_PUSHED_IDS, skip=n * WORDS_APART).to(model.device))
    print(
        setting(ensemble.device, ensemble.dtype, f"{args.new_tokens} new tokens", f"{args.repeats} repeats"),
    )
    own_steps(ensemble, NUM_OWN_STEPS)
    timed(ensemble, 2, args.new_tokens)
    print_heads(
        "L", "own steps, ms", "a token, ms", "above the slowest, ms", "agreed", "forwards a round", "naive, ms"
    )  # fmt: skip
    for length in tqdm(args.lengths):
        tokens, extra, own, rounds = [], [], [], []
        for _ in range(args.repeats):
            own.append(own_steps(ensemble, NUM_OWN_STEPS))
            spent, rounds = timed(ensemble, length, args.new_tokens)
            tokens.append(spent)
            extra.append(spent - max(own[-1]))
        naive = timed(ensemble, length, args.naive_tokens, use_cache=False)[0] if args.naive_tokens else None
        agreed = sum(len(item.candidates) == 1 for item in rounds) / len(rounds)
        forwards = [statistics.mean(counts) for counts in zip(*(item.num_forwards for item in rounds), strict=True)]
        print_row(
            length, medians(own), milliseconds(tokens), milliseconds(extra), f"{agreed:.0%}",
            ", ".join(f"{count:.1f}" for count in forwards), "" if naive is None else f"{1e3 * naive:.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
