"""A repetition penalty that does not count padding."""

import torch
from transformers import LogitsProcessor


class UnpaddedPenalty(LogitsProcessor):
    """A repetition penalty that does not count padding, as the stock one of transformers 5.17 does.

    Args:
        penalty: The penalty.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of shape `(batch_size, prompt_length)`.
    """

    def __init__(self, penalty: LogitsProcessor, prompt_mask: torch.Tensor):
        self._penalty = penalty
        self._is_prompt = prompt_mask != 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        length = self._is_prompt.shape[1]
        # In place of padding an id that the row holds anyway: a penalty asks only which ids there are.
        present = input_ids.gather(1, self._is_prompt.long().argmax(-1, keepdim=True))
        prompt = torch.where(self._is_prompt, input_ids[:, :length], present)
        return self._penalty(torch.cat([prompt, input_ids[:, length:]], dim=-1), scores)  # type: ignore[no-any-return]
