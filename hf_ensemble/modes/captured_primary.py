"""The primary alone on a GPU: its captured steps take the place of its passes through the stock loop."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..decoding.token_decoder import TokenDecoder
from .stock_loop import Hook
from .tokens import TokenMode


class CapturedPrimaryMode(TokenMode):
    """The primary has all the weight, and runs as members of ensembles do, in a state of its own."""

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Leave them as they are, between what reads the primary's own state and what looks at what they left."""
        call = self.call
        decoder = self.decoder = TokenDecoder(
            call,
            call.method(),
            prompt_ids,
            prompt_mask,
            # The stock loop warns of no control token.
            end_ids=range(call.members[0].vocab_size),
            is_wide=False,
            runs_primary=True,
            max_new_tokens=call.settings.max_length - prompt_ids.shape[1],
        )
        first = Hook(lambda _, scores: decoder.fuse(scores, add_level=False))
        do_sample = call.settings.do_sample
        last = Hook(lambda _, scores: decoder.select(scores, do_sample))
        return [first, *stock, last]
