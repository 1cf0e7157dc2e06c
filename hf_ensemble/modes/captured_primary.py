"""The primary alone on a GPU: its captured steps replace its passes through the stock loop."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..decoding.call import Call
from ..decoding.token_decoder import TokenDecoder
from ..methods.base import TokenMethod
from .stock_loop import Hook
from .tokens import TokenMode


class CapturedPrimaryMode(TokenMode):
    """The primary has all the weight, and runs like other members, in its own state."""

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Leave them unchanged, between the hooks that read the primary's state and check the result."""
        call = self.call
        decoder = self.decoder = decoder_of_one(call, call.method(), prompt_ids, prompt_mask, runs_primary=True)
        first = Hook(lambda _, scores: decoder.fuse(scores, add_level=False))
        do_sample = call.settings.do_sample
        last = Hook(lambda _, scores: decoder.select(scores, do_sample))
        return [first, *stock, last]


def decoder_of_one(
    call: Call, method: TokenMethod, prompt_ids: Tensor, prompt_mask: Tensor | None, runs_primary: bool
) -> TokenDecoder:
    """Create the decoder of a member that writes by itself.

    Args:
        call: The call.
        method: The member's own logits.
        prompt_ids: Its prompt ids, of shape `(num_rows, length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        runs_primary: Whether its state runs it, and not the stock loop.
    """
    return TokenDecoder(
        call,
        method,
        prompt_ids,
        prompt_mask,
        # The stock loop does not warn about control tokens.
        end_ids=range(call.members[0].vocab_size),
        is_wide=False,
        runs_primary=runs_primary,
        max_new_tokens=call.settings.max_length - prompt_ids.shape[1],
    )
