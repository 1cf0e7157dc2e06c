"""What came of the drafts of one call."""

import itertools
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculationRound:
    """One round of one row: it wrote the accepted entries of the draft, and one more.

    Attributes:
        drafter: `"ngram"`, or the name of the member that drafted; None if nothing was drafted.
        num_drafted: Number of entries that were drafted and verified.
        num_accepted: Number of them that were accepted. `num_kept` is an older name for it.
    """

    drafter: str | None
    num_drafted: int
    num_accepted: int

    @property
    def num_kept(self) -> int:
        """Older name for `num_accepted`."""
        return self.num_accepted


@dataclass(frozen=True)
class SpeculationStats:
    """What came of the drafts of one call.

    Attributes:
        rounds: For each row, its rounds. A row may be decided further than it was written.
    """

    rounds: list[list[SpeculationRound]]

    @property
    def num_rounds(self) -> int:
        """Number of rounds of all rows."""
        return sum(map(len, self.rounds))

    @property
    def drafted(self) -> dict[str, int]:
        """For each drafter, the number of its drafted entries that were verified."""
        return self._counted("num_drafted")

    @property
    def accepted(self) -> dict[str, int]:
        """For each drafter, the number of its entries that were accepted."""
        return self._counted("num_accepted")

    @property
    def kept(self) -> dict[str, int]:
        """Older name for `accepted`."""
        return self.accepted

    @property
    def acceptance_rate(self) -> dict[str, float]:
        """For each drafter, the share of its drafted entries that were accepted."""
        accepted = self.accepted
        return {drafter: accepted[drafter] / count for drafter, count in self.drafted.items()}

    @property
    def entries_per_round(self) -> float:
        """Mean number of entries that a round of a row wrote: 1 without speculation."""
        return 1 + sum(self.accepted.values()) / max(self.num_rounds, 1)

    def _counted(self, what: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for item in itertools.chain(*self.rounds):
            if item.drafter is not None:
                counts[item.drafter] += getattr(item, what)
        return dict(counts)
