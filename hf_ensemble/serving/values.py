"""Values of a request's fields: one of the wrong kind or out of bounds is refused with the field's name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError

_TEXTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that hold text."""

_OF_THE_SERVER = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
}
"""Arguments of `apply_chat_template` that no request may set."""


def integer(body: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    """A whole number, or the default if there is none.

    Raises:
        ConfigurationError: If it is anything else, or out of bounds.
    """
    value = body.get(name)
    if value is None:
        return default
    if not is_id(value) or not least <= value <= most:
        raise ConfigurationError(f"`{name}` has to be a whole number from {least} to {most}, but is {value!r:.60}.")
    return value


def is_id(value: Any) -> bool:
    """Whether a value is a whole number of 64 bits, as ids are."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def check_number(value: Any, name: str, least: float, most: float) -> None:
    """Refuse what is no number within these bounds; None is fine.

    Raises:
        ConfigurationError: If the value is none.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and least <= value <= most):
        raise ConfigurationError(f"`{name}` has to be a number from {least:g} to {most:g}, but is {value!r:.60}.")


def check_kind(body: Mapping[str, Any], name: str, kind: type, words: str) -> None:
    """Refuse a field whose value has another type; None is fine.

    Args:
        body: The request.
        name: The field.
        kind: The type.
        words: What the type is called, such as "a text".

    Raises:
        ConfigurationError: If the type is another one.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"`{name}` has to be {words}, but is {value!r:.60}.")


def check_sampling(body: Mapping[str, Any]) -> None:
    """Refuse values that no endpoint can sample with.

    Raises:
        ConfigurationError: If there is one.
    """
    check_kind(body, "stream", bool, "true or false")
    check_number(body.get("temperature"), "temperature", 0, 2)
    check_number(body.get("top_p"), "top_p", 0, 1)
    # The stock server makes it a repetition penalty of 1 more.
    check_number(body.get("frequency_penalty"), "frequency_penalty", -0.9, 2)
    given = body.get("generation_config")
    if given is not None:
        try:
            is_object = isinstance(json.loads(given), dict)
        except (TypeError, ValueError):
            is_object = False
        if not is_object:
            raise ConfigurationError(f"`generation_config` has to be an object as JSON text, but is {given!r:.60}.")


def read_logit_bias(body: Mapping[str, Any], vocab_size: int) -> dict[tuple[int], float]:
    """The biases of a request, by id, as `generate` takes them.

    Args:
        body: The request.
        vocab_size: Number of ids of the primary.

    Raises:
        ConfigurationError: If there is no such id, or a bias is no number from -100 to 100.
    """
    check_kind(body, "logit_bias", dict, "an object with ids and numbers")
    found = {}
    for key, value in (body.get("logit_bias") or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            raise ConfigurationError(
                f"`logit_bias` has to name ids from 0 to {vocab_size - 1}, but names {key!r:.60}."
            )
        check_number(value, f"logit_bias[{key}]", -100, 100)
        found[(int(key),)] = float(value or 0.0)
    return found


def check_conversation(body: Mapping[str, Any], name: str) -> None:
    """Refuse turns that nobody can read, and what goes with them.

    Args:
        body: The request.
        name: The field that holds the turns: `messages` or `input`.

    Raises:
        ConfigurationError: If there is one.
    """
    turns = body.get(name)
    if not isinstance(turns, (str, type(None))) or name == "messages":
        check_kind(body, name, list, "a list of turns")
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        where = f"{name}[{number}]"
        if not isinstance(turn, dict):
            raise ConfigurationError(f"`{where}` has to be an object, but is {turn!r:.60}.")
        if name == "input" and str(turn.get("type")).startswith("input_"):
            _check_parts([turn], name, number)
            continue
        check_kind(turn, "role", str, f"a text in `{where}`")
        content = turn.get("content")
        # An assistant may have called a function and said nothing.
        if content is None and "role" in turn and turn["role"] != "assistant":
            raise ConfigurationError(f"`{where}` has no `content`: {turn!r:.100}.")
        if isinstance(content, list):
            _check_parts(content, f"{where}.content")
        else:
            check_kind(turn, "content", str, f"a text or a list of parts in `{where}`")
    _check_template_options(body)


def _check_parts(parts: Sequence[Any], where: str, first: int = 0) -> None:
    for number, part in enumerate(parts, first):
        if not isinstance(part, dict):
            raise ConfigurationError(f"`{where}[{number}]` has to be an object, but is {part!r:.60}.")
        if part.get("type") not in _TEXTS:
            raise ConfigurationError(
                f"`{where}[{number}].type={part.get('type')!r:.60}` is not supported by this server: members read text only."
            )
        check_kind(part, "text", str, f"a text in `{where}[{number}]`")


def _check_template_options(body: Mapping[str, Any]) -> None:
    check_kind(body, "chat_template_kwargs", dict, "an object")
    taken = _OF_THE_SERVER.intersection(body.get("chat_template_kwargs") or {})
    if taken:
        raise ConfigurationError(f"`chat_template_kwargs.{min(taken)}` is not supported by this server. Leave it out.")
    tools = body.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ConfigurationError(
                f"`tools[{number}].type={kind!r:.60}` is not supported by this server: the model calls functions only."
            )
