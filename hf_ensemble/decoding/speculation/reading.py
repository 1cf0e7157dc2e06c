"""One member reads every row and its draft in one forward pass, and then follows what was written."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...members.state import MemberState
from ...members.transfer import sent
from ...vocabulary.context import MemberContext
from .rows import Row


class Reading:
    """What one member reads in one round. The forward pass starts at once, if any position needs it.

    A draft is read with the context at its end. An earlier context that is not a prefix of it becomes a branch: one
    more row of the same forward pass. The rows of the member's state are the live rows, followed by the branches.

    Args:
        index: The member's number.
        state: Its state, with one row for each live row.
        rows: The live rows.
        is_needed: For each position, whether the member's logits are needed there.
        device: Device of the mixing.
    """

    def __init__(
        self, index: int, state: MemberState, rows: Sequence[Row], is_needed: Sequence[bool], device: torch.device
    ):
        self._state = state
        self._device = device
        self._num_positions = len(is_needed)
        # Of each row of the state: its context, the live row that it belongs to, and after how many of its last ids
        # logits are wanted.
        self._contexts = [row.contexts[0][index] for row in rows]
        self._parents = list(range(len(rows)))
        self._num_last = [1] * len(rows)
        self._rows_of: list[list[int]] = [[] for _ in rows]  # rows of the state that are read for each live row
        self._wanted: list[tuple[int, int, int]] = []  # position, row, and how far from its end
        for live_index, row in enumerate(rows):
            for contexts, position in zip(reversed(row.contexts), reversed(row.positions), strict=True):
                if is_needed[position]:
                    self._want(position, live_index, contexts[index])
        self._wanted.sort()
        self._read_rows = sorted(itertools.chain(*self._rows_of))
        if self._wanted:
            self._start()

    def _start(self) -> None:
        positions, rows, from_end = zip(*self._wanted, strict=True)
        columns = [max(self._num_last) - 1 - distance for distance in from_end]
        self._at = sent([rows, columns], self._state.member.device)
        self._positions = sent(positions, self._device) if len(positions) < self._num_positions else None
        self._state.select(self._parents, self._contexts)
        self._state.start(self._num_last, rows=self._read_rows)

    def logits(self) -> Tensor | None:
        """Wait for the logits at all positions, of shape `(num_positions, vocab_size)`; None if none is needed.

        They are zeros at positions where the member is not needed.
        """
        if not self._wanted:
            return None
        logits = self._state.logits(self._num_last, rows=self._read_rows)
        taken = logits[self._at[0], self._at[1]].to(self._device).float()
        if self._positions is not None:
            spread = taken.new_zeros(self._num_positions, taken.shape[-1])
            taken = spread.index_copy_(0, self._positions, taken)
        return taken

    def settle(self, contexts: Mapping[int, MemberContext]) -> None:
        """Let the state follow the continuing rows, each from the state's row that has read the most of it.

        Args:
            contexts: For each of these rows, by its live index, the member's context after what was written.
        """
        parents = []
        for live_index, context in contexts.items():
            rows = self._rows_of[live_index] or [live_index]
            num_cached = [self._state.num_cached(row, context) for row in rows] if len(rows) > 1 else [0]
            parents.append(rows[num_cached.index(max(num_cached))])
        self._state.select(parents, list(contexts.values()))

    def _want(self, position: int, live_index: int, context: MemberContext) -> None:
        """Read a context: as a prefix of one already read, else in its row's own place, else as a branch."""
        ids, rows = context.ids, self._rows_of[live_index]
        row = next((row for row in rows if self._contexts[row].ids[: len(ids)] == ids), None)
        if row is None:
            row = len(self._contexts) if rows else live_index
            rows.append(row)
            if row == live_index:
                self._contexts[row] = context
            else:
                self._contexts.append(context)
                self._parents.append(live_index)
                self._num_last.append(1)
        distance = len(self._contexts[row].ids) - len(ids)
        self._num_last[row] = max(self._num_last[row], distance + 1)
        self._wanted.append((position, row, distance))
