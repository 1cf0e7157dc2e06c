"""Time large members with random weights on one or two GPUs: alone, together with each method, and the naive way.

Members of the shapes 8B (Llama, vocabulary 128,256), 7B (Qwen2, 152,064) or 1B (Llama) in bfloat16. Random weights write
byte garbage, so every run replays a real text: the chosen ids are overridden after fusion. All variants take turns; the
tables show medians over the turns with quartiles. `--plot` draws the time of a token against length and batch.

    python examples/benchmarks/large_members.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3 [--devices cuda:0 cuda:1]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from decode import naive_step
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LogitsProcessor, Qwen2Config
from turns import quartiles

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM, MemberConfig
from hf_ensemble.members.contexts import PlainContext
from hf_ensemble.members.member import Member
from hf_ensemble.members.state import MemberState
from hf_ensemble.methods.captured import CapturedMix

TEXT = (
    "The history of the city begins with a small settlement at the river. Over the centuries it grew, traded with its "
    "neighbours, burned down twice and was built again, each time with wider streets. In 1874 the first railway came, "
    "and with it factories, workers' quarters, a gasworks and two newspapers (one of them still exists). "
    "Zürich, naïve café, 你好世界, def main(argv): return [int(x) for x in argv[1:]] # done. "
) * 24
SHAPES = {
    "8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, eos_token_id=128001, bos_token_id=128000,
    ),
    "7B": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768, eos_token_id=151645,
    ),
    "1B": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, eos_token_id=128001, bos_token_id=128000, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Replay(LogitsProcessor):
    """Overrides what was chosen with the next id of a text."""

    def __init__(self, ids: list[int]):
        self.ids = ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1]]] = 0.0
        return forced


class ReplayingEnsemble(EnsembleForCausalLM):
    """An ensemble whose every step is overridden, after fusion and selection, with the next id of a text."""

    text_ids: list[int] | None
    """None to leave choosing to others."""

    def _get_logits_processor(self, generation_config, **kwargs):
        processors = super()._get_logits_processor(generation_config, **kwargs)
        if self.text_ids is not None:
            processors.append(Replay(self.text_ids))
        return processors


def load(shapes: list[str], devices: list[str], folders: list[str]) -> ReplayingEnsemble:
    """Members of these shapes with random weights; the text to replay is the first's."""
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in folders]
    models = []
    for n, shape in enumerate(shapes):
        with torch.device(devices[n % len(devices)]):
            torch.manual_seed(n)
            models.append(transformers.AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).eval())
    configs = [MemberConfig(name=f"{shape}, member {n}") for n, shape in enumerate(shapes)]
    ensemble = ReplayingEnsemble.from_members(models, tokenizers, member_configs=configs)
    ensemble.text_ids = tokenizers[0](TEXT).input_ids
    return ensemble


def timed(function: Callable[[], object]) -> float:
    for n in range(torch.cuda.device_count()):
        torch.cuda.synchronize(n)
    start = time.perf_counter()
    function()
    for n in range(torch.cuda.device_count()):
        torch.cuda.synchronize(n)
    return time.perf_counter() - start


def time_stock(model, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds a token of a member's own stock `generate`, without an end."""
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    ids = ids.to(model.device)
    return timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **settings)) / new_tokens


def time_steps(member: Member, ids: torch.Tensor, num_new: int = 1, repeats: int = 32) -> float:
    """Seconds of a member's captured step alone, of `num_new` ids a row."""
    state = MemberState(member, [PlainContext(row) for row in ids.tolist()], num_expected=num_new * (repeats + 4))

    def step() -> None:
        for context in state.contexts:
            context.ids += [11] * num_new
        state.logits(num_new)

    with torch.no_grad():
        for _ in range(4):
            step()
        return timed(lambda: [step() for _ in range(repeats)]) / repeats


