"""Compare the two real models, as an ensemble, with the plain reference: texts, and distributions along a long text.

Every case is a method, a primary and a prompt; the reference runs every model anew at every step, so a case takes
minutes. Finished cases are kept in a file, one JSON line each, and are not run again.

    python tests/real/compare_reference.py --state compare.jsonl [--tokens 48] [--only gac english] [--device cuda]
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo_models import models_or_demo  # noqa: E402

from examples.benchmarks.texts import Replay  # noqa: E402
from hf_ensemble import EnsembleForCausalLM  # noqa: E402
from tests.reference import Reference, ReferenceMember  # noqa: E402

PROMPTS = {
    "english": "The capital of France is",
    "german": "Die Hauptstadt von Österreich heißt",
    "chinese": "今天天气很好，",
    "thai": "ประเทศไทยมีเมืองหลวงชื่อ",
    "code": "def add(a, b):\n    return",
    "emoji": "I love pizza 🍕 and",
    "trailing_space": "The answer is ",
    "newlines_and_tabs": "Name:\tAnna\n\nAge:\t31\n\n",
}
LONG_TEXT = (
    "The history of the city begins with a small settlement at the river. Over the centuries it grew, traded with its "
    "neighbours, burned down twice and was built again, each time with wider streets.\n\n"
    "Im Jahr 1874 kam die erste Eisenbahn; mit ihr kamen Fabriken, Arbeiterviertel und zwei Zeitungen (eine gibt es "
    "noch). 你好，世界！今天天气很好。 สวัสดีครับ\n\n\tdef main(argv):\n\t\treturn [int(x) for x in argv[1:]]  # done 🎉\n\n"
) * 4
NUM_LONG_TOKENS = 620
LONG_POSITIONS = range(0, NUM_LONG_TOKENS, 31)
TIE = 1e-4
"""Where the two best differ by less in log-probability, either may be chosen."""


@functools.cache
def _loaded(device: str, folders: tuple[str, ...] | None) -> tuple[list, list, list, list]:
    paths = models_or_demo(folders)
    ensemble = EnsembleForCausalLM.from_pretrained(paths, dtype="float32", device_map=device)
    models, tokenizers = list(ensemble.members), list(ensemble.tokenizers)
    members = [
        ReferenceMember(model, tokenizer, name=Path(path).name)
        for model, tokenizer, path in zip(models, tokenizers, paths, strict=True)
    ]
    return models, tokenizers, members, [member.cache_mode for member in ensemble.member_views]


class Pair:
    """The two models on one device, the one at place `primary` first, as an ensemble and as a reference.

    `folders` of other models stand in for the real ones, to show that a comparison runs.
    """

    def __init__(self, primary: int, device: str = "cpu", folders: tuple[str, ...] | None = None):
        # In both orders of the same loaded models, since describing a large vocabulary to the reference takes long.
        models, tokenizers, members, modes = (items[:: -1 if primary else 1] for items in _loaded(device, folders))
        self.ensemble = EnsembleForCausalLM.from_members(models, tokenizers)
        for member, mode in zip(self.ensemble.member_views, modes, strict=True):
            member.cache_mode = mode  # trying it out takes seconds, too
        self.references = {name: Reference(members, method=name) for name in ("gac", "unite")}

    def compare_text(self, method: str, prompt: str, num_tokens: int) -> dict:
        """Both greedy texts, up to the first decision that is as good as tied."""
        inputs = self.ensemble.tokenizer(prompt, return_tensors="pt").to(self.ensemble.device)
        prompt_ids = inputs.input_ids[0].tolist()
        output = self.ensemble.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, method=method)
        found = output[0, len(prompt_ids) :].tolist()
        expected, margins = self.references[method].greedy(prompt_ids, num_tokens)
        same = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
        is_equal = found[: len(expected)] == expected
        return {"equal": is_equal, "tokens": same, "of": len(expected), "least margin": min(margins)}

    def compare_long(self, method: str) -> dict:
        """The largest difference in probability at positions along a text that is written whatever the scores."""
        tokenizer = self.ensemble.tokenizer
        prompt = tokenizer(LONG_TEXT[:60], return_tensors="pt").to(self.ensemble.device)
        ids = tokenizer(LONG_TEXT[60:], add_special_tokens=False).input_ids[:NUM_LONG_TOKENS]
        output = self.ensemble.generate(
            **prompt, max_new_tokens=len(ids), do_sample=False, method=method, return_dict_in_generate=True,
            output_logits=True, logits_processor=[Replay(ids, prompt.input_ids.shape[1])],
        )  # fmt: skip
        prompt_ids = prompt.input_ids[0].tolist()
        positions = [position for position in LONG_POSITIONS if position < len(ids)]
        expected = self.references[method].distributions_along(prompt_ids, ids, positions)
        largest = 0.0
        for position in positions:
            found = output.logits[position][0].exp().cpu()
            columns = expected[position]
            dense = torch.zeros_like(found)
            dense[list(columns)] = torch.tensor(list(columns.values()), dtype=found.dtype)
            largest = max(largest, (found - dense).abs().max().item())
        return {"equal": largest < 1e-4, "tokens": len(ids), "of": len(ids), "largest difference": largest}


def run_cases(cases: Iterable[tuple[str, Callable[[], dict]]], state: Path, only: Sequence[str]) -> list[dict]:
    """Run the cases, given by name, that are not in the file of finished ones yet, and return all that are.

    Args:
        cases: Names, and what gives each result.
        state: The file, one JSON line a case.
        only: Run only cases whose name holds all of these.
    """
    done = {}
    if state.exists():
        done = {case["case"]: case for case in map(json.loads, state.read_text("utf-8").splitlines())}
    for name, compare in tqdm(list(cases), unit="case"):
        if name in done or not all(word in name for word in only):
            continue
        start = time.perf_counter()
        result = compare()
        done[name] = {"case": name, **result, "seconds": round(time.perf_counter() - start)}
        with state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[name]) + "\n")
    return list(done.values())


pair_of = functools.cache(Pair)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """What every comparison is asked on its command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="file of finished cases")
    parser.add_argument("--only", nargs="*", default=[], help="run only cases whose name holds all of these")
    parser.add_argument("--device", default="cpu", help="where the models are; the reference counts on the CPU")
    parser.add_argument("--models", nargs=2, help="other models, to show that it runs; default: the two real ones")
    return parser


