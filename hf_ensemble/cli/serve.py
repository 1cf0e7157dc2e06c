"""`hf-ensemble serve`: an ensemble behind the API that `openai` clients speak."""

import argparse
from typing import Any

from . import arguments

_EXAMPLES = """\
  hf-ensemble serve --members chat-a model-b
  hf-ensemble serve --members my-chat --port 8080 --name my-chat
  hf-ensemble serve --members chat-a model-b --method gac --weights 0.7 0.3 --host 0.0.0.0
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = arguments.new_parser(
        subparsers,
        "serve",
        "serve an ensemble as `transformers serve` serves a model",
        _EXAMPLES,
        [arguments.member_arguments(), arguments.method_arguments()],
    )
    parser.add_argument("--host", default="localhost", help="default: localhost")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for any that is free")
    parser.add_argument("--name", help="name of the model that clients ask for (default: the members' names, with +)")
    parser.add_argument("--enable-cors", action="store_true", help="let pages of other hosts ask")
    parser.add_argument("--log-level", default="info", choices=["error", "warning", "info", "debug"])


def run(args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    # It needs packages that the other commands do not.
    from ..serving import serve

    serve(
        arguments.load_ensemble(args),
        args.host,
        args.port,
        name=args.name,
        enable_cors=args.enable_cors,
        log_level=args.log_level,
    )
