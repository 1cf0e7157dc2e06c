"""The command line as a whole: its subcommands, and what becomes of errors, warnings and interruptions."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..errors import EnsembleError
from . import chat, compare, eval, generate, inspect, select, serve
from .arguments import UsageError

COMMANDS = (generate, chat, compare, inspect, select, eval, serve)
"""Modules of a subcommand each: `add_parser(subparsers)` adds its parser, `run(args)` runs it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line."""
        self.exit(2, f"hf-ensemble: error: {message} (see `{self.prog} --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all subcommands."""
    parser = _Parser(
        prog="hf-ensemble",
        description="Several language models, with different tokenizers, that decode together as one.",
        epilog="`hf-ensemble COMMAND --help` shows a command's options and examples.",
    )
    parser.add_argument("--version", action="version", version=f"hf_ensemble {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(subparsers)
    for module, subparser in zip(COMMANDS, subparsers.choices.values(), strict=True):
        subparser.set_defaults(run=module.run)
        subparser.add_argument("--traceback", action="store_true", help="show all of an error, not one line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments. Default: those of the process.

    Returns:
        The exit code: 0, 1 if something failed, 2 if the arguments make no sense, 130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            args.run(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; without this the interpreter complains when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        else:
            print(f"hf-ensemble: error: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (UsageError, EnsembleError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (`--traceback` shows where)"


def _show_warning(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
    print(f"hf-ensemble: warning: {' '.join(str(message).split())}", file=sys.stderr)
