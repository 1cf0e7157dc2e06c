"""Time a fused step and the members' own cached steps, in one process, in turn at every step.

After texts of each requested length, the script prints the members' own steps, their sum, the fused step of each
method, its ratio to the sum (median and quartiles over the steps), and the naive way: the assistant re-encodes and
recomputes the whole text at every step, and entries are mixed in Python dictionaries. Then it prints the throughput of
a batch of prompts of different lengths.

    python examples/benchmarks/decode.py [--models A B] [--at 50 500 2000] [--methods unite gac]
"""

import argparse
import itertools
import statistics
import time

import torch
from members import models_or_demo
from report import medians, milliseconds, print_heads, print_row, quartiles, setting
from texts import BEGINNINGS, text_ids
from tqdm import tqdm
from turns import OwnLoop, TakeTurns

from hf_ensemble import EnsembleForCausalLM


@torch.no_grad()
def naive_step(ensemble: EnsembleForCausalLM, ids: torch.Tensor, own_primary: float, top_k: int = 10) -> float:
    """Return the seconds of one naive step after the text `ids`; the primary's cached step counts as `own_primary`."""
    start = time.perf_counter()
    primary, assistant = ensemble.tokenizers
    text = primary.decode(ids[0], skip_special_tokens=True)
    inputs = assistant(text, return_tensors="pt").to(ensemble.members[1].device)
    row = ensemble.members[1](**inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    table = {assistant.decode([i]): p for i, p in enumerate(row.softmax(-1).tolist())}
    mixed = dict.fromkeys((primary.decode([i]) for i in range(len(primary))), 0.0)
    for key in sorted(table, key=table.get, reverse=True)[:top_k]:
        mixed[key] = mixed.get(key, 0.0) + table[key]
    max(mixed, key=mixed.get)
    return own_primary + time.perf_counter() - start


def time_lengths(ensemble: EnsembleForCausalLM, args: argparse.Namespace) -> None:
    rows = []
    for length in args.at:
        prompt = text_ids(ensemble.tokenizer, length)[None].to(ensemble.device)
        naive: dict[str, str] = {}
        own: dict[str, list[list[float]]] = {method: [] for method in args.methods}
        fused: dict[str, list[float]] = {method: [] for method in args.methods}
        progress = tqdm(total=args.turns * len(args.methods) * (args.steps + 2), desc=f"after {length}", unit="step")
        for turn, method in itertools.product(range(args.turns), args.methods):
            turns, output = decode(ensemble, prompt, method, args.steps, progress)
            own[method] += turns.own[2:]  # the first reads the prompt
            fused[method] += turns.fused[2:]
            if turn == 0 and not args.skip_naive:
                primary_step = statistics.median(step[0] for step in turns.own[2:])
                seconds = [naive_step(ensemble, output, primary_step) for _ in range(args.repeats)]
                naive[method] = f"{1e3 * statistics.median(seconds):.0f}"
        progress.close()
        rows += [(method, length, own[method], fused[method], naive.get(method, "")) for method in args.methods]
    print_heads(
        "method", "tokens before", "own steps, ms", "sum, ms", "fused step, ms", "ratio to sum, median (quartiles)", "naive, ms"
    )  # fmt: skip
    for method, length, own_steps, fused_steps, naive_step_ms in rows:
        sums = [sum(step) for step in own_steps]
        ratios = [a / b for a, b in zip(fused_steps, sums, strict=True)]
        each = milliseconds(sums), milliseconds(fused_steps), quartiles(ratios, 3)
        print_row(method, length, medians(own_steps), *each, naive_step_ms)


def decode(ensemble: EnsembleForCausalLM, prompt: torch.Tensor, method: str, num_steps: int, progress):
    """Decode after a text, in turn with the members by themselves: the times, and the ids."""
    prompts = [prompt, *(t(ensemble.tokenizer.decode(prompt[0]), return_tensors="pt").input_ids
                         for t in ensemble.tokenizers[1:])]  # fmt: skip
    loops = [OwnLoop(model, ids) for model, ids in zip(ensemble.members, prompts, strict=True)]
    for loop in loops:
        loop.step()
    turns = TakeTurns(loops, progress)
    # No EOS: the script measures steps, wherever the text would end.
    settings = {"max_new_tokens": num_steps + 2, "do_sample": False, "eos_token_id": ensemble.tokenizer.unk_token_id}
    mask = torch.ones_like(prompt)
    return turns, ensemble.generate(
        prompt, attention_mask=mask, **settings, method=method, stopping_criteria=[turns]
    )  # fmt: skip


def time_batch(ensemble: EnsembleForCausalLM, methods: list[str], repeats: int, new_tokens: int = 32) -> None:
    print_heads("method", "batch", "tokens a second, median (quartiles)", "to batch 1")
    end = {"eos_token_id": ensemble.tokenizer.unk_token_id}
    for method in methods:
        rates: dict[int, list[float]] = {1: [], len(BEGINNINGS): []}
        for _ in range(repeats):
            for size, values in rates.items():
                prompts = BEGINNINGS[-size:]
                inputs = ensemble.tokenizer(prompts, return_tensors="pt", padding=True).to(ensemble.device)
                start = time.perf_counter()
                ensemble.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, method=method, **end)
                values.append(size * new_tokens / (time.perf_counter() - start))
        one = statistics.median(rates[1])
        for size, values in rates.items():
            print_row(method, size, quartiles(values, 3), f"{statistics.median(values) / one:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--methods", nargs="+", default=["unite", "gac"])
    parser.add_argument("--at", nargs="+", type=int, default=[50, 500, 1000, 2000], help="lengths of texts")
    parser.add_argument("--steps", type=int, default=24, help="steps after each text")
    parser.add_argument("--turns", type=int, default=1, help="times that each method reads each text, in turn")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the batches, and of the naive step")
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--skip-batch", action="store_true")
    args = parser.parse_args()
    ensemble = EnsembleForCausalLM.from_pretrained(models_or_demo(args.models), dtype=torch.float32)
    print(setting(ensemble.device, "float32"))
    time_lengths(ensemble, args)
    if not args.skip_batch:
        time_batch(ensemble, args.methods, args.repeats)


if __name__ == "__main__":
    main()
