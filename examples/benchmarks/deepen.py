"""Time, memory and exactness of DeePEn, compared with GaC.

    python examples/benchmarks/deepen.py                           # the two demo models, whole steps
    python examples/benchmarks/deepen.py --tokenizers A B          # the mixing alone, with random embeddings

The first command prints a fused step of each method, in turn in one process. It then prints the distance of DeePEn's
distribution from the one without a bound on the support and, for two members with one vocabulary (a model, and the
same model without its last two layers), from the plain average. The second command needs no model: logits and
embeddings are random, on a GPU if there is one. In a `new` step, no row of the support is kept from before (the worst
case); in a `half` step, half the support's ids are from the step before and half were never seen; in a `kept` step,
all rows are kept. Distances are total variation: half the sum of absolute differences.
"""

import argparse
import copy
import functools
import itertools
import statistics
from pathlib import Path

import torch
from measure import Peak, seconds_of
from members import models_or_demo
from report import milliseconds, print_heads, print_row, setting
from torch import nn
from transformers import AutoTokenizer
from turns import TakeTurns

from hf_ensemble import AnchorTokens, DeepenConfig, EnsembleForCausalLM, GacConfig, UnionVocabulary
from hf_ensemble.methods.base import CapturedMix
from hf_ensemble.methods.deepen import Deepen
from hf_ensemble.methods.gac import Gac

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village far away from the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three most important inventions of the nineteenth century were",
    "Dear Sir or Madam,\n\nI am writing to you about",
    "In mathematics, a prime number is",
    "Die Hauptstadt von Deutschland ist",
)
FEW = 4096
EXACT = 1024
"""Number of anchors to compare with all ids of the demo models; more would take minutes."""
NUM_WARM_UP = 5
"""Steps of the mixing alone that are not counted."""


def configs() -> dict[str, GacConfig | DeepenConfig]:
    return {"gac": GacConfig(), f"deepen, {FEW} anchors": DeepenConfig(num_anchors=FEW), "deepen, all": DeepenConfig()}


# --- Whole steps ----------------------------------------------------------------------------------------------------


def time_steps(ensemble: EnsembleForCausalLM, new_tokens: int, rounds: int) -> None:
    """Decode by turns with each method and print a step of each."""
    inputs = ensemble.tokenizer(PROMPTS[1], return_tensors="pt").to(ensemble.device)
    # No EOS: the script measures steps, wherever the text would end.
    settings = {"max_new_tokens": 1 + new_tokens, "do_sample": False, "eos_token_id": ensemble.tokenizer.unk_token_id}
    first: dict[str, list[float]] = {name: [] for name in configs()}
    later: dict[str, list[float]] = {name: [] for name in configs()}
    peaks: dict[str, float] = {}
    ensemble.generate(**inputs, **{**settings, "max_new_tokens": 2}, method="gac")
    for _ in range(rounds):
        for name, config in configs().items():
            for method in ensemble._kept.methods.values():
                method.forget()
            peak = Peak([ensemble.device])
            turns = TakeTurns([])
            ensemble.generate(**inputs, **settings, method=config, stopping_criteria=[turns])
            first[name].append(turns.fused[0])
            later[name] += turns.fused[1:]
            peaks[name] = max(peak.mib_above_start(), peaks.get(name, 0.0))
    print_heads("method", "step, ms, median (quartiles)", "to GaC", "first step, ms", "peak above before, MiB")
    gac = statistics.median(later["gac"])
    for name, values in later.items():
        ratio = statistics.median(values) / gac
        start = 1e3 * statistics.median(first[name])
        print_row(name, milliseconds(values), f"{ratio:.2f}", f"{start:.0f}", f"{peaks[name]:.0f}")


# --- Distances ------------------------------------------------------------------------------------------------------


def last_logits(model, tokenizer) -> torch.Tensor:
    """Logits after each prompt, of shape `(num_prompts, vocab_size)`."""
    rows = [model(**tokenizer(text, return_tensors="pt").to(model.device)).logits[0, -1].float() for text in PROMPTS]
    return torch.stack(rows)


def method_of(models, tokenizers, config: DeepenConfig) -> Deepen:
    union = UnionVocabulary.from_tokenizers(tokenizers)
    eos_ids = [[tokenizer.eos_token_id] for tokenizer in tokenizers]
    return Deepen(union, eos_ids, models[0].device, [model.get_input_embeddings() for model in models], config)


def describe(found: torch.Tensor, expected: torch.Tensor) -> tuple[str, str, str]:
    distance = (found - expected).abs().sum(-1) / 2
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return f"{distance.median():.4f}", f"{distance.max():.4f}", f"{same} of {len(found)}"


def mixed(models, tokenizers, logits, config: DeepenConfig) -> torch.Tensor:
    weights = torch.full((len(PROMPTS), len(models)), 1 / len(models), device=logits[0].device)
    return method_of(models, tokenizers, config).mix(logits, weights).logprobs.exp()


