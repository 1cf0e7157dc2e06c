"""Time the likelihood of a long text: the members alone, the ensemble, and the ensemble step by step, in turns.

Prints, for each method, the members' own single forward passes over the text, their sum, `ensemble.score`, its ratio to
the sum, its forward passes, and the naive way: a `generate` call that is made to write the text, which takes every step
by itself and keeps its logits.

    python examples/benchmarks/score.py [--models A B] [--tokens 500] [--methods gac unite] [--repeats 3]
"""

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import LogitsProcessor

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TEXT = (
    "The history of the city begins with a small settlement at the river. Over the centuries it grew, traded with its "
    "neighbours, burned down twice and was built again, each time with wider streets. In 1874 the first railway came, "
    "and with it came factories, crowded quarters and two newspapers, one of which is still printed today. "
) * 20


class Replay(LogitsProcessor):
    """Writes a given text and keeps the log-probabilities of its ids."""

    def __init__(self, ids: list[int], num_prompt_ids: int):
        self.ids, self.num_prompt_ids, self.total = ids, num_prompt_ids, 0.0

    def __call__(self, input_ids, scores):
        target = self.ids[input_ids.shape[1] - self.num_prompt_ids]
        self.total += float(scores.log_softmax(-1)[0, target])
        forced = torch.full_like(scores, -torch.inf)
        forced[:, target] = 0.0
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
    replay = Replay(ids, len(prompt))
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
    models = args.models
    if models is None:
        from demo_models import demo_model_paths

        models = demo_model_paths()
    ensemble = EnsembleForCausalLM.from_pretrained([str(path) for path in models], dtype="float32")
    whole = ensemble.tokenizer(TEXT)["input_ids"][: args.tokens + 8]
    prompt, ids = whole[:8], whole[8:]
    text = ensemble.tokenizer.decode(whole, skip_special_tokens=True)
    num_naive = len(ids[: args.naive_tokens])
    print(f"{len(ids)} ids after {len(prompt)}; hf_ensemble {hf_ensemble.__version__}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {platform.machine()}, {torch.get_num_threads()} threads; naive: {num_naive} ids; seconds", flush=True)  # fmt: skip
    scored(ensemble, prompt, ids[:8], args.methods[0])
    print(
        f"{'method':8} {'alone':>15} {'sum':>7} {'score':>7} {'ratio':>6} {'naive':>7} {'forwards':>10} {'difference':>10}"
    )
    for method in args.methods:
        scored(ensemble, prompt, ids[:8], method)
        alone, ours = [], []
        for _ in range(args.repeats):
            pairs = zip(ensemble.members, ensemble.tokenizers, strict=True)
            alone.append([own_forward(model, tokenizer, text) for model, tokenizer in pairs])
            ours.append(scored(ensemble, prompt, ids, method))
        few = ids[: args.naive_tokens]
        naive, total = replayed(ensemble, prompt, few, method)
        difference = abs(total - scored(ensemble, prompt, few, method)[1])
        own = [statistics.median(column) for column in zip(*alone, strict=True)]
        score = statistics.median(seconds for seconds, _ in ours)
        forwards = count_forwards(ensemble, prompt, ids, method)
        print(
            f"{method:8} {' + '.join(f'{seconds:.2f}' for seconds in own):>15} {sum(own):7.2f} {score:7.2f} "
            f"{score / sum(own):6.2f} {naive:7.2f} {'+'.join(map(str, forwards)):>10} {difference:10.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
