"""`hf-ensemble compare`: each member alone and the ensemble, side by side."""

import argparse
import time
from typing import Any

from ..dev_set import refuse_ids_of_one, with_greedy
from ..model import EnsembleForCausalLM
from . import arguments


def run(args: argparse.Namespace) -> None:
    """Write a block of texts for each prompt."""
    prompts = arguments.read_prompts(args)
    options = arguments.generate_options(args)
    refuse_ids_of_one(options)
    ensemble = arguments.load_ensemble(args)
    writers = [(member.name, ensemble.alone(index)) for index, member in enumerate(ensemble.member_views)]
    writers.append((f"ensemble, {ensemble.config.method.name}", ensemble))
    # The first call builds maps, whose time is not part of a token's.
    for name, writer in writers:
        _go_on(name, writer, prompts[0], {**options, "max_new_tokens": 1})
    with arguments.output(args) as write:
        for prompt in prompts:
            texts = [_go_on(name, writer, prompt, options) for name, writer in writers]
            write({"prompt": prompt, "texts": texts}, "\n".join([f"=== {prompt}", *map(_block, texts)]))


def _block(text: dict[str, Any]) -> str:
    per_token = f"{1000 * text['seconds'] / max(text['num_tokens'], 1):.0f} ms per token"
    return f"--- {text['name']} ({text['num_tokens']} tokens, {per_token})\n{text['text']}\n"


def _go_on(name: str, ensemble: EnsembleForCausalLM, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    """The new text, the number of its ids in the tokenizer that wrote it, and its seconds, including the prompt."""
    tokenizer: Any = ensemble.tokenizer
    inputs = tokenizer(prompt, return_tensors="pt").to(ensemble.member_views[0].device)
    start = time.perf_counter()
    ids = ensemble.generate(**inputs, **with_greedy(ensemble, options))[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - start
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return {"name": name, "text": text, "num_tokens": len(ids), "seconds": seconds}
