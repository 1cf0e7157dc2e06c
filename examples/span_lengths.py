"""Quality and time of SweetSpan by span length, on your own development sets.

For every span length, and for each member alone, the script measures the share of right answers on short questions
(the answer is the first line) and on reasoning questions (the answer is the last number), greedily and in batches; and
the time per token, with one prompt at a time. It keeps finished points in a file, one JSON line each, and does not
measure them again.

    python examples/span_lengths.py --results lengths.jsonl --plot lengths.svg [--device cuda] [--num-examples 100]
        [--short-answers trivia.jsonl trivia_prompt.txt] [--reasoning maths.jsonl maths_prompt.txt]

A set consists of a file of JSON lines with `question` and `answer` (one right answer or a list of them), and a file of
worked examples that begin with "Question:" and precede each question. Without a set, the script prints and draws what
the results file holds.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from demo_models import models_or_demo
from tqdm import tqdm

from hf_ensemble import EnsembleForCausalLM, SweetSpanConfig
from hf_ensemble.evaluation import EvaluationSet, read_set

NUM_TIMED_PROMPTS, NUM_TIMED_TOKENS = 4, 64


class Kind(NamedTuple):
    """How the questions of a set are asked and marked."""

    title: str
    marking: str
    cue: str
    """The text between a question and its answer."""
    max_new_tokens: int

    def read(self, data: Path, worked_examples: Path, count: int) -> EvaluationSet:
        """Read the first questions of a set."""
        options = {"cue": self.cue, "marking": self.marking, "limit": count}
        return read_set(data, name=self.title, worked_examples=worked_examples, **options)


SHORT = Kind("short answers", "text", "\nAnswer:", 32)
REASONING = Kind("reasoning", "number", "\nLet's think step by step\n", 256)


class Writer(NamedTuple):
    """A member or the ensemble, with the options to call it with."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    options: dict

    def write(self, prompts: list[str], **options) -> torch.Tensor:
        """Return the new ids, of shape `(num_prompts, num_new_ids)`."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(self.model.device)
        pad = self.tokenizer.pad_token_id
        output = self.model.generate(**inputs, do_sample=False, pad_token_id=pad, **self.options, **options)
        return output[:, inputs.input_ids.shape[1] :]


def quality(writer: Writer, kind: Kind, examples: EvaluationSet, batch_size: int) -> dict:
    num_right, texts = 0, []
    stop = {"stop_strings": examples.stop_strings, "tokenizer": writer.tokenizer}
    for start in range(0, len(examples.items), batch_size):
        items = examples.items[start : start + batch_size]
        new_ids = writer.write([item.prompt for item in items], max_new_tokens=kind.max_new_tokens, **stop)
        for ids, item in zip(new_ids, items, strict=True):
            texts.append(writer.tokenizer.decode(ids, skip_special_tokens=True))
            num_right += examples.is_right(texts[-1], item)
    return {"right": num_right, "of": len(examples.items), "texts": texts}


def time_of_a_token(writer: Writer, examples: EvaluationSet) -> dict:
    """Return the milliseconds per token of the writer's own, including reading the prompt."""
    options = {"max_new_tokens": NUM_TIMED_TOKENS, "min_new_tokens": NUM_TIMED_TOKENS}
    prompts = [item.prompt for item in examples.items[:NUM_TIMED_PROMPTS]]
    writer.write(prompts[:1], max_new_tokens=8)
    start = time.perf_counter()
    for prompt in prompts:
        writer.write([prompt], **options).tolist()
    return {"milliseconds": 1e3 * (time.perf_counter() - start) / len(prompts) / NUM_TIMED_TOKENS}


