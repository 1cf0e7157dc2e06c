"""The token decoder of a batch that rows of other calls join and leave between steps."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MemberError
from .joining_rows import JoiningRows
from .token_decoder import TokenDecoder


class SharedDecoder(TokenDecoder):
    """Decides token by token for rows of several calls, independently of each other.

    Every row has its own draws, and the primary runs here. Arguments are those of `TokenDecoder`.
    """

    kind_of_rows = JoiningRows
    rows: JoiningRows

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, runs_primary=True, **kwargs)
        self._max_new = math.inf
        # Rows end independently.
        self._writes_on = False
        self._keeps_fused = True

    def _fault(self, row: int, error: MemberError) -> None:
        self.faults.setdefault(row, error)

    @property
    def is_writing_entries(self) -> bool:
        """Whether all rows are inside entries of several ids, so that nothing is fused in this step."""
        return len(self._queued) == len(self.rows.live)

    def law(self, rows: Sequence[int]) -> Tensor:
        """The fused log-probabilities of this step; inside an entry, the next id has probability 1.

        Args:
            rows: The rows.

        Returns:
            Of shape `(num_rows, primary_vocab_size)`.
        """
        to_write = [self._progress[row].to_write for row in rows]
        if self.is_writing_entries:
            return self._one_hot(torch.tensor([ids[0] for ids in to_write], device=self.method.device))
        assert self._recorded is not None
        found = self._step.folded(self._recorded.logprobs[list(rows)])
        for place, ids in enumerate(to_write):
            if ids:
                found[place] = self._one_hot(torch.tensor([ids[0]], device=found.device))[0]
        return found

    def join(self, other: "SharedDecoder") -> None:
        """Append the rows of another decoder, which is not used afterwards.

        Args:
            other: Decoder of a call with the same members, method and way of deciding.
        """
        assert self.is_wide == other.is_wide
        assert self.is_constrained == other.is_constrained
        self.keep(self.rows.live)
        self.rows.join(other.rows)
        self.call.weights.join(other.call.weights)
        self._draws.join(other._draws)
        self._progress += other._progress

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, renumbered from 0 on in order, and end the others."""
        self.rows.drop(set(self.rows.live).difference(rows))
        if len(self._progress) > len(self.rows.live):
            kept = self.rows.renumber()
            self.call.weights.keep(kept)
            self._draws.keep(kept)
            self._progress = [self._progress[row] for row in kept]
            self._last_plan = None
        self.faults = {}
