"""The weights of every step of one call: for all rows, per row, or decided step by step."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..config import normalize_weights
from ..errors import ConfigurationError

WeightsLike: TypeAlias = Sequence[float] | Sequence[Sequence[float]] | Tensor | Callable[[int, Tensor], Any]
"""One weight per member; one such list per prompt; or a function of the step (from 0) and the ids so far that returns
either.
"""


class StepWeights:
    """Every row's mixing weights at every step.

    Args:
        weights: See `WeightsLike`; None for equal weights.
        num_members: Number of members.
        as_given: Whether weights may be negative and are not scaled to sum to 1.

    Raises:
        ConfigurationError: If there is not one weight per member, or one is not allowed.
    """

    def __init__(self, weights: WeightsLike | None, num_members: int, as_given: bool = False):
        self._num_members = num_members
        self._as_given = as_given
        self._function = weights if callable(weights) else None
        self._rows = None if callable(weights) else self._checked(weights)

    @property
    def participants(self) -> set[int]:
        """Members that may have a weight other than 0."""
        if self._rows is None:
            return set(range(self._num_members))
        return set((self._rows != 0).any(0).nonzero()[:, 0].tolist())

    def is_only(self, member: int) -> bool:
        """Whether this member has all the weight."""
        if self.participants != {member}:
            return False
        return not self._as_given or (self._rows is not None and bool((self._rows[:, member] == 1).all()))

    @property
    def num_rows(self) -> int:
        """Number of rows with given weights; 1 if they are the same for all."""
        return 1 if self._rows is None else len(self._rows)

    def expand(self, num_prompts: int, copies: int) -> None:
        """Set the number of rows: `num_prompts` prompts, each `copies` times.

        Raises:
            ConfigurationError: If weights were given for another number of prompts.
        """
        self._num_prompts, self._copies = num_prompts, copies
        if self._rows is not None:
            self._rows = self._expanded(self._rows)

    @property
    def fixed(self) -> Tensor:
        """The weights of all rows, if they are not decided step by step, of shape `(num_rows, num_members)`."""
        assert self._rows is not None
        return self._rows

    @property
    def varies(self) -> bool:
        """Whether they are decided step by step."""
        return self._rows is None

    def of_prompts(self, prompts: Sequence[int]) -> "StepWeights":
        """Return the weights of some prompts, once the number of prompts is set."""
        twin = copy.copy(self)
        twin._num_prompts, twin._copies = len(prompts), 1
        if self._rows is not None:
            twin._rows = self._rows[list(prompts)]
        return twin

    def join(self, other: "StepWeights") -> None:
        """Append the rows of other weights; neither are decided step by step."""
        self._rows = torch.cat([self.fixed, other.fixed])

    def keep(self, rows: Sequence[int]) -> None:
        """Let row n have the weights of former row `rows[n]`; the others end."""
        self._rows = self.fixed[list(rows)]

    def at(self, step: int, input_ids: Tensor) -> Tensor:
        """The weights of a step, of shape `(batch_size, num_members)`, on the CPU; the same tensor if nothing changes.

        Args:
            step: Number of earlier steps.
            input_ids: All ids so far, of shape `(batch_size, length)`.
        """
        if self._rows is not None:
            return self._rows
        assert self._function is not None
        return self._expanded(self._checked(self._function(step, input_ids), f" at step {step + 1}"))

    def _expanded(self, rows: Tensor) -> Tensor:
        num_rows = self._num_prompts * self._copies
        if len(rows) == 1:
            return rows.expand(num_rows, -1)
        if len(rows) not in (self._num_prompts, num_rows):
            raise ConfigurationError(
                f"`weights` must have one row per prompt: got {len(rows)} rows for {self._num_prompts} prompts."
            )
        return rows if len(rows) == num_rows else rows.repeat_interleave(self._copies, dim=0)

    def _checked(self, weights: Any, where: str = "") -> Tensor:
        if weights is None and where:
            raise ConfigurationError(f"`weights`{where} must have one entry per member, but the function gave None.")
        values = weights.tolist() if hasattr(weights, "tolist") else weights
        if isinstance(values, (int, float)):
            raise ConfigurationError(f"`weights`{where} must have one entry per member, but is {values!r}.")
        if isinstance(values, (list, tuple)):
            values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        is_by_row = isinstance(values, (list, tuple)) and len(values) > 0 and isinstance(values[0], (list, tuple))
        rows = values if is_by_row else [values]
        try:
            checked = [normalize_weights(row, self._num_members, self._as_given) for row in rows]
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} (given{where})" if where else str(error)) from None
        return torch.tensor(checked)