def time_ensemble(ensemble, ids: torch.Tensor, new_tokens: int, method: str, outputs: list | None = None, **options):
    """Seconds a token of the ensemble's `generate`, the prompt included; the output goes to `outputs`."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "method": method, **options}
    outputs = [] if outputs is None else outputs
    run = lambda: outputs.append(ensemble.generate(ids, attention_mask=torch.ones_like(ids), **settings))  # noqa: E731
    return timed(run) / new_tokens


def time_again(ensemble, ids: torch.Tensor, new_tokens: int, method: str) -> float:
    """Seconds a token of the second of two equal calls: the first captures graphs, as other batch sizes had theirs."""
    time_ensemble(ensemble, ids, new_tokens, method)
    return time_ensemble(ensemble, ids, new_tokens, method)


def time_fusion(ensemble, method: str, repeats: int = 100) -> list[float]:
    """Milliseconds of fusing one step: from both members' logits to the fused scores."""
    fuser = CapturedMix(
        ensemble._method(hf_ensemble.config.method_config(method), list(ensemble._members[0].eos_token_ids))
    )
    logits = [torch.randn(1, m.config.vocab_size, device=ensemble.device) for m in ensemble.members]
    weights = torch.full((1, len(logits)), 1 / len(logits), device=ensemble.device)
    times = [1e3 * timed(lambda: fuser(logits, weights)) for _ in range(repeats)]
    return times[10:]


