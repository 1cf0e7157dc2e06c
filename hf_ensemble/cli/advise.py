"""`hf-ensemble advise`: whether an ensemble of given members pays."""

import argparse
import sys
from pathlib import Path

from ..advising import advise
from ..advising.run import FIRST_METHODS
from ..evaluation import read_set
from ..files import check_ending, check_place
from . import arguments
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Write the advice, then the page and the advised ensemble.

    Raises:
        UsageError: If arguments contradict each other, or the folder to save to exists.
    """
    if args.save is not None:
        arguments.check_free(args.save)
    if args.page is not None:
        check_ending(args.page, (".html",))
    if args.output is not None:
        check_place(Path(args.output))
    tried = [arguments.read_configuration(text) for text in args.methods]
    if any(weights is not None for _, weights in tried):
        raise UsageError("`--methods` takes no weights: `advise` tries weights by itself.")
    path, *worked = args.data
    if len(worked) > 1:
        raise UsageError(f"`--data` takes one file or two, but got {len(args.data)}.")
    questions = read_set(path, worked_examples=worked[0] if worked else None, limit=args.limit, marking=args.marking)
    ensemble = arguments.load_ensemble(args)
    advice = advise(
        ensemble,
        questions,
        measure=None if args.measure is None else args.measure.replace("_", " "),
        methods=[method for method, _ in tried if method is not None] or FIRST_METHODS,
        least_gain=args.least_gain,
        minutes=args.minutes,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        state_folder=args.state_folder,
    )
    with arguments.output(args) as write:
        write(advice.to_dict(), advice)
    if args.page is not None:
        advice.write_page(args.page)
    if args.save is not None and advice.chosen is not None and advice.pays is not False:
        advice.build(ensemble).save_pretrained(args.save)
        doubt = "" if advice.pays else ", though not decided"
        print(f"saved{doubt}: {args.save}", file=sys.stderr)
    elif args.save is not None:
        print("nothing is saved, because nothing is advised", file=sys.stderr)
