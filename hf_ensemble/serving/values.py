"""Checks of the values in a request: a wrong type, or a value out of bounds, is refused with the field's name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import is_integer, is_number
from ..errors import ConfigurationError

_TEXTS = ("text", "input_text", "output_text")
"""Types of message parts that hold text."""

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
"""Arguments of `apply_chat_template` that requests cannot set."""


def integer(body: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    """Return a whole number, or the default if the field is missing.

    Raises:
        ConfigurationError: If the value is anything else, or out of bounds.
    """
    value = body.get(name)
    if value is None:
        return default
    if not is_id(value) or not least <= value <= most:
        raise ConfigurationError(f"`{name}` has to be a whole number from {least} to {most}, but is {value!r:.60}.")
    return value


def is_id(value: Any) -> bool:
    """Return whether a value is a whole number of 64 bits, as ids are."""
    return is_integer(value) and -(2**63) <= value < 2**63


def check_number(value: Any, name: str, least: float, most: float) -> None:
    """Refuse anything but a number within these bounds or None.

    Raises:
        ConfigurationError: If the value is anything else.
    """
    if value is not None and not (is_number(value) and least <= value <= most):
        raise ConfigurationError(f"`{name}` has to be a number from {least:g} to {most:g}, but is {value!r:.60}.")


def check_kind(body: Mapping[str, Any], name: str, kind: type, words: str) -> None:
    """Refuse a field whose value has another type and is not None.

    Args:
        body: The request.
        name: The field.
        kind: The type.
        words: Name of the type in the error, such as "a text".

    Raises:
        ConfigurationError: If the value has another type.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"`{name}` has to be {words}, but is {value!r:.60}.")


def check_of_all(body: Mapping[str, Any]) -> None:
    """Refuse values of fields that every endpoint has, and text that is not Unicode.

    Raises:
        ConfigurationError: If an option is out of bounds or of another type.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError("the request holds text that is not Unicode: half of a surrogate pair.") from error
    check_kind(body, "stream", bool, "true or false")
    check_number(body.get("temperature"), "temperature", 0, 2)
    check_number(body.get("top_p"), "top_p", 0, 1)
    # The stock server adds 1 and uses it as a repetition penalty.
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
    """Return the biases of a request, by id, as `generate` takes them.

    Args:
        body: The request.
        vocab_size: Number of ids of the primary.

    Raises:
        ConfigurationError: If an id does not exist, or a bias is not a number from -100 to 100.
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
    """Refuse malformed turns, tools and template arguments.

    Args:
        body: The request.
        name: The field that holds the turns: `messages` or `input`.

    Raises:
        ConfigurationError: If one is malformed.
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
        # An assistant may have called a function without writing text.
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
