"""`hf-ensemble eval`: measures what an ensemble and its members write, and how likely they find the right texts."""

import argparse

from ..errors import EnsembleError
from ..evaluation import Configuration, EvaluationSet, evaluate, read_set
from ..evaluation.measures import read_measures, works_for
from ..evaluation.results import RESPONSES_ENDINGS, TABLE_ENDINGS, check_plot
from ..files import check_ending
from ..tables import spelled
from . import arguments
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Print the table, and write the requested files.

    Raises:
        EnsembleError: If the time limit came before the end.
    """
    if args.table is not None:
        check_ending(args.table, TABLE_ENDINGS)
    if args.plot is not None:
        check_plot(args.plot)
    measures = [name.replace("_", " ") for name in args.measures]
    wanted = read_measures(measures)
    sets = [_read_set(paths, args.limit, args.skip_damaged) for paths in args.data]
    if args.responses is not None:
        check_ending(args.responses, RESPONSES_ENDINGS)
        if not any("write" in works_for(one, wanted) for one in sets):
            raise UsageError(
                "`--responses` needs a measure of written text, but none of the chosen measures and files has one: "
                "ask for exact_match, F1, chrF or BLEU on a file of questions."
            )
    also = {text: arguments.read_configuration(text) for text in args.also}
    options = {name: getattr(args, name) for name in ("max_new_tokens", "batch_size", "state_file", "time_limit")}
    ensemble = arguments.load_ensemble(args)
    own = ensemble.config.method
    # Two rows must not have the same name, so the ensemble's own gets a full name.
    configurations = {f"{spelled(own)}, as loaded" if own.name in also else own.name: Configuration(), **also}
    result = evaluate(
        ensemble, sets, configurations=configurations, members=not args.no_members, measures=measures, **options
    )
    print(result)
    if args.table is not None:
        result.write_table(args.table)
    if args.plot is not None:
        result.plot(args.plot)
    if args.responses is not None:
        result.write_responses(args.responses)
    if not result.is_complete:
        again = "" if args.state_file is None else ": run the same command again to continue"
        raise EnsembleError(f"the time limit came before the end{again}.")


def _read_set(paths: list[str], limit: int | None, skip_damaged: bool) -> EvaluationSet:
    if len(paths) > 2:
        raise UsageError(f"`--data` takes one file or two, but got {len(paths)}: repeat `--data` for other sets.")
    path, *worked = paths
    return read_set(path, worked_examples=worked[0] if worked else None, limit=limit, skip_damaged=skip_damaged)