def copy_bandwidth() -> float:
    """Bytes a second that a copy on the GPU reads and writes."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * 2**30 / min(timed(lambda: target.copy_(source)) for _ in range(5))


def memory_above(ensemble, ids: torch.Tensor, new_tokens: int, methods: list[str]) -> float:
    """GiB that a call takes at most, on all devices, besides the members and their caches."""
    devices = range(torch.cuda.device_count())
    for n in devices:
        torch.cuda.reset_peak_memory_stats(n)
    for method in methods:
        time_ensemble(ensemble, ids, new_tokens, method)
    caches = [buffers.cache for member in ensemble._members for buffers in member.buffer_pool._free]
    held = [*ensemble.parameters(), *(tensor for cache in caches for tensor in (*cache.keys, *cache.values))]
    peak = sum(torch.cuda.max_memory_allocated(n) for n in devices)
    return (peak - sum(tensor.numel() * tensor.element_size() for tensor in held)) / 2**30


def show_copies(ensemble, ids: torch.Tensor, method: str, new_tokens: int = 12) -> str:
    """Profile some steps and say what they copied from the GPU to the host."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        time_ensemble(ensemble, ids, new_tokens, method)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    copies = [event["args"]["bytes"] for event in events if "Memcpy DtoH" in event.get("name", "")]
    return f"{len(copies) / new_tokens:.1f} copies to the host a step, the largest {max(copies)} bytes"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", nargs="+", required=True, help="one folder per member")
    parser.add_argument("--members", nargs="+", default=["8B", "7B"], choices=SHAPES)
    parser.add_argument("--devices", nargs="+", default=["cuda:0"])
    parser.add_argument("--methods", nargs="+", default=["unite", "gac", "deepen"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="*", type=int, default=[], help="prompts to time at besides --prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plot", help="file to draw to")
    args = parser.parse_args()
    ensemble = load(args.members, args.devices, args.tokenizers)
    texts = [tokenizer(TEXT, return_tensors="pt").input_ids[0] for tokenizer in ensemble.tokenizers]
    texts[0] = texts[0].to(ensemble.device)
    prompt = [ids[None, : args.prompt] for ids in texts]
    print(
        f"{torch.cuda.get_device_name()} x{len(args.devices)}, hf_ensemble {hf_ensemble.__version__}, transformers "
        f"{transformers.__version__}, torch {torch.__version__}, bfloat16, prompt {args.prompt}, {args.new_tokens} new "
        f"tokens; caches: {', '.join(member.cache_mode for member in ensemble._members)}"
    )
    variants: dict[str, Callable[[], float]] = {}
    for shape, member, ids in zip(args.members, ensemble._members, prompt, strict=True):
        variants[f"{shape} alone, stock"] = lambda m=member, i=ids: time_stock(m.model, i, args.new_tokens)
        for num_new in (1, 8):
            variants[f"{shape}, captured step of {num_new}"] = lambda m=member, i=ids, n=num_new: time_steps(m, i, n)
        variants[f"{shape}, captured step, batch 32"] = lambda m=member, i=ids: time_steps(m, i.repeat(32, 1))
    for method in args.methods:
        for batch in args.batches:
            ids = prompt[0].repeat(batch, 1)
            variants[f"{method}, batch {batch}"] = lambda i=ids, m=method: time_again(ensemble, i, args.new_tokens, m)
        for length in args.lengths:
            ids = texts[0][None, :length]
            variants[f"{method}, prompt {length}"] = lambda i=ids, m=method: time_again(
                ensemble, i, args.new_tokens, m
            )
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.turns + 1):
        for name, variant in tqdm(variants.items(), desc=f"turn {turn}"):
            found = variant()
            tqdm.write(f"turn {turn}, {name}: {1e3 * found:.2f} ms", file=sys.stderr)
            if turn:  # the first warms up
                seconds[name].append(found)
    middle = {name: statistics.median(values) for name, values in seconds.items()}

    bandwidth = copy_bandwidth()
    floors = [sum(p.numel() * p.element_size() for p in model.parameters()) / bandwidth for model in ensemble.members]
    floor = sum(floors) if len(args.devices) == 1 else max(floors)
    captured = [middle[f"{shape}, captured step of 1"] for shape in args.members]
    with torch.no_grad():
        naive = [naive_step(ensemble, prompt[0], middle[f"{args.members[0]} alone, stock"]) for _ in range(3)]
    print("\n| one run, batch 1 unless named | ms a token (quartiles) | tokens a second of all rows |\n|---|---|---|")
    for name, values in seconds.items():
        rows = int(name.rsplit("batch ", 1)[1]) if "batch " in name else 1
        tokens = rows * (int(name.rsplit(" ", 1)[1]) if "step of" in name else 1)
        print(f"| {name} | {quartiles([1e3 * value for value in values], 2)} | {tokens / middle[name]:.0f} |")
    for name, value in (
        (f"memory floor at {bandwidth / 1e12:.2f} TB/s", floor),
        ("sum of captured steps", sum(captured)),
        ("slowest captured step", max(captured)),
        ("naive: all text anew, dictionaries", statistics.median(naive)),
    ):
        print(f"| {name} | {1e3 * value:.2f} | {1 / value:.1f} |")
    for method in args.methods:
        print(f"\n{method}: fusing one step {quartiles(time_fusion(ensemble, method), 3)} ms;", end=" ")
        print(show_copies(ensemble, prompt[0], method))
        batch = max(args.batches)
        ratio = batch * middle[f"{method}, batch 1"] / middle[f"{method}, batch {batch}"]
        print(f"{method}: batch {batch} gives {ratio:.1f} times the tokens a second of batch 1")
    for batch in args.batches:
        above = memory_above(ensemble, prompt[0].repeat(batch, 1), args.new_tokens, args.methods)
        print(f"GPU memory at batch {batch}: {above:.2f} GiB more than weights and caches at most")
    if args.plot:
        lengths = sorted([args.prompt, *args.lengths])
        names = {length: f"prompt {length}" if length in args.lengths else "batch 1" for length in lengths}
        by_length = {m: {length: middle[f"{m}, {names[length]}"] for length in lengths} for m in args.methods}
        by_batch = {m: {batch: middle[f"{m}, batch {batch}"] for batch in args.batches} for m in args.methods}
        draw(args.plot, by_length, by_batch)


if __name__ == "__main__":
    main()
