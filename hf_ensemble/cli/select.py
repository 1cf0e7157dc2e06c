"""`hf-ensemble select`: choose members by their scores, given or measured."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from ..choosing.selection import ensemble_of, select_members
from ..errors import ConfigurationError
from ..files import read_json_lines
from ..model import EnsembleForCausalLM
from . import arguments
from .parsers import UsageError


def run(args: argparse.Namespace) -> None:
    """Write the choice, and save it if asked.

    Raises:
        UsageError: If arguments contradict each other, or the folder to save to exists.
    """
    if (args.scores is None) == (args.examples is None):
        raise UsageError("give either `--scores`, or `--examples` and a `--metric` to measure them with.")
    if (args.examples is None) != (args.metric is None):
        raise UsageError("`--examples` and `--metric` need each other: give both.")
    if args.save is not None:
        arguments.check_free(args.save)
    limits = {name: getattr(args, name) for name in ("max_members", "max_gap", "max_length_ratio")}
    candidates: EnsembleForCausalLM | None = None
    if args.examples is None:
        responses = None if args.responses is None else [_read_responses(path) for path in args.responses]
        lengths = {"responses": responses, "mean_lengths": args.mean_lengths}
        selection = select_members(args.members, scores=args.scores, **lengths, **limits)
    else:
        examples = [_read_example(line) for line in read_json_lines(args.examples)]
        options = arguments.generate_options(args)
        candidates = arguments.load_ensemble(args)
        selection = select_members(candidates, examples, args.metric, batch_size=args.batch_size, **options, **limits)
    if args.save is not None:
        _save(args, candidates, selection.indices)
    with arguments.output(args) as write:
        write([dataclasses.asdict(row) for row in selection.table], selection)


def _read_example(line: Any) -> Any:
    # `answers` is what examples/select_and_tune.py calls it.
    if isinstance(line, dict) and "answers" in line and "reference" not in line:
        return {"prompt": line.get("prompt"), "reference": line["answers"]}
    return line


def _read_responses(path: str) -> Sequence[str]:
    texts: list[Any] = [line.get("text") if isinstance(line, dict) else line for line in read_json_lines(path)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(f"{path!r} has to hold a text, or an object with a `text`, on each line.")
    return texts


def _save(args: argparse.Namespace, candidates: EnsembleForCausalLM | None, chosen: Sequence[int]) -> None:
    ensemble = arguments.load_ensemble(args, chosen) if candidates is None else ensemble_of(candidates, chosen)
    ensemble.save_pretrained(args.save)
