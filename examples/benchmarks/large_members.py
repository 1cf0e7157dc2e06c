"""Time large members with random weights on one or two GPUs: alone, together with each method, and the naive way.

Members of the shapes 8B (Llama, vocabulary 128,256), 7B (Qwen2, 152,064) or 1B (Llama) in bfloat16. Random weights
write byte garbage, so every run replays a real text: the script overrides the chosen ids after fusion. All variants
take turns; the tables show medians over the turns with quartiles. `--plot` draws the time per token by length and
batch.

    python examples/benchmarks/large_members.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 [--devices cuda:0 cuda:1]

With `--members tiny tiny-qwen --devices cpu`, the script runs without a GPU, as a check; steps are not captured then.
"""

import argparse
import functools
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from unittest import mock

import torch
from decode import naive_step
from measure import Peak, gpu_events, seconds_of
from members import SHAPES, push_along, random_members
from quantized import quantise
from report import milliseconds, print_heads, print_row, setting
from spans import NUM_PUSHED_IDS, WORDS_APART, timed
from texts import Replay, text_ids
from tqdm import tqdm

from hf_ensemble import EnsembleForCausalLM, GacConfig
from hf_ensemble.config import method_config
from hf_ensemble.members import state as member_state
from hf_ensemble.members.member import Member
from hf_ensemble.members.member_model import tensors_of
from hf_ensemble.members.state import MemberState, PlainContext
from hf_ensemble.methods.base import CapturedMix

NUM_PROFILED = 12
"""Tokens whose copies to the host are counted."""


class ReplayingEnsemble(EnsembleForCausalLM):
    """An ensemble whose every step is overridden, after fusion and selection, with the next id of a text."""

    replayed_ids: list[int] | None = None
    """None to leave choosing to others."""

    def _get_logits_processor(self, generation_config, **kwargs):
        processors = super()._get_logits_processor(generation_config, **kwargs)
        if self.replayed_ids is not None:
            processors.append(Replay(self.replayed_ids))
        return processors


def time_stock(model, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds a token of a member's own stock `generate`, without an end."""
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    ids = ids.to(model.device)
    return seconds_of(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **settings)) / new_tokens


def time_steps(member: Member, ids: torch.Tensor, num_new: int = 1, repeats: int = 32, num_expected: int = 0) -> float:
    """Seconds of a member's captured step alone, of `num_new` ids a row, with room for `num_expected` if these are more."""
    room = max(num_expected, num_new * (repeats + 4))
    state = MemberState(member, [PlainContext(row) for row in ids.tolist()], num_expected=room)

    def step() -> None:
        for context in state.contexts:
            context.ids += [11] * num_new
        state.logits(num_new)

    with torch.no_grad():
        for _ in range(4):
            step()
        return seconds_of(lambda: [step() for _ in range(repeats)]) / repeats


