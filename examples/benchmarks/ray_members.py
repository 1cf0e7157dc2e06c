"""Time members in Ray actors against the same members in this process, in turn, and count the traffic.

Members are ids or folders (by default the two demo models), or random weights in the shapes of large models
(`members.py`), which need tokenizers. Each is loaded twice by the same code: in this process, and in an actor. Every
run replays a real text: the script overrides the chosen ids after fusion, so all runs do the same work. Tables show
the time per token, including the prompt, and the bytes and calls per step, without the prompt and without Ray's
overhead.

    python examples/benchmarks/ray_members.py [--members A B] [--methods unite gac] [--batches 1 8]
    python examples/benchmarks/ray_members.py --members 8B 7B --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 \
        --dtype bfloat16 --num-gpus 0.5 --new-tokens 128 --methods unite

With `--num-gpus 0.5`, two actors share a GPU, and this process uses the same one. With `--num-gpus 1`, each actor has
a GPU, and this process spreads its members over all of them. The script needs Ray (`pip install ray`), and starts a
cluster unless `RAY_ADDRESS` names one.
"""

import argparse
import copy
import functools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from large_members import ReplayingEnsemble, take_turns, time_ensemble
from members import SHAPES, models_or_demo
from report import milliseconds, print_heads, print_row, setting
from texts import text_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ensemble import MemberConfig
from hf_ensemble.members.local import LocalMember
from hf_ensemble.members.ray.member import RayMember

METHODS = ("unite", "gac", "mined", "eva", "deepen")
HERE, MIXED, ACTORS = "all in this process", "the first in this process", "an actor each"
NUM_EMPTY_CALLS = 50
SMALL_RAY = {"include_dashboard": False, "object_store_memory": 2**29}


