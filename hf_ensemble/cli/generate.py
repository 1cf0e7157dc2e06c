"""`hf-ensemble generate`: go on from prompts."""

import argparse
from collections.abc import Iterator
from typing import Any

from ..dev_set import run_batches
from ..model import EnsembleForCausalLM
from . import arguments
from .chat import answer
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Write the texts.

    Raises:
        UsageError: If arguments do not go together.
    """
    if args.system is not None and not args.chat:
        raise UsageError("`--system` needs `--chat`.")
    if args.batch_size < 1:
        raise UsageError(f"`--batch-size` has to be a positive integer, but is {args.batch_size}.")
    prompts = arguments.read_prompts(args)
    options = arguments.generate_options(args)
    ensemble = arguments.load_ensemble(args)
    with arguments.output(args) as write, arguments.seeded(args.seed):
        for prompt, text in zip(prompts, _texts(ensemble, prompts, options, args), strict=True):
            write({"prompt": prompt, "text": text}, text)


def _texts(
    ensemble: EnsembleForCausalLM, prompts: list[str], options: dict[str, Any], args: argparse.Namespace
) -> Iterator[str]:
    if args.chat:
        for prompt in prompts:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            yield answer(ensemble, [*system, {"role": "user", "content": prompt}], **options)
    else:
        for batch in run_batches(ensemble, prompts, batch_size=args.batch_size, **options):
            yield from batch
