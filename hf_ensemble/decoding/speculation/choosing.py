"""Choosing an entry at every position, independent of the draft."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..proposals import Proposals
from ..row_processors import RowProcessors
from .rows import KeptRows, Row


@dataclass
class Choices:
    """What was chosen at each position, on the host; meaningless beyond where a row departs from its draft.

    Attributes:
        columns: The chosen entries.
        is_empty: Positions with nothing left to choose from.
        not_finite: For each member, positions where its logits were not finite.
        best: For each member that may draft, by its number, its own best id at each position.
        kept: The logits and the scores that `generate` returns, of shape `(num_positions, width)`; None if not
            requested.
    """

    columns: list[int]
    is_empty: list[int]
    not_finite: list[list[int]]
    best: dict[int, list[int]]
    kept: KeptRows | None = None


class Chosen(NamedTuple):
    """What was chosen at each position, on the mixing device.

    Attributes:
        columns: The chosen entries, of shape `(num_positions,)`.
        is_empty: Positions without a choice, of the same shape.
        scores: The processed scores, of shape `(num_positions, width)`.
        falls_back: Positions where constraints allow none of the proposals, of shape `(num_positions, 1)`; None
            without constraints.
    """

    columns: Tensor
    is_empty: Tensor
    scores: Tensor
    falls_back: Tensor | None = None


class Chooser:
    """Processes the fused scores and chooses an entry at every position.

    The noise of sampled entries depends on the call's seed, the row and the entry's index only, so the text is the
    same whatever was drafted.

    Args:
        processors: The call's processors.
        do_sample: Whether to draw from the softmax of the scores; otherwise the best is taken.
        num_rows: Number of rows.
    """

    def __init__(self, processors: RowProcessors, do_sample: bool, num_rows: int):
        self._processors = processors
        self._do_sample = do_sample
        seed = int(torch.randint(2**62, (1,))) if do_sample else 0
        self._sources = [random.Random(f"{seed} {row}") for row in range(num_rows)]
        self._seeds: list[list[int]] = [[] for _ in range(num_rows)]
        self._generator: torch.Generator | None = None

    def choose(self, scores: Tensor, rows: Sequence[Row], proposals: Proposals | None = None) -> Chosen:
        """Choose at all positions.

        Args:
            scores: The fused scores, of shape `(num_positions, width)`.
            rows: The live rows.
            proposals: The proposals, if constraints may allow none of them.
        """
        if self._processors.read_ids:
            return self._choose_one_by_one(scores, rows, proposals)
        scores = self._processors.warp(scores)
        entries = [(row.number, row.num_entries + at) for row in rows for at in range(len(row.positions))]
        return Chosen(*self._pick(scores, entries), scores)

    def _choose_one_by_one(self, scores: Tensor, rows: Sequence[Row], proposals: Proposals | None) -> Chosen:
        """Process and choose position by position, up to where each row departs from its draft."""
        columns = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        is_empty = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        falls_back = torch.zeros(len(scores), 1, dtype=torch.bool, device=scores.device)
        processed = torch.zeros_like(scores)
        for row in rows:
            for at, position in enumerate(row.positions):
                here = slice(position, position + 1)
                here_proposed = None if proposals is None else proposals.at(here)
                constrained, falls_back[here] = self._processors.constrain(
                    row.number, row.ids_after(at), scores[here], here_proposed
                )
                processed[here] = self._processors.warp(constrained)
                columns[here], is_empty[here] = self._pick(processed[here], [(row.number, row.num_entries + at)])
                if at == len(row.columns) or int(columns[here]) != row.columns[at]:
                    break
        return Chosen(columns, is_empty, processed, falls_back)

    def _pick(self, scores: Tensor, entries: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Choose a column of every row of scores, given each entry's row and index; also return where there is none."""
        is_empty = ~(scores.amax(-1) > -torch.inf)
        scores = scores.masked_fill(is_empty[:, None], 0.0)
        if not self._do_sample:
            return scores.argmax(-1), is_empty
        if self._generator is None:
            self._generator = torch.Generator(scores.device)
        probs = scores.softmax(-1)
        noise = torch.empty_like(probs)
        for of_entry, (row, number) in zip(noise, entries, strict=True):
            seeds = self._seeds[row]
            while len(seeds) <= number:
                seeds.append(self._sources[row].getrandbits(62))
            of_entry.exponential_(generator=self._generator.manual_seed(seeds[number]))
        # The first of exponential clocks that run at these speeds is drawn with these probabilities.
        return (probs / noise).argmax(-1), is_empty
