"""Time fused steps of two large members with random weights on one GPU, and show what a step copies to the host.

An 8B (Llama shape, vocabulary 128,256) and a 7B (Qwen2 shape, 152,064) in bfloat16. Random weights write byte garbage,
so every run replays a real text: the chosen ids are overridden after fusion. Each member alone runs the stock
loop, one step after each fused step; medians over all steps are printed with quartiles.

    python examples/benchmarks/large_members.py --tokenizers FOLDER_OF_LLAMA3 FOLDER_OF_QWEN3
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, LlamaConfig, LogitsProcessor, Qwen2Config
from turns import OwnLoop, TakeTurns, quartiles

import hf_ensemble
from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.methods.captured import CapturedMix

TEXT = (
    "The history of the city begins with a small settlement at the river. Over the centuries it grew, traded with its "
    "neighbours, burned down twice and was built again, each time with wider streets. In 1874 the first railway came, "
    "and with it factories, workers' quarters, a gasworks and two newspapers (one of them still exists). "
    "Zürich, naïve café, 你好世界, def main(argv): return [int(x) for x in argv[1:]] # done. "
) * 8
SHAPES = {
    "8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, eos_token_id=128001, bos_token_id=128000,
    ),
    "7B": Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768, eos_token_id=151645,
    ),
}  # fmt: skip


class Replay(LogitsProcessor):
    """Overrides what was chosen with the next id of a text."""

    def __init__(self, ids: torch.Tensor, prompt_length: int):
        self.ids, self.prompt_length = ids, prompt_length

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1]]] = 0.0
        return forced


class ReplayingEnsemble(EnsembleForCausalLM):
    """An ensemble whose every step is overridden, after fusion and selection, with the next id of a text."""

    text_ids: torch.Tensor

    def _get_logits_processor(self, generation_config, **kwargs):
        processors = super()._get_logits_processor(generation_config, **kwargs)
        processors.append(Replay(self.text_ids, kwargs["input_ids_seq_length"]))
        return processors


def run(ensemble, texts: list[torch.Tensor], prompt_length: int, new_tokens: int, method: str, own=True) -> TakeTurns:
    """Replay the text with fused steps and the members' own steps in turn."""
    pairs = list(zip(ensemble.members, texts, strict=True)) if own else []
    loops = [OwnLoop(model, ids[None, :prompt_length], ids) for model, ids in pairs]
    for loop in loops:
        loop.step()
    turns = TakeTurns(loops)
    ids = texts[0][None, :prompt_length]
    ensemble.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        stopping_criteria=[turns], method=method,
    )  # fmt: skip
    return turns


def time_fusion(ensemble, method: str, repeats: int = 100) -> list[float]:
    """Milliseconds of fusing one step: from both members' logits to the fused scores."""
    fuser = CapturedMix(
        ensemble._method(hf_ensemble.config.method_config(method), list(ensemble._members[0].eos_token_ids))
    )
    logits = [torch.randn(1, m.config.vocab_size, device=ensemble.device) for m in ensemble.members]
    weights = torch.full((1, 2), 0.5, device=ensemble.device)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fuser(logits, weights)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[10:]


def show_copies(ensemble, texts, method: str, prompt_length: int, new_tokens: int = 12) -> str:
    """Profile some steps and say what they copied from the GPU to the host."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        run(ensemble, texts, prompt_length, new_tokens, method, own=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    copies = [event["args"]["bytes"] for event in events if "Memcpy DtoH" in event.get("name", "")]
    return f"{len(copies) / new_tokens:.1f} copies to the host a step, the largest {max(copies)} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", nargs=2, required=True)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--alternations", type=int, default=5)
    args = parser.parse_args()
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in args.tokenizers]
    models = []
    for config in SHAPES.values():
        with torch.device("cuda"):
            torch.manual_seed(0)
            models.append(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    pair = ReplayingEnsemble.from_members(models, tokenizers)
    texts = [tokenizer(TEXT, return_tensors="pt").input_ids[0].cuda() for tokenizer in tokenizers]
    pair.text_ids = texts[0]
    print(
        f"{torch.cuda.get_device_name()}, hf_ensemble {hf_ensemble.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, bfloat16, batch 1, prompt {args.prompt}, {args.new_tokens} new tokens; caches: "
        f"{', '.join(member.cache_mode for member in pair._members)}"
    )
    print(
        "\n| method | 8B, ms | 7B, ms | fused step, ms | to the sum, median (quartiles) of the steps |\n|---|---|---|---|---|"
    )
    for method in ("unite", "gac"):
        run(pair, texts, args.prompt, 16, method)
        fused, own = [], []
        for _ in range(args.alternations):
            turns = run(pair, texts, args.prompt, args.new_tokens, method)
            fused, own = fused + turns.fused[5:], own + turns.own[5:]
        ratios = [f / sum(o) for f, o in zip(fused, own, strict=True)]
        columns = [quartiles([1e3 * value for value in values], 2) for values in (*zip(*own, strict=True), fused)]
        print(f"| {method} | {' | '.join(columns)} | {quartiles(ratios, 2)} |")
    for method in ("unite", "gac"):
        print(f"fusion alone, {method}: {quartiles(time_fusion(pair, method), 2)} ms")
    for method in ("unite", "gac"):
        print(f"{method}: {show_copies(pair, texts, method, args.prompt)}")
    print(f"GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


if __name__ == "__main__":
    main()
