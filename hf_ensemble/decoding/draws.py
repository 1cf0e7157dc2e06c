"""Sampling from torch's generator, or from one generator per row."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


class Draws:
    """Draws from distributions, with torch's generator of their device or with one generator per row.

    With its own generator, a row draws the same whatever other rows are in the batch. Every entry waits for a random
    time, exponential with its probability as the rate, and the first one is drawn (the Gumbel trick without
    logarithms). So small numerical differences, as in another batch, hardly ever change what is drawn.

    Args:
        seeds: For each row the seed of its generator; None for torch's.
    """

    def __init__(self, seeds: Sequence[int] | None = None):
        self._seeds = seeds
        self._generators: dict[tuple[int, torch.device], torch.Generator] = {}

    @property
    def are_seeded(self) -> bool:
        """Whether every row has a generator of its own."""
        return self._seeds is not None

    def of_member(self, index: int) -> "Draws":
        """Return draws for the same rows that are independent of these, for one of several members."""
        return Draws(self._seeds and [seed_of(seed, index) for seed in self._seeds])

    def seed(self, row: int, *parts: int) -> int:
        """Return a seed for another generator that draws for a row, such as a server's.

        Args:
            row: Index of the row.
            parts: What else the seed depends on, if rows have their own seeds.
        """
        if self._seeds is None:
            return int(torch.randint(2**63 - 1, ()))
        return seed_of(self._seeds[row], *parts)

    def join(self, other: "Draws") -> None:
        """Append the rows of other draws; both have one generator per row."""
        assert self._seeds is not None
        assert other._seeds is not None
        count = len(self._seeds)
        self._seeds = [*self._seeds, *other._seeds]
        self._generators |= {(count + row, device): own for (row, device), own in other._generators.items()}

    def keep(self, rows: Sequence[int]) -> None:
        """Let row n continue the draws of former row `rows[n]`; the others end."""
        assert self._seeds is not None
        self._seeds = [self._seeds[row] for row in rows]
        place_of = {row: place for place, row in enumerate(rows)}
        kept = self._generators.items()
        self._generators = {(place_of[row], device): own for (row, device), own in kept if row in place_of}

    def choose(self, probs: Tensor, rows: Sequence[int | None]) -> Tensor:
        """Draw one entry from every distribution.

        Args:
            probs: Probabilities, of shape `(num_rows, width)`; they need not sum to 1.
            rows: Index of the row that each belongs to; None if nothing needs to be drawn and the best is taken.

        Returns:
            Of shape `(num_rows,)`.
        """
        if self._seeds is None:
            return torch.multinomial(probs, 1)[:, 0]
        bits = torch.zeros(probs.shape, dtype=torch.int32, device=probs.device)
        for place, row in enumerate(rows):
            if row is not None:
                bits[place].random_(generator=self._generator(row, probs.device))
        # Torch's own exponential times take four times as long on a CPU. The largest value would be rounded to an
        # infinite wait.
        waits = bits.float().clamp_max_(2.0**31 - 128).add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()
        return torch.div(probs, waits, out=waits).argmax(-1)

    def _generator(self, row: int, device: torch.device) -> torch.Generator:
        assert self._seeds is not None
        key = row, device
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(self._seeds[row])
        return self._generators[key]


def seed_of(*parts: int | str | bytes) -> int:
    """Return a seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "big") + data)
    return int.from_bytes(digest.digest()[:8], "big") >> 1
