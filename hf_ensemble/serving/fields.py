"""The fields of a request: every field of OpenAI's is supported, has no effect, or is refused by name."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from .limits import Limits
from .values import check_conversation, check_kind, check_of_all, integer, is_id

_MOST_CHOICES = 128
"""Largest number of answers to one prompt, as in OpenAI's API."""

_MOST_SEED = 2**63

_IDLE = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream", "model"}
"""Fields that change nothing about a text."""

_IF_THEY_SAY_NOTHING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "verbosity": (),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "best_of": (1,),
    "echo": (False,),
}
"""Unsupported fields, and their values that ask for nothing; None is always one."""

_OF_RESPONSES_IF_THEY_SAY_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""The same for `/v1/responses`, whose other fields the stock server handles."""

_OF_CHAT = {
    "messages",
    "chat_template_kwargs",
    "max_completion_tokens",
    "response_format",
    "tools",
    "tool_choice",
    "top_logprobs",
}
_OF_COMPLETIONS = {"prompt", "suffix"}
_OF_BOTH = {
    "frequency_penalty",
    "generation_config",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "seed",
    "stop",
    "stream_options",
    "temperature",
    "top_p",
}


@dataclass(frozen=True)
class Asked:
    """What a request asks for, besides its prompts and its generation config.

    Attributes:
        count: Answers to each prompt.
        seeds: A seed for each of them.
        num_best: Number of most likely tokens to return beside each; None for no log-probabilities.
        stops: Stop strings.
        is_streamed: Whether the answer comes piece by piece.
        wants_usage: Whether a stream reports the number of tokens at its end.
        tools: Functions that the model may call; None for none.
    """

    count: int
    seeds: Sequence[int]
    num_best: int | None
    stops: Sequence[str]
    is_streamed: bool
    wants_usage: bool
    tools: Any = None


def read_fields(body: Mapping[str, Any], is_chat: bool, limits: Limits) -> Asked:
    """Read the fields of a request, and refuse unsupported ones.

    Args:
        body: The request.
        is_chat: Whether it is for a conversation; otherwise for plain completions.
        limits: The server's limits.

    Raises:
        ConfigurationError: If a field is not supported, or invalid.
    """
    _refuse(body, _OF_BOTH | (_OF_CHAT if is_chat else _OF_COMPLETIONS))
    check_of_all(body)
    if is_chat:
        check_conversation(body, "messages")
    for name, kind, words in (("stream_options", dict, "an object"), ("suffix", str, "a text")):
        check_kind(body, name, kind, words)
    count = integer(body, "n", 1, 1, min(_MOST_CHOICES, limits.max_batch))
    seed = integer(body, "seed", None, -_MOST_SEED, _MOST_SEED - 1)
    first = random.SystemRandom().randrange(_MOST_SEED) if seed is None else seed % _MOST_SEED
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        raise ConfigurationError("`stream_options` can be used with `stream` only.")
    if unknown := set(options) - {"include_usage", "include_obfuscation"}:
        raise ConfigurationError(f"`stream_options.{min(unknown)}` is not supported by this server.")
    tool_choice = body.get("tool_choice")
    if tool_choice not in (None, "auto", "none"):
        raise ConfigurationError(
            f"`tool_choice={tool_choice!r}` is not supported by this server: the model chooses. Pass 'auto' or 'none'."
        )
    for name in ("max_tokens", "max_completion_tokens"):
        integer(body, name, None, 1, limits.max_new_tokens)
    return Asked(
        count=count or 1,
        # The first answer is the one of `n=1`.
        seeds=[(first + 0x9E3779B97F4A7C15 * number) % _MOST_SEED for number in range(count or 1)],
        num_best=_num_best(body, is_chat),
        stops=_stops(body.get("stop")),
        is_streamed=bool(body.get("stream")),
        wants_usage=bool(options.get("include_usage")),
        tools=None if tool_choice == "none" else body.get("tools"),
    )


def refuse_of_responses(body: Mapping[str, Any], limits: Limits) -> None:
    """Refuse unsupported fields of a request for a response.

    Raises:
        ConfigurationError: If there is one.
    """
    check_of_all(body)
    check_conversation(body, "input")
    check_kind(body, "instructions", str, "a text")
    integer(body, "seed", None, -_MOST_SEED, _MOST_SEED - 1)
    integer(body, "max_output_tokens", None, 1, limits.max_new_tokens)
    for name, idle in _OF_RESPONSES_IF_THEY_SAY_NOTHING.items():
        _refuse_unless_idle(body, name, idle)


def read_prompts(prompt: Any, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the prompts of a request for completions: a text, several texts, ids, or several lists of ids.

    Args:
        prompt: The value sent.
        encode: Returns the ids of a text.

    Raises:
        ConfigurationError: If it is none of these, or empty.
    """
    is_list = isinstance(prompt, list) and bool(prompt)
    if isinstance(prompt, str):
        return [encode(prompt)]
    if is_list and all(isinstance(part, str) for part in prompt):
        return [encode(part) for part in prompt]
    if is_list and all(is_id(part) for part in prompt):
        return [prompt]
    if is_list and all(isinstance(part, list) and part and all(map(is_id, part)) for part in prompt):
        return list(prompt)
    raise ConfigurationError(
        f"`prompt` has to be a text, a list of texts, a list of ids, or a list of such lists, but is {prompt!r:.100}."
    )


def _refuse(body: Mapping[str, Any], served: set[str]) -> None:
    for name in body:
        if name not in served and name not in _IDLE:
            _refuse_unless_idle(body, name, _IF_THEY_SAY_NOTHING.get(name, ()))


def _refuse_unless_idle(body: Mapping[str, Any], name: str, idle: Sequence[Any]) -> None:
    value = body.get(name)
    if value is not None and value not in idle:
        raise ConfigurationError(f"`{name}={value!r:.60}` is not supported by this server. Leave it out.")


def _num_best(body: Mapping[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        found: int | None = integer(body, "logprobs", None, 0, 20)
        return found
    number: int | None = integer(body, "top_logprobs", None, 0, 20)
    asked = body.get("logprobs") or False
    if not isinstance(asked, bool):
        raise ConfigurationError(f"`logprobs` has to be true or false, but is {asked!r:.60}.")
    if number is not None and not asked:
        raise ConfigurationError("`top_logprobs` needs `logprobs=true`.")
    return (number or 0) if asked else None


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ConfigurationError(f"`stop` has to be a text or a list of non-empty texts, but is {stop!r:.100}.")
    return list(stops)
