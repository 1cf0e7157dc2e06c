"""The mode of a call, by what its method decides."""

from ..decoding.call import Call
from .base import Mode
from .primary import PrimaryMode

MODES: dict[str, type[Mode]] = {}
"""The mode of every way in which a method decides, by what its configuration calls it."""


def mode_of(call: Call) -> Mode:
    """The mode of a call without drafts."""
    mode = MODES[call.config.decides](call)
    if not call.is_by_primary:
        return mode
    # The stock loop has no passes of a primary elsewhere: its state runs it, token by token.
    return PrimaryMode(call) if call.members[0].runs_in_loop else MODES["tokens"](call)
