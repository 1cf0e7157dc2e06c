"""The mode of a call, by what its method decides."""

from ..decoding.call import Call
from .base import Mode
from .primary import PrimaryMode

MODES: dict[str, type[Mode]] = {}
"""The mode for each kind of decision in a method's configuration."""


def mode_of(call: Call) -> Mode:
    """Return the mode of a call without drafts."""
    mode = MODES[call.config.decides](call)
    if not call.is_by_primary:
        return mode
    # The stock loop cannot run a primary elsewhere; its state runs it, token by token.
    return PrimaryMode(call) if call.members[0].runs_in_loop else MODES["tokens"](call)
