"""`hf-ensemble generate`: continues prompts."""

import argparse
from collections.abc import Iterable
from itertools import chain

from ..dev_set import run_batches
from . import arguments
from .chat import answer
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Write the texts.

    Raises:
        UsageError: If arguments contradict each other.
    """
    if args.system is not None and not args.chat:
        raise UsageError("`--system` needs `--chat`.")
    if args.batch_size < 1:
        raise UsageError(f"`--batch-size` has to be a positive integer, but is {args.batch_size}.")
    prompts = arguments.read_prompts(args)
    options = arguments.generate_options(args)
    ensemble = arguments.load_ensemble(args)
    texts: Iterable[str] = chain.from_iterable(run_batches(ensemble, prompts, batch_size=args.batch_size, **options))
    if args.chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        texts = (answer(ensemble, [*system, {"role": "user", "content": prompt}], **options) for prompt in prompts)
    with arguments.output(args) as write, arguments.seeded(args.seed):
        for prompt, text in zip(prompts, texts, strict=True):
            write({"prompt": prompt, "text": text}, text)
