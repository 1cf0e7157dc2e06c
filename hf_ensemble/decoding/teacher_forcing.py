"""One member's logits at every step of given texts, many steps to a forward pass, and its log-probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..members.member import Member
from ..members.state import MemberState, PlainContext
from ..vocabulary.context import MemberContext
from ..vocabulary.token_bytes import NO_TOKEN

_MAX_LOGITS = 2**26
"""Largest number of logits of one member to hold at once."""

_MAX_MIXED = 2**24
"""Largest number of columns to work on at once, which takes several times as much memory."""

_MAX_BRANCH_IDS = 2**13
"""Largest number of cached ids in branches at once: every branch copies the cache before it."""


@dataclass(frozen=True)
class ForcedText:
    """What a member reads at every step of one row.

    At step t that is `trunk[: shared[t]] + tails[t]`. Most tails are empty. The others occur where the member cuts the
    text so far differently than it does later.
    """

    trunk: list[int]
    shared: list[int]
    tails: list[list[int]]
    sits_out: list[bool]
    loses_space: list[bool]

    @classmethod
    def of_ids(cls, prompt: Sequence[int], continuation: Sequence[int]) -> "ForcedText":
        """Read ids unchanged, with a step before each id of the continuation.

        Args:
            prompt: Ids of the prompt.
            continuation: Ids after it.
        """
        steps = range(len(continuation))
        shared = [len(prompt) + step for step in steps]
        never = [False for _ in steps]
        return cls([*prompt, *continuation[:-1]], shared, [[] for _ in steps], never, never)

    @classmethod
    def of_context(cls, context: MemberContext, written: Sequence[bytes]) -> "ForcedText":
        """Let a context follow the steps; it is changed in place.

        Args:
            context: The member's context after the prompt.
            written: What each step but the last writes.
        """
        shared, sits_out, loses_space = [len(context.ids)], [context.sits_out], [context.loses_space]
        tails: list[list[int]] = [[]]
        ids = list(context.ids)
        for data in written:
            num_same = context.write(data)
            # Only the last steps have read ids that have changed since.
            for step in reversed(range(len(shared))):
                if shared[step] <= num_same:
                    break
                tails[step] = ids[num_same : shared[step]] + tails[step]
                shared[step] = num_same
            ids[num_same:] = context.ids[num_same:]
            shared.append(len(context.ids))
            tails.append([])
            sits_out.append(context.sits_out)
            loses_space.append(context.loses_space)
        return cls(list(context.ids), shared, tails, sits_out, loses_space)

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.shared)

    @property
    def longest(self) -> int:
        """The number of ids in the longest context; 0 without steps."""
        return max((n + len(tail) for n, tail in zip(self.shared, self.tails, strict=True)), default=0)

    def context(self, step: int) -> list[int]:
        """What the member reads at a step."""
        return self.trunk[: self.shared[step]] + self.tails[step]


class ForcedMember:
    """Gives a member's logits along its texts, block of steps after block of steps.

    Args:
        member: The member.
        texts: What it reads, by row.
    """

    def __init__(self, member: Member, texts: dict[int, ForcedText]):
        self.member = member
        self._texts = texts
        self._live = [row for row, text in texts.items() if text.num_steps]
        self._logits: list[Tensor] = []
        # For each row and step: the part of `_logits`, its row in that part, and its position, counted from the end.
        self._place_of: dict[tuple[int, int], tuple[int, int, int]] = {}

    def advance(self, start: int, stop: int) -> None:
        """Compute the logits of a block of steps, which follows the last one.

        Args:
            start: Its first step.
            stop: The step after its last.
        """
        live = [row for row in self._live if self._texts[row].num_steps > start]
        if live != self._live:
            self._state.select([self._live.index(row) for row in live])
            self._live = live
        self._logits, self._place_of = [], {}
        if not live:
            return
        branches = [
            (row, step)
            for row in live
            for step in range(start, min(stop, self._texts[row].num_steps) - 1)
            if self._texts[row].tails[step] and not self._texts[row].sits_out[step]
        ]
        if branches and not self._state.caches.can_be_cut:
            # States that cannot be cut follow the growing text.
            for step in range(start, stop):
                self._run_rows(step, step + 1)
            return
        self._run_rows(start, stop)
        branches.sort(key=lambda branch: len(self._texts[branch[0]].tails[branch[1]]))
        width = max(len(self._texts[row].trunk) for row in live)
        size = max(1, _MAX_BRANCH_IDS // width)
        for n in range(0, len(branches), size):
            self._run_branches(branches[n : n + size])

    def take(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """The logits at (row, step) pairs of the block, in float32, of shape `(num_pairs, vocab_size)`.

        They are 0 in rows that the member does not read.
        """
        by_part: dict[int, list[int]] = {}
        for n, pair in enumerate(pairs):
            if pair in self._place_of:
                by_part.setdefault(self._place_of[pair][0], []).append(n)
        found = []
        for part, places in by_part.items():
            at = torch.tensor([self._place_of[pairs[n]][1:] for n in places], device=self._logits[part].device)
            found.append((places, self._logits[part][at[:, 0], at[:, 1]].float()))
        if len(found) == 1 and len(found[0][0]) == len(pairs):
            return found[0][1]
        taken = torch.zeros(len(pairs), self.member.vocab_size, device=self.member.device)
        for places, logits in found:
            taken.index_copy_(0, torch.tensor(places, device=taken.device), logits)
        return taken

    @cached_property
    def _state(self) -> MemberState:
        """The state of the live rows; a shared prompt runs once."""
        first = [self._texts[row].context(0) for row in self._live]
        distinct = list(map(list, dict.fromkeys(map(tuple, first))))
        # To read a lone BOS in every row takes less than a pass of its own.
        shares = len(distinct) < len(first) and max(map(len, distinct)) > 1
        state = MemberState(self.member, list(map(PlainContext, distinct if shares else first)))
        if shares:
            state.logits()
            state.select(list(map(distinct.index, first)), list(map(PlainContext, first)))
        return state

    def _run_rows(self, start: int, stop: int) -> None:
        """Bring every row to its last step here, and collect the logits of the other steps on the way."""
        wanted, places = [0] * len(self._live), []
        for place, row in enumerate(self._live):
            text = self._texts[row]
            steps = range(start, min(stop, text.num_steps))
            if steps:
                ids = self._state.contexts[place].ids = text.context(steps[-1])
                # A model cannot run a row without ids.
                ends = [*(max(1, text.shared[step]) for step in steps[:-1]), len(ids)]
                for step, end in zip(steps, ends, strict=True):
                    self._place_of[row, step] = len(self._logits), place, end - len(ids) - 1
                wanted[place] = len(ids) - ends[0] + 1
                places.append(place)
        if places:
            self._logits.append(self._state.logits(wanted, places))

    def _run_branches(self, branches: Sequence[tuple[int, int]]) -> None:
        contexts = [PlainContext(self._texts[row].context(step)) for row, step in branches]
        twin = self._state.fork([self._live.index(row) for row, _ in branches], contexts)
        self._place_of.update((branch, (len(self._logits), place, -1)) for place, branch in enumerate(branches))
        self._logits.append(twin.logits()[:, None])


def advance_by_blocks(
    members: Sequence[ForcedMember], num_steps: Sequence[int], width: int
) -> Iterator[list[tuple[int, int]]]:
    """Advance members side by side along their texts, as far at once as memory allows.

    Args:
        members: The members, at the start of their texts.
        num_steps: Number of steps of every row.
        width: Number of columns that each step is worked on in.

    Yields:
        The (row, step) pairs to work on next, which every member has reached.
    """
    longest = max(num_steps)
    size = max(1, _MAX_LOGITS // (len(num_steps) * max(forced.member.vocab_size for forced in members)))
    num_pairs = max(1, _MAX_MIXED // width)
    for start in range(0, longest, size):
        stop = min(start + size, longest)
        for forced in members:
            forced.advance(start, stop)
        steps = [(row, step) for row, count in enumerate(num_steps) for step in range(start, min(stop, count))]
        for n in range(0, len(steps), num_pairs):
            yield steps[n : n + num_pairs]


class OwnLogProbs:
    """Turns a member's logits into log-probabilities over its own ids, in float32; ids without a token are left out.

    If a row of logits contains NaN or `inf`, or only `-inf`, the maximum of its log-probabilities is NaN.

    Args:
        member: The member.
        over_all_ids: Whether to include ids without a token, as when the member decodes by itself.
    """

    def __init__(self, member: Member, over_all_ids: bool = False):
        no_token = torch.as_tensor(member.encoder.token_bytes.kinds == NO_TOKEN, device=member.device)
        self._left_out = None if over_all_ids else no_token

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the shape of the logits, `(..., vocab_size)`."""
        logits = logits.float()
        if self._left_out is not None:
            logits = logits.masked_fill(self._left_out, -torch.inf)
        return logits.log_softmax(-1)
