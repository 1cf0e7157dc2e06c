"""Ways of writing, one a file."""

from ..decoding.call import Call
from ..decoding.speculation.options import Speculation, obstacle_to_drafts
from .base import Mode
from .drafts import DraftMode
from .primary import PrimaryMode
from .spans import SpanMode
from .tokens import TokenMode

MODES: dict[str, type[Mode]] = {"tokens": TokenMode, "spans": SpanMode}
"""The mode of every way in which a method decides, by what its configuration calls it."""


def mode_of(call: Call) -> Mode:
    """The mode of a call without drafts."""
    mode = MODES[call.config.decides](call)
    return PrimaryMode(call) if call.is_by_primary else mode


def mode_for_generate(call: Call, speculation: str | None) -> Mode:
    """The mode of a call of `generate`, which has refused what it cannot do.

    Args:
        call: What the call works with.
        speculation: Who drafts, where nothing stands against it or plain decoding may not take over; None for nobody.

    Raises:
        ConfigurationError: If an option cannot be used, or there is no such drafter.
    """
    mode = mode_of(call)
    if speculation is not None:
        drafting = Speculation(speculation, call.members)
        found = obstacle_to_drafts(call, call.settings, call.arguments["synced_gpus"])
        if found is not None:
            drafting.refuse(found)
        elif not (call.is_by_primary and drafting.is_auto):
            mode = DraftMode(mode, drafting)
    mode.refuse()
    return mode
