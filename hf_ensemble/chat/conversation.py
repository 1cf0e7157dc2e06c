"""A conversation as the user gave it, which every member renders in its own way."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Conversation:
    """One conversation and how to render it. It is a copy of what the user gave.

    Attributes:
        messages: The turns: dictionaries with `role` and `content` (a text or text parts), and any other keys.
        options: Other arguments of `apply_chat_template`: JSON schemas of `tools`, `documents`, how to render the end,
            and variables of the templates.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)

    def with_strings(self, change: Callable[[str], str]) -> "Conversation":
        """Return the same with every text changed, except names of fields and of special tokens."""

        def changed(value: Any) -> Any:
            return _map(value, lambda leaf: change(leaf) if isinstance(leaf, str) else leaf)

        options = {
            key: value if key.endswith("_token") or key == "continue_final_message" else changed(value)
            for key, value in self.options.items()
        }
        return Conversation(changed(self.messages), options)

    def with_system_prompt(self, text: str | None) -> "Conversation":
        """Return the same with this system turn instead of its own; empty for no system turn, None for its own."""
        if text is None:
            return self
        rest = self.messages[1:] if self.messages[0]["role"] == "system" else self.messages
        turn = [{"role": "system", "content": text}] if text else []
        return dataclasses.replace(self, messages=[*turn, *rest])

    def with_joined_parts(self) -> "Conversation":
        """Return the same with the text parts of each turn joined, without a separator."""
        messages = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                message = {**message, "content": "".join(part["text"] for part in content)}
            messages.append(message)
        return dataclasses.replace(self, messages=messages)

    def with_folded_system(self) -> "Conversation":
        """Return the same with every system turn put in front of the next user turn, after a blank line."""
        messages: list[dict[str, Any]] = []
        waiting: list[str] = []
        for message in self.with_joined_parts().messages:
            if message["role"] == "system":
                waiting.append(message["content"])
            elif message["role"] == "user" and waiting:
                messages.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
                waiting = []
            else:
                messages.append(message)
        if waiting:
            messages.append({"role": "user", "content": "\n\n".join(waiting)})
        return dataclasses.replace(self, messages=messages)


def read_conversations(conversation: Any, tools: Any, **options: Any) -> tuple[list[Conversation], bool]:
    """Read one conversation or a batch of them.

    Args:
        conversation: Turns, or a list of such conversations; each may also be an object with `messages`.
        tools: JSON schemas, or functions with type hints and a docstring.
        **options: Other arguments of `apply_chat_template`.

    Returns:
        The conversations, and whether it was a batch.

    Raises:
        ConfigurationError: If there is no turn, or a turn contains anything but text.
        TypeError: If a turn is not a dictionary with a role.
    """
    if options.get("add_generation_prompt") and options.get("continue_final_message"):
        raise ConfigurationError(
            "`add_generation_prompt` begins a new turn and `continue_final_message` keeps the last one open: set only one."
        )
    conversation = getattr(conversation, "messages", conversation)
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise ConfigurationError(f"a conversation has to be a list of turns, but is {conversation!r:.200}.")
    is_batch = isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    if tools is not None:
        is_list = isinstance(tools, (list, tuple))
        if not is_list or not all(isinstance(tool, Mapping) or callable(tool) for tool in tools):
            raise TypeError(f"`tools` has to be a list of JSON schemas or functions, but is {tools!r:.200}.")
        tools = [tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools]
    options = _plain({"tools": tools, **options})
    found = []
    for turns in conversation if is_batch else [conversation]:
        turns = getattr(turns, "messages", turns)
        if not turns:
            raise ConfigurationError("a conversation of the batch is empty: give at least one turn.")
        found.append(Conversation([_read_message(message) for message in turns], options))
    return found, is_batch


def _read_message(message: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        message = {key: value for key, value in dataclasses.asdict(message).items() if value is not None}
    elif hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a turn has to be a dictionary with `role` and `content`, but is {message!r:.200}.")
    plain: dict[str, Any] = _plain(message)
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ConfigurationError(
                    f"a turn of role {plain['role']!r} contains a part of type {kind!r}, but members read text only: "
                    'parts have to be {"type": "text", "text": ...}.'
                )
    elif content is not None and not isinstance(content, str):
        raise ConfigurationError(
            f"the content of a turn has to be a text or a list of text parts, but is {content!r:.200}."
        )
    return plain


def _plain(value: Any) -> Any:
    """A deep copy made of dictionaries and lists."""
    return _map(value, copy.deepcopy)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_map(item, change) for item in value]
    return change(value)
