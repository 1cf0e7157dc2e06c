"""Compare an older checkout with a newer one: time per token and memory, both loaded, strictly in turn.

Each version runs in its own process and waits while the other works; the first of a pair alternates. On a CPU, the
script measures the processor time of a call. On a GPU, it measures the time between two events around the call, the
host's processor time and, in the first pairs, the time of the call's kernels (with the profiler). For every case it
prints the median of the pairs' ratios, new to old, with its 95 % interval (by order statistics), the medians, peak
memory (of the process on a CPU, allocated memory on a GPU), and whether both wrote the same text. A case passes if the
median is at most 1.02 or the interval holds values below it, memory is at most 1.02 times the old, and the texts are
equal. The exit code says whether all cases pass.

    python examples/benchmarks/versions.py --old CHECKOUT [--new CHECKOUT] [--models A B] [--cases unite gac auto spans]
    python examples/benchmarks/versions.py --old CHECKOUT --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3

With `--tokenizers` the members are an 8B and a 7B with random weights in bfloat16 on a GPU (`--shapes`, `--device`), pushed
along a real text.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from members import add_arguments
from report import milliseconds, print_heads, print_row
from tqdm import tqdm
from versions_worker import CASES, DEFAULT_CASES

WORKER = Path(__file__).with_name("versions_worker.py")
LIMIT = 1.02
"""Greatest ratio, of time and of memory, that passes."""
NUM_PROFILED = 6
"""Pairs whose kernels are measured: the fewest of which a median has a 95 % interval."""


class Version:
    """A checkout in a process of its own, which runs one call at a time."""

    def __init__(self, checkout: Path, options: Sequence[str], threads: int):
        self.checkout = checkout
        path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [sys.executable, WORKER, checkout, *options],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> str:
        """Wait until it can run, and return what it is and where it runs."""
        ready = self._answer()
        self.has_gpu = ready["device"] == "cuda"
        git = ["git", "-C", self.checkout, "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        return f"{commit or 'no commit'}, {ready['setting']}"

    def run(self, **asked) -> dict:
        """Run one call, and return what it cost and wrote."""
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"versions.py: the process of {self.checkout} has ended; what it said is above")
        return json.loads(line)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a median, whatever the distribution; the least and the greatest of fewer than six values.

    The median lies below the k-th smallest of n values as often as n tosses of a coin show less than k heads.
    """
    ordered, count = sorted(values), len(values)
    outside, num_cut = 0.0, 0
    for heads in range(count // 2):
        outside += 2 * math.comb(count, heads) / 2**count
        if outside > 0.05:
            break
        num_cut = heads
    return ordered[num_cut], ordered[-1 - num_cut]


def compare(
    old: Version, new: Version, case: str, new_tokens: int, pairs: int, progress: Callable[[], object]
) -> bool:
    """Run a case by turns, print its lines, and say whether it passes.

    Args:
        old: The older version.
        new: The newer version.
        case: A name in `CASES`.
        new_tokens: Tokens of a call.
        pairs: How many calls of each are counted.
        progress: Called after each pair.
    """
    times = defaultdict(lambda: ([], []))
    memory, num_kernels = [0.0, 0.0], [0, 0]
    texts_are_equal = True
    for _ in range(2):  # the first calls build maps and capture steps
        for version in (old, new):
            version.run(case=case, new_tokens=new_tokens)
    for pair in range(pairs):
        answers = [{}, {}]
        for index in (0, 1) if pair % 2 == 0 else (1, 0):
            version = (old, new)[index]
            answers[index] = version.run(case=case, new_tokens=new_tokens)
            if version.has_gpu and pair < NUM_PROFILED:
                profiled = version.run(case=case, new_tokens=new_tokens, profile=True)
                answers[index]["seconds"] |= profiled["seconds"]
                num_kernels[index] = profiled["num_kernels"]
        for index, answer in enumerate(answers):
            memory[index] = max(memory[index], answer["mib"])
            for measure, seconds in answer["seconds"].items():
                times[measure][index].append(seconds / len(answer["ids"]))
        texts_are_equal &= answers[0]["ids"] == answers[1]["ids"]
        progress()
    has_room = memory[1] <= LIMIT * memory[0]
    all_pass = texts_are_equal and has_room
    for measure, (before, after) in times.items():
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        middle, (low, high) = statistics.median(ratios), median_interval(ratios)
        is_fast = middle <= LIMIT or low < LIMIT
        all_pass &= is_fast
        words = [*(() if is_fast else ("slower",)), *(() if has_room else ("more memory",))]
        words += [] if texts_are_equal else ["unequal"]
        counts = f": {num_kernels[0]} and {num_kernels[1]}" if measure == "kernels" else ""
        print_row(
            case, measure + counts, f"{middle:.3f} ({low:.3f}-{high:.3f})", milliseconds(before, 2), milliseconds(after, 2),
            f"{memory[0]:.0f}", f"{memory[1]:.0f}", "equal" if texts_are_equal else "unequal",
            "passes" if not words else f"fails: {', '.join(words)}",
        )  # fmt: skip
    return all_pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the older checkout")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[2], help="the newer; default: this one")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(DEFAULT_CASES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    add_arguments(parser, "8B", "7B")
    args = parser.parse_args()
    options = ["--shapes", *args.shapes]
    for name in ("models", "tokenizers"):
        options += [f"--{name}", *getattr(args, name)] if getattr(args, name) else []
    options += ["--device", args.device] if args.device else []
    with contextlib.ExitStack() as stack:
        old, new = (
            stack.enter_context(contextlib.closing(Version(checkout.resolve(), options, args.threads)))
            for checkout in (args.old, args.new)
        )
        for name, version in (("old", old), ("new", new)):
            print(f"{name}: {version.wait()}")
        failed = compare_all(old, new, args)
    print(f"\nfails: {', '.join(failed)}" if failed else "\nall cases pass")
    sys.exit(bool(failed))


def compare_all(old: Version, new: Version, args: argparse.Namespace) -> list[str]:
    """Print a table of all cases, and return those that fail."""
    print(f"{args.pairs} pairs, {args.new_tokens} new tokens")
    print_heads(
        "case", "measure", "new to old, median (95 % interval)", "old, ms a token", "new, ms a token",
        "old, MiB", "new, MiB", "texts", "",
    )  # fmt: skip
    failed = []
    with tqdm(total=args.pairs * len(args.cases), unit="pair") as progress:
        for case in args.cases:
            if not compare(old, new, case, args.new_tokens, args.pairs, progress.update):
                failed.append(case)
    return failed


if __name__ == "__main__":
    main()
