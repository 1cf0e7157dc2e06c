"""Ways of writing, one per file."""

from ..decoding.call import Call, refuse_for_primary_elsewhere
from ..decoding.speculation.options import Speculation, obstacle_to_drafts
from ..errors import ConfigurationError
from .answers import AnswersMode
from .base import Mode
from .drafts import DraftMode
from .registry import MODES
from .registry import mode_of as mode_of
from .spans import SpanMode
from .tokens import TokenMode

MODES |= {"tokens": TokenMode, "spans": SpanMode, "answers": AnswersMode}


def mode_for_generate(call: Call, speculation: str | None) -> Mode:
    """Return the mode of a call of `generate`, after it has refused what it cannot do.

    Args:
        call: The call.
        speculation: The drafters, if drafts are possible or plain decoding may not replace them; None for no drafts.

    Raises:
        ConfigurationError: If an option cannot be used, or there is no such drafter.
    """
    mode = mode_of(call)
    if call.seed is not None and not call.config.takes_seed:
        raise ConfigurationError(
            f"`seed={call.seed!r}` cannot be used with method {call.config.name!r}, which draws from torch's global "
            "generator. Call `torch.manual_seed` first."
        )
    if speculation is not None:
        drafting = Speculation(speculation, call.members)
        found = obstacle_to_drafts(call, call.settings, call.arguments["synced_gpus"])
        if found is not None:
            drafting.refuse(found)
        elif not (call.is_by_primary and drafting.is_auto):
            mode = DraftMode(mode, drafting)
    mode.refuse()
    if not call.members[0].runs_in_loop:
        refuse_for_primary_elsewhere(call)
    return mode
