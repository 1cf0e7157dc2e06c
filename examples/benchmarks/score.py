"""Time the likelihood of a long text: the members alone, the ensemble, and the ensemble step by step, in turn.

For each method, the script prints the members' own single forward passes over the text, their sum, `ensemble.score`,
its ratio to the sum, its number of forward passes, and the naive way: a `generate` call that is made to write the text
step by step and keeps its logits.

    python examples/benchmarks/score.py [--models A B] [--tokens 500] [--methods gac unite] [--repeats 3]
"""

import argparse
import statistics
import time

import torch
from members import models_or_demo
from report import medians, print_heads, print_row, setting
from texts import Replay, text_ids

from hf_ensemble import EnsembleForCausalLM


class ScoredReplay(Replay):
    """Keeps the log-probabilities of the ids that it writes."""

    total = 0.0

    def __call__(self, input_ids, scores):
        forced = super().__call__(input_ids, scores)
        self.total += float(scores.log_softmax(-1)[forced == 0].sum())
        return forced


@torch.no_grad()
def own_forward(model, tokenizer, text: str) -> float:
    """Seconds of one forward pass over the text, and the log-probabilities of its ids."""
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    start = time.perf_counter()
    logits = model(ids, use_cache=False).logits[0, :-1]
    for block, targets in zip(logits.split(64), ids[0, 1:].split(64), strict=True):
        block.float().log_softmax(-1).gather(-1, targets[:, None]).sum().item()
    return time.perf_counter() - start


def scored(ensemble: EnsembleForCausalLM, prompt: list[int], ids: list[int], method: str) -> tuple[float, float]:
    start = time.perf_counter()
    found = ensemble.score([prompt], [ids], method=method)
    return time.perf_counter() - start, found.log_probs.item()


def replayed(ensemble: EnsembleForCausalLM, prompt: list[int], ids: list[int], method: str) -> tuple[float, float]:
    replay = ScoredReplay(ids, len(prompt))
    inputs = torch.tensor([prompt], device=ensemble.device)
    start = time.perf_counter()
    settings = {"max_new_tokens": len(ids), "min_new_tokens": None, "do_sample": False, "use_cache": True}
    ensemble.generate(inputs, method=method, logits_processor=[replay], **settings)
    return time.perf_counter() - start, replay.total


def count_forwards(ensemble: EnsembleForCausalLM, prompt: list[int], ids: list[int], method: str) -> list[int]:
    counts = [0] * len(ensemble.members)

    def add(index: int):
        counts[index] += 1

    hooks = [model.register_forward_hook(lambda *_, n=n: add(n)) for n, model in enumerate(ensemble.members)]
    scored(ensemble, prompt, ids, method)
    for hook in hooks:
        hook.remove()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members, the primary first; default: the two demo models")
    parser.add_argument("--tokens", type=int, default=500, help="ids of the primary that are scored")
    parser.add_argument("--methods", nargs="+", default=["gac", "unite"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive-tokens", type=int, help="ids that the naive way takes; default: all")
    args = parser.parse_args()
    ensemble = EnsembleForCausalLM.from_pretrained(models_or_demo(args.models), dtype="float32")
    whole = text_ids(ensemble.tokenizer, args.tokens + 8).tolist()
    prompt, ids = whole[:8], whole[8:]
    few = ids[: args.naive_tokens]
    text = ensemble.tokenizer.decode(whole, skip_special_tokens=True)
    details = f"{len(ids)} ids after {len(prompt)}", f"naive: {len(few)} ids", f"{args.repeats} repeats"
    print(setting(ensemble.device, *details))
    print_heads("method", "alone, ms", "sum, ms", "score, ms", "ratio", "naive, ms", "forwards", "difference")
    for method in args.methods:
        scored(ensemble, prompt, ids[:8], method)
        alone, ours = [], []
        for _ in range(args.repeats):
            pairs = zip(ensemble.members, ensemble.tokenizers, strict=True)
            alone.append([own_forward(model, tokenizer, text) for model, tokenizer in pairs])
            ours.append(scored(ensemble, prompt, ids, method)[0])
        naive, total = replayed(ensemble, prompt, few, method)
        again = scored(ensemble, prompt, few, method)[1]
        difference = 0.0 if total == again else abs(total - again)  # both may be -inf
        own, score = statistics.median(map(sum, alone)), statistics.median(ours)
        print_row(
            method, medians(alone), f"{1e3 * own:.1f}", f"{1e3 * score:.1f}", f"{score / own:.2f}", f"{1e3 * naive:.1f}",
            " + ".join(map(str, count_forwards(ensemble, prompt, ids, method))), f"{difference:.1e}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
