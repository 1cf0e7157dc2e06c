"""Time spans beside the members' own cached steps, in one process, for several span lengths.

For every span length: the time of one of the primary's tokens, what that is above the slowest member decoding by itself
(medians and quartiles over repeats, members' own steps in between), the share of rounds in which all members agreed,
and forward passes a round. On a CPU the naive way too: the same rounds without any cache.

    python examples/benchmarks/spans.py [--models A B] [--lengths 1 2 4 8]
    python examples/benchmarks/spans.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 --lengths 1 4 8 16

With `--tokenizers` the members are an 8B and a 7B with random weights in bfloat16 on a GPU. Random weights write byte
garbage, so each is pushed along a text of its own: the two never agree, and every round is scored.
"""

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from decode import PROMPT
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria
from turns import OwnLoop, quartiles

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM, SweetSpanConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def push_along(model, ids: torch.Tensor) -> None:
    """Make a model prefer, at every position, the next id of a text."""

    def hook(module, args, kwargs, output):
        positions = kwargs["position_ids"][:, -output.logits.shape[1] :]
        following = ids[(positions + 1) % len(ids)]
        output.logits.scatter_add_(-1, following[..., None], torch.full_like(output.logits[..., :1], 16.0))
        return output

    model.register_forward_hook(hook, with_kwargs=True)


def large_members(folders: list[str]) -> EnsembleForCausalLM:
    """Members with random weights on a GPU, pushed along unlike texts."""
    from large_members import SHAPES, TEXT

    models, tokenizers = [], [AutoTokenizer.from_pretrained(folder) for folder in folders]
    words = TEXT.split(" ")
    for index, config in enumerate((SHAPES["8B"], SHAPES["7B"])):
        with torch.device("cuda"):
            torch.manual_seed(0)
            models.append(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
        text = " ".join(words[7 * index :] + words[: 7 * index])
        push_along(models[-1], tokenizers[index](text, return_tensors="pt").input_ids[0].cuda())
    return EnsembleForCausalLM.from_members(models, tokenizers)


def own_steps(ensemble: EnsembleForCausalLM, num_steps: int) -> list[float]:
    """Milliseconds of each member's own cached step, members in turn."""
    loops = []
    for model, tokenizer in zip(ensemble.members, ensemble.tokenizers, strict=True):
        loops.append(OwnLoop(model, tokenizer(PROMPT, return_tensors="pt").input_ids))
        loops[-1].step()
    steps = [[1e3 * loop.step() for loop in loops] for _ in range(num_steps)]
    return [statistics.median(values) for values in zip(*steps, strict=True)]


class Clock(StoppingCriteria):
    """Notes when each id is written; never stops."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def timed(ensemble: EnsembleForCausalLM, length: int, new_tokens: int, **options):
    """Milliseconds of one of the primary's tokens, and the rounds; the first, with the prompt, is no part of it."""
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
    texts = [item.candidates[item.winner].text for item in rounds]
    num_ids = sum(len(ensemble.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    return 1e3 * (clock.times[-1] - clock.times[0]) / num_ids, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--tokenizers", nargs=2, help="measure large members with random weights and these tokenizers")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--naive-tokens", type=int, default=0, help="tokens to time without caches")
    args = parser.parse_args()
    if args.tokenizers:
        ensemble = large_members(args.tokenizers)
    else:
        models = args.models
        if models is None:
            from demo_models import demo_model_paths

            models = [str(path) for path in demo_model_paths()]
        ensemble = EnsembleForCausalLM.from_pretrained(models, dtype=torch.float32)
    where = (
        torch.cuda.get_device_name() if args.tokenizers else f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    print(
        f"{where}, hf_ensemble {hf_ensemble.__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}, {ensemble.dtype}, {args.new_tokens} new tokens, {args.repeats} repeats"
    )
    own_steps(ensemble, 12)
    timed(ensemble, 2, 16)
    print("\n| L | own steps, ms | a token, ms | above the slowest, ms | agreed | forwards a round | naive, ms |")
    print("|---|---|---|---|---|---|---|")
    for length in tqdm(args.lengths):
        tokens, extra, own, rounds = [], [], [], []
        for _ in range(args.repeats):
            own.append(own_steps(ensemble, 12))
            spent, rounds = timed(ensemble, length, args.new_tokens)
            tokens.append(spent)
            extra.append(spent - max(own[-1]))
        naive = timed(ensemble, length, args.naive_tokens, use_cache=False)[0] if args.naive_tokens else None
        agreed = sum(len(item.candidates) == 1 for item in rounds) / len(rounds)
        forwards = [statistics.mean(counts) for counts in zip(*(item.num_forwards for item in rounds), strict=True)]
        each = " + ".join(f"{statistics.median(values):.1f}" for values in zip(*own, strict=True))
        print(
            f"| {length} | {each} | {quartiles(tokens, 1)} | {quartiles(extra, 1)} | {agreed:.0%} | "
            f"{', '.join(f'{count:.1f}' for count in forwards)} | {'' if naive is None else f'{naive:.0f}'} |"
        )


if __name__ == "__main__":
    main()
