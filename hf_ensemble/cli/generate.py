"""`hf-ensemble generate`: go on from prompts."""

import argparse
from collections.abc import Iterator
from typing import Any

from ..dev_set import run_batches
from ..model import EnsembleForCausalLM
from . import arguments
from .conversation import answer
from .output import json_line, output

_EXAMPLES = """\
  hf-ensemble generate "The capital of France is" --members model-a model-b
  hf-ensemble generate --members my-ensemble --file prompts.txt --lines --json --output texts.jsonl
  hf-ensemble generate "The cat" --members model-a model-b --method gac --weights 0.7 0.3 --max-new-tokens 16
  hf-ensemble generate "The cat" --members model-a model-b --method unite --option top_k=5 --temperature 0.8 --seed 1
  hf-ensemble generate "Who are you?" --members chat-a model-b --chat --max-new-tokens 16
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = arguments.new_parser(
        subparsers,
        "generate",
        "go on from prompts; only the new text goes to stdout",
        _EXAMPLES,
        [
            arguments.prompt_arguments(),
            arguments.member_arguments(),
            arguments.method_arguments(),
            arguments.length_arguments(),
            arguments.sampling_arguments(),
            arguments.output_arguments(),
        ],
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a message, and the text the answer to it")
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts that run together; default: 8")


def run(args: argparse.Namespace) -> None:
    """Write the texts."""
    if args.system is not None and not args.chat:
        raise arguments.UsageError("`--system` needs `--chat`.")
    if args.batch_size < 1:
        raise arguments.UsageError(f"`--batch-size` has to be a positive integer, but is {args.batch_size}.")
    prompts = arguments.read_prompts(args)
    options = arguments.generate_options(args)
    ensemble = arguments.load_ensemble(args)
    with output(args.output) as stream, arguments.seeded(args.seed):
        for prompt, text in zip(prompts, _texts(ensemble, prompts, options, args), strict=True):
            print(json_line({"prompt": prompt, "text": text}) if args.json else text, file=stream, flush=True)


def _texts(
    ensemble: EnsembleForCausalLM, prompts: list[str], options: dict[str, Any], args: argparse.Namespace
) -> Iterator[str]:
    if args.chat:
        for prompt in prompts:
            conversation = [{"role": "system", "content": args.system}] if args.system is not None else []
            yield answer(ensemble, [*conversation, {"role": "user", "content": prompt}], options)
    else:
        limit = options.pop("max_new_tokens")
        for batch in run_batches(ensemble, ensemble.tokenizer, prompts, limit, args.batch_size, options):
            yield from batch