@torch.no_grad()
def show_support(ensemble: EnsembleForCausalLM, supports=(64, 512, 2048)) -> None:
    logits = [last_logits(*pair) for pair in zip(ensemble.members, ensemble.tokenizers, strict=True)]
    print(f"\n{EXACT} anchors, {len(PROMPTS)} prompts, beside `support=None`:")
    print_heads("support", "distance, median", "greatest", "same best token")
    exact = None
    for support in (None, *supports):
        config = DeepenConfig(num_anchors=EXACT, support=support)
        found = mixed(ensemble.members, ensemble.tokenizers, logits, config)
        if exact is None:
            exact = found
            print_row("the primary alone", *describe(logits[0].softmax(-1), exact))
        else:
            print_row(support, *describe(found, exact))


@torch.no_grad()
def show_average(model, tokenizer) -> None:
    """Print how far DeePEn is from the average of two members with the same vocabulary."""
    worse = copy.deepcopy(model)
    worse.model.layers = worse.model.layers[:-2]
    models, tokenizers = [model, worse], [tokenizer] * 2
    logits = [last_logits(one, tokenizer) for one in models]
    probs = [one.softmax(-1) for one in logits]
    average = (probs[0] + probs[1]) / 2
    print("\nTwo members with one vocabulary, beside their plain average:")
    print_heads("", "distance, median", "greatest", "same best token")
    print_row("the primary alone", *describe(probs[0], average))
    for num_anchors, variant in itertools.product((FEW, None), ("released", "paper")):
        found = mixed(models, tokenizers, logits, DeepenConfig(num_anchors=num_anchors, variant=variant))
        print_row(f"{variant}, {num_anchors or 'all'} anchors", *describe(found, average))


# --- The mixing alone -----------------------------------------------------------------------------------------------


@torch.no_grad()
def time_mixing(folders: list[str], width: int, dtype: torch.dtype, device: torch.device, repeats: int) -> None:
    """Print a mixing step with random embeddings and logits for real tokenizers."""
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    union = UnionVocabulary.from_tokenizers(tokenizers)
    sizes = [encoder.token_bytes.num_ids for encoder in union.encoders]
    eos_ids = [[tokenizer.eos_token_id] for tokenizer in tokenizers]
    generator = torch.Generator(device).manual_seed(0)
    embeddings = []
    for size in sizes:
        module = nn.Module()
        module.weight = torch.randn(size, width, generator=generator, device=device, dtype=dtype)
        embeddings.append(module)
    weights = torch.full((1, len(sizes)), 1 / len(sizes), device=device)

    def new_logits() -> list[torch.Tensor]:
        return [3 * torch.randn(1, size, generator=generator, device=device) for size in sizes]

    orders = [torch.randperm(size, generator=generator, device=device) for size in sizes]

    def half_new_logits(at: int) -> list[torch.Tensor]:
        """The best ids are a window over a random order of the vocabulary, which moves by half its length."""
        rows, half = new_logits(), DeepenConfig().support // 2
        for logits, order in zip(rows, orders, strict=True):
            logits[:, order.roll(-at * half)[: 2 * half]] += 30
        return rows

    common = AnchorTokens(union).num_common
    print(f"\nvocabularies {sizes}, {common:,} common entries, embeddings {width} wide in {dtype}")
    print_heads(
        "method", "rows", "mixing, ms, median (quartiles)", "above GaC, ms", "peak above the embeddings, MiB"
    )  # fmt: skip
    gac = 0.0
    for name, config in configs().items():
        new_logits()
        peak = Peak([device])
        is_gac = isinstance(config, GacConfig)
        method = Gac(union, eos_ids, device) if is_gac else Deepen(union, eos_ids, device, embeddings, config)
        mix = CapturedMix(method)

        same = new_logits()
        new, half, kept = (
            [seconds_of(functools.partial(mix, logits, weights)) for logits in steps][NUM_WARM_UP:]
            for steps in (
                (new_logits() for _ in range(NUM_WARM_UP + repeats)),
                (half_new_logits(at) for at in range(NUM_WARM_UP + repeats)),
                itertools.repeat(same, NUM_WARM_UP + repeats),
            )
        )
        gac = gac or statistics.median(new)
        for rows, values in (("new", new), ("half", half), ("kept", kept))[: 1 if is_gac else 3]:
            above = 1e3 * (statistics.median(values) - gac)
            print_row(name, rows, milliseconds(values), f"{above:.1f}", f"{peak.mib_above_start():.0f}")
        del method, mix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs=2, help="members; default: the two demo models")
    parser.add_argument("--tokenizers", nargs="+", help="time the mixing alone, for these tokenizers")
    parser.add_argument("--width", type=int, default=4096, help="of the random embeddings")
    parser.add_argument("--dtype", default="bfloat16", help="of the random embeddings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=39, help="steps after the first of a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=35, help="steps of the mixing alone")
    parser.add_argument("--skip-distances", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    print(setting(device))
    if args.tokenizers:
        time_mixing(args.tokenizers, args.width, getattr(torch, args.dtype), device, args.repeats)
        return
    models = models_or_demo(args.models)
    ensemble = EnsembleForCausalLM.from_pretrained(models, dtype=torch.float32, device_map=args.device)
    common = AnchorTokens(ensemble.union_vocabulary).num_common
    print(f"{' + '.join(Path(path).name for path in models)}: {common:,} common entries")
    time_steps(ensemble, args.new_tokens, args.rounds)
    if not args.skip_distances:
        show_average(ensemble.members[0], ensemble.tokenizers[0])
        show_support(ensemble)


if __name__ == "__main__":
    main()
