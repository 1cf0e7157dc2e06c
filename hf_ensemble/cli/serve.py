"""`hf-ensemble serve`: an ensemble behind the API that `openai` clients speak."""

import argparse

from .. import serving
from . import arguments


def run(args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    ensemble = arguments.load_ensemble(args)
    serving.serve(
        ensemble, args.host, args.port, name=args.name, enable_cors=args.enable_cors, log_level=args.log_level
    )