def pairs_of(args: argparse.Namespace) -> list[tuple[str, Callable[[], Pair]]]:
    """For each order of the two models what it is called, and what gives it.

    Args:
        args: What the parser of `argument_parser` gives.
    """
    folders = None if args.models is None else tuple(args.models)
    return [
        (f"{Path(folder).name} first", functools.partial(pair_of, primary, args.device, folders))
        for primary, folder in enumerate(models_or_demo(folders))
    ]


def _compare(pair: Callable[[], Pair], method: str, prompt: str, num_tokens: int) -> dict:
    if prompt == "long":
        return pair().compare_long(method)
    return pair().compare_text(method, PROMPTS[prompt], num_tokens)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    cases = []
    for (order, pair), method, prompt in itertools.product(pairs_of(args), ("unite", "gac"), (*PROMPTS, "long")):
        name = f"{method}, {order}, {prompt}, {NUM_LONG_TOKENS if prompt == 'long' else args.tokens}"
        cases.append((name, functools.partial(_compare, pair, method, prompt, args.tokens)))
    done = run_cases(cases, args.state, args.only)
    print("\n| case | equal | tokens | least margin or largest difference | s |\n|---|---|---|---|---|")
    for case in done:
        figure = case.get("least margin", case.get("largest difference"))
        print(
            f"| {case['case']} | {case['equal']} | {case['tokens']} of {case['of']} | {figure:.2g} | {case['seconds']} |"
        )


if __name__ == "__main__":
    main()
