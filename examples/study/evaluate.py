"""Evaluate members alone and their ensembles on the study's sets; finished cells are kept, and a stopped run resumes.

    python examples/study/evaluate.py --members smollm2-qamr-lora-s{seed} gemma-qamr-lora-s{seed} --seeds 0 1 2 --at-once 3
    python examples/study/evaluate.py --members gemma smollm2 --systems alone gac unite --tasks qamr_test_a
    python examples/study/evaluate.py --small       # after `train.py --small --kind full`

`--members` can be repeated; the primary comes first. A system is METHOD:OPTION=VALUE,...@WEIGHT,... as for
`hf-ensemble eval --also`. A task is a set, or the first examples of one (`qamr_test_a:100`). Weights can be `@dev`:
derived from the members' exact match on the development set. Weights and an option's value can be `tuned`: the value
that is best on the development set. `--bits` also scores the likelihoods of the answers.

If a system chooses among several candidates of each member (`vote:num_candidates=5`), they are sampled at a
temperature of 0.7, once for all systems that need only samples. With the weights 1,0 this is the first member's
self-consistency. On GSM8K a vote compares the last numbers.

With `--minutes`, a run starts no cell that would probably not finish in time, and exits with code 3 if cells are left.
"""

import argparse
import dataclasses
import math
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import side_by_side
import torch
import transformers
from cells import Cells, Key, add_cell, read_cells, read_examples
from marks import evaluation_set, share_right
from trained import load

from hf_ensemble import EnsembleForCausalLM, VoteConfig, weights_from_scores
from hf_ensemble.answers.base import AnswersConfig, Panel, Question, Written
from hf_ensemble.answers.candidates import merged
from hf_ensemble.cli.arguments import read_configuration
from hf_ensemble.dev_set import with_greedy
from hf_ensemble.evaluation import EvaluationSet
from hf_ensemble.evaluation.sets import NUMBER

SYSTEMS = ["alone", "gac", "gac@dev", "unite:top_k=10", "sweetspan:span_length=1", "sweetspan:span_length=4"]
DEV_SETS = {"qamr": "qa_dev", "squad": "qa_dev", "qa": "qa_dev", "gsm": "gsm_dev"}
TUNED = {
    "weights": ["0.5,0.5", "0.6,0.4", "0.4,0.6", "0.7,0.3", "0.3,0.7", "0.8,0.2", "0.2,0.8"],
    "learning_rate": ["0.15", "0.05", "0.3", "0.6", "1.0"],
    "top_k": ["10", "5", "20", "100"],
    "threshold": ["0.5", "0.3", "0.7", "0.9"],
}
"""The values to try; the first wins a tie."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--members", nargs="+", action="append", help="names, the primary first; may hold {seed}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="what {seed} stands for")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--tasks", nargs="+", default=["qamr_test_a", "squad_test_a"])
    parser.add_argument("--bits", nargs="*", default=[], metavar="SYSTEM", help="of these bits per byte too")
    parser.add_argument("--max-new-tokens", type=int, help="default: 32, on GSM8K 256")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop in these")
    parser.add_argument("--at-once", type=int, default=1, help="how many ensembles run at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="tiny members, after `train.py --small --kind full`")
    args = parser.parse_args()
    if args.small:
        torch.set_num_threads(1)
        args.members = args.members or [["smollm2-qamr-full-s{seed}", "gemma-qamr-full-s{seed}"]]
        args.bits, args.max_new_tokens, args.dtype = args.bits or ["alone", "gac"], 4, "float32"
    if not args.members:
        parser.error("--members are needed, or --small")

    asked = [[name.format(seed=seed) for name in names] for seed in args.seeds for names in args.members]
    ensembles = list(dict.fromkeys(map(tuple, asked)))
    if args.at_once > 1 and len(ensembles) > 1:
        options = _without(sys.argv[1:], ("--members", "--seeds", "--at-once"))
        own = [[*options, "--members", *names] for names in ensembles]
        return side_by_side.run_all(__file__, own, args.at_once)
    stop_at = time.monotonic() + 60 * args.minutes
    done = [Ensemble(args, names, stop_at).run() for names in ensembles]
    return 0 if all(done) else 3


def chooses_among_samples(system: str) -> bool:
    """Whether a system needs only samples of the members and their contents."""
    return system.partition(":")[0] in ("vote", "mbr") and "num_candidates=" in system and "methods=" not in system


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the arguments without some options and their values."""
    kept, is_kept = [], True
    for argument in arguments:
        if argument.startswith("--"):
            is_kept = argument not in options
        if is_kept:
            kept.append(argument)
    return kept


