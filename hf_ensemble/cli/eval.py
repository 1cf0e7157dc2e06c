"""`hf-ensemble eval`: exact match, accuracy and bits per byte of an ensemble and of its members."""

import argparse

from ..errors import EnsembleError
from ..evaluation import Configuration, EvaluationSet, evaluate, read_set
from ..evaluation.results import TABLE_ENDINGS, check_plot
from ..files import check_ending
from . import arguments
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Print the table, and write what was asked for.

    Raises:
        EnsembleError: If the time limit came before the end.
    """
    if args.table is not None:
        check_ending(args.table, TABLE_ENDINGS)
    if args.plot is not None:
        check_plot(args.plot)
    sets = [_read_set(paths, args.limit, args.skip_damaged) for paths in args.data]
    also = {text: read_configuration(text) for text in args.also}
    measures = [name.replace("_", " ") for name in args.measures]
    options = {name: getattr(args, name) for name in ("max_new_tokens", "batch_size", "state_file", "time_limit")}
    ensemble = arguments.load_ensemble(args)
    configurations = {ensemble.config.method.name: Configuration(), **also}
    result = evaluate(
        ensemble, sets, configurations=configurations, members=not args.no_members, measures=measures, **options
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
        raise UsageError(f"`--data` takes one file or two, but got {len(paths)}: repeat it for other sets.")
    path, *worked = paths
    return read_set(path, worked_examples=worked[0] if worked else None, limit=limit, skip_damaged=skip_damaged)


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
        raise UsageError(
            f"`--also` has to be METHOD:KEY=VALUE,…@WEIGHT,…, but the weights in {text!r} are no numbers."
        ) from None
    return Configuration(method, weights)
