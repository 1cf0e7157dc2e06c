"""The command line as a whole: runs a command, and handles errors, warnings and interruptions."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..errors import EnsembleError
from .parsers import UsageError, build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments. Default: the arguments of the process.

    Returns:
        The exit code: 0, 1 if something failed or a check found something, 2 for invalid arguments, 130 after Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Imported only now, so that help and usage errors do not need torch.
            code: int | None = import_module(f".{args.command}", __package__).run(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has gone; without this, the interpreter complains when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            traceback.print_exc()
        else:
            print(f"hf-ensemble: error: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return code or 0


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (UsageError, EnsembleError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (`--traceback` shows where)"


def _show_warning(message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None) -> None:
    print(f"hf-ensemble: warning: {' '.join(str(message).split())}", file=sys.stderr)
