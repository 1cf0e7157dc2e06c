"""Sources of drafts: look-up in the row's own text, or a member that continues by itself."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...members.cached_rows import AHEAD
from ...members.state import MemberState, PlainContext
from ...vocabulary.token_bytes import NO_TOKEN

NGRAM = "ngram"
"""Name of the drafter that looks up the row's own text."""

_ORDERS = (5, 3, 2)
"""Numbers of last ids by which a text is looked up, in this order."""
_MOST_IDS = 32
"""Largest assumed number of ids of a drafted entry, so that no work grows with the text."""


class PromptLookup:
    """Prompt look-up: what followed the last ids of a row earlier in its prompt or its new text.

    It holds the row's ids, cut into the entries they were written as, with an index of what followed each n-gram.

    An entry is given by its column: an id of the primary, or a union id of what only another member has.

    Args:
        ids: The primary's ids of the prompt, each an entry, without padding.
        is_control: Tells which of the primary's ids are control tokens; drafts stop before one.
    """

    def __init__(self, ids: Sequence[int], is_control: Callable[[int], bool]):
        self._is_control = is_control
        self._ids = list(ids)
        # The column of the entry that starts at each id, None inside an entry.
        self._columns: list[int | None] = list(ids)
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def append(self, column: int, ids: Sequence[int]) -> None:
        """Take in an entry that has been decided.

        Args:
            column: The entry.
            ids: The primary's ids that write it.
        """
        if ids:
            self._ids += ids
            self._columns += [column, *([None] * (len(ids) - 1))]

    def continuation(self, length: int) -> tuple[list[int], int]:
        """Look up what followed earlier occurrences of the last ids.

        Args:
            length: Largest number of entries.

        Returns:
            The entries (none if the ids are new), and how many of the last ids were found.
        """
        ids, count = self._ids, len(self._ids)
        for end in range(self._num_indexed + 1, count):  # all n-grams but those at the very end
            for order in _ORDERS:
                if end >= order:
                    self._after[tuple(ids[end - order : end])] = end
        self._num_indexed = max(self._num_indexed, count - 1)
        found = ((self._after.get(tuple(ids[-order:])), order) for order in _ORDERS if count >= order)
        start, found_order = next(((place, order) for place, order in found if place is not None), (None, 0))
        if start is None:
            return [], 0
        stop = start + _MOST_IDS * length
        columns, more = self._columns[start:stop], ids[start:stop]
        # If an entry was found from its middle on, its ids are drafted one by one.
        num_inside = next((n for n, column in enumerate(columns) if column is not None), len(columns))
        entries = [*more[:num_inside], *(column for column in columns[num_inside:] if column is not None)]
        # At the end of the text, it continues into its own draft.
        draft = itertools.islice(itertools.cycle(entries), length)
        return list(itertools.takewhile(lambda column: not self._is_control(column), draft)), found_order


@dataclass(frozen=True)
class Drafted:
    """A member's draft.

    Attributes:
        ids: The member's ids for each row, without control tokens.
        num_steps: Number of its steps so far; a control token takes one too.
        seconds: How long these steps took; known when all ids are there.
    """

    ids: list[list[int]]
    num_steps: int
    seconds: float


