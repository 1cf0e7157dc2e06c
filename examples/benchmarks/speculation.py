"""Time drafts: each method with plain decoding, look-up in the text, each member as the drafter, and `auto`, in turn.

The script prints the seconds per new token (on a CPU: of CPU time), the entries drafted and accepted per round, and
the ratio to plain decoding. All variants take turns for every prompt, so they run under the same conditions.
`--save-acceptance` writes what was drafted and accepted in every round to a file, for a replay elsewhere;
`--draft-length` then fixes the length, whether it pays here or not.

    python examples/benchmarks/speculation.py [--members A B] [--methods unite gac] [--prompts TEXT ...] [--device cuda]
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

from measure import seconds_of
from members import models_or_demo
from report import print_heads, print_row, setting
from texts import PROMPT, QUESTIONS
from tqdm import tqdm

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.decoding.speculation.draft_length import DraftLength

PROMPTS = (
    QUESTIONS,
    PROMPT[: PROMPT.index(" traded")],
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Give a list of ten animals, one on each line.\n",
)


def timed(ensemble: EnsembleForCausalLM, prompt: str, new_tokens: int, **options):
    """Seconds of one call (on a CPU: of CPU time), the number of new tokens, and the output."""
    inputs = ensemble.tokenizer(prompt, return_tensors="pt").to(ensemble.device)
    outputs = []

    def run() -> None:
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "return_dict_in_generate": True}
        outputs.append(ensemble.generate(**inputs, **settings, **options))

    seconds = seconds_of(run, time.perf_counter if ensemble.device.type == "cuda" else time.process_time)
    return seconds, outputs[0].sequences.shape[1] - inputs.input_ids.shape[1], outputs[0]


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
    members = models_or_demo(args.members)
    ensemble = EnsembleForCausalLM.from_pretrained(members, dtype=args.dtype, device_map=args.device)
    names = [Path(member).name for member in members]
    lengths = f"{len(args.prompts)} prompts", f"{args.new_tokens} new tokens"
    print(setting(ensemble.device, ensemble.dtype, *lengths))
    drafters = [None, "ngram", *names, "auto"]
    acceptance = []
    print_heads("method", "drafts", "rounds", "drafted a round", "kept a round", "s a token", "ratio")
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
            shares = (rounds, f"{drafted / rounds:.2f}", f"{kept / rounds:.2f}") if rounds else ("", "", "")
            print_row(method, name or "none", *shares, f"{each:.3f}", f"{each / plain:.2f}")
    if args.save_acceptance:
        args.save_acceptance.write_text(json.dumps(acceptance, indent=1), "utf-8")


if __name__ == "__main__":
    main()