def time_ensemble(ensemble, ids: torch.Tensor, new_tokens: int, method: str, outputs: list | None = None, **options):
    """Seconds a token of the ensemble's `generate`, the prompt included; the output goes to `outputs`."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "method": method, **options}
    outputs = [] if outputs is None else outputs
    run = lambda: outputs.append(ensemble.generate(ids, attention_mask=torch.ones_like(ids), **settings))  # noqa: E731
    return seconds_of(run) / new_tokens


def time_again(ensemble, ids: torch.Tensor, new_tokens: int, method: str, **options) -> float:
    """Seconds a token of the second of two equal calls: the first captures graphs, as other batch sizes had theirs."""
    time_ensemble(ensemble, ids, new_tokens, method, **options)
    return time_ensemble(ensemble, ids, new_tokens, method, **options)


def time_decoding(ensemble, ids: torch.Tensor, new_tokens: int, method: str, **options) -> float:
    """Seconds a token of a call, without its prompt: what all tokens take more than the first."""
    first = time_again(ensemble, ids, 1, method, **options)
    # Not what twice the tokens take more: there would be more slots.
    return (new_tokens * time_again(ensemble, ids, new_tokens, method, **options) - first) / (new_tokens - 1)


def time_beginning(ensemble, ids: torch.Tensor, rows: int, method: str, least_saved: float) -> float:
    """Seconds until the first token of rows that differ in their last 16 ids.

    What they begin with is read once if that saves `least_saved` ids.
    """
    rows_of_ids = ids.repeat(rows, 1)
    rows_of_ids[:, -16:] = ids[0].unfold(0, 16, 1)[:rows]
    with mock.patch.object(member_state, "_LEAST_SAVED", least_saved):
        return time_again(ensemble, rows_of_ids, 1, method)


def time_alone(ensemble, ids: torch.Tensor, new_tokens: int, method: str) -> float:
    """The same where only the primary decides."""
    weights = [1.0] + [0.0] * (len(ensemble.members) - 1)
    return time_decoding(ensemble, ids, new_tokens, method, weights=weights)


def time_mixture(ensemble, ids: torch.Tensor, new_tokens: int) -> float:
    """The same as `time_again` where one member is drawn for every token. Nothing is replayed, which would be no sample."""
    replayed, ensemble.replayed_ids = ensemble.replayed_ids, None
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": []}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what random weights write
            return time_again(ensemble, ids, new_tokens, GacConfig(strategy="mixture_sampling"), **options)
    finally:
        ensemble.replayed_ids = replayed


def time_fusion(ensemble, method: str, repeats: int = 100) -> list[float]:
    """Seconds of fusing one step: from both members' logits to the fused scores."""
    fuser = CapturedMix(ensemble._kept.method(method_config(method), list(ensemble.member_views[0].eos_token_ids)))
    logits = [torch.randn(1, m.config.vocab_size, device=ensemble.device) for m in ensemble.members]
    weights = torch.full((1, len(logits)), 1 / len(logits), device=ensemble.device)
    return [seconds_of(lambda: fuser(logits, weights)) for _ in range(repeats)][10:]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on a device reads and writes."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**24, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / min(seconds_of(lambda: target.copy_(source)) for _ in range(5))


def memory_above(ensemble, ids: torch.Tensor, args: argparse.Namespace) -> float:
    """GiB that a call takes at most, on all devices, besides the members and their caches (on a CPU: the process)."""
    peak = Peak(args.devices)
    for method in args.methods:
        time_ensemble(ensemble, ids, args.new_tokens, method)
    caches = sum(buffers.num_bytes for member in ensemble.member_views for buffers in member.buffer_pool._free)
    weights = sum(tensor.nbytes for tensor in tensors_of(ensemble.members))
    return (peak.bytes() - weights - caches) / 2**30


def show_copies(ensemble, ids: torch.Tensor, method: str) -> str:
    """Profile some steps and say what they copied from the GPU to the host."""
    events = gpu_events(lambda: time_ensemble(ensemble, ids, NUM_PROFILED, method))
    copies = [event["args"]["bytes"] for event in events if "Memcpy DtoH" in event.get("name", "")]
    return f"{len(copies) / NUM_PROFILED:.1f} copies to the host a step, the largest {max(copies, default=0)} bytes"


