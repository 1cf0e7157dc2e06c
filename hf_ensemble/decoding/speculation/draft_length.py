"""How many entries to draft: the number that decodes the most entries per second, by measurement."""

import functools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

_LENGTHS = (0, 1, 3, 7)
"""Only a few, so that each is measured soon. With one id more, a member reads 1, 2, 4 or 8: steps are captured for these
numbers, and a CPU may take longer for 3 ids than for 4.
"""
_NUM_TIMES = 5
_MEMORY = 64
"""Number of rounds after which a time is forgotten: a length that did not pay is then tried again for one round."""
_FADING = 0.95
"""Weight of an outcome one round later."""
_MEMORY_OF_ONE = 8
"""The same for a single time: the first forward pass of a shape may take long, because kernels are chosen."""
_MEMORY_OF_TEXTS = 8.0
"""Largest weight of a drafter's outcomes in former texts: a new one may be harder to draft."""
_CAUTION = 1.0
"""Number of standard errors by which acceptance rates are estimated low: a rejected draft costs more than a missed one."""
_MORE_PER_ENTRY = 0.03
"""The share of a plain step by which each drafted entry is assumed to lengthen a round, until it is measured; small,
so that drafts are tried.
"""

_CREDIT = 2.5
"""How much drafts may cost before they have gained anything, in plain steps."""
_MORE_CREDIT = 0.01
"""How much more each round, so that drafts that never pay cost no more than this share of the time."""
_MOST_CREDIT = 6.0
"""No gain lets them cost more than this later."""
_REPAID, _LEAST_GAIN = 0.25, 0.1
"""While nothing is drafted because the credit is used up, this share of what drafts would gain in a round, above this
part of a plain step, comes back in it: they may have lost by bad luck.
"""
_MOST_LOSS = 1.5
"""The most that one round can cost: whatever took longer was other work of the machine."""


def clock_of(places: Iterable[Hashable]) -> Callable[[], float]:
    """What measures the steps of members: on a CPU this thread's processor time, because other work doesn't lengthen it.

    Args:
        places: The members' `place`.
    """
    return time.thread_time if set(places) == {torch.device("cpu")} else time.perf_counter


