"""Ask for JSON with bounded schemas, and count the answers that end by themselves, parse and match their schema.

    python examples/benchmarks/json_answers.py [--models A B] [--answers 200] [--methods unite gac] [--clients 32]

Answers without drafts come from a server, whose requests share a batch. Answers with drafts (look-up in the text, of
`--draft-length` entries, whether that pays or not) come from `generate` with the same grammar, one by one. A fifth of
the answers are greedy, the others are sampled at several temperatures. The last column says how many answers with a
budget of `--cut` tokens, too few for every schema, ended with `finish_reason` "length". Needs `jsonschema` and
`openai` in addition to the extras `serve` and `json`.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema
import torch
from members import models_or_demo
from report import print_heads, print_row, setting
from serving import client_of

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.config import method_config
from hf_ensemble.decoding.speculation.draft_length import DraftLength
from hf_ensemble.serving.grammar import Grammars

MOST_TOKENS = 256


def record(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def listed(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


ANIMALS = {"enum": ["cat", "dog", "bird"]}
SCHEMAS = {
    "a pet": (record(name=text(8), kind=ANIMALS), '{"name": "Rex", "kind": "dog"}'),
    "a city": (record(city=text(10), big={"type": "boolean"}), '{"city": "Bonn", "big": false}'),
    "a list": (record(buy=listed({"enum": ["milk", "tea", "größer", "新"]}, 3)), '{"buy": ["milk", "tea"]}'),
    "a person": (
        record(name=record(first=text(6)), age={"type": "integer", "minimum": 0, "maximum": 99}),
        '{"name": {"first": "Ann"}, "age": 31}',
    ),
    "a family": (record(pets=listed(record(kind=ANIMALS), 2), of=text(4)), '{"pets": [{"kind": "cat"}], "of": "us"}'),
}
"""What is asked for: a schema, and a text that fits. All are bounded, so a text that keeps to one ends."""

PROMPTS = (
    "Describe {name} as JSON, like this: {example}",
    "{example} is {name}. Write another one.",
    "Write a JSON object about {name}. Say nothing else.",
    "{example}\n{example}\nGo on.",
    "Give me {name}.",
    'Finish this: the record of {name} is {{"',
    "Erfinde {name}, etwa {example}, und antworte auf Deutsch!",
    "{name} {name} {name}",
)
TEMPERATURES = (0.0, 0.7, 1.0, 1.3, 2.0)


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: str
    schema: dict[str, Any]
    temperature: float
    seed: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    @property
    def response_format(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}


@dataclass(frozen=True)
class Answer:
    """What came back."""

    text: str
    has_ended: bool
    num_tokens: int


def requests(count: int) -> list[Asked]:
    """Make so many requests: every prompt with every schema and temperature, again from the first after the last."""
    kinds = itertools.cycle(itertools.product(TEMPERATURES, PROMPTS, SCHEMAS.items()))
    return [
        Asked(prompt.format(name=name, example=example), schema, temperature, seed)
        for seed, (temperature, prompt, (name, (schema, example))) in enumerate(itertools.islice(kinds, count))
    ]


def from_server(client: Any, asked: Asked, most: int = MOST_TOKENS) -> Answer:
    """Ask a server."""
    answer = client.chat.completions.create(
        model="ensemble",
        messages=asked.messages,
        response_format=asked.response_format,
        temperature=asked.temperature,
        seed=asked.seed,
        max_tokens=most,
    )
    (choice,) = answer.choices
    return Answer(choice.message.content, choice.finish_reason == "stop", answer.usage.completion_tokens)


def with_drafts(ensemble: EnsembleForCausalLM, grammars: Grammars, asked: Asked) -> Answer:
    """Call `generate` with drafts and the grammar that the server would use."""
    inputs = ensemble.tokenizer.apply_chat_template(
        asked.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"do_sample": True, "temperature": asked.temperature} if asked.temperature else {"do_sample": False}
    torch.manual_seed(asked.seed)
    ids = ensemble.generate(
        **inputs,
        max_new_tokens=MOST_TOKENS,
        logits_processor=grammars.processors(asked.response_format)(),
        speculation="ngram",
        **options,
    )[0, inputs["input_ids"].shape[1] :].tolist()
    ends = ensemble.generation_config.eos_token_id
    has_ended = ids[-1] in (ends if isinstance(ends, list) else [ends])
    return Answer(ensemble.tokenizer.decode(ids, skip_special_tokens=True), has_ended, len(ids))


def misfits(asked: Sequence[Asked], answers: Sequence[Answer]) -> tuple[int, int]:
    """Print the answers that do not parse, or do not fit; returns how many do."""
    num_parsed = num_fit = 0
    for one, answer in zip(asked, answers, strict=True):
        try:
            found = json.loads(answer.text)
            num_parsed += 1
            jsonschema.validate(found, one.schema)
            num_fit += 1
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"{one}\n  {answer}\n  {error}")
    return num_parsed, num_fit


def runs(
    ensemble: EnsembleForCausalLM, methods: Sequence[str], num_clients: int, num_cut: int
) -> Iterator[tuple[str, str, Callable[[Sequence[Asked]], tuple[list[Answer], str]]]]:
    """Every method, without drafts and with them: what it is called, and what answers requests."""
    for name in methods:
        ensemble.config.method = method_config(name)

        def shared(asked: Sequence[Asked]) -> tuple[list[Answer], str]:
            with client_of(ensemble, num_clients) as client, ThreadPoolExecutor(num_clients) as pool:
                answers = list(pool.map(lambda one: from_server(client, one), asked))
                cut = list(pool.map(lambda one: from_server(client, one, num_cut), asked[:num_clients]))
            return answers, f"{sum(not answer.has_ended for answer in cut)} of {len(cut)}"

        def drafted(asked: Sequence[Asked]) -> tuple[list[Answer], str]:
            grammars = Grammars(ensemble)
            return [with_drafts(ensemble, grammars, one) for one in asked], ""

        yield name, "no", shared
        yield name, "yes", drafted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="members; default: the two demo models")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--answers", type=int, default=200, help="for each method, with drafts and without")
    parser.add_argument("--methods", nargs="+", default=["unite", "gac"])
    parser.add_argument("--clients", type=int, default=32, help="clients that ask at once")
    parser.add_argument("--draft-length", type=int, default=2)
    parser.add_argument("--cut", type=int, default=4, help="tokens of an answer that is cut")
    args = parser.parse_args()
    DraftLength.choose = lambda self, drafters, share=1.0: (drafters[0], args.draft_length)
    ensemble = EnsembleForCausalLM.from_pretrained(models_or_demo(args.models), dtype=args.dtype)
    asked = requests(args.answers)
    print(setting(ensemble.device, ensemble.dtype, f"{args.clients} clients", f"drafts of {args.draft_length}"))
    print_heads(
        "method", "drafts", "answers", "ended by themselves", "parsed", "fit", "tokens", "seconds", "cut and say so"
    )
    for name, drafts, answer in runs(ensemble, args.methods, args.clients, args.cut):
        start = time.perf_counter()
        answers, cut = answer(asked)
        seconds = time.perf_counter() - start
        num_parsed, num_fit = misfits(asked, answers)
        print_row(
            name, drafts, len(answers), sum(one.has_ended for one in answers), num_parsed, num_fit,
            sum(one.num_tokens for one in answers), f"{seconds:.0f}", cut,
        )  # fmt: skip


if __name__ == "__main__":
    main()
