"""One version of the library, loaded once: `versions.py` starts one worker per checkout and tells it when to run.

Each input line is a JSON object that names a case; the answer is a JSON object with the cost and the text of a call.
Uses only public names of `hf_ensemble`, because the version may be older than this file.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Peak, gpu_events, seconds_of, synchronize
from members import add_arguments, load, push_along
from report import setting
from texts import PROMPT, QUESTIONS, text_ids

import hf_ensemble
from hf_ensemble import SweetSpanConfig

CASES = {
    **{method: {"method": method} for method in ("unite", "gac", "deepen", "mined", "eva")},
    "ngram": {"method": "unite", "speculation": "ngram"},
    "auto": {"method": "unite", "speculation": "auto"},
    "spans": {"method": SweetSpanConfig(span_length=4)},
}
"""Options of `generate`, by name."""
DEFAULT_CASES = ("unite", "gac", "ngram", "auto", "spans")
NUM_PUSHED_IDS = 4096
NUM_PROMPT_IDS = 128
WORDS_APART = 7
"""Offset in words between the texts that random weights are pushed along, for cases in which members should disagree."""


class Runner:
    """The members of a version, and the call of each case."""

    def __init__(self, args: argparse.Namespace):
        self.ensemble = load(args)
        self._pushed: list[torch.Tensor] = []
        if args.tokenizers:
            for model in self.ensemble.members:
                self._pushed.append(torch.zeros(NUM_PUSHED_IDS, dtype=torch.int64, device=model.device))
                push_along(model, self._pushed[-1])

    def call(self, case: str, new_tokens: int) -> Callable[[], list[int]]:
        """What writes the new ids of a case.

        Args:
            case: A name in `CASES`.
            new_tokens: How many ids.
        """
        tokenizer, options = self.ensemble.tokenizer, CASES[case]
        if self._pushed:
            # Spans are scored only where members disagree; otherwise the primary's text is to be written.
            apart = WORDS_APART if case == "spans" else 0
            for n, ids in enumerate(self._pushed):
                ids.copy_(text_ids(self.ensemble.tokenizers[n], len(ids), skip=n * apart))
            prompt = self._pushed[0][None, :NUM_PROMPT_IDS].clone()
            options = {**options, "weights": [0.6, *[0.4 / (len(self._pushed) - 1)] * (len(self._pushed) - 1)]}
        else:
            text = QUESTIONS if "speculation" in options else PROMPT
            prompt = tokenizer(text, return_tensors="pt").input_ids.to(self.ensemble.device)
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, **options}

        def write() -> list[int]:
            output = self.ensemble.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
            return output[0, prompt.shape[1] :].tolist()

        return write

    def run(self, case: str, new_tokens: int, profile: bool = False) -> dict:
        """What a call costs and writes.

        Args:
            case: A name in `CASES`.
            new_tokens: How many ids are written.
            profile: Whether to measure the kernels, and nothing else.
        """
        write, ids = self.call(case, new_tokens), []
        if profile:
            kernels = [event for event in gpu_events(write) if event.get("cat") == "kernel"]
            return {"seconds": {"kernels": sum(event["dur"] for event in kernels) / 1e6}, "num_kernels": len(kernels)}
        peak = Peak([self.ensemble.device])
        if self.ensemble.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            seconds = {"host": seconds_of(lambda: ids.extend(write()), time.process_time)}
            last.record()
            synchronize()
            seconds["GPU"] = first.elapsed_time(last) / 1e3
        else:
            seconds = {"processor": seconds_of(lambda: ids.extend(write()), time.process_time)}
        return {"ids": ids, "seconds": seconds, "mib": peak.bytes() / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    add_arguments(parser, "8B", "7B")
    args = parser.parse_args()
    # Answers go where standard output went; whatever else is printed goes to the errors.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not Path(hf_ensemble.__file__).is_relative_to(args.checkout):
        sys.exit(f"versions_worker.py: hf_ensemble is that of {hf_ensemble.__file__}, not of {args.checkout}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    runner = Runner(args)
    device = runner.ensemble.device
    ready = {"device": device.type, "setting": setting(device, runner.ensemble.dtype)}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(runner.run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
