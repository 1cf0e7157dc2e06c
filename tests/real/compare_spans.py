"""Compare SweetSpan on the two real models with the plain reference, round by round.

Every case is a primary, a prompt, a span length and a score, with the filter's ratios by turns; it goes on for 24 words
and takes minutes. Finished cases are kept in a file, one JSON line each, and are not run again.

    python tests/real/compare_spans.py --state spans.jsonl [--words 24] [--only english perplexity] [--device cuda]
"""

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from hf_ensemble import SweetSpanConfig  # noqa: E402
from tests.real.compare_reference import PROMPTS, Pair, argument_parser, pairs_of, run_cases  # noqa: E402
from tests.reference_spans import ReferenceSpans, compare_rounds  # noqa: E402

SPAN_LENGTHS = (4, 1, 8, 2)
SCORES = ("perplexity", "bits_per_byte")
FILTER_RATIOS = (10.0, 0.0, 1.01)
"""With two members the filter must not change anything."""
MAX_NEW_TOKENS = 400


def compare_spans(pair: Pair, prompt: str, span_length: int, score: str, filter_ratio: float, num_rounds: int) -> dict:
    """The rounds of both, up to the first decision that is as good as tied, and their ids."""
    options = {"span_length": span_length, "score": score, "filter_ratio": filter_ratio}
    reference = ReferenceSpans(pair.references["gac"].members, **options)
    inputs = pair.ensemble.tokenizer(prompt, return_tensors="pt").to(pair.ensemble.device)
    prompt_ids = inputs.input_ids[0].tolist()
    expected, rounds = reference.run(prompt_ids, num_rounds, MAX_NEW_TOKENS)
    output = pair.ensemble.generate(
        **inputs,
        method=SweetSpanConfig(**options),
        max_new_tokens=len(expected),
        do_sample=False,
        return_dict_in_generate=True,
    )
    number, difference = compare_rounds(output.rounds[0], rounds)
    found = output.sequences[0, len(prompt_ids) :].tolist()
    settled = expected if number == len(rounds) else [i for round in rounds[:number] for i in round.ids]
    if difference is None and found[: len(settled)] != settled:
        difference = f"ids {found} do not start with {settled}"
    return {
        "equal": difference is None,
        "rounds": number,
        "of": len(rounds),
        "ids": len(expected),
        "agreed": sum(round.scores is None for round in rounds),
        "least margin": min(min(round.proposal_margin, round.choice_margin) for round in rounds),
        "difference": difference,
        "text": b"".join(round.candidates[round.winner].data for round in rounds).decode(errors="replace"),
    }


def _compare(pair: Callable[[], Pair], *options) -> dict:
    return compare_spans(pair(), *options)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--words", type=int, default=24)
    args = parser.parse_args()
    cases = []
    turns = itertools.product(SPAN_LENGTHS, SCORES, PROMPTS, pairs_of(args))
    for (span_length, score, prompt, (order, pair)), filter_ratio in zip(
        turns, itertools.cycle(FILTER_RATIOS), strict=False
    ):
        name = f"{order}, {prompt}, {score}, {filter_ratio:g}, L = {span_length}, {args.words} words"
        options = (PROMPTS[prompt], span_length, score, filter_ratio, max(args.words // span_length, 1))
        cases.append((name, functools.partial(_compare, pair, *options)))
    done = run_cases(cases, args.state, args.only)
    print("\n| case | equal | rounds | agreed | ids | least margin | s |\n|---|---|---|---|---|---|---|")
    for case in done:
        print(
            f"| {case['case']} | {case['equal']} | {case['rounds']} of {case['of']} | {case['agreed']} "
            f"| {case['ids']} | {case['least margin']:.2g} | {case['seconds']} |"
        )
    for case in done:
        if not case["equal"]:
            print(f"\n{case['case']}: {case['difference']}")


if __name__ == "__main__":
    main()
