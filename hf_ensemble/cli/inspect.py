"""`hf-ensemble inspect`: how well members fit together."""

import argparse

from ..files import read_text
from . import arguments


def run(args: argparse.Namespace) -> None:
    """Write the figures."""
    text = None if args.text is None else read_text(args.text)
    report = arguments.load_ensemble(args).compatibility(text)
    with arguments.output(args) as write:
        write(report.to_dict(), report)
