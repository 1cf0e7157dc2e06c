"""Which drafter drafts in a round, how much, and how much of that is accepted."""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from .choosing import Choices
from .draft_length import DraftLength
from .drafts import NGRAM, Drafted, MemberDrafter
from .rows import EntryWriter, Row


class Drafting:
    """The drafts of one call, round by round: begun, followed as they come, and judged.

    The rows' own texts are looked up first. If that finds nothing, a member drafts.

    Args:
        drafters: The members that may draft, in order of preference.
        writer: Writes entries.
        length: Chooses the drafter and how much is drafted.
        max_new_tokens: Number of ids after which a row is complete.
    """

    def __init__(
        self, drafters: Sequence[MemberDrafter], writer: EntryWriter, length: DraftLength, max_new_tokens: int
    ):
        self._drafters = {drafter.member.name: drafter for drafter in drafters}
        self._writer = writer
        self.length = length
        self._max_new = max_new_tokens
        self._asked: tuple[MemberDrafter, Iterator[Drafted]] | None = None
        self._is_paused = False

    def pause(self, rows: Sequence[Row]) -> bool:
        """Decide, before this round is decided, whether to draft nothing in the next one.

        What looking up a row's text finds depends on this round, so rows with a lookup are never paused.

        Returns:
            Whether nothing will be drafted.
        """
        if self._drafters and all(row.lookup is None for row in rows):
            self._is_paused = self.length.choose(list(self._drafters))[1] == 0
        return self._is_paused

    def begin(self, rows: Sequence[Row]) -> None:
        """Begin to draft for the live rows.

        Nothing is drafted in the first round, which reads the prompts.
        """
        for row in rows:
            if row.lookup is not None:
                row.found, row.found_by = row.lookup.continuation(self.length.longest)
            row.room = max(0, self._max_new - len(row.ids) - 1)
        is_paused, self._is_paused = self._is_paused, False
        if is_paused or not any(row.rounds for row in rows):
            return
        counts = Counter(row.found_by for row in rows if row.found)
        lengths = {n: self.length.choose([_lookup_by(n)], count / len(rows))[1] for n, count in counts.items()}
        for row in rows:
            row.follow(row.found[: min(lengths.get(row.found_by, 0), row.room)], self._writer)
        if self._drafters and any(row.room for row in rows) and not any(row.columns for row in rows):
            name, length = self.length.choose(list(self._drafters))
            if length:
                drafter = self._drafters[name]
                self._asked = drafter, drafter.draft([min(length, row.room) for row in rows], self.length.clock)

    def finish(self, rows: Sequence[Row]) -> str | None:
        """Wait for the draft, and let the live rows follow it as it arrives.

        Returns:
            The drafter; None if there is no draft.
        """
        name = NGRAM
        if self._asked is not None:
            (drafter, arriving), self._asked = self._asked, None
            name = drafter.member.name
            for drafted in arriving:
                for row, ids in zip(rows, drafted.ids, strict=True):
                    row.follow(self._writer.entries_of(ids, drafter.index)[: row.room], self._writer)
            if drafted.num_steps:
                self.length.drafted(name, drafted.num_steps, drafted.seconds)
        return name if any(row.columns for row in rows) else None

    def close(self) -> None:
        """Give up a draft in progress, and wait for a GPU, because another call may get its buffers."""
        if self._asked is not None:
            deque(self._asked[1], maxlen=0)
            self._asked = None

    def judge(self, rows: Sequence[Row], choices: Choices, weights: Tensor, drafter: str | None) -> None:
        """Record how much was accepted of the drafts, and of what others would have drafted.

        Args:
            rows: The rows of the round.
            choices: What was chosen.
            weights: The weights at all positions, of shape `(num_positions, num_members)`, on the CPU.
            drafter: The drafter.
        """
        judged: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # accepted, rejected
        for row in rows:
            if not row.used:
                continue
            done = row.rounds[-1]
            if done.drafter is not None:
                counts = judged[_lookup_by(row.found_by) if done.drafter == NGRAM else done.drafter]
                counts[0] += done.num_accepted
                counts[1] += done.num_accepted < min(done.num_drafted, len(row.used))
            if row.found and done.drafter != NGRAM:
                judged[_lookup_by(row.found_by)][choices.columns[row.used[0]] != row.found[0]] += 1
        for name, other in self._drafters.items():
            if name == drafter:
                continue
            for position in itertools.chain(*(row.used for row in rows)):
                if weights[position, other.index] != 0:
                    own = other.member.encoder.token_bytes.entry(choices.best[other.index][position])
                    data = self._writer.step.entry(choices.columns[position])[1]
                    agrees = bool(own and data) and (own.startswith(data) or data.startswith(own))
                    judged[name][not agrees] += 1
        for name, counts in judged.items():
            self.length.judged(name, *counts)


def _lookup_by(num_ids: int) -> str:
    """The name in `DraftLength` of look-up by this many ids: the more ids, the more is accepted."""
    return f"{NGRAM}, {num_ids} ids"
