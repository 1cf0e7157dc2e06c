"""Send a server good and bad requests from many clients at once, and check the promises of docs/reliability.md.

    python examples/reliability/soak.py                                    # 10,000 requests to tiny members
    python examples/reliability/soak.py --models demo --requests 200       # to the two demo models
    python examples/reliability/soak.py --models FOLDER FOLDER --clients 8 --seed 1

The server is a separate process that listens on this machine only. Most requests are good and have random OpenAI
fields; some are bad, and some clients disconnect. The script prints one table, and the exit code is 1 if a promise is
broken. Needs Linux: the server's memory, threads and sockets are read from `/proc`.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "benchmarks"))

from demo_models import models_or_demo
from report import setting
from requests_at_random import CHAT, MODEL, Request, make_request
from rows import Table
from server_process import IDLE, ServerProcess
from soak_client import Client, Outcome
from tiny_members import save_tiny_members

from hf_ensemble import EnsembleForCausalLM

TIE = 1e-4
"""Two best ids whose log-probabilities differ by less may change places where rounding differs."""

MOST_GROWTH = 32.0
"""MiB by which memory may grow from the first fifth of the requests to the last; 5 % if that is more."""


class Soak:
    """A run: what was sent, and what came of it.

    Args:
        args: The script's.
        ensemble: What is served.
        server: Its server.
    """

    def __init__(self, args: argparse.Namespace, ensemble: EnsembleForCausalLM, server: ServerProcess):
        self._args, self._ensemble, self._server = args, ensemble, server
        self._sent: list[tuple[Request, Outcome]] = []
        self._again: list[Outcome] = []

    def run(self, table: Table) -> None:
        """Send everything, in fifths, and add what is found to a table."""
        args, server = self._args, self._server
        memory, states = [], []
        for fifth in range(5):
            self._send(range(fifth * args.requests // 5, (fifth + 1) * args.requests // 5))
            server.wait(args.timeout)
            if fifth in (0, 4):
                time.sleep(IDLE)
                states.append((server.num_threads(), server.num_sockets()))
            memory.append(server.memory())
            print(f"{len(self._sent)} of {args.requests}", file=sys.stderr, flush=True)
        self._report_answers(table)
        self._report_texts(table)
        self._report_metrics(table)
        growth, limit = memory[-1] - memory[0], max(MOST_GROWTH, 0.05 * memory[0])
        steps = ", ".join(f"{value:.0f}" for value in memory)
        found = f"{steps} MiB after each fifth: {growth:+.0f} of at most {limit:.0f}"
        table.row("memory stays flat", found, is_right=growth <= limit)
        for what, before, after in zip(("thread", "socket"), states[0], states[-1], strict=True):
            found = f"{before} after the first fifth, {after} at the end"
            table.row(f"no {what} is left over", found, is_right=after <= before)

    def _send(self, numbers: Iterable[int]) -> None:
        end_id = self._ensemble.generation_config.eos_token_id[0]
        asked = [make_request(number, self._args.seed, self._args.max_tokens, end_id) for number in numbers]
        local = threading.local()
        clients: list[Client] = []

        def send(request: Request) -> Outcome:
            if not hasattr(local, "client"):
                local.client = self._client()
                clients.append(local.client)
            return local.client.send(request)

        with ThreadPoolExecutor(self._args.clients) as pool:
            self._sent += zip(asked, pool.map(send, asked), strict=True)
        for client in clients:
            client.close()

    def _client(self) -> Client:
        return Client(self._server.port, self._args.timeout)

    def _of(self, kind: str) -> list[tuple[Request, Outcome]]:
        return [pair for pair in self._sent if pair[0].kind == kind]

    def _report_answers(self, table: Table) -> None:
        counts = Counter(request.kind for request, _ in self._sent)
        parts = ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))
        table.row("requests", f"{len(self._sent)} from {self._args.clients} clients: {parts}", is_right=True)
        good, bad = self._of("good"), self._of("bad")
        wrong = [_told(*pair) for pair in good if pair[1].status != 200 or pair[1].problem]
        table.row(
            "good ones are answered", f"{len(good) - len(wrong)} of {len(good)}", is_right=not wrong, details=wrong
        )
        wrong = [_told(*pair) for pair in bad if pair[1].problem or (pair[1].status or 0) // 100 != 4]
        by_status = Counter(outcome.status for _, outcome in bad)
        found = f"{len(bad) - len(wrong)} of {len(bad)}: {_counted(by_status)}"
        table.row("bad ones get a 4xx with the reason", found, is_right=not wrong, details=wrong)
        hung = [_told(*pair) for pair in self._sent if pair[1].is_late]
        slowest = max(outcome.seconds for _, outcome in self._sent)
        found = f"{len(hung)} without an answer in {self._args.timeout:g} s; the slowest took {slowest:.1f} s"
        table.row("nothing hangs", found, is_right=not hung, details=hung)

    def _report_texts(self, table: Table) -> None:
        """Ask a sample again, alone; and let `generate` write plain greedy texts."""
        pairs = [(request, outcome) for request, outcome in self._of("good") if request.is_repeatable]
        sample = random.Random(self._args.seed).sample(pairs, min(len(pairs), self._args.sample))
        equal: Counter[str] = Counter()
        ties: Counter[str] = Counter()
        other: dict[str, list[str]] = {"greedy": [], "seeded": [], "generate": []}

        def count(kind: str, request: Request, outcome: Outcome, is_equal: bool, is_tie: bool, beside: Any) -> None:
            equal[kind] += is_equal
            ties[kind] += is_tie and not is_equal
            if not (is_equal or is_tie):
                other[kind].append(f"{_told(request, outcome)}: {outcome.texts}, else {beside}")

        client = self._client()
        for request, outcome in sample:
            self._again.append(again := client.send(request))
            kind = "greedy" if request.is_greedy else "seeded"
            is_equal = (again.texts, again.finish) == (outcome.texts, outcome.finish)
            text, begun = self._generated(request) if request.is_plain else ("", [])
            is_tie = any(outcome.texts[0].startswith(one) for one in begun)
            count(kind, request, outcome, is_equal, is_tie, again.problem or again.texts)
            if request.is_plain:
                count("generate", request, outcome, set(outcome.texts) == {text}, is_tie, text)
        client.close()
        names = {
            "greedy": "texts are those alone, greedy",
            "seeded": "and with a seed",
            "generate": "and by `generate`",
        }
        for kind, name in names.items():
            total = equal[kind] + ties[kind] + len(other[kind])
            found = f"{equal[kind]} of {total}" + (f", {ties[kind]} up to a tie" if ties[kind] else "")
            table.row(name, found, is_right=not other[kind], details=other[kind])

    def _generated(self, request: Request) -> tuple[str, list[str]]:
        """The text of a call of its own, and how far it had come at each near tie."""
        tokenizer: Any = self._ensemble.tokenizer
        if request.path == CHAT:
            inputs = tokenizer.apply_chat_template(
                request.fields["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(request.fields["prompt"], return_tensors="pt", return_token_type_ids=False)
        count = request.fields.get("max_tokens") or request.fields["max_completion_tokens"]
        output = self._ensemble.generate(
            **inputs, max_new_tokens=count, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        best = torch.stack(output.logits)[:, 0].topk(2).values
        steps = (best[:, 0] - best[:, 1] < TIE).nonzero().flatten().tolist()
        begun = [tokenizer.decode(ids[:step], skip_special_tokens=True).rstrip("\ufffd") for step in steps]
        return tokenizer.decode(ids, skip_special_tokens=True), begun

    def _report_metrics(self, table: Table) -> None:
        """What clients saw is what the server counted; of who hung up it may have counted an answer or not."""
        self._server.wait(self._args.timeout)
        found = self._server.metrics()
        counted: Counter[int] = Counter()
        for name, value in found.items():
            if name.startswith("requests_total") and "/metrics" not in name:
                counted[int(name.split('status="')[1][:3])] += int(value)
        outcomes = [*(outcome for _, outcome in self._sent), *self._again]
        seen = Counter(outcome.status for outcome in outcomes if outcome.status is not None)
        num_gone = sum(request.kind.startswith("hangs") for request, _ in self._sent)
        wrong = [
            f"status {status}: clients saw {seen[status]}, the server counted {counted[status]}"
            for status in sorted({*seen, *counted})
            if not seen[status] <= counted[status] <= seen[status] + num_gone
        ]
        if sum(counted.values()) > sum(seen.values()) + num_gone:
            wrong.append(f"{sum(counted.values())} requests counted, {len(outcomes)} sent")
        told = sum(outcome.num_tokens for outcome in outcomes)
        tokens, given_up = found["generated_tokens_total"], found["texts_given_up_total"]
        if tokens < told:
            wrong.append(f"{tokens:.0f} tokens counted, {told} told to clients")
        wrong += [f"{what}: {found[what]}" for what in ("texts_running", "texts_waiting") if found[what]]
        cells = (
            f"{_counted(counted)}; {tokens:.0f} tokens, {told} of them told to clients; {given_up:.0f} texts given up"
        )
        table.row("metrics add up", cells, is_right=not wrong, details=wrong)


def _counted(by_status: Counter[Any]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in by_status.most_common())


def _told(request: Request, outcome: Outcome) -> str:
    return f"{outcome.status} {outcome.problem or ''} for {request.method} {request.path} {request.body[:300]!r}"


def load(models: Sequence[str], folder: Path) -> EnsembleForCausalLM:
    """The ensemble that is asked for: "tiny", "demo", or folders of members."""
    if list(models) == ["tiny"]:
        models = save_tiny_members(folder)
    elif list(models) == ["demo"]:
        models = models_or_demo(None)
    return EnsembleForCausalLM.from_pretrained(models, dtype=torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["tiny"], help='members; default: "tiny", made at once; or "demo"'
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--max-tokens", type=int, default=16, help="most tokens that a good request asks for")
    parser.add_argument("--sample", type=int, default=400, help="most texts that are compared")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a byte that count as hanging")
    args = parser.parse_args()
    torch.set_num_threads(
        1
    )  # or the server's process, which is a copy of this one, waits for threads it does not have
    with tempfile.TemporaryDirectory() as folder:
        ensemble = load(args.models, Path(folder))
        server = ServerProcess(ensemble, MODEL)
        names = " + ".join(member.name for member in ensemble.member_views)
        print(setting(ensemble.device, ensemble.dtype, names, f"seed {args.seed}"))
        table = Table("what", "found")
        try:
            Soak(args, ensemble, server).run(table)
        finally:
            seconds, code = server.end()
        table.row("SIGTERM ends it", f"in {seconds:.1f} s, exit code {code}", is_right=code == -15)
    return int(table.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
