"""Compare texts that are drafted ahead with those of the plain loop, on prompts of evaluation sets.

Greedy texts have to be the same up to the first decision that is as good as tied. Every case is a method and a prompt;
finished ones are kept in a file, one JSON line each, and are not run again.

    python tests/real/compare_speculation.py DATA --state speculation.jsonl [--prompts 200] [--new-tokens 32]
        [--methods gac unite deepen] [--speculation ngram auto SmolLM2-135M-Instruct] [--device cuda]

DATA is a folder of JSON lines, as for `examples/evaluation_sets.py`.
"""

import argparse
import functools
import itertools
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo_models import demo_model_paths  # noqa: E402
from evaluation_sets import SETS, read  # noqa: E402

from hf_ensemble import DeepenConfig, EnsembleForCausalLM, EvaConfig, GacConfig, MinedConfig, UniteConfig  # noqa: E402
from tests.real.compare_reference import TIE, run_cases  # noqa: E402

METHODS = {
    "gac": GacConfig(),
    "unite": UniteConfig(),
    "deepen": DeepenConfig(num_anchors=4096),
    "mined": MinedConfig(),
    "eva": EvaConfig(),
}


def generate(ensemble: EnsembleForCausalLM, prompt: str, num_new: int, **options):
    """The output of one greedy call, and the seconds it took."""
    inputs = ensemble.tokenizer(prompt, return_tensors="pt").to(ensemble.device)
    start = time.perf_counter()
    output = ensemble.generate(
        **inputs, max_new_tokens=num_new, do_sample=False, return_dict_in_generate=True, **options
    )
    ids = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
    return output, ids, time.perf_counter() - start


def compare(ensemble: EnsembleForCausalLM, method: str, prompt: str, num_new: int, names: list[str]) -> dict:
    """One prompt without drafts, and with each kind of them."""
    config = METHODS[method]
    plain, expected, seconds = generate(ensemble, prompt, num_new, method=config, output_logits=True)
    best = torch.stack([step[0].topk(2).values for step in plain.logits])
    is_tied = (best[:, 0] - best[:, 1] < TIE).tolist()
    num_sure = is_tied.index(True) if any(is_tied) else len(expected)
    result = {"tokens": len(expected), "plain": seconds, "speculation": {}}
    for name in names:
        output, found, seconds = generate(ensemble, prompt, num_new, method=config, speculation=name)
        stats = output.speculation
        result["speculation"][name] = {
            "equal": found[:num_sure] == expected[:num_sure],
            "tie": found != expected,
            "seconds": seconds,
            "rounds": stats.num_rounds,
            "drafted": sum(stats.drafted.values()),
            "kept": sum(stats.accepted.values()),
        }
    return result


def prompts_of(data: Path, sets: list[str], count: int) -> list[tuple[str, str]]:
    """Names and texts of prompts, from each set in turn."""
    of_set = [[item.prompt for item in read(name, data, -(-count // len(sets))).items] for name in sets]
    named = [[(f"{name} {n}", prompt) for n, prompt in enumerate(of)] for name, of in zip(sets, of_set, strict=True)]
    return [item for turn in itertools.zip_longest(*named) for item in turn if item is not None][:count]


@functools.cache
def ensemble_on(device: str, dtype: str) -> EnsembleForCausalLM:
    return EnsembleForCausalLM.from_pretrained(demo_model_paths(), dtype=dtype, device_map=device)


def table(cases: list[dict]) -> str:
    """The cases as one line for each method and drafter."""
    lines = [
        "| method | drafts | prompts | equal | ties | drafted a round | accepted a round | ms a token, plain | with drafts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = defaultdict(list)
    for case in cases:
        for name, found in case["speculation"].items():
            groups[case["case"].split(",")[0], name].append((case, found))
    for (method, name), pairs in groups.items():
        total = {key: sum(found[key] for _, found in pairs) for key in pairs[0][1]}
        num_tokens = sum(case["tokens"] for case, _ in pairs)
        plain = sum(case["plain"] for case, _ in pairs)
        ties = sum(found["tie"] and found["equal"] for _, found in pairs)
        lines.append(
            f"| {method} | {name} | {len(pairs)} | {total['equal']} | {ties} | {total['drafted'] / total['rounds']:.2f} | "
            f"{total['kept'] / total['rounds']:.2f} | {1e3 * plain / num_tokens:.0f} | "
            f"{1e3 * total['seconds'] / num_tokens:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the evaluation sets")
    parser.add_argument("--state", type=Path, required=True, help="file of finished cases")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["triviaqa", "nq", "arc", "piqa"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["gac", "unite", "deepen"])
    parser.add_argument("--speculation", nargs="+", default=["ngram", "auto", "SmolLM2-135M-Instruct"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*", default=[], help="run only cases whose name holds all of these")
    args = parser.parse_args()

    def run(method: str, prompt: str) -> dict:
        ensemble = ensemble_on(args.device, args.dtype)
        return compare(ensemble, method, prompt, args.new_tokens, args.speculation)

    asked = f"{args.new_tokens} tokens, {' '.join(args.speculation)}, {args.device}, {args.dtype}"
    cases = [
        (f"{method}, {name}, {asked}", functools.partial(run, method, prompt))
        for name, prompt in prompts_of(args.data, args.sets, args.prompts)
        for method in args.methods
    ]
    names = {name for name, _ in cases}
    done = [case for case in run_cases(cases, args.state, args.only) if case["case"] in names]
    print(f"\n{table(done)}")
    wrong = [
        f"{case['case']}: {name}" for case in done for name, one in case["speculation"].items() if not one["equal"]
    ]
    print("\n".join(["", "unequal:", *wrong]) if wrong else "\nall equal")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
