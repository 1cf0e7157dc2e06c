"""Time whole answers: members alone with stock `generate`, sample by sample, and an ensemble that chooses.

For a few prompts, the script prints how many seconds the members take to write all samples: with stock `generate` and
`num_return_sequences`, with one call per sample (the naive way), and as candidates of the ensemble. Then, for each way
of choosing, it prints the seconds for writing, the seconds for everything else (cutting, encoding, choosing), and the
share of the latter.

    python examples/benchmarks/answers.py [--models A B] [--prompts 4] [--samples 16] [--tokens 64] [--device cuda]
"""

import argparse
import time

from measure import synchronize
from members import models_or_demo
from report import print_heads, print_row, setting

from hf_ensemble import EnsembleForCausalLM, MbrConfig, RerankConfig, VoteConfig
from hf_ensemble.answers.base import AnswersConfig

PROMPTS = [
    "Once upon a time there was a king who",
    "The best way to learn a language is",
    "Dear Sir or Madam, I am writing to you because",
    "The train from London to Paris",
    "In the year 1969, for the first time,",
    "My grandmother's recipe begins with",
    "The three laws that every engineer should know are",
    "Yesterday I found out that",
]
WAYS = {
    "vote": VoteConfig,
    "MBR, chrF pair by pair": MbrConfig,
    "MBR, chrF aggregated": lambda **options: MbrConfig(aggregate=True, **options),
    "rerank by likelihood": RerankConfig,
}


def seconds_of(run) -> tuple[float, object]:
    synchronize()
    start = time.perf_counter()
    found = run()
    synchronize()
    return time.perf_counter() - start, found


class Bench:
    """Prompts to write samples for.

    Args:
        ensemble: The members.
        prompts: The prompts.
        num_samples: Samples per member and prompt.
        max_new_tokens: Ids per sample.
    """

    def __init__(self, ensemble: EnsembleForCausalLM, prompts: list[str], num_samples: int, max_new_tokens: int):
        self.ensemble, self.prompts, self.num_samples = ensemble, prompts, num_samples
        # All samples have the same length; otherwise the times would be for different texts.
        self.options = {"do_sample": True, "max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}

    def stock(self, number: int, num_at_once: int) -> None:
        """Let a member write with its own `generate`, several samples per call."""
        model, tokenizer = self.ensemble.members[number], self.ensemble.alone(number).tokenizer
        inputs = tokenizer(self.prompts, return_tensors="pt", padding=True).to(model.device)
        for _ in range(self.num_samples // num_at_once):
            model.generate(**inputs, num_return_sequences=num_at_once, **self.options)

    def ours(self, make, weights: list[float] | None = None) -> object:
        """Let the ensemble write and choose; return its output."""
        method: AnswersConfig = make(num_candidates=self.num_samples)
        inputs = self.ensemble.tokenizer(self.prompts, return_tensors="pt", padding=True).to(self.ensemble.device)
        return self.ensemble.generate(
            **inputs, method=method, weights=weights, seed=0, return_dict_in_generate=True, **self.options
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members, the primary first; default: the two demo models")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="of each member to each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="ids of each sample")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    ensemble = EnsembleForCausalLM.from_pretrained(
        models_or_demo(args.models), dtype=args.dtype, device_map=args.device
    )
    count = len(ensemble.members)
    bench = Bench(ensemble, PROMPTS[: args.prompts], args.samples, args.tokens)
    details = f"{len(bench.prompts)} prompts", f"{args.samples} samples of {args.tokens} ids each"
    print(setting(ensemble.device, args.dtype, *details))
    # The first calls load weights from the disk, and capture graphs on a GPU.
    for number in range(count):
        bench.stock(number, args.samples)
    bench.ours(VoteConfig)

    print_heads("writing", "stock, all at once, s", "stock, one by one, s", "as candidates, s")
    for number, view in enumerate(ensemble.member_views):
        alone = [1.0 if n == number else 0.0 for n in range(count)]
        at_once = seconds_of(lambda number=number: bench.stock(number, args.samples))[0]
        naive = seconds_of(lambda number=number: bench.stock(number, 1))[0]
        ours = seconds_of(lambda alone=alone: bench.ours(VoteConfig, alone))[0]
        print_row(view.name, *(f"{seconds:.2f}" for seconds in (at_once, naive, ours)))

    print_heads("choosing", "candidates a prompt", "all, s", "writing, s", "everything else, s", "share, %")
    for name, make in WAYS.items():
        whole, output = seconds_of(lambda make=make: bench.ours(make))
        writing = sum(writer.seconds for row in output.answers for answer in row for writer in answer.writers)
        rest = whole - writing
        share = f"{100 * rest / writing:.1f}"
        print_row(name, count * args.samples, f"{whole:.2f}", f"{writing:.2f}", f"{rest:.2f}", share)


if __name__ == "__main__":
    main()