class MemberDrafter:
    """A member that drafts by continuing greedily, one of its own tokens at a time.

    Args:
        index: Its number.
        state: Its state.
    """

    def __init__(self, index: int, state: MemberState):
        self.index = index
        self.member = state.member
        self._state = state
        no_token = (self.member.encoder.token_bytes.kinds == NO_TOKEN).nonzero()[0]
        self._no_token = torch.as_tensor(no_token, device=self.member.device) if len(no_token) else None

    def draft(self, lengths: Sequence[int], clock: Callable[[], float]) -> Iterator[Drafted]:
        """Let the member continue its own contexts, which stay unchanged.

        A draft ends before a control token. A row with more ids than the member has positions gets none.

        Args:
            lengths: For each row, the largest number of ids to draft.
            clock: Gives seconds.

        Returns:
            The draft so far, each time with more ids, the last time with all. If a GPU is still drafting, the iterator
            waits for it.
        """
        start, state = clock(), self._state
        contexts = state.contexts
        fits = max(len(context.ids) for context in contexts) <= self.member.max_length
        active = [n for n, length in enumerate(lengths) if fits and length > 0 and not contexts[n].sits_out]
        state.contexts = drafts = [PlainContext(list(context.ids)) for context in contexts]
        if state.is_captured and len(active) == len(contexts):
            ids, events = self._write_chained(drafts, max(lengths))
            drafted = self._arriving(ids, lengths, clock() - start, events)
        else:
            written, num_steps = self._write_one_by_one(drafts, lengths, active)
            drafted = iter([Drafted(written, num_steps, clock() - start)])
        state.contexts = contexts
        return drafted

    def _write_chained(self, drafts: Sequence[PlainContext], length: int) -> tuple[Tensor, list[torch.cuda.Event]]:
        """Start writing ids; the device passes each on to the next step.

        They are written beside everything else, so other launches do not wait for them.

        Returns:
            The ids, of shape `(num_steps, num_rows)`, which a GPU fills in as it goes. For a GPU, also its events: at
            the beginning, when all but the last ids were there, and at the end.
        """
        state, is_cuda = self._state, self.member.device.type == "cuda"
        ids = torch.empty(length, len(drafts), dtype=torch.long, pin_memory=is_cuda)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if is_cuda else []
        if is_cuda:
            events[0].record(torch.cuda.current_stream(self.member.device))
        state.start()
        with state.caches.beside():
            num_written = 0
            while True:
                best = self._best(state.logits())
                ids[num_written].copy_(best, non_blocking=True)
                num_written += 1
                if num_written == length:
                    break
                if is_cuda:
                    events[1].record()
                if not state.run_ahead(best):
                    break
                for draft in drafts:
                    draft.ids.append(AHEAD)
            if is_cuda:
                events[2].record()
        state.forget_ahead()
        return ids[:num_written], events

    def _arriving(
        self, ids: Tensor, lengths: Sequence[int], seconds: float, events: Sequence[torch.cuda.Event]
    ) -> Iterator[Drafted]:
        """Wait for what `_write_chained` has started: first for all ids but the last, then for all."""

        def wanted(steps: Tensor) -> list[list[int]]:
            rows = [row[:length] for row, length in zip(steps.T.tolist(), lengths, strict=True)]
            return [list(itertools.takewhile(lambda i: not self.member.is_control(i), row)) for row in rows]

        if events:
            began, nearly, done = events
            nearly.synchronize()
            yield Drafted(wanted(ids[:-1]), len(ids) - 1, 0.0)
            done.synchronize()
            seconds = began.elapsed_time(done) / 1e3
        yield Drafted(wanted(ids), len(ids), seconds)

    def _write_one_by_one(
        self, drafts: Sequence[PlainContext], lengths: Sequence[int], active: list[int]
    ) -> tuple[list[list[int]], int]:
        """Write in these rows until they are long enough, and count the steps."""
        written: list[list[int]] = [[] for _ in drafts]
        num_steps = 0
        while active:
            best = self._best(self._state.logits(rows=active)).tolist()
            num_steps += 1
            active = [n for n in active if not self.member.is_control(best[n])]
            for n in active:
                written[n].append(best[n])
                drafts[n].ids.append(best[n])
            most = self.member.max_length
            active = [n for n in active if len(written[n]) < lengths[n] and len(drafts[n].ids) <= most]
        return written, num_steps

    def _best(self, logits: Tensor) -> Tensor:
        if self._no_token is not None:
            logits = logits.index_fill(-1, self._no_token, -torch.inf)
        return logits.argmax(-1)
