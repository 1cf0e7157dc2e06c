"""Ids outside the proposals: what is chosen where constraints leave none of the few entries that members propose.

Some methods give mass to few entries only. Processors therefore see, for every other id, its log-probability in the
weighted mean of the members' whole distributions. What they make of it counts where they leave none of the proposals, or
where an option raises an id by name; elsewhere the proposals decide alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import ExponentialDecayLengthPenalty, LogitsProcessor, SequenceBiasLogitsProcessor

BANNED = -5000.0
"""Scores below this are bans, however they are written: as `-inf`, as the least number there is, as -1e9."""


@dataclass(frozen=True)
class Proposals:
    """What is proposed at some positions, and what stands behind it.

    Attributes:
        logprobs: Log-probabilities of what is proposed, `-inf` elsewhere, of shape `(num_positions, width)`.
        whole: Those of the members' whole distributions, of the same shape.
    """

    logprobs: Tensor
    whole: Tensor

    @property
    def offered(self) -> Tensor:
        """What processors see: both in one row."""
        return torch.where(self.logprobs > -torch.inf, self.logprobs, self.whole)

    def at(self, positions: slice) -> "Proposals":
        """Those of some positions."""
        return Proposals(self.logprobs[positions], self.whole[positions])

    def decided(self, falls_back: Tensor) -> Tensor:
        """The log-probabilities that were decided on, given in which rows nothing that was proposed was left."""
        return torch.where(falls_back, self.whole, self.logprobs)

    def settled(self, scores: Tensor, raised: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Drop what was not proposed from every row that has a proposal left.

        Args:
            scores: What the processors made of `offered`, of the same shape.
            raised: Ids that an option raises at this step, of the same shape; they enter beside the proposals.

        Returns:
            The scores of what may be chosen; and, of shape `(num_positions, 1)`, in which rows nothing that was proposed
            is left, so that what the processors left of the others stays.
        """
        is_proposed = self.logprobs > -torch.inf
        is_left = scores > BANNED
        falls_back = ~(is_proposed & is_left).any(-1, keepdim=True)
        if raised is None:
            return scores.masked_fill(~(is_proposed | falls_back), -torch.inf), falls_back
        enters = raised & ~is_proposed
        mass = torch.where(enters & is_left & ~falls_back, self.whole.exp(), 0.0).sum(-1, keepdim=True)
        return scores.masked_fill(~(is_proposed | enters | falls_back), -torch.inf) - mass.log1p(), falls_back


class RaisedIds:
    """Which ids the options of a call raise, step by step.

    These are the last id of a sequence in `sequence_bias` whose bias is above 0, where the text ends in the rest of it,
    and EOS once `exponential_decay_length_penalty` has begun.

    Args:
        processors: The call's processors.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]):
        biases = [item.sequence_bias for item in processors if isinstance(item, SequenceBiasLogitsProcessor)]
        self._sequences = [tuple(ids) for of_ids in biases for ids, bias in of_ids.items() if bias > 0]
        self._decays = [item for item in processors if isinstance(item, ExponentialDecayLengthPenalty)]

    def at(self, input_ids: Tensor, scores: Tensor) -> Tensor | None:
        """Say which ids are raised.

        Args:
            input_ids: All ids so far, of shape `(num_rows, length)`.
            scores: Of shape `(num_rows, width)`.

        Returns:
            Of the shape of `scores`; None if no option raises any.
        """
        if not self._sequences and not self._decays:
            return None
        raised = torch.zeros_like(scores, dtype=torch.bool)
        for *before, last in self._sequences:
            if len(before) <= input_ids.shape[1]:
                tail = input_ids[:, input_ids.shape[1] - len(before) :]
                raised[:, last] |= (tail == torch.tensor(before, device=tail.device)).all(-1).to(scores.device)
        for decay in self._decays:
            if input_ids.shape[1] > decay.regulation_start:
                raised[:, decay.eos_token_id.to(scores.device)] = True
        return raised
