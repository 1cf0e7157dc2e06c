"""The requests of the soak's clients: good ones with random options, bad ones, and when clients disconnect."""

import json
import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

MODEL = "soak"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

TEXTS = (
    "The history of the city", "Zürich, naïve café", "你好世界", "def main(argv):\n\treturn", "x", " ", "🎉 party",
    "Once upon a time there was a small settlement at the river, and the years went by with it. " * 2,
)  # fmt: skip


@dataclass
class Request:
    """One request.

    Attributes:
        kind: What it is meant for: "good", "bad", "hangs up" or "hangs up, streamed".
        path: Where it goes.
        body: What is sent.
        method: How it is sent.
        fields: The body, of good requests.
        patience: Seconds, or pieces of a stream, after which it hangs up.
    """

    kind: str
    path: str
    body: bytes
    method: str = "POST"
    fields: dict[str, Any] = field(default_factory=dict)
    patience: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken at every step."""
        return not self.fields.get("temperature") and "top_p" not in self.fields

    @property
    def is_repeatable(self) -> bool:
        """Whether its texts are to be the same when it is sent again."""
        return self.kind == "good" and (self.is_greedy or "seed" in self.fields)

    @property
    def is_plain(self) -> bool:
        """Whether `generate` writes its text without any option but a length."""
        others = {"stop", "logit_bias", "frequency_penalty", "response_format"}.intersection(self.fields)
        has_text = self.path == CHAT or isinstance(self.fields.get("prompt"), str)
        return self.is_greedy and has_text and not others


def make_request(number: int, seed: int, max_tokens: int, end_id: int) -> Request:
    """Make the request of a number, which is the same in every run.

    Args:
        number: Of the request.
        seed: Of the soak.
        max_tokens: Most tokens that a good request asks for.
        end_id: An id of the primary, for biases.
    """
    draw = random.Random(f"{seed}-{number}")
    if draw.random() < 0.15:
        return _bad(draw)
    path, fields = _good(draw, max_tokens, end_id)
    kind = draw.choices(["good", "hangs up", "hangs up, streamed"], [0.8, 0.1, 0.1])[0]
    if kind != "good":
        fields["stream"] = kind.endswith("streamed")
        # Long enough that there is something to give up.
        fields["max_output_tokens" if path == RESPONSES else "max_tokens"] = 4 * max_tokens
    patience = draw.randrange(4) if kind.endswith("streamed") else draw.random() * 0.2
    return Request(kind, path, json.dumps(fields).encode(), "POST", fields, patience)


def _good(draw: random.Random, max_tokens: int, end_id: int) -> tuple[str, dict[str, Any]]:
    path = draw.choices([CHAT, COMPLETIONS, RESPONSES], [0.45, 0.45, 0.1])[0]
    text, few = draw.choice(TEXTS), draw.randint(1, max_tokens)
    fields: dict[str, Any] = {"model": MODEL, "stream": draw.random() < 0.4}
    if path == RESPONSES:
        return path, fields | {"input": text, "max_output_tokens": few, "temperature": draw.choice([0, 0.8])}
    fields["max_tokens" if path == COMPLETIONS or draw.random() < 0.5 else "max_completion_tokens"] = few
    if path == CHAT:
        turns = [{"role": "user", "content": text}]
        if draw.random() < 0.3:
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": draw.choice(TEXTS)}]
        fields["messages"] = turns
    else:
        prompts = [text, [text, draw.choice(TEXTS)], [3, 4, 5], [[6, 7], [8, 9, 10]]]
        fields["prompt"] = draw.choices(prompts, [0.7, 0.1, 0.1, 0.1])[0]
    options: list[tuple[float, str, Any]] = [
        (0.5, "temperature", draw.choice([0, 0.5, 1, 1.5])),
        (0.2, "top_p", draw.choice([0.5, 0.9, 1])),
        (0.6, "seed", draw.randrange(2**40)),
        (0.3, "n", draw.randint(1, 3)),
        (0.3, "stop", draw.choice(["the", [" ", "\n"], ["zzz"]])),
        (0.2, "frequency_penalty", draw.choice([0.1, 1])),
        (0.2, "logit_bias", {str(end_id): draw.choice([-5, 2])}),
        (0.1, "presence_penalty", 0),
        (0.1, "user", "somebody"),
    ]
    fields |= {name: value for share, name, value in options if draw.random() < share}
    if fields["stream"] and draw.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    if draw.random() < 0.3:
        number = draw.randrange(4)
        fields |= {"logprobs": True, "top_logprobs": number} if path == CHAT else {"logprobs": number}
    if path == CHAT and draw.random() < 0.1 and find_spec("xgrammar"):
        fields["response_format"] = {"type": "json_object"}
    return path, fields


_WRONG: tuple[tuple[str, Any], ...] = (
    ("model", "another"), ("model", 3), ("messages", "text"), ("messages", []), ("messages", [3]),
    ("messages", [{"role": "user"}]), ("messages", [{"role": 7, "content": "x"}]), ("max_tokens", 0),
    ("max_tokens", 10**12), ("max_tokens", "many"), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", "hot"),
    ("temperature", -1), ("temperature", [1]), ("top_p", 7), ("top_p", "x"), ("seed", 2**80), ("seed", "x"),
    ("n", 0), ("n", 10**9), ("n", "x"), ("stop", [""]), ("stop", 5), ("stop", [[]]), ("logprobs", 99),
    ("logprobs", "x"), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"999999999999": 1}),
    ("logit_bias", {"3": "x"}), ("logit_bias", [3]), ("logit_bias", 3), ("presence_penalty", 1),
    ("frequency_penalty", "x"), ("stream", "perhaps"), ("stream_options", {"include_usage": True}),
    ("stream_options", 3), ("response_format", {"type": "poem"}), ("response_format", 3), ("echo", True),
    ("best_of", 4), ("unheard_of", 1), ("tool_choice", "required"), ("tools", 3), ("generation_config", "{"),
    ("generation_config", "[]"), ("generation_config", '{"max_new_tokens": 100000}'),
    ("generation_config", '{"num_beams": "x"}'), ("generation_config", 3), ("chat_template_kwargs", 3),
    ("prompt", []), ("prompt", [[]]), ("prompt", {"x": 1}), ("prompt", [True]), ("prompt", [10**9]), ("prompt", [-1]),
    ("prompt", ["x"] * 5000), ("input", 3), ("max_output_tokens", 10**9),
    ("previous_response_id", "x"), ("truncation", "auto"),
)  # fmt: skip
"""A field, and what it must not be."""

_OF_CHAT = ("messages", "tools", "tool_choice", "response_format", "chat_template_kwargs")
_OF_COMPLETIONS = ("prompt", "best_of", "echo")
_OF_RESPONSES = ("input", "max_output_tokens", "previous_response_id", "truncation")


def _bad(draw: random.Random) -> Request:
    whole: list[tuple[str, str, bytes]] = [
        ("POST", COMPLETIONS, b""), ("POST", CHAT, b"{"), ("POST", CHAT, b"\xff\xfe"), ("POST", COMPLETIONS, b"[]"),
        ("POST", CHAT, b"null"), ("POST", COMPLETIONS, b'{"model": "soak"'), ("POST", CHAT, b"[" * 50_000),
        ("POST", COMPLETIONS, b'{"a":' * 50_000), ("POST", CHAT, b" " * (2**20 + 1)),
        ("POST", COMPLETIONS, b'{"model": "soak", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}"),
        ("POST", COMPLETIONS, b'{"model": "soak", "prompt": "x", "temperature": NaN}'),
        ("POST", COMPLETIONS, b'{"model": "soak", "prompt": "x", "top_p": Infinity}'),
        ("GET", CHAT, b""), ("POST", "/v1/models", b"{}"), ("POST", "/v1/nothing", b"{}"), ("DELETE", "/v1/models", b""),
    ]  # fmt: skip
    if draw.random() < 0.25:
        method, path, body = draw.choice(whole)
        return Request("bad", path, body, method)
    name, value = draw.choice(_WRONG)
    paths = {CHAT: _OF_CHAT, COMPLETIONS: _OF_COMPLETIONS, RESPONSES: _OF_RESPONSES}
    path = next((path for path, names in paths.items() if name in names), draw.choice([CHAT, COMPLETIONS]))
    own = {
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
    }
    return Request("bad", path, json.dumps({"model": MODEL, **own[path], name: value}).encode())
