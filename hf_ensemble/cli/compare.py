"""`hf-ensemble compare`: each member alone and the ensemble, side by side."""

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..dev_set import member_options
from ..members.member_model import input_device
from ..model import EnsembleForCausalLM
from . import arguments
from .output import json_line, output

_EXAMPLES = """\
  hf-ensemble compare "The capital of France is" --members model-a model-b
  hf-ensemble compare --members my-ensemble --file prompts.txt --lines --max-new-tokens 16 --json
  hf-ensemble compare "The cat" --members model-a model-b --method gac --stop "."
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    arguments.new_parser(
        subparsers,
        "compare",
        "let each member alone and the ensemble go on from the same prompts, greedily",
        _EXAMPLES,
        [
            arguments.prompt_arguments(),
            arguments.member_arguments(),
            arguments.method_arguments(),
            arguments.length_arguments(32),
            arguments.output_arguments(),
        ],
    )


@dataclass(frozen=True)
class _Text:
    """What one of them wrote.

    Attributes:
        name: Of the member, or of the ensemble's method.
        text: The new text.
        num_tokens: Number of its ids, in the tokenizer that wrote it.
        seconds: Time that it took, reading the prompt included.
    """

    name: str
    text: str
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        per_token = f"{1000 * self.seconds / max(self.num_tokens, 1):.0f} ms a token"
        return f"--- {self.name} ({self.num_tokens} tokens, {per_token})\n{self.text}\n"


def run(args: argparse.Namespace) -> None:
    """Write a block of texts for each prompt."""
    prompts = arguments.read_prompts(args)
    options = arguments.generate_options(args)
    ensemble = arguments.load_ensemble(args)
    together = ensemble.config.method.name
    # What is made at the first call is not the time of a token.
    first = {**options, "max_new_tokens": 1}
    _alone(ensemble, prompts[0], first)
    _go_on(together, ensemble, ensemble.tokenizer, prompts[0], first)
    with output(args.output) as stream:
        for prompt in prompts:
            texts = _alone(ensemble, prompt, options)
            texts.append(_go_on(f"ensemble, {together}", ensemble, ensemble.tokenizer, prompt, options))
            if args.json:
                print(json_line({"prompt": prompt, "texts": [asdict(text) for text in texts]}), file=stream)
            else:
                print(f"=== {prompt}", *texts, sep="\n", file=stream)


def _alone(ensemble: EnsembleForCausalLM, prompt: str, options: dict[str, Any]) -> list[_Text]:
    return [
        _go_on(member.name, member.model, member.tokenizer, prompt, member_options(member, options))
        for member in ensemble._members
    ]


def _go_on(name: str, model: Any, tokenizer: Any, prompt: str, options: dict[str, Any]) -> _Text:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    inputs = inputs.to(input_device(model))
    start = time.perf_counter()
    ids = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - start
    return _Text(name, tokenizer.decode(ids, skip_special_tokens=True), len(ids), seconds)
