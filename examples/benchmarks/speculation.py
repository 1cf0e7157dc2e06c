"""Time drafts: each method with plain decoding, look-up in the text, each member as the drafter, and `auto`, in turn.

For each drafter, the script prints the seconds per new token (on a CPU: of CPU time), the entries drafted and accepted
per round, the ratio to plain decoding of all calls together and of single calls, and how many texts equal the plain
ones. All variants take turns for every prompt, so they run under the same conditions. What is learned from the drafts
of a call serves the calls after it, as in any process. `--save-acceptance` writes what was drafted and accepted in
every round to a file, for a replay elsewhere; `--draft-length` then fixes the length, whether it pays here or not.

    python examples/benchmarks/speculation.py [--members A B] [--methods unite gac] [--drafts auto] [--device cuda]
"""

import argparse
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from measure import seconds_of
from members import models_or_demo
from report import print_heads, print_row, quartiles, setting
from texts import BEGINNINGS, PROMPT, QUESTIONS
from tqdm import tqdm

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.decoding.speculation.draft_length import DraftLength

PROMPTS = (
    QUESTIONS,
    PROMPT[: PROMPT.index(" traded")],
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "Give a list of ten animals, one on each line.\n",
    *BEGINNINGS,
)


@dataclass
class Calls:
    """The calls with one drafter.

    Attributes:
        seconds: Of each call.
        texts: New ids of each call.
        num_rounds: Rounds of all calls.
        num_drafted: Their drafted entries.
        num_accepted: How many of these were accepted.
    """

    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def seconds_a_token(self) -> float:
        """Of all calls together."""
        return sum(self.seconds) / sum(map(len, self.texts))

    def cells(self, plain: "Calls") -> list[object]:
        """The cells of a row that compares these calls with the plain ones."""
        per_token = ([s / len(ids) for s, ids in zip(one.seconds, one.texts, strict=True)] for one in (self, plain))
        ratios = [a / b for a, b in zip(*per_token, strict=True)]
        num_equal = sum(a == b for a, b in zip(self.texts, plain.texts, strict=True))
        return [
            self.num_rounds,
            f"{self.num_drafted / self.num_rounds:.2f}",
            f"{self.num_accepted / self.num_rounds:.2f}",
            f"{self.seconds_a_token:.3f}",
            f"{self.seconds_a_token / plain.seconds_a_token:.3f}",
            quartiles(ratios, 3),
            f"{max(ratios):.3f}",
            f"{num_equal} of {len(ratios)}",
        ]


def timed(ensemble: EnsembleForCausalLM, prompt: str, new_tokens: int, **options):
    """Seconds of one call (on a CPU: of CPU time), the new ids, and the output."""
    inputs = ensemble.tokenizer(prompt, return_tensors="pt").to(ensemble.device)
    outputs = []

    def run() -> None:
        settings = {"do_sample": False, "max_new_tokens": new_tokens, "return_dict_in_generate": True}
        outputs.append(ensemble.generate(**inputs, **settings, **options))

    seconds = seconds_of(run, time.perf_counter if ensemble.device.type == "cuda" else time.process_time)
    return seconds, outputs[0].sequences[0, inputs.input_ids.shape[1] :].tolist(), outputs[0]


def take_turns(ensemble, method: str, drafters: list[str], args: argparse.Namespace, acceptance: list):
    """The calls of plain decoding and of each drafter, in turn for every prompt; adds to what was accepted."""
    calls = {name: Calls() for name in (None, *drafters)}
    timed(ensemble, args.prompts[0], 4, method=method)
    for _, prompt in tqdm(list(itertools.product(range(args.turns), args.prompts)), desc=method):
        for name, of_drafter in calls.items():
            seconds, ids, output = timed(ensemble, prompt, args.new_tokens, method=method, speculation=name)
            of_drafter.seconds.append(seconds)
            of_drafter.texts.append(ids)
            if name is None:
                continue
            rounds = [[one.drafter, one.num_drafted, one.num_accepted] for one in output.speculation.rounds[0]]
            of_drafter.num_rounds += len(rounds)
            of_drafter.num_drafted += sum(num_drafted for _, num_drafted, _ in rounds)
            of_drafter.num_accepted += sum(num_accepted for _, _, num_accepted in rounds)
            acceptance.append({"method": method, "speculation": name, "prompt": prompt, "rounds": rounds})
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", help="default: the two demo models")
    parser.add_argument("--methods", nargs="+", default=["unite", "gac"])
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="texts to go on from")
    parser.add_argument("--drafts", nargs="+", help="'ngram', 'auto' or members' names; default: all")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=1, help="times that each drafter continues each prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-length", type=int, help="length of every draft; default: what pays")
    parser.add_argument("--save-acceptance", type=Path, help="file for what was accepted in every round")
    args = parser.parse_args()
    if args.draft_length is not None:
        DraftLength.choose = lambda self, drafters, share=1.0: (drafters[0], args.draft_length)
    members = models_or_demo(args.members)
    ensemble = EnsembleForCausalLM.from_pretrained(members, dtype=args.dtype, device_map=args.device)
    drafters = args.drafts or ["ngram", *(Path(member).name for member in members), "auto"]
    details = f"{len(args.prompts)} prompts", f"{args.new_tokens} new tokens", f"{args.turns} turns"
    print(setting(ensemble.device, ensemble.dtype, *details))
    acceptance: list[dict] = []
    print_heads(
        "method", "drafts", "rounds", "drafted a round", "kept a round", "s a token", "ratio",
        "ratio of a call, median (quartiles)", "highest", "same texts",
    )  # fmt: skip
    for method in args.methods:
        calls = take_turns(ensemble, method, drafters, args, acceptance)
        plain = calls.pop(None)
        print_row(method, "none", "", "", "", f"{plain.seconds_a_token:.3f}", "1.000", "", "", "")
        for name, of_drafter in calls.items():
            print_row(method, name, *of_drafter.cells(plain))
    if args.save_acceptance:
        args.save_acceptance.write_text(json.dumps(acceptance, indent=1), "utf-8")


if __name__ == "__main__":
    main()
