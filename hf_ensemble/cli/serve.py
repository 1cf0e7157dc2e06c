"""`hf-ensemble serve`: an ensemble behind an API for `openai` clients."""

import argparse
import dataclasses
import os

from . import arguments
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    from .. import serving

    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env: the environment variable {args.api_key_env} does not exist or is empty.")
    names = [field.name for field in dataclasses.fields(serving.Limits)]
    limits = serving.Limits(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    ensemble = arguments.load_ensemble(args)
    serving.serve(
        ensemble,
        args.host,
        args.port,
        name=args.name,
        enable_cors=args.enable_cors,
        log_level=args.log_level,
        limits=limits,
        api_key=key,
    )
