"""`hf-ensemble inspect`: how well members go together."""

import argparse
from typing import Any

from ..files import read_text
from . import arguments
from .output import json_line, output

_EXAMPLES = """\
  hf-ensemble inspect --members model-a model-b
  hf-ensemble inspect --members my-ensemble --text prompts.txt --json
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = arguments.new_parser(
        subparsers,
        "inspect",
        "show what the members' tokenizers share, and in what the members differ",
        _EXAMPLES,
        [arguments.member_arguments(), arguments.output_arguments()],
    )
    parser.add_argument("--text", metavar="FILE", help="text like those to be written, whose words are cut")


def run(args: argparse.Namespace) -> None:
    """Write the figures."""
    text = None if args.text is None else read_text(args.text)
    report = arguments.load_ensemble(args).compatibility(text)
    with output(args.output) as stream:
        print(json_line(report.to_dict()) if args.json else report, file=stream)