def load_member(name: str, source: Any, folder: str, dtype: torch.dtype, device: str, seed: int) -> LocalMember:
    """Load or make a member: here, or in an actor.

    Args:
        name: Its name.
        source: Its id or folder; or a configuration, for random weights.
        folder: Its tokenizer.
        dtype: Of its weights.
        device: Where they go.
        seed: Of random weights.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if isinstance(source, str):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    else:
        source.vocab_size = max(source.vocab_size, len(tokenizer))
        source.bos_token_id, source.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        with torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(source, dtype=dtype)
    return LocalMember(model.eval(), tokenizer, name)


def ensembles_of(args: argparse.Namespace) -> dict[str, ReplayingEnsemble]:
    """The same members in three places, by the names of these."""
    sources = args.members if args.tokenizers else models_or_demo(args.members)
    names = [f"{n}: {source.rstrip('/').rsplit('/', 1)[-1]}" for n, source in enumerate(map(str, sources))]
    loads = []
    for n, source in enumerate(map(str, sources)):
        folder = args.tokenizers[n] if args.tokenizers else source
        made_of = copy.deepcopy(SHAPES[source]) if args.tokenizers else source
        loads.append(functools.partial(load_member, names[n], made_of, folder, getattr(torch, args.dtype), seed=n))
    options = {"num_cpus": 0, "num_gpus": args.num_gpus}
    actors = [
        RayMember(name, functools.partial(load, device="cuda" if args.num_gpus else "cpu"), options)
        for name, load in zip(names, loads, strict=True)
    ]
    parts = []
    for n, (actor, load) in enumerate(zip(actors, loads, strict=True)):
        member = load(device=args.devices[n % len(args.devices)])
        parts.append((member.model, member.tokenizer))
        actor.finish(member.tokenizer, None, None)
    items = [MemberConfig(name=name) for name in names]
    of_places = {HERE: parts, MIXED: [parts[0], *actors[1:]], ACTORS: actors}
    return {place: ReplayingEnsemble._of_parts(chosen, items, "unite", None) for place, chosen in of_places.items()}


def traffic_of(ensemble: ReplayingEnsemble, ids: torch.Tensor, new_tokens: int, method: str) -> list[list[float]]:
    """Bytes to, bytes from and calls of each member for a token more, of a call with so many tokens."""
    members = ensemble.member_views
    found = []
    for count in (1, new_tokens):
        before = [copy.copy(member.traffic) for member in members]
        time_ensemble(ensemble, ids, count, method)
        pairs = zip(before, (member.traffic for member in members), strict=True)
        found.append([(b.sent - a.sent, b.received - a.received, b.trips - a.trips) for a, b in pairs])
    return [[(m - o) / (new_tokens - 1) for o, m in zip(*both, strict=True)] for both in zip(*found, strict=True)]


def num_same(ensembles: dict[str, ReplayingEnsemble], ids: torch.Tensor, new_tokens: int, method: str) -> list[int]:
    """How many ids each writes as the first does, where nothing is overridden."""
    written = []
    for ensemble in ensembles.values():
        outputs, ensemble.replayed_ids = [], None
        time_ensemble(ensemble, ids.to(ensemble.device), new_tokens, method, outputs, eos_token_id=[])
        written.append(outputs[0][0, ids.shape[1] :].tolist())
    differing = [[a != b for a, b in zip(written[0], other, strict=True)] for other in written]
    return [row.index(True) if any(row) else len(row) for row in differing]


def empty_calls(member: RayMember) -> list[float]:
    """Seconds of calls that an actor answers at once."""
    seconds = []
    for _ in range(NUM_EMPTY_CALLS):
        start = time.perf_counter()
        member.link.wait(member.link.ask("is_there"))
        seconds.append(time.perf_counter() - start)
    return seconds


def print_times(ensembles: dict[str, ReplayingEnsemble], args: argparse.Namespace, ids: torch.Tensor) -> None:
    """Let all take turns, and print the time of a token of each."""
    variants = {
        (method, batch, place): functools.partial(
            time_ensemble, ensemble, ids.repeat(batch, 1).to(ensemble.device), args.new_tokens, method
        )
        for method in args.methods
        for batch in args.batches
        for place, ensemble in ensembles.items()
    }
    seconds, failed = take_turns(variants, args.turns)
    print_heads("method", "batch", "members", "ms a token of every row (quartiles)", "times as long as in one process")
    for (method, batch, place), values in seconds.items():
        one_process = seconds[method, batch, HERE]
        ratio = f"{statistics.median(values) / statistics.median(one_process):.2f}" if values and one_process else ""
        shown = milliseconds(values, 2) if values else failed[method, batch, place]
        print_row(method, batch, place, shown, ratio)
    if failed:
        sys.exit(f"ray_members.py: these failed: {'; '.join(failed.values())}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", nargs="+", help=f"ids, folders, or with --tokenizers of {', '.join(SHAPES)}")
    parser.add_argument("--tokenizers", nargs="+", help="one folder per member, for random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-gpus", type=float, default=0, help="of each actor; may be a fraction")
    parser.add_argument(
        "--devices", nargs="+", help="of the members in this process, in turn; default: like the actors"
    )
    parser.add_argument("--methods", nargs="+", default=["unite"], choices=METHODS)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.devices is None:
        num_devices = torch.cuda.device_count() if args.num_gpus >= 1 else 1
        args.devices = [f"cuda:{n}" for n in range(num_devices)] if args.num_gpus else ["cpu"]
    if not ray.is_initialized():
        of_ours = {} if "RAY_ADDRESS" in os.environ else {"num_gpus": torch.cuda.device_count(), **SMALL_RAY}
        ray.init(log_to_driver=False, logging_level="error", **of_ours)
    ensembles = ensembles_of(args)
    with ensembles[ACTORS] as in_actors:
        text = text_ids(in_actors.tokenizer, args.prompt + args.new_tokens)
        for ensemble in ensembles.values():
            ensemble.replayed_ids = text.tolist()
        modes = [member.cache_mode for member in (*ensembles[HERE].member_views, *in_actors.member_views)]
        details = args.dtype, f"prompt {args.prompt}", f"{args.new_tokens} new tokens", f"caches: {', '.join(modes)}"
        print(setting(args.devices[0], *details))
        print(f"here on {', '.join(args.devices)}; actors: {', '.join(m.address for m in in_actors.member_views)}")
        ids = text[None, : args.prompt]
        print_times(ensembles, args, ids)
        print_heads("method", "member", "bytes to its actor, a token of a row", "bytes from it", "calls a token")
        for method in args.methods:
            of_members = traffic_of(in_actors, ids, args.new_tokens, method)
            for member, (sent, received, trips) in zip(in_actors.member_views, of_members, strict=True):
                print_row(method, member.name, f"{sent:.0f}", f"{received:.0f}", f"{trips:.2f}")
        for method in args.methods:
            same = num_same(ensembles, ids, args.new_tokens, method)
            print(f"\n{method}, where nothing is overridden: {same} of {args.new_tokens} ids as in one process")
        print(f"\na call that an actor answers at once: {milliseconds(empty_calls(in_actors.member_views[0]), 2)} ms")


if __name__ == "__main__":
    main()
