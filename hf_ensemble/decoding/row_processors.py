"""Logits processors at the positions of drafts: constraints one by one, with the row's ids, and warpers at any number."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from .proposals import Proposals, RaisedIds

WARPERS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
}
"""Processors that treat all columns alike, so they can act on the union vocabulary."""

_BY_ROW = WARPERS | {
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
}
"""Processors that treat a row alone as they treat it in a batch."""


def split_at_warpers(processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """Split a call's processors: the constraints, up to the last one that is not a warper, and the warpers after it."""
    is_constraint = [type(item).__name__ not in WARPERS for item in processors]
    count = max((place + 1 for place, it_is in enumerate(is_constraint) if it_is), default=0)
    return list(processors[:count]), list(processors[count:])


def counting_all(processor: Any) -> Any:
    """Return the processor itself; for a stock penalty that skips padding, one that skips nothing."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty)
    return processor


class _UnpaddedPenalty(LogitsProcessor):
    """A repetition penalty that does not count padding, as the stock one of transformers 5.17 does.

    Args:
        penalty: The penalty.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of shape `(batch_size, prompt_length)`.
    """

    def __init__(self, penalty: LogitsProcessor, prompt_mask: Tensor):
        self._penalty = penalty
        self._is_prompt = prompt_mask != 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        length = self._is_prompt.shape[1]
        # Padding is replaced by an id of the row, because a penalty only asks which ids occur.
        present = input_ids.gather(1, self._is_prompt.long().argmax(-1, keepdim=True))
        prompt = torch.where(self._is_prompt, input_ids[:, :length], present)
        return self._penalty(torch.cat([prompt, input_ids[:, length:]], dim=-1), scores)  # type: ignore[no-any-return]


def without_padding(processor: LogitsProcessor, prompt_mask: Tensor | None) -> LogitsProcessor:
    """Return the processor; for a repetition penalty, one that does not count padding.

    Args:
        processor: The processor.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of shape `(batch_size, prompt_length)`; None for no padding.
    """
    if prompt_mask is None or not isinstance(processor, RepetitionPenaltyLogitsProcessor):
        return processor
    return _UnpaddedPenalty(processor, prompt_mask)


def needs_whole_batch(processors: Sequence[LogitsProcessor]) -> str | None:
    """Return the name of a processor that cannot be applied to one of several rows; None if all can."""
    names = (type(processor).__name__ for processor in processors)
    return next((name for name in names if name not in _BY_ROW), None)


class RowProcessors:
    """The processors of a call whose rows are decided at their own pace: first the constraints, then the warpers.

    Constraints are all processors up to the last one that is not a warper. They may depend on the ids before a
    position, so `constrain` is called for one position of a row at a time. The warpers after them need no ids, so
    `warp` takes any number of positions.

    Args:
        processors: The processors, in the order of the call. With several rows, none of them may need the whole batch
            (`needs_whole_batch`).
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], prompt_ids: Tensor, prompt_mask: Tensor | None):
        self._constraints, warpers = split_at_warpers(processors)
        self._warpers = LogitsProcessorList(warpers)
        self._raised = RaisedIds(self._constraints)
        self._prompt_ids = prompt_ids
        self._mask = prompt_mask
        self._of_row: dict[int, LogitsProcessorList] = {}

    @property
    def read_ids(self) -> bool:
        """Whether there are constraints, so that a position's scores depend on earlier ids."""
        return bool(self._constraints)

    def constrain(
        self, row: int, new_ids: Sequence[int], scores: Tensor, proposals: Proposals | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the constraints at one position of a row.

        Args:
            row: The row.
            new_ids: The primary's ids between its prompt and this position.
            scores: The scores there, of shape `(1, width)`.
            proposals: The proposals there, if the constraints may allow none of them.

        Returns:
            The scores of the ids that may be chosen, and whether none of them was proposed, of shape `(1, 1)`.
        """
        if row not in self._of_row:
            own = self._constraints
            if self._mask is not None:
                own = [without_padding(counting_all(item), self._mask[row : row + 1]) for item in own]
            self._of_row[row] = LogitsProcessorList(own)
        prompt = self._prompt_ids[row : row + 1]
        ids = torch.cat([prompt, torch.tensor([new_ids], dtype=prompt.dtype, device=prompt.device)], dim=-1)
        constrained = self._of_row[row](ids, scores)  # type: ignore[arg-type]
        if proposals is None:
            return constrained, torch.zeros(1, 1, dtype=torch.bool)
        return proposals.settled(constrained, self._raised.at(ids, constrained))

    def warp(self, scores: Tensor) -> Tensor:
        """Apply the warpers to the scores of any positions, of shape `(num_positions, width)`."""
        ids = self._prompt_ids.new_zeros(len(scores), 1)
        return self._warpers(ids, scores)  # type: ignore[arg-type]
