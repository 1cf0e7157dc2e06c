"""`hf-ensemble select`: choose members by their scores, given or measured."""

import argparse
import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..choosing.selection import Selection, select_members
from ..dev_set import METRICS
from ..errors import ConfigurationError
from ..files import read_json_lines
from ..model import EnsembleForCausalLM
from . import arguments
from .output import json_line, output

_EXAMPLES = """\
  hf-ensemble select --members model-a model-b --scores 80.6 72.7 --save chosen
  hf-ensemble select --members model-a model-b --scores 80.6 72.7 --responses a.jsonl b.jsonl
  hf-ensemble select --members model-a model-b --examples dev.jsonl --metric contains --max-new-tokens 8 --json

files are lines of JSON:
  --examples   {"prompt": "2 + 2 =", "reference": "4"}; a reference is a text or a list of texts
  --responses  a text, or what `hf-ensemble generate --json` writes
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = arguments.new_parser(
        subparsers,
        "select",
        "choose the best candidate and those that come near",
        _EXAMPLES,
        [arguments.member_arguments(), arguments.length_arguments(), arguments.output_arguments()],
    )
    group = parser.add_argument_group("scores, given or measured")
    group.add_argument("--scores", nargs="+", type=float, metavar="POINTS", help="one a candidate, in percent")
    group.add_argument("--responses", nargs="+", metavar="FILE", help="one a candidate, to compare their lengths")
    group.add_argument("--mean-lengths", nargs="+", type=float, metavar="LENGTH", help="one a candidate")
    group.add_argument("--examples", metavar="FILE", help="development set to run every candidate on")
    group.add_argument("--metric", choices=list(METRICS), help="how an answer is compared with its reference")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    group = parser.add_argument_group("limits")
    group.add_argument("--max-members", type=int, metavar="N", help="default: no limit")
    group.add_argument("--max-gap", type=float, default=10.0, metavar="POINTS", help="below the best; default: 10")
    group.add_argument("--max-length-ratio", type=float, default=2.0, metavar="RATIO", help="default: 2")
    group.add_argument(
        "--save", metavar="FOLDER", help="save an ensemble of the chosen there, the best as the primary"
    )


def run(args: argparse.Namespace) -> None:
    """Write the choice, and save it if asked."""
    if (args.scores is None) == (args.examples is None):
        raise arguments.UsageError("give either `--scores`, or `--examples` and a `--metric` to measure them with.")
    if (args.examples is None) != (args.metric is None):
        raise arguments.UsageError("`--examples` and `--metric` belong together.")
    if args.save is not None and Path(args.save).exists():
        raise arguments.UsageError(f"`--save {args.save}` exists already: name a folder that does not.")
    limits = {name: getattr(args, name) for name in ("max_members", "max_gap", "max_length_ratio")}
    candidates: EnsembleForCausalLM | None = None
    if args.examples is None:
        responses = None if args.responses is None else [_read_responses(path) for path in args.responses]
        lengths = args.mean_lengths
        selection = select_members(
            args.members, scores=args.scores, responses=responses, mean_lengths=lengths, **limits
        )
    else:
        examples = [_read_example(line) for line in read_json_lines(args.examples)]
        options = arguments.generate_options(args)
        candidates = arguments.load_ensemble(args)
        selection = select_members(candidates, examples, args.metric, batch_size=args.batch_size, **options, **limits)
    if args.save is not None:
        _save(args, candidates, selection)
    with output(args.output) as stream:
        rows = [dataclasses.asdict(row) for row in selection.table]
        print(json_line(rows) if args.json else selection, file=stream)


def _read_example(line: Any) -> Any:
    # `answers` is what examples/select_and_tune.py calls it.
    if isinstance(line, dict) and "answers" in line and "reference" not in line:
        return {"prompt": line.get("prompt"), "reference": line["answers"]}
    return line


def _read_responses(path: str) -> Sequence[str]:
    texts: list[Any] = [line.get("text") if isinstance(line, dict) else line for line in read_json_lines(path)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(f"{path!r} has to hold a text, or an object with a `text`, in each line.")
    return texts


def _save(args: argparse.Namespace, candidates: EnsembleForCausalLM | None, selection: Selection) -> None:
    chosen = selection.indices
    if candidates is None:
        own = copy.copy(args)
        own.members = [args.members[i] for i in chosen]
        for name in ("dtype", "device_map", "revision"):
            values = getattr(args, name)
            if values is not None and len(values) > 1:
                setattr(own, name, [values[i] for i in chosen])
        ensemble = arguments.load_ensemble(own)
    else:
        members = [candidates._members[i] for i in chosen]
        ensemble = EnsembleForCausalLM.from_members(
            [member.model for member in members],
            [member.tokenizer for member in members],
            member_configs=[candidates.config.members[i] for i in chosen],
        )
    ensemble.save_pretrained(args.save)
