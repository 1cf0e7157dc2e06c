"""Checks of a member's chat template: which parts of a conversation it reads, and whether its turns end."""

from collections.abc import Iterator
from typing import Any

from ..chat.conversation import read_conversations
from ..errors import ConfigurationError
from ..members.member import Member
from .findings import Finding

_SYSTEM, _TOOL, _CALL = "qwertysystem", "qwertytool", "qwertycall"
"""Words that appear in a rendering if the template reads the part that contains them."""

_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object"}}}]
_CALLS = [{"type": "function", "function": {"name": _CALL, "arguments": {}}}]


def read_by_template(member: Member) -> tuple[str, ...]:
    """What the member's template shows besides user and assistant turns; empty without a template."""
    if not _has_template(member):
        return ()
    user = {"role": "user", "content": "hello"}
    system = [{"role": "system", "content": _SYSTEM}, user]
    calls = [user, {"role": "assistant", "content": "", "tool_calls": _CALLS}]
    tried: dict[str, tuple[Any, Any, str]] = {
        "system turns": (system, None, _SYSTEM),
        "tools": ([user], _TOOLS, _TOOL),
        "tool calls": (calls, None, _CALL),
    }
    return (
        "turns",
        *(what for what, (turns, tools, word) in tried.items() if word in _rendered(member, turns, tools)),
    )


def check_template(member: Member) -> Iterator[Finding]:
    """Check a member's chat template, if it has one."""
    if not _has_template(member):
        return
    if "system turns" not in read_by_template(member):
        yield Finding(
            member.name,
            "system turns",
            "its chat template drops them",
            "This member never reads the instruction that the others follow.",
            "Give it a template that shows system turns, `MemberConfig(chat_template=...)`, or put the instruction "
            "into the first user turn.",
        )
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    try:
        conversations, _ = read_conversations(turns, None)
        ids = member.renderer.ids(conversations[0])
    except ConfigurationError:
        return
    last = next(
        (i for i in reversed(ids) if member.encoder.token_bytes.write([i]).strip() or member.is_control(i)), None
    )
    if last is not None and member.is_control(last) and last not in member.eos_token_ids:
        token = member.tokenizer.convert_ids_to_tokens(last)
        yield Finding(
            member.name,
            "end of turns",
            f"its chat template ends an answer with {token!r} (id {last}), which does not end its texts",
            "Answers continue into user turns that the model makes up.",
            f"Add this id: `MemberConfig(eos_token_id=[{last}])`.",
        )


def _has_template(member: Member) -> bool:
    return bool(member.renderer.chat_template or member.tokenizer.chat_template)


def _rendered(member: Member, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        conversations, _ = read_conversations(turns, tools)
        return member.renderer.text(conversations[0])
    except ConfigurationError:
        return ""
