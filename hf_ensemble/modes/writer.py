"""A single member that writes candidates in its own loop, with its own draws for every row."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria

from ..decoding.call import Call
from ..decoding.row_processors import without_padding
from ..methods.base import Mixed
from ..methods.primary_alone import PrimaryAlone
from ..mixing import log_normalizer
from .captured_primary import decoder_of_one
from .stock_loop import FollowingCriteriaList, Hook
from .stop_strings import AfterLostSpace
from .tokens import TokenMode


class _Watched(PrimaryAlone):
    """A member's own logits, unchanged, and a check that they are finite."""

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        mixed = super().mix(logits, weights)
        return Mixed(mixed.logprobs, log_normalizer(mixed.logprobs)[:, None])


class WriterMode(TokenMode):
    """The mode of a member that writes by itself. Rows of one prompt share its forward pass.

    Args:
        call: The call.
        loses_space: For each prompt whether the first word of its text loses the space that its tokenizer adds.

    Attributes:
        log_probs: For each step, the log-probability of the written ids by the member's own distribution, before any
            option changes it, of shape `(num_rows,)`; empty in beam search.
    """

    def __init__(self, call: Call, loses_space: Sequence[bool] = (False,)):
        super().__init__(call)
        self.loses_space = loses_space
        self.log_probs: list[Tensor] = []
        self._log_probs_of_step: Tensor | None = None

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Leave them unchanged, between the hooks that read the member's state and draw."""
        call, settings = self.call, self.call.settings
        member, do_sample = call.members[0], settings.do_sample
        stock = [without_padding(item, prompt_mask) for item in stock]
        if settings.num_beams > 1 and member.runs_in_loop:
            return [Hook(self._check_beams), *stock]
        shares = len({tuple(row) for row in prompt_ids.tolist()}) < len(prompt_ids)
        runs_primary = (not call.needs_stock_passes and (shares or member.is_captured)) or not member.runs_in_loop
        method = _Watched(call.kept.union, [[]], member.device)
        decoder = self.decoder = decoder_of_one(call, method, prompt_ids, prompt_mask, runs_primary)
        if settings.num_beams > 1:
            # A beam's score is a sum of log-probabilities.
            return [Hook(lambda ids, scores: decoder.fuse_beams(ids, scores).log_softmax(-1)), *stock]

        def begin(_: Tensor, scores: Tensor) -> Tensor:
            logits = decoder.fuse(scores, add_level=False)
            self._log_probs_of_step = logits.log_softmax(-1)
            return logits

        return [Hook(begin), *stock, Hook(lambda _, scores: decoder.select(scores, do_sample))]

    def _check_beams(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool(scores.isnan().any()):
            raise self.call.members[0].not_finite("while it searched with beams")
        return scores

    def criteria(self, stock: StoppingCriteriaList) -> StoppingCriteriaList:
        """Let the decoder follow the written ids, and keep their log-probabilities."""
        if any(self.loses_space):
            write = self.call.members[0].encoder.token_bytes.write
            stock = StoppingCriteriaList(
                AfterLostSpace(one, self.loses_space, write) if isinstance(one, StopStringCriteria) else one
                for one in stock
            )
        if self.decoder is None or self.call.settings.num_beams > 1:
            return stock

        def follow(input_ids: Tensor, done: Tensor) -> Tensor:
            found = self._log_probs_of_step
            assert found is not None
            self.log_probs.append(found.gather(-1, input_ids[:, -1:].to(found.device))[:, 0])
            return self.decoder.receive(input_ids, done)

        return FollowingCriteriaList(stock, follow, self.decoder.run_ahead)
