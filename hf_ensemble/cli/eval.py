"""`hf-ensemble eval`: exact match, accuracy and bits per byte of an ensemble and of its members."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import EnsembleError
from ..evaluation import Configuration, EvaluationSet, evaluate, read_set
from ..evaluation.results import MEASURES, TABLE_ENDINGS, check_ending, check_plot
from . import arguments

_EXAMPLES = """\
  hf-ensemble eval --members model-a model-b --data questions.jsonl worked.txt --max-new-tokens 8
  hf-ensemble eval --members model-a model-b --data choices.jsonl --method gac --also gac@0.7,0.3 unite:top_k=5
  hf-ensemble eval --members model-a model-b --data questions.jsonl worked.txt --data choices.jsonl --limit 2 \\
      --measures exact_match accuracy --state-file state.jsonl --time-limit 500 --table table.md --plot plot.svg

files are lines of JSON, all of one form:
  {"question": "Who?", "answer": ["Paris", "Paris, France"]}          exact match, bits per byte
  {"question": "Which?", "A": "this", "B": "that", "answer": "B"}     accuracy, bits per byte
  {"prompt": "2 + 2 =", "reference": "4"}                             exact match, bits per byte
  {"text": "Once upon a time"}                                        bits per byte
"""

_MEASURES = {measure.replace(" ", "_"): measure for measure in MEASURES}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = arguments.new_parser(
        subparsers,
        "eval",
        "evaluate an ensemble and each of its members on files of examples",
        _EXAMPLES,
        [arguments.member_arguments(), arguments.method_arguments()],
    )
    group = parser.add_argument_group("what is evaluated")
    group.add_argument(
        "--data",
        nargs="+",
        action="append",
        required=True,
        metavar=("FILE", "WORKED"),
        help="examples, and a file of worked ones that are put before each; can be repeated",
    )
    group.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="METHOD[:KEY=VALUE,…][@WEIGHT,…]",
        help="further methods, each a row of the table",
    )
    group.add_argument("--no-members", action="store_true", help="leave out the members alone")
    group.add_argument("--measures", nargs="+", choices=_MEASURES, default=list(_MEASURES), help="default: all")
    group.add_argument("--limit", type=int, metavar="N", help="most examples of a file")
    group.add_argument("--skip-damaged", action="store_true", help="leave out examples of no known form")
    group = parser.add_argument_group("how it runs")
    group.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="of an answer; default: 32")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    group.add_argument("--state-file", metavar="FILE", help="keeps what is done, so that the same command goes on")
    group.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop before; exit code 1 if work is left")
    group = parser.add_argument_group("output beside the table on stdout")
    group.add_argument("--table", type=Path, metavar="FILE", help=f"a table: {', '.join(TABLE_ENDINGS)}")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a plot: .svg, .png, .pdf")


def run(args: argparse.Namespace) -> None:
    """Print the table, and write what was asked for."""
    if args.table is not None:
        check_ending(args.table, TABLE_ENDINGS)
    if args.plot is not None:
        check_plot(args.plot)
    sets = [_read_set(paths, args.limit, args.skip_damaged) for paths in args.data]
    also = {text: read_configuration(text) for text in args.also}
    ensemble = arguments.load_ensemble(args)
    result = evaluate(
        ensemble,
        sets,
        configurations={ensemble.config.method.name: Configuration(), **also},
        members=not args.no_members,
        measures=[_MEASURES[name] for name in args.measures],
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        state_file=args.state_file,
        time_limit=args.time_limit,
    )
    print(result)
    if args.table is not None:
        result.write_table(args.table)
    if args.plot is not None:
        result.plot(args.plot)
    if not result.is_complete:
        again = "" if args.state_file is None else ": run the same command again to go on"
        raise EnsembleError(f"the time limit came before the end{again}.")


def _read_set(paths: list[str], limit: int | None, skip_damaged: bool) -> EvaluationSet:
    if len(paths) > 2:
        raise arguments.UsageError(f"`--data` takes one file or two, but got {len(paths)}: repeat it for other sets.")
    return read_set(
        paths[0], worked_examples=paths[1] if len(paths) == 2 else None, limit=limit, skip_damaged=skip_damaged
    )


def read_configuration(text: str) -> Configuration:
    """Read `METHOD[:KEY=VALUE,…][@WEIGHT,…]`.

    Raises:
        UsageError: If it has another form, or there is no such method or option.
    """
    head, at, listed = text.partition("@")
    name, _, pairs = head.partition(":")
    method = arguments.read_method(argparse.Namespace(method=name, option=pairs.split(",") if pairs else []))
    try:
        weights = [float(weight) for weight in listed.split(",")] if at else None
    except ValueError:
        raise arguments.UsageError(
            f"`--also` has to be METHOD:KEY=VALUE,…@WEIGHT,…, but the weights in {text!r} are no numbers."
        ) from None
    return Configuration(method, weights)