def run_points(points: Iterable[tuple[dict, Callable[[], dict]]], results: Path) -> None:
    """Measure the points that the file does not hold yet."""
    done = read_points(results)
    for point, measure in tqdm(list(points), unit="point"):
        if any(point.items() <= known.items() for known in done):
            continue
        start = time.perf_counter()
        result = {**point, **measure(), "seconds": round(time.perf_counter() - start, 1)}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def read_points(results: Path) -> list[dict]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def draw(points: list[dict], plot: Path) -> None:
    """Draw quality and time by span length, with members as horizontal lines."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "span_lengths", "svg.fonttype": "none", "axes.grid": True})
    titles = sorted({point["measures"] for point in points}, key=lambda title: (title == "time", title))
    figure, panels = pyplot.subplots(len(titles), 1, figsize=(6.4, 2.6 * len(titles)), sharex=True, squeeze=False)
    for axes, title in zip(panels[:, 0], titles, strict=True):
        own = [point for point in points if point["measures"] == title]
        spans = sorted((point for point in own if "span_length" in point), key=lambda point: point["span_length"])
        lengths = [point["span_length"] for point in spans]
        values, errors = zip(*map(_value_and_error, spans), strict=True)
        axes.errorbar(lengths, values, errors, marker="o", capsize=3, label="ensemble")
        for style, point in zip(("--", ":", "-."), (p for p in own if "span_length" not in p), strict=False):
            axes.axhline(_value_and_error(point)[0], color="gray", linestyle=style, label=point["member"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, map(str, lengths))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms a token" if title == "time" else "right, %")
        axes.set_title(title if title == "time" else f"{title}, {own[0]['of']} questions")
        axes.legend(fontsize="small")
    axes.set_xlabel("words of a span (L)")
    figure.tight_layout()
    figure.savefig(plot, metadata={"Date": None})


def _value_and_error(point: dict) -> tuple[float, float]:
    """Return the percentage of right answers and its standard error, or the milliseconds."""
    if "milliseconds" in point:
        return point["milliseconds"], 0.0
    share = point["right"] / point["of"]
    return 100 * share, 100 * (share * (1 - share) / point["of"]) ** 0.5


def measure_all(args: argparse.Namespace) -> None:
    models = models_or_demo(args.models)
    ensemble = EnsembleForCausalLM.from_pretrained(models, dtype=torch.float32, device_map=args.device)
    where = torch.cuda.get_device_name() if ensemble.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    # With the same models, sets and machine, a point is measured only once.
    sets_of = [str(path) for path in (*(args.short_answers or ()), *(args.reasoning or ()))]
    same = {"models": models, "where": where, "sets": sets_of}
    setting = {"transformers": transformers.__version__, "torch": torch.__version__}
    writers: list[tuple[dict, Writer]] = []
    for path, model, tokenizer in zip(models, ensemble.members, ensemble.tokenizers, strict=True):
        writers.append(({"member": Path(path).name}, Writer(model, tokenizer, {})))
    for length in args.lengths:
        options = {"method": SweetSpanConfig(span_length=length)}
        writers.append(({"span_length": length}, Writer(ensemble, ensemble.tokenizer, options)))

    sets = [
        (kind, kind.read(*paths, args.num_examples))
        for kind, paths in ((SHORT, args.short_answers), (REASONING, args.reasoning))
        if paths
    ]
    points: list[tuple[dict, Callable[[], dict]]] = []
    if "time" in args.measures:
        examples = sets[-1][1]
        for who, writer in writers:
            points.append(
                ({"measures": "time", **who, **same}, lambda w=writer: {**time_of_a_token(w, examples), **setting})
            )
    if "quality" in args.measures:
        for (kind, examples), (who, writer) in ((s, w) for s in sets for w in writers):
            point = {"measures": kind.title, **who, "of": len(examples.items), **same}
            points.append(
                (point, lambda w=writer, k=kind, e=examples: {**quality(w, k, e, args.batch_size), **setting})
            )
    run_points(points, args.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file of finished points")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    parser.add_argument("--short-answers", type=Path, nargs=2, metavar=("DATA", "PROMPT"))
    parser.add_argument("--reasoning", type=Path, nargs=2, metavar=("DATA", "PROMPT"))
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--measures", nargs="+", choices=("quality", "time"), default=["time", "quality"])
    parser.add_argument("--num-examples", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.short_answers or args.reasoning:
        measure_all(args)
    points = read_points(args.results)
    if not points:
        sys.exit(f"span_lengths.py: {args.results} holds no points: give a set with --short-answers or --reasoning")
    for point in points:
        value, error = _value_and_error(point)
        who = point.get("member") or f"L = {point['span_length']}"
        print(f"{point['measures']}, {who}: {value:.1f}" + (f" ± {error:.1f} %" if "of" in point else " ms"))
    if args.plot:
        draw(points, args.plot)


if __name__ == "__main__":
    main()
