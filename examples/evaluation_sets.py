"""Evaluate members and methods on evaluation sets: exact match, accuracy and bits per byte, with intervals and times.

    python examples/evaluation_sets.py DATA --state-file state.jsonl --table table.md --plot plot.svg [--device cuda]
        [--dtype bfloat16] [--batch-size 32] [--num-examples 200] [--time-limit 540]

DATA is a folder of JSON lines: `triviaqa_dev.jsonl` and `nq_dev.jsonl` (question, accepted answers) with the worked
examples `triviaqa_prompt.txt` and `nq_prompt.txt`, `arc_challenge_train.jsonl` and `piqa_dev_a.jsonl` (question, choices,
letter), and for `--sets gsm8k`, in a run of its own because its answers are long, `gsm8k_train300.jsonl` and
`gsm8k_prompt.txt`.

Finished work is kept in the state file, and the same command resumes where it stopped. At the time limit the script
stops by itself, with exit code 3 while work is left.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from demo_models import models_or_demo

from hf_ensemble import DeepenConfig, EnsembleForCausalLM, SweetSpanConfig, UniteConfig
from hf_ensemble.evaluation import Configuration, EvaluationSet, evaluate, read_set

CONFIGURATIONS = {
    "GaC": Configuration("gac"),
    "UniTE": Configuration("unite"),
    "UniTE, k = 1000": Configuration(UniteConfig(top_k=1000)),
    "DeePEn": Configuration(DeepenConfig(num_anchors=4096)),
    "spans of 1 word": Configuration(SweetSpanConfig(span_length=1)),
    "spans of 4 words": Configuration(SweetSpanConfig(span_length=4)),
    "spans of 8 words": Configuration(SweetSpanConfig(span_length=8)),
}
SETS = {
    "triviaqa": {"name": "TriviaQA", "source": "triviaqa_dev.jsonl", "worked_examples": "triviaqa_prompt.txt"},
    "nq": {"name": "NQ", "source": "nq_dev.jsonl", "worked_examples": "nq_prompt.txt"},
    "arc": {"name": "ARC-Challenge", "source": "arc_challenge_train.jsonl"},
    "piqa": {"name": "PIQA", "source": "piqa_dev_a.jsonl"},
    "gsm8k": {
        "name": "GSM8K",
        "source": "gsm8k_train300.jsonl",
        "worked_examples": "gsm8k_prompt.txt",
        "cue": "\nLet's think step by step\n",
        "marking": "number",
    },
}
MAX_NEW_TOKENS = {"gsm8k": 256}


def read(name: str, folder: Path, num_examples: int) -> EvaluationSet:
    """Read one of the sets."""
    options = dict(SETS[name])
    for key in {"source", "worked_examples"} & options.keys():
        options[key] = folder / options[key]
    return read_set(limit=num_examples, skip_damaged=True, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the sets")
    parser.add_argument("--state-file", type=Path, required=True, help="file that keeps finished work")
    parser.add_argument("--table", type=Path, help="file for the table (.md, .csv, .json)")
    parser.add_argument("--plot", type=Path, help="file for the plot (.svg, .png)")
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["triviaqa", "nq", "arc", "piqa"])
    parser.add_argument("--configurations", nargs="*", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--num-examples", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=24, help="most tokens of a short answer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--time-limit", type=float, help="seconds")
    args = parser.parse_args()

    ensemble = EnsembleForCausalLM.from_pretrained(
        models_or_demo(args.models), dtype=args.dtype, device_map=args.device
    )
    where = (
        torch.cuda.get_device_name() if ensemble.device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    result = evaluate(
        ensemble,
        [read(name, args.data, args.num_examples) for name in args.sets],
        configurations={name: CONFIGURATIONS[name] for name in args.configurations},
        max_new_tokens=max(MAX_NEW_TOKENS.get(name, args.max_new_tokens) for name in args.sets),
        batch_size=args.batch_size,
        state_file=args.state_file,
        time_limit=args.time_limit,
    )
    print(result)
    print(f"{where}, {args.dtype}, torch {torch.__version__}, transformers {transformers.__version__}")
    if args.table:
        result.write_table(args.table)
    if args.plot:
        result.plot(args.plot)
    if not result.is_complete:
        print("the time limit was reached: run the command again to resume", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
