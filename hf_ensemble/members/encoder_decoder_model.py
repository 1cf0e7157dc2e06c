"""An encoder-decoder model, as its caches see it."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutput

from .. import messages
from .member_model import MemberModel


class EncoderDecoderModel(MemberModel):
    """An encoder-decoder model, whose two halves are run one after the other. It is never changed."""

    has_encoder = True

    @cached_property
    def max_positions(self) -> int | None:
        """How many ids fit the decoder's learned positions; None if there is no limit."""
        return self._positions_of(self.model.get_decoder())

    @cached_property
    def max_source_positions(self) -> int | None:
        """How many ids fit the encoder's learned positions; None if there is no limit."""
        return self._positions_of(self.model.get_encoder())

    def run_encoder(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Run the encoder.

        Args:
            sources: Ids of each source.

        Returns:
            Its states, of shape `(num_sources, longest, width)`, and 1 where a source has an id.
        """
        pad, longest = self.model.config.pad_token_id or 0, max(map(len, sources))
        ids = torch.tensor([[*source, *[pad] * (longest - len(source))] for source in sources])
        mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources])
        ids, mask = ids.to(self.device), mask.to(self.device)
        try:
            states = self.model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)[0]
        except Exception as error:
            raise messages.failed_pass(self.name, error, "the forward pass of its encoder") from error
        return states, mask

    def run_decoder(self, ids: Tensor, encoded: Tensor, source_mask: Tensor, cache: Cache | None) -> Tensor:
        """Run the decoder.

        Args:
            ids: New ids, of shape `(num_rows, num_new)`.
            encoded: The encoder's states of the rows' sources, of shape `(num_rows, longest, width)`.
            source_mask: 1 where a source has an id, of shape `(num_rows, longest)`.
            cache: The cache, extended in place; None to use none.

        Returns:
            Logits of shape `(num_rows, num_new, vocab_size)`.
        """
        kwargs = {} if cache is None else {self.cache_keyword: cache}
        try:
            logits: Tensor = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
                attention_mask=source_mask,
                decoder_input_ids=ids,
                use_cache=cache is not None,
                return_dict=True,
                **kwargs,
            ).logits
        except Exception as error:
            raise messages.failed_pass(self.name, error) from error
        self._check_width(logits.shape[-1])
        return logits.to(self.device)