class DraftLength:
    """Chooses how many entries to draft, from 0 (a plain step) up, and which drafter to ask.

    It measures how long it takes to verify each number of drafted entries, how long drafting takes, and how often a
    drafted entry is accepted if those before it were. From these it computes the expected entries per second for every
    length, and takes the best. Drafters are also judged by what they would have drafted, so a drafter that is off
    costs nothing and turns on again when it would pay.

    Acceptance is estimated low, and a new text soon counts for more than former ones. Estimates may still be wrong, and
    trying out a length that doesn't pay costs time. So what drafts have gained and lost is counted, and where they have
    lost more than a small share of the time, nothing is drafted for a while: until the drafters' own choices, which are
    compared in plain steps too, say that drafts would pay.

    Args:
        lengths: The lengths to choose from, 0 among them.
        clock: Gives seconds; see `clock_of`.
        shares: For each drafter, the assumed cost of drafting an entry until it is measured, as a share of a plain
            step; 0 for others.
        num_trials: Number of rounds of a length before their times count: more than one if the first ones also capture
            graphs.
    """

    def __init__(
        self,
        lengths: Sequence[int] = _LENGTHS,
        clock: Callable[[], float] = time.perf_counter,
        shares: Mapping[str, float] | None = None,
        num_trials: int = 1,
    ):
        self.longest = max(lengths)
        self._lengths = sorted(lengths)
        self.clock = clock
        self._shares = dict(shares or {})
        self._num_trials = num_trials
        self._round = 0
        # The last measured seconds, each with its round.
        times = functools.partial(deque[tuple[int, float]], maxlen=_NUM_TIMES)
        self._verifying: dict[int, deque[tuple[int, float]]] = defaultdict(times)
        self._drafting: dict[str, deque[tuple[int, float]]] = defaultdict(times)
        self._outcomes: dict[str, tuple[float, float]] = {}  # accepted, rejected
        self._credit = _CREDIT
        self._drafting_now = 0.0  # seconds in this round

    def begin_text(self) -> None:
        """Begin another text: what was accepted in former ones counts for less."""
        for name, counts in self._outcomes.items():
            share = min(1.0, _MEMORY_OF_TEXTS / max(sum(counts), 1.0))
            self._outcomes[name] = counts[0] * share, counts[1] * share

    def choose(self, drafters: Sequence[str], share: float = 1.0) -> tuple[str, int]:
        """Choose a drafter and the length of its drafts.

        Args:
            drafters: The drafters to choose from. Ties go to the shortest draft, then to the first drafter.
            share: Share of the rows that would get a draft.

        Returns:
            The drafter and the length; 0 to draft nothing.
        """
        none = drafters[0], 0
        if self._least_seconds(0) is None:
            return none

        def rate(way: tuple[str, int]) -> float:
            return self._rate(way[0], way[1], share)

        best = max(((name, length) for length in self._lengths for name in drafters), key=rate)
        if self._credit >= 0:
            return best
        gain = rate(best) / rate(none) - 1
        self._credit += _REPAID * max(0.0, gain - _LEAST_GAIN)
        return none

    def verified(self, length: int, seconds: float, num_decided: float) -> None:
        """Record how long it took to verify drafts: a round without drafting.

        Args:
            length: Number of entries in its longest draft.
            seconds: How long it took to read, choose and accept.
            num_decided: Number of entries that were decided, one more than were accepted: the mean over the rows.
        """
        self._round += 1
        self._outcomes = {name: (_FADING * good, _FADING * bad) for name, (good, bad) in self._outcomes.items()}
        self._verifying[length].append((self._round, seconds))
        drafting, self._drafting_now = self._drafting_now, 0.0
        plain, needed = self._least_seconds(0), self._least_seconds(length)
        gain = _MORE_CREDIT
        if length and plain and needed is not None:
            gain += max(-_MOST_LOSS, num_decided - (needed + drafting) / plain)
        self._credit = min(_MOST_CREDIT, self._credit + gain)

    def drafted(self, drafter: str, num_steps: int, seconds: float) -> None:
        """Record how long it took to draft.

        Args:
            drafter: Who drafted.
            num_steps: Number of steps, with an entry of each row per step.
            seconds: How long all of them took.
        """
        self._drafting[drafter].append((self._round, seconds / num_steps))
        self._drafting_now += seconds

    def judged(self, drafter: str, num_accepted: int, num_rejected: int) -> None:
        """Record how many of a drafter's entries were accepted, or would have been.

        Args:
            drafter: Who drafted.
            num_accepted: Number of its entries that were accepted.
            num_rejected: Number of drafts that ended at a rejected entry.
        """
        accepted, rejected = self._outcomes.get(drafter, (0.0, 0.0))
        self._outcomes[drafter] = accepted + num_accepted, rejected + num_rejected

    def _rate(self, drafter: str, length: int, share: float) -> float:
        """Expected entries per second and row."""
        acceptance_rate = self._acceptance_rate(drafter)
        expected = sum(acceptance_rate**n for n in range(length + 1))
        seconds = self._round_seconds(length) + length * self._drafting_seconds(drafter)
        return (1 - share + share * expected) / max(seconds, 1e-12)

    def _acceptance_rate(self, drafter: str) -> float:
        """How often a drafted entry is accepted if those before it were: an estimate that is rather low."""
        accepted, rejected = self._outcomes.get(drafter, (0.0, 0.0))
        count = accepted + rejected + 2
        mean = (accepted + 1) / count
        return max(0.0, mean - _CAUTION * math.sqrt(mean * (1 - mean) / count))

    def _round_seconds(self, length: int) -> float:
        """The measured time, or else one between the nearest measured lengths, rather low so that it is tried."""
        times = {known: seconds for known in self._verifying if (seconds := self._least_seconds(known)) is not None}
        below = max(known for known in times if known <= length)
        above = min((known for known in times if known >= length), default=below)
        at_least = times[below] + times[0] * _MORE_PER_ENTRY * (length - below)
        if above == below:
            return at_least
        between = times[below] + (times[above] - times[below]) * (length - below) / (above - below)
        return (at_least + between) / 2

    def _drafting_seconds(self, drafter: str) -> float:
        seconds = self._least(self._drafting[drafter])
        return self._shares.get(drafter, 0.0) * self._round_seconds(0) if seconds is None else seconds

    def _least_seconds(self, length: int) -> float | None:
        return self._least(self._verifying[length], self._num_trials)

    def _least(self, times: Sequence[tuple[int, float]], num_needed: int = 1) -> float | None:
        """The smallest, because the rest is other work of the machine; None if there are too few, or none is recent."""
        if len(times) < num_needed:
            return None
        memory = _MEMORY if len(times) > 1 else _MEMORY_OF_ONE
        return min((seconds for then, seconds in times if self._round - then <= memory), default=None)