class OutOfTime(Exception):
    """The next cell would probably not finish in time."""


class Ensemble:
    """Members together and alone, loaded for the first cell that needs them."""

    def __init__(self, args: argparse.Namespace, names: tuple[str, ...], stop_at: float):
        self.args, self.names, self.stop_at = args, names, stop_at
        self.cells: Cells = read_cells(args.folder)
        self.sets: dict[str, EvaluationSet] = {}
        self.model: EnsembleForCausalLM | None = None
        self.longest = 0.0

    def run(self) -> bool:
        """Finish all cells; return whether there was time for them."""
        try:
            for task in self.args.tasks:
                for work, systems in (("write", self.args.systems), ("score", self.args.bits)):
                    for system in systems:
                        for names in [(name,) for name in self.names] if system == "alone" else [self.names]:
                            self.cell(Key(names, system, task, work))
        except OutOfTime:
            print(f"{'+'.join(self.names)}: time is up, run the command again to resume", file=sys.stderr)
            return False
        return True

    def cell(self, key: Key) -> dict[str, Any]:
        """Run a cell unless it is already finished."""
        if key not in self.cells:
            resolved = self.resolve(key)
            if time.monotonic() + self.longest > self.stop_at:
                raise OutOfTime
            questions = self.questions(key.task)
            began = time.perf_counter()
            if self.model is None:
                self.model = load(self.args.folder, self.names, self.args.device, self.args.dtype)
            loaded = time.perf_counter()
            run = self.write if key.work == "write" else self.score
            if chooses_among_samples(resolved):
                run = self.choose
            cell = {"as": resolved, **run(key, resolved, questions)}
            cell |= {"seconds": round(time.perf_counter() - loaded, 2), "load seconds": round(loaded - began, 2)}
            self.longest = max(self.longest, time.perf_counter() - began)
            cell["with"] = {
                "device": torch.cuda.get_device_name() if self.model.device.type == "cuda" else "cpu",
                "dtype": self.args.dtype,
                "batch size": self.args.batch_size,
                "versions": [torch.__version__, transformers.__version__],
            }
            add_cell(self.args.folder, self.names, key, cell)
            self.cells[key] = cell
            said = share_right(self.cells, key, questions) if key.work == "write" else sum(cell["bits"])
            print(
                f"{'+'.join(key.members)} {resolved} {key.task} {key.work}: {said:.4f}, {cell['seconds']} s",
                flush=True,
            )
        return self.cells[key]

    def questions(self, task: str) -> EvaluationSet:
        if task not in self.sets:
            self.sets[task] = evaluation_set(task, read_examples(self.args.folder, task))
        return self.sets[task]

    def dev_score(self, key: Key, system: str, members: tuple[str, ...]) -> float:
        own = Key(members, system, DEV_SETS[key.task.split("_")[0]], "write")
        self.cell(own)
        return share_right(self.cells, own, self.questions(own.task))

    def resolve(self, key: Key) -> str:
        """Return the system with the values chosen on the development set."""
        head, _, weights = key.system.partition("@")
        if weights == "dev":
            scores = [self.dev_score(key, "alone", (name,)) for name in key.members]
            # If no member has answered anything right, the weights are equal.
            found = weights_from_scores(scores) if any(scores) else [1 / len(scores)] * len(scores)
            return f"{head}@{','.join(f'{weight:.4f}' for weight in found)}"
        if "tuned" not in key.system:
            return key.system
        option = re.search(r"(\w+)=tuned", head)
        name = option[1] if option else "weights"
        tried = [key.system.replace("tuned", value) for value in TUNED[name]]
        return max(tried, key=lambda system: self.dev_score(key, system, key.members))

    def caller(self, key: Key, resolved: str) -> tuple[EnsembleForCausalLM, dict[str, Any]]:
        """Return the ensemble, or a member as an ensemble, with its options."""
        assert self.model is not None
        if key.system == "alone":
            return self.model.alone(key.members[0]), {}
        # For samples, it does not matter which method chooses among them.
        method, weights = read_configuration(resolved.replace("samples:", "vote:"))
        if isinstance(method, VoteConfig) and self.questions(key.task).marking == "number":
            method = dataclasses.replace(method, extract=NUMBER)
        if isinstance(method, AnswersConfig) and method.num_candidates > 1:
            method = dataclasses.replace(method, generate_options={"do_sample": True, "temperature": 0.7, "top_k": 0})
        return self.model, {"method": method, "weights": weights}

    def choose(self, key: Key, resolved: str, questions: EvaluationSet) -> dict[str, Any]:
        """Choose answers among samples; the samples are written once for all ways of choosing and all weights."""
        _, options = self.caller(key, resolved)
        method, weights = options["method"], options["weights"] or [1 / len(key.members)] * len(key.members)
        samples = Key(key.members, f"samples:num_candidates={method.num_candidates}", key.task, "write")
        rows = self.cell(samples)["samples"]
        asked, tokens = [], []
        for item, row in zip(questions.items, rows, strict=True):
            written = [
                Written(member, key.members[member], number, (), text.encode(), "eos" if ended else None)
                for member, number, text, ended, _ in row
                if weights[member]
            ]
            turns = [{"role": "user", "content": item.prompt}]
            asked.append(Question(turns, merged(written, weights, method.num_candidates)))
            tokens.append(sum(count for member, _, _, _, count in row if weights[member]))
        choices = method.choose(asked, Panel(lambda _: [], {}, {}))
        pairs = zip(asked, choices, strict=True)
        return {"responses": [question.texts[choice.ranking[0]] for question, choice in pairs], "tokens": tokens}

    def write(self, key: Key, resolved: str, questions: EvaluationSet) -> dict[str, Any]:
        """Write answers, and count the writers' tokens, including the end tokens.

        Answers are greedy. Several candidates of a member are samples, which are the same in every run.
        """
        model, options = self.caller(key, resolved)
        tokenizer = model.tokenizer
        pad = tokenizer.pad_token_id
        options |= {"stop_strings": questions.stop_strings, "tokenizer": tokenizer, "pad_token_id": pad}
        picks = isinstance(options.get("method"), AnswersConfig)
        if picks:
            options |= {"seed": 0, "return_dict_in_generate": True}
        options = with_greedy(model, options)
        options["max_new_tokens"] = self.args.max_new_tokens or (256 if questions.marking == "number" else 32)
        responses, tokens = [""] * len(questions.items), [0] * len(questions.items)
        samples: list[list[Any]] = [[] for _ in responses]
        for places in self.batches([len(item.prompt) for item in questions.items]):
            prompts = [questions.items[place].prompt for place in places]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            output = model.generate(**inputs, **options)
            new = (output.sequences if picks else output)[:, inputs["input_ids"].shape[1] :].tolist()
            for place, ids in zip(places, new, strict=True):
                responses[place] = tokenizer.decode(ids, skip_special_tokens=True)
                padding = next((n for n, token in enumerate(reversed(ids)) if token != pad), len(ids))
                tokens[place] = len(ids) - max(0, padding - (pad == tokenizer.eos_token_id))
            for place, row in zip(places, output.answers if picks else (), strict=False):
                samples[place] = [
                    (writer.member, writer.number, answer.text, answer.ended, writer.num_tokens)
                    for answer in row
                    for writer in answer.writers
                ]
                tokens[place] = sum(num_tokens for *_, num_tokens in samples[place])
        cell = {"responses": responses, "tokens": tokens}
        return {**cell, "samples": samples} if key.system.startswith("samples:") else cell

    def score(self, key: Key, resolved: str, questions: EvaluationSet) -> dict[str, Any]:
        """Compute the bits of each example's first accepted answer."""
        model, options = self.caller(key, resolved)
        prompts = [item.prompt for item in questions.items]
        answers = [item.continuations[item.right] for item in questions.items]
        found = model.score(prompts, answers, batch_size=self.args.batch_size, **options)
        return {"bits": [round(-value / math.log(2), 4) for value in found.log_probs.tolist()]}

    def batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return positions of examples in batches of even sizes, the longest first."""
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        count = math.ceil(len(order) / self.args.batch_size)
        cuts = [len(order) * n // count for n in range(count + 1)]
        return [order[start:stop] for start, stop in pairwise(cuts)]


if __name__ == "__main__":
    sys.exit(main())
