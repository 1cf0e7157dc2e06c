"""Choosing an entry at every position, the same one whatever was drafted."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..row_processors import RowProcessors
from .chain import Chain


@dataclass
class Choices:
    """What was chosen at each position, on the host; meaningless beyond where a row departs from its draft.

    Attributes:
        columns: The chosen entries.
        is_empty: Where nothing was left to choose from.
        not_finite: For each member, where its logits were not finite.
        best: For each member that may draft, by its number, its own best id at each position.
        kept: The logits and the scores that `generate` returns, of shape `(num_positions, width)`; None if they are not
            asked for.
    """

    columns: list[int]
    is_empty: list[int]
    not_finite: list[list[int]]
    best: dict[int, list[int]]
    kept: tuple[Tensor, Tensor] | None = None

    @classmethod
    def fetch(cls, columns: Tensor, is_empty: Tensor, normalizers: Tensor, best: Mapping[int, Tensor]) -> "Choices":
        """Take what was chosen to the host, in one transfer.

        Args:
            columns: The chosen entries, of shape `(num_positions,)`.
            is_empty: Where there are none, of the same shape.
            normalizers: Logsumexp of every member's logits, of shape `(num_positions, num_members)`.
            best: For each member that may draft its own best ids, of shape `(num_positions,)`.
        """
        not_finite = (~normalizers.isfinite()).long().T
        chosen, empty, *rest = torch.stack([columns, is_empty.long(), *not_finite, *best.values()]).tolist()
        return cls(chosen, empty, rest[: len(not_finite)], dict(zip(best, rest[len(not_finite) :], strict=True)))


class Chooser:
    """Processes the fused scores and chooses an entry at every position.

    Sampled entries are drawn with noise that depends on the call's seed, the row and the entry's number only, so that
    the text is the same whatever was drafted.

    Args:
        processors: The call's processors.
        do_sample: Whether to draw from the softmax of the scores; else the best is taken.
        num_rows: Number of rows.
    """

    def __init__(self, processors: RowProcessors, do_sample: bool, num_rows: int):
        self._processors = processors
        self._do_sample = do_sample
        seed = int(torch.randint(2**62, (1,))) if do_sample else 0
        self._sources = [random.Random(f"{seed} {row}") for row in range(num_rows)]
        self._seeds: list[list[int]] = [[] for _ in range(num_rows)]
        self._generator: torch.Generator | None = None

    def choose(self, scores: Tensor, chains: Sequence[Chain]) -> tuple[Tensor, Tensor, Tensor]:
        """Choose at all positions.

        Args:
            scores: The fused scores, of shape `(num_positions, width)`.
            chains: The live rows.

        Returns:
            The chosen entries and where there is none, of shape `(num_positions,)`, and the processed scores.
        """
        if self._processors.read_ids:
            return self._choose_one_by_one(scores, chains)
        scores = self._processors.warp(scores)
        entries = [(chain.row, at) for chain in chains for at in range(len(chain.positions))]
        return *self._pick(scores, [(row.number, row.num_entries + at) for row, at in entries]), scores

    def _choose_one_by_one(self, scores: Tensor, chains: Sequence[Chain]) -> tuple[Tensor, Tensor, Tensor]:
        """Process and choose position by position, up to where each row departs from its draft."""
        columns = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        is_empty = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        processed = torch.zeros_like(scores)
        for chain in chains:
            row = chain.row
            for at, position in enumerate(chain.positions):
                here = slice(position, position + 1)
                constrained = self._processors.constrain(row.number, chain.new_ids(at), scores[here])
                processed[here] = self._processors.warp(constrained)
                columns[here], is_empty[here] = self._pick(processed[here], [(row.number, row.num_entries + at)])
                if at == len(chain.columns) or int(columns[here]) != chain.columns[at]:
                    break
        return columns, is_empty, processed

    def _pick(self, scores: Tensor, entries: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Choose a column of every row of scores, given each entry's row and number there; say where there is none."""
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
