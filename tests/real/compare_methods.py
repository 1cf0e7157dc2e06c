"""Compare DeePEn, gates and log space on the two real models with the plain references: distributions and greedy ids.

DeePEn with 1,000 anchors and without a limit on its support, which takes gigabytes and minutes. Finished cases are kept
in a file, one JSON line each, and are not run again.

    python tests/real/compare_methods.py --state methods.jsonl [--tokens 4] [--only deepen SmolLM2 english]
"""

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from hf_ensemble import DeepenConfig, GacConfig, UniteConfig  # noqa: E402
from tests.real.compare_reference import PROMPTS, TIE, Pair, argument_parser, pairs_of, run_cases  # noqa: E402
from tests.reference import Reference  # noqa: E402
from tests.reference_deepen import ReferenceDeepen  # noqa: E402

DEEPEN = {"num_anchors": 1000, "support": None}
METHODS = {
    "deepen, released": (DeepenConfig(**DEEPEN), None, functools.partial(ReferenceDeepen, **DEEPEN)),
    "deepen, paper": (
        DeepenConfig(variant="paper", **DEEPEN), None, functools.partial(ReferenceDeepen, variant="paper", **DEEPEN),
    ),
    "unite, gate 0 at 0.5": (UniteConfig(threshold=0.5), None, functools.partial(Reference, method="unite", threshold=0.5)),
    "gac, gate 1 at 0.5": (
        GacConfig(threshold=0.5, gate=1), None, functools.partial(Reference, method="gac", threshold=0.5, gate=1),
    ),
    "log space, contrast": (
        GacConfig(space="log", alpha=0.1), [1.5, -0.5],
        functools.partial(Reference, method="gac", weights=[1.5, -0.5], space="log", alpha=0.1),
    ),
}  # fmt: skip
"""By name: the configuration, the weights and the reference."""


def compare(pair: Pair, name: str, prompt: str, num_tokens: int) -> dict:
    """The largest difference of a probability along the reference's own text, and the ids."""
    config, weights, make = METHODS[name]
    reference = make(pair.references["gac"].members)
    inputs = pair.ensemble.tokenizer(prompt, return_tensors="pt").to(pair.ensemble.device)
    output = pair.ensemble.generate(
        **inputs, max_new_tokens=num_tokens, do_sample=False, method=config, weights=weights,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    prompt_ids = inputs.input_ids[0].tolist()
    found = output.sequences[0, len(prompt_ids) :].tolist()
    state, written, largest, least_margin, is_equal = reference.prompt_state(prompt_ids), [], 0.0, float("inf"), True
    while len(written) < len(found) and is_equal and least_margin >= TIE:
        step = reference.distribution(state)
        row = output.logits[len(written)][0].exp().cpu()
        dense = torch.zeros_like(row)
        dense[list(step.columns)] = torch.tensor(list(step.columns.values()), dtype=row.dtype)
        largest = max(largest, (row - dense).abs().max().item())
        chosen, margin = reference.choose(step)
        least_margin = min(least_margin, margin)
        is_equal = found[len(written) : len(written) + len(chosen)] == chosen[: len(found) - len(written)]
        written += chosen
        state = reference.advance(state, chosen)
    return {
        "equal": largest < 1e-4 and (is_equal or least_margin < TIE),
        "tokens": len(found),
        "largest difference": largest,
        "least margin": least_margin,
        "share ensembled": output.share_ensembled[0],
    }


def _compare(pair: Callable[[], Pair], *options) -> dict:
    return compare(pair(), *options)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=["english", "thai"])
    args = parser.parse_args()
    cases = []
    for method, (order, pair), prompt in itertools.product(METHODS, pairs_of(args), args.prompts):
        name = f"{method}, {order}, {prompt}, {args.tokens}"
        cases.append((name, functools.partial(_compare, pair, method, PROMPTS[prompt], args.tokens)))
    done = run_cases(cases, args.state, args.only)
    print(
        "\n| case | equal | tokens | largest difference | least margin | ensembled | s |\n|---|---|---|---|---|---|---|"
    )
    for case in done:
        print(
            f"| {case['case']} | {case['equal']} | {case['tokens']} | {case['largest difference']:.2g} "
            f"| {case['least margin']:.2g} | {case['share ensembled']:.0%} | {case['seconds']} |"
        )


if __name__ == "__main__":
    main()
