"""A row of a shared batch: `generate` prepares it like any call, and the batch runs it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decoding.call import Call, end_ids
from ..decoding.draws import Draws
from ..decoding.loop import Loop
from ..decoding.refusals import Obstacle, first_obstacle, refuse_for_ensembles
from ..decoding.row_processors import split_at_warpers, without_padding
from ..decoding.running_batch import Row, Written
from ..decoding.shared_decoder import SharedDecoder
from ..errors import ConfigurationError
from .base import Mode
from .options import run_call
from .tokens import TokenMode, refuse_processors


class NotShared(ConfigurationError):
    """A call cannot share a batch, and has to run alone."""


def obstacle_to_sharing(call: Call) -> Obstacle | None:
    """Return why a call cannot share a batch with others; None if it can."""
    config, settings = call.config, call.settings
    return first_obstacle(
        [
            Obstacle(config.decides != "tokens", f"method {config.name!r}", "it does not decide token by token"),
            Obstacle(call.weights.varies, "`weights` as a function", "it needs all rows of a call"),
            Obstacle(call.needs_stock_passes, "an option", "only the stock loop supports it"),
            Obstacle(settings.num_return_sequences != 1, "`num_return_sequences`", "each row is a request of its own"),
        ]
    )


@torch.no_grad()
def new_row(
    ensemble: Any,
    inputs: dict[str, Tensor],
    generation_config: Any,
    seed: int,
    *,
    logits_processor: Sequence[Any] = (),
    num_best: int | None = None,
    take: Callable[[Written], None],
) -> Row:
    """Create a row that is ready to join a batch, by running `generate` up to its loop.

    Args:
        ensemble: The `EnsembleForCausalLM`.
        inputs: The prompt: `input_ids` of shape `(1, length)`, and the mask if there is one.
        generation_config: The options.
        seed: Seed of its samples.
        logits_processor: Further processors, of this row alone.
        num_best: Number of most likely ids to return at every step; None for no log-probabilities.
        take: Receives what every step writes.

    Raises:
        NotShared: If the call cannot share a batch.
        ConfigurationError: If an option cannot be used.
    """

    def mode_for(call: Call) -> Mode:
        refuse_for_ensembles(call.settings, {}, {})
        found = obstacle_to_sharing(call)
        if found is not None:
            raise NotShared(f"{found.what} cannot be used in a shared batch: {found.why}.")
        mode = SharedMode(call, num_best, take)
        made.append(mode)
        mode.refuse()
        return mode

    made: list[SharedMode] = []
    call = ensemble.new_call()
    call.draws = Draws([seed])
    call.arguments = {
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": None,
    }
    run_call(ensemble, call, mode_for, None, dict(inputs))
    return made[0].row


class SharedMode(TokenMode):
    """Creates the row that will join a batch, which runs it.

    Args:
        call: What the call works with; every row has draws of its own.
        num_best: Number of most likely ids to return at every step; None for no log-probabilities.
        take: Receives what every step writes.

    Attributes:
        row: The row, once `generate` has come to its loop.
    """

    row: Row

    def __init__(self, call: Call, num_best: int | None, take: Callable[[Written], None]):
        super().__init__(call)
        self._num_best, self._take = num_best, take

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Create the decoder, and leave the processors to the row."""
        call, settings = self.call, self.call.settings
        if call.config.draws_one:
            refuse_processors(stock)
        constraints, self._warpers = split_at_warpers(stock)
        method = call.method()
        self.decoder = SharedDecoder(
            call,
            method,
            prompt_ids,
            prompt_mask,
            range(call.members[0].vocab_size) if call.is_by_primary else end_ids(settings),
            is_wide=not constraints and method.is_wide,
            constraints=constraints,
            max_new_tokens=settings.max_length - prompt_ids.shape[1],
        )
        if constraints and self.decoder.rows.lists_few:
            raise NotShared("constraints cannot be used in a shared batch with members that list only a few ids.")
        self._constraints = [without_padding(item, prompt_mask) for item in constraints]
        return stock

    def sample(self, loop: Loop) -> Tensor:
        """Create the row; the loop does not run."""
        do_sample = bool(self.call.settings.do_sample)
        decoder: Any = self.decoder
        self.row = Row(
            decoder,
            loop.input_ids,
            self._constraints,
            self._warpers,
            loop.criteria,
            do_sample,
            self._num_best,
            self._take,
            (tuple(end_ids(self.call.settings)), decoder.is_constrained),
        )
        return loop.input_ids

    def criteria(self, stock: Any) -> Any:
        """Leave them unchanged."""
        return stock
