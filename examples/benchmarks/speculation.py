"""Time drafts: each method with plain decoding, look-up in the text, each member as the drafter, and `auto`, in turn.

Prints seconds a new token (on a CPU: of CPU time), entries drafted and accepted in a round, and the ratio to plain
decoding; by turns for every prompt, so that all meet the same machine. With `--save-acceptance` what was drafted and
accepted in every round goes to a file, for a replay elsewhere; `--draft-length` then fixes the length, whether it pays
here or not.

    python examples/benchmarks/speculation.py [--members A B] [--methods unite gac] [--prompts TEXT ...] [--device cuda]
"""

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.decoding.speculation.draft_length import DraftLength

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPTS = (
    "Question: What is the capital of France?\nAnswer: Paris\n\nQuestion: What is the capital of Italy?\nAnswer: Rome\n\n"
    "Question: What is the capital of Spain?\nAnswer:",
    "The history of the city begins with a small settlement at the river. Over the centuries it grew,",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Give a list of ten animals, one on each line.\n",
)


def timed(ensemble: EnsembleForCausalLM, prompt: str, new_tokens: int, **options):
    """Seconds of one call (on a CPU: of CPU time), the number of new tokens, and the output."""
    inputs = ensemble.tokenizer(prompt, return_tensors="pt").to(ensemble.device)
    clock = time.perf_counter if ensemble.device.type == "cuda" else time.process_time
    start = clock()
    output = ensemble.generate(
        **inputs, do_sample=False, max_new_tokens=new_tokens, return_dict_in_generate=True, **options
    )
    if ensemble.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start, output.sequences.shape[1] - inputs.input_ids.shape[1], output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", help="default: the two demo models")
    parser.add_argument("--methods", nargs="+", default=["unite", "gac"])
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="texts to go on from")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-length", type=int, help="length of every draft; default: what pays")
    parser.add_argument("--save-acceptance", type=Path, help="file for what was accepted in every round")
    args = parser.parse_args()
    if args.draft_length is not None:
        DraftLength.choose = lambda self, drafters, share=1.0: (drafters[0], args.draft_length)
    members = args.members
    if members is None:
        from demo_models import demo_model_paths

        members = [str(path) for path in demo_model_paths()]
    ensemble = EnsembleForCausalLM.from_pretrained(members, dtype=args.dtype, device_map=args.device)
    names = [Path(member).name for member in members]
    is_cuda = ensemble.device.type == "cuda"
    where = torch.cuda.get_device_name() if is_cuda else f"{torch.get_num_threads()} threads, {platform.machine()}"
    print(
        f"{where}, hf_ensemble {hf_ensemble.__version__}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}, {ensemble.dtype}, {len(args.prompts)} prompts, {args.new_tokens} new tokens"
    )
    drafters = [None, "ngram", *names, "auto"]
    acceptance = []
    print(
        "\n| method | drafts | rounds | drafted a round | accepted a round | s a token | ratio |\n|---|---|---|---|---|---|---|"
    )
    for method in args.methods:
        timed(ensemble, args.prompts[0], 4, method=method)
        seconds, counts = defaultdict(float), defaultdict(lambda: [0, 0, 0, 0])
        for prompt in tqdm(args.prompts, desc=method):
            for name in drafters:
                spent, num_new, output = timed(ensemble, prompt, args.new_tokens, method=method, speculation=name)
                seconds[name] += spent
                counts[name][0] += num_new
                if name is None:
                    continue
                stats = output.speculation
                for n, value in enumerate(
                    (stats.num_rounds, sum(stats.drafted.values()), sum(stats.accepted.values()))
                ):
                    counts[name][n + 1] += value
                rounds = [[one.drafter, one.num_drafted, one.num_accepted] for one in stats.rounds[0]]
                acceptance.append({"method": method, "speculation": name, "prompt": prompt, "rounds": rounds})
        plain = seconds[None] / counts[None][0]
        for name in drafters:
            num_new, rounds, drafted, kept = counts[name]
            each = seconds[name] / num_new
            shares = f"{rounds} | {drafted / rounds:.2f} | {kept / rounds:.2f}" if rounds else "| | "
            print(f"| {method} | {name or 'none'} | {shares} | {each:.3f} | {each / plain:.2f} |")
    if args.save_acceptance:
        args.save_acceptance.write_text(json.dumps(acceptance, indent=1), "utf-8")


if __name__ == "__main__":
    main()
