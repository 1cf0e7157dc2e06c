"""`hf-ensemble inspect`: how well members go together."""

import argparse

from ..files import read_text
from . import arguments
from .output import json_line, output


def run(args: argparse.Namespace) -> None:
    """Write the figures."""
    text = None if args.text is None else read_text(args.text)
    report = arguments.load_ensemble(args).compatibility(text)
    with output(args.output) as stream:
        print(json_line(report.to_dict()) if args.json else report, file=stream)
