"""Choose members on a small development set, weight them by their scores, and tune the method that combines them.

python examples/select_and_tune.py dev.jsonl                   # the two models of demo_models.py
python examples/select_and_tune.py dev.jsonl --models A B C    # ids or paths of other candidates

Each line of the file is a JSON object with a `prompt` and `answers`: a list of texts, one of which must be in the
response. Responses end at a newline. An interrupted search resumes from `--state-file`.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from demo_models import models_or_demo

from hf_ensemble import EnsembleForCausalLM, select_members, tune_method, weights_from_scores


def main() -> None:
    """Print how well the candidates match, which are selected, and how each setting of the method scores."""
    parser = argparse.ArgumentParser(description="Select members and tune a method on a development set.")
    parser.add_argument("file", type=Path, help="JSON lines with `prompt` and `answers`")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="ids or paths of the candidates")
    parser.add_argument("--limit", type=int, default=100, help="maximum number of examples")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument(
        "--max-gap", type=float, default=10.0, help="maximum number of points that a member may score below the best"
    )
    parser.add_argument("--state-file", help="file that keeps finished points of the search")
    args = parser.parse_args()

    with args.file.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in islice(file, args.limit)]
    examples = [{"prompt": line["prompt"], "reference": line["answers"]} for line in lines]
    options = {"max_new_tokens": args.max_new_tokens, "stop_strings": ["\n"]}

    candidates = EnsembleForCausalLM.from_pretrained(models_or_demo(args.models))
    selection = select_members(candidates, examples, "contains", max_gap=args.max_gap, **options)
    responses = [row.responses for row in sorted(selection.table, key=lambda row: row.index)]
    print(f"{candidates.compatibility(responses=responses)}\n\n{selection}\n")
    if len(selection.indices) < 2:
        sys.exit("Only the best candidate was selected: there is nothing to tune.")
    if max(selection.scores) == 0:
        sys.exit("No member answered anything right: there are no scores to derive weights from.")

    ensemble = EnsembleForCausalLM.from_members(
        [candidates.members[i] for i in selection.indices],
        [candidates.tokenizers[i] for i in selection.indices],
        member_configs=[candidates.config.members[i] for i in selection.indices],
    )
    uniform = [1 / len(selection.indices)] * len(selection.indices)
    grid = {"top_k": [5, 10], "weights": [uniform, weights_from_scores(selection.scores)]}
    result = tune_method(ensemble, examples, "contains", grid, state_file=args.state_file, **options)
    print(f"{result}\n\nbest: {result.best.method} with weights {[round(w, 3) for w in result.best.weights]}")


if __name__ == "__main__":
    main()
