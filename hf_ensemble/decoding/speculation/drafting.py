"""Who drafts in a round, how much, and how much of that is accepted."""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from .chain import Chain, EntryWriter
from .choosing import Choices
from .draft_length import DraftLength
from .drafts import NGRAM, Drafted, MemberDrafter


class Drafting:
    """The drafts of one call, round by round: begun, followed as they come, and judged.

    The rows' own texts are looked up first. Where that gives nothing, a member is asked.

    Args:
        drafters: The members that may draft, in order of preference.
        writer: Writes entries.
        length: Chooses the drafter and how much is drafted.
        max_new_tokens: Number of ids after which a row needs no more.
    """

    def __init__(
        self, drafters: Sequence[MemberDrafter], writer: EntryWriter, length: DraftLength, max_new_tokens: int
    ):
        self._drafters = {drafter.member.name: drafter for drafter in drafters}
        self._writer = writer
        self.length = length
        self._max_new = max_new_tokens
        # For each live row: what look-up found, and by how many ids; and the most entries that may be drafted.
        self._found: list[tuple[list[int], int]] = []
        self._room: list[int] = []
        self._asked: tuple[MemberDrafter, Iterator[Drafted]] | None = None

    def begin(self, chains: Sequence[Chain]) -> None:
        """Begin to draft for the live rows.

        Nothing is drafted in the first round, which reads the prompts.
        """
        texts = [chain.row.lookup for chain in chains]
        self._found = [([], 0) if text is None else text.continuation(self.length.longest) for text in texts]
        self._room = [max(0, self._max_new - len(chain.row.ids) - 1) for chain in chains]
        if not any(chain.row.rounds for chain in chains):
            return
        counts = Counter(found_by for draft, found_by in self._found if draft)
        lengths = {n: self.length.choose([_lookup_by(n)], count / len(chains))[1] for n, count in counts.items()}
        for chain, (draft, found_by), most in zip(chains, self._found, self._room, strict=True):
            chain.follow(draft[: min(lengths.get(found_by, 0), most)], self._writer)
        if self._drafters and any(self._room) and not any(chain.columns for chain in chains):
            name, length = self.length.choose(list(self._drafters))
            if length:
                drafter = self._drafters[name]
                self._asked = drafter, drafter.draft([min(length, most) for most in self._room], self.length.clock)

    def finish(self, chains: Sequence[Chain]) -> str | None:
        """Wait for what is drafted, and let the live rows follow it as it comes.

        Returns:
            Who drafted; None if there is no draft.
        """
        name = NGRAM
        if self._asked is not None:
            (drafter, arriving), self._asked = self._asked, None
            name = drafter.member.name
            for drafted in arriving:
                for chain, ids, most in zip(chains, drafted.ids, self._room, strict=True):
                    chain.follow(self._writer.entries_of(ids, drafter.index)[:most], self._writer)
            if drafted.num_steps:
                self.length.drafted(name, drafted.num_steps, drafted.seconds)
        return name if any(chain.columns for chain in chains) else None

    def close(self) -> None:
        """Give up what has been begun, and wait for a GPU: its buffers may be given to another call."""
        if self._asked is not None:
            deque(self._asked[1], maxlen=0)
            self._asked = None

    def judge(self, chains: Sequence[Chain], choices: Choices, weights: Tensor, drafter: str | None) -> None:
        """Take note of how much was accepted: of the drafts, and of what others would have drafted.

        Args:
            chains: The rows of the round.
            choices: What was chosen.
            weights: The weights at all positions, of shape `(num_positions, num_members)`, on the CPU.
            drafter: Who drafted.
        """
        judged: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # accepted, rejected
        for chain, (found, found_by) in zip(chains, self._found, strict=True):
            if not chain.used:
                continue
            done = chain.row.rounds[-1]
            if done.drafter is not None:
                counts = judged[_lookup_by(found_by) if done.drafter == NGRAM else done.drafter]
                counts[0] += done.num_accepted
                counts[1] += done.num_accepted < min(done.num_drafted, len(chain.used))
            if found and done.drafter != NGRAM:
                judged[_lookup_by(found_by)][choices.columns[chain.used[0]] != found[0]] += 1
        for name, other in self._drafters.items():
            if name == drafter:
                continue
            for position in itertools.chain(*(chain.used for chain in chains)):
                if weights[position, other.index] != 0:
                    own = other.member.encoder.token_bytes.entry(choices.best[other.index][position])
                    data = self._writer.entry(choices.columns[position])[1]
                    agrees = bool(own and data) and (own.startswith(data) or data.startswith(own))
                    judged[name][not agrees] += 1
        for name, counts in judged.items():
            self.length.judged(name, *counts)


def _lookup_by(num_ids: int) -> str:
    """What `DraftLength` calls look-up by so many ids: the more there are, the more of it is accepted."""
    return f"{NGRAM}, {num_ids} ids"
