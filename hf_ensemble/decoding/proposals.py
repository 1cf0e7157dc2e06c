"""Ids outside the proposals: the choice if constraints allow none of the few entries that members propose.

Some methods give probability to a few entries only. For every other id, processors see its log-probability in the
weighted mean of the members' whole distributions. The processors' result for these ids counts only if they allow none
of the proposals, or if an option raises an id by name. Otherwise the proposals decide alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import ExponentialDecayLengthPenalty, LogitsProcessor, SequenceBiasLogitsProcessor

BANNED = -5000.0
"""Scores below this are bans, whether written as `-inf`, as the smallest possible number or as -1e9."""


@dataclass(frozen=True)
class Proposals:
    """The proposals at some positions, and the whole distributions behind them.

    Attributes:
        logprobs: Log-probabilities of the proposals, `-inf` elsewhere, of shape `(num_positions, width)`.
        whole: Log-probabilities of the members' whole distributions, of the same shape.
    """

    logprobs: Tensor
    whole: Tensor

    @property
    def offered(self) -> Tensor:
        """The scores that processors see: both in one row."""
        return torch.where(self.logprobs > -torch.inf, self.logprobs, self.whole)

    def at(self, positions: slice) -> "Proposals":
        """Those of some positions."""
        return Proposals(self.logprobs[positions], self.whole[positions])

    def decided(self, falls_back: Tensor) -> Tensor:
        """The log-probabilities used for the decision, given which rows had no proposal left."""
        return torch.where(falls_back, self.whole, self.logprobs)

    def settled(self, scores: Tensor, raised: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Drop what was not proposed from every row that has a proposal left.

        Args:
            scores: `offered` after the processors, of the same shape.
            raised: Ids that an option raises at this step, of the same shape; they join the proposals.

        Returns:
            The scores of the ids that may be chosen, and, of shape `(num_positions, 1)`, which rows have no proposal
            left and so keep the other ids that the processors allow.
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

    These are the last id of a sequence in `sequence_bias` with a bias above 0, if the text ends with the rest of the
    sequence; and EOS, once `exponential_decay_length_penalty` has begun.

    Args:
        processors: The call's processors.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]):
        biases = [item.sequence_bias for item in processors if isinstance(item, SequenceBiasLogitsProcessor)]
        self._sequences = [tuple(ids) for of_ids in biases for ids, bias in of_ids.items() if bias > 0]
        self._decays = [item for item in processors if isinstance(item, ExponentialDecayLengthPenalty)]

    def at(self, input_ids: Tensor, scores: Tensor) -> Tensor | None:
        """Return which ids are raised.

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
