"""`hf-ensemble compare`: each member alone and the ensemble, side by side."""

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..dev_set import refuse_ids_of_one
from ..model import EnsembleForCausalLM
from . import arguments
from .output import json_line, output


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
    refuse_ids_of_one(options)
    ensemble = arguments.load_ensemble(args)
    writers = [(member.name, ensemble.alone(index)) for index, member in enumerate(ensemble.member_views)]
    writers.append((f"ensemble, {ensemble.config.method.name}", ensemble))
    # What is made at the first call is not the time of a token.
    for name, writer in writers:
        _go_on(name, writer, prompts[0], {**options, "max_new_tokens": 1})
    with output(args.output) as stream:
        for prompt in prompts:
            texts = [_go_on(name, writer, prompt, options) for name, writer in writers]
            if args.json:
                print(json_line({"prompt": prompt, "texts": [asdict(text) for text in texts]}), file=stream)
            else:
                print(f"=== {prompt}", *texts, sep="\n", file=stream)


def _go_on(name: str, ensemble: EnsembleForCausalLM, prompt: str, options: dict[str, Any]) -> _Text:
    tokenizer: Any = ensemble.tokenizer
    inputs = tokenizer(prompt, return_tensors="pt").to(ensemble.member_views[0].device)
    start = time.perf_counter()
    ids = ensemble.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - start
    return _Text(name, tokenizer.decode(ids, skip_special_tokens=True), len(ids), seconds)