def draw(path: str, by_length: dict[str, dict[int, float]], by_batch: dict[str, dict[int, float]]) -> None:
    """Plot milliseconds a token against the length of the text and against the batch."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    labels = "text before the new tokens, tokens", "batch"
    for axis, label, table in zip(axes, labels, (by_length, by_batch), strict=True):
        for name, values in table.items():
            axis.plot(list(values), [1e3 * value for value in values.values()], marker="o", label=name)
        axis.set_xlabel(label)
        axis.legend()
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("ms for a token of every row")
    figure.tight_layout()
    figure.savefig(path)


def variants_of(ensemble, args: argparse.Namespace, texts: list[torch.Tensor]) -> dict[str, Callable[[], float]]:
    """What takes turns, by the name of its line; each gives seconds a token of every row."""
    variants: dict[str, Callable[[], float]] = {}
    prompts = [ids[None, : args.prompt] for ids in texts]
    for member, ids in zip(ensemble.member_views, prompts, strict=True):
        steps = functools.partial(time_steps, member, num_expected=args.new_tokens)
        variants[f"{member.name} alone, stock"] = functools.partial(time_stock, member.model, ids, args.new_tokens)
        variants[f"{member.name}, captured step of 1"] = functools.partial(steps, ids)
        variants[f"{member.name}, captured step of 8"] = functools.partial(steps, ids, 8)
        variants[f"{member.name}, captured step, batch 32"] = functools.partial(steps, ids.repeat(32, 1))
    for batch in (1, 32):
        inputs = prompts[0].repeat(batch, 1), args.new_tokens, args.methods[0]
        variants[f"{ensemble.member_views[0].name} alone, batch {batch}"] = functools.partial(
            time_alone, ensemble, *inputs
        )
    for method in args.methods:
        inputs = {f"batch {batch}": prompts[0].repeat(batch, 1) for batch in args.batches}
        inputs |= {f"prompt {length}": texts[0][None, :length] for length in args.lengths}
        for name, ids in inputs.items():
            variants[f"{method}, {name}"] = functools.partial(time_again, ensemble, ids, args.new_tokens, method)
        for length in (args.prompt, *args.lengths):
            ids = texts[0][None, :length]
            variants[f"{method}, steps after a prompt of {length}"] = functools.partial(
                time_decoding, ensemble, ids, args.new_tokens, method
            )
    if args.beginning:
        inputs = ensemble, texts[0][None, : args.beginning], max(args.batches), args.methods[0]
        name = f"first token of {max(args.batches)} rows with one beginning of {args.beginning}"
        variants[f"{name}, read once"] = functools.partial(time_beginning, *inputs, member_state._LEAST_SAVED)
        variants[f"{name}, read by every row"] = functools.partial(time_beginning, *inputs, math.inf)
    ways = {
        "gac, gate shut": {"method": GacConfig(gate=0, threshold=1e-9)},
        "gac, gate open": {"method": GacConfig(gate=0, threshold=1 - 1e-9)},
    }
    for name, way in ways.items():
        variants[name] = functools.partial(time_again, ensemble, prompts[0], args.new_tokens, **way)
    variants["gac, mixture sampling"] = functools.partial(time_mixture, ensemble, prompts[0], args.new_tokens)
    return variants


def print_spans(ensemble, args: argparse.Namespace, middle: dict[str, float]) -> None:
    """Print what spans take on which the members never agree: each is pushed along a text of its own."""
    ensemble.replayed_ids = None
    for n, (model, tokenizer) in enumerate(zip(ensemble.members, ensemble.tokenizers, strict=True)):
        push_along(model, text_ids(tokenizer, NUM_PUSHED_IDS, skip=n * WORDS_APART).to(model.device))
    own = sum(middle[f"{member.name}, captured step of 1"] for member in ensemble.member_views)
    for length in args.spans:
        found = [timed(ensemble, length, args.new_tokens)[0] for _ in range(args.turns + 2)][2:]
        ratio = statistics.median(found) / own
        print_row(f"spans, L = {length}", milliseconds(found, 2), f"{ratio:.2f} of the captured steps' sum")


def take_turns(
    variants: dict[str, Callable[[], float]], turns: int, most_seconds: float = math.inf
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The seconds of each variant in each turn but one that warms up, and why those failed that did.

    Nothing starts after `most_seconds`, so that what was measured is printed before a borrowed machine is gone.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    failed: dict[str, str] = {}
    start = time.perf_counter()
    for turn in range(turns + 1):
        for name, variant in tqdm(variants.items(), desc=f"turn {turn}"):
            if name in failed:
                continue
            if time.perf_counter() - start > most_seconds:
                if not seconds[name]:
                    failed[name] = "no time was left"
                continue
            try:
                found = variant()
            except Exception as error:  # hours of the others are not lost for one that has no room, say
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            tqdm.write(f"turn {turn}, {name}: {1e3 * found:.2f} ms", file=sys.stderr)
            if turn:
                seconds[name].append(found)
    return seconds, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", nargs="+", required=True, help="one folder per member")
    parser.add_argument("--members", nargs="+", default=["8B", "7B"], choices=SHAPES)
    parser.add_argument("--devices", nargs="+", default=["cuda:0"])
    parser.add_argument("--methods", nargs="+", default=["unite", "gac", "deepen"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32], help="batches to time besides one row")
    parser.add_argument("--lengths", nargs="*", type=int, default=[], help="prompts to time at besides --prompt")
    parser.add_argument("--spans", nargs="*", type=int, default=[], help="lengths of spans to time, in words")
    parser.add_argument(
        "--beginning", type=int, default=0, help="length of prompts with one beginning to time, in ids"
    )
    parser.add_argument("--weights", choices=["torchao-int8", "torchao-int4"], help="quantise the members first")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start nothing more in the turns after so many"
    )
    parser.add_argument("--plot", help="file to draw to")
    args = parser.parse_args()
    args.batches = sorted({1, *args.batches})
    ensemble = random_members(args.members, args.tokenizers, args.devices, ReplayingEnsemble)
    for model in ensemble.members if args.weights else ():
        quantise(model, args.weights, args.devices[0])
    longest = max([args.prompt, args.beginning, *args.lengths]) + max(args.new_tokens, NUM_PROFILED)
    texts = [text_ids(tokenizer, longest) for tokenizer in ensemble.tokenizers]
    ensemble.replayed_ids = texts[0].tolist()
    texts[0] = texts[0].to(ensemble.device)
    modes = ", ".join(member.cache_mode for member in ensemble.member_views)
    details = args.weights or "bfloat16", f"prompt {args.prompt}", f"{args.new_tokens} new tokens", f"caches: {modes}"
    print(setting(args.devices[0], f"{len(args.devices)} devices", *details))

    first = texts[0][None, : args.prompt], args.new_tokens, args.methods[0]
    calls = ", ".join(f"{args.new_tokens * time_ensemble(ensemble, *first):.2f}" for _ in range(4))
    print(f"the first calls take {calls} s")
    seconds, failed = take_turns(variants_of(ensemble, args, texts), args.turns, args.seconds)
    middle = {name: statistics.median(values) if values else math.nan for name, values in seconds.items()}
    print_heads("one run, batch 1 unless named", "ms a token (quartiles)", "tokens a second of all rows")
    for name, values in seconds.items():
        rows = int(name.rsplit("batch ", 1)[1]) if "batch " in name else 1
        tokens = rows * (int(name.rsplit(" ", 1)[1]) if "captured step of" in name else 1)
        print_row(name, failed.get(name) or milliseconds(values, 2), f"{tokens / middle[name]:.0f}")
    print_what_follows(ensemble, args, texts[0][None, : args.prompt], middle)
    for batch in args.batches:
        above = memory_above(ensemble, texts[0][: args.prompt].repeat(batch, 1), args)
        print(f"memory at batch {batch}: {above:.2f} GiB more than weights and caches at most")
    if args.spans:
        print_heads("spans that never agree", "ms a token (quartiles)", "")
        print_spans(ensemble, args, middle)
    if args.plot:
        lengths = sorted([args.prompt, *args.lengths])
        runs = {length: f"prompt {length}" if length in args.lengths else "batch 1" for length in lengths}
        by_length = {m: {length: middle[f"{m}, {runs[length]}"] for length in lengths} for m in args.methods}
        by_batch = {m: {batch: middle[f"{m}, batch {batch}"] for batch in args.batches} for m in args.methods}
        draw(args.plot, by_length, by_batch)
    if failed:
        sys.exit(f"large_members.py: these failed: {'; '.join(failed)}")


def print_what_follows(ensemble, args: argparse.Namespace, prompt: torch.Tensor, middle: dict[str, float]) -> None:
    """Print, beside the medians, what they are to be compared with, and how a step is spent."""
    names = [member.name for member in ensemble.member_views]
    bandwidth = copy_bandwidth(ensemble.device)
    floors = [sum(tensor.nbytes for tensor in tensors_of([model])) / bandwidth for model in ensemble.members]
    captured = [middle[f"{name}, captured step of 1"] for name in names]
    with torch.no_grad():
        naive = [naive_step(ensemble, prompt, middle[f"{names[0]} alone, stock"]) for _ in range(3)]
    for name, value in (
        (f"memory floor at {bandwidth / 1e12:.2f} TB/s", sum(floors) if len(args.devices) == 1 else max(floors)),
        ("sum of captured steps", sum(captured)),
        ("slowest captured step", max(captured)),
        ("naive: all text anew, dictionaries", statistics.median(naive)),
    ):
        print_row(name, f"{1e3 * value:.2f}", f"{1 / value:.1f}")
    for batch, step in ((1, "step of 1"), (32, "step, batch 32")):
        ratio = middle[f"{names[0]} alone, batch {batch}"] / middle[f"{names[0]}, captured {step}"]
        print(f"{names[0]} alone at batch {batch}: {ratio:.2f} of its captured step")
    for method in args.methods:
        copies = show_copies(ensemble, prompt, method)
        print(f"\n{method}: fusing one step {milliseconds(time_fusion(ensemble, method), 3)} ms; {copies}")
        batch = max(args.batches)
        ratio = batch * middle[f"{method}, batch 1"] / middle[f"{method}, batch {batch}"]
        print(f"{method}: batch {batch} gives {ratio:.1f} times the tokens a second of batch 1")


if __name__ == "__main__":
    main()
