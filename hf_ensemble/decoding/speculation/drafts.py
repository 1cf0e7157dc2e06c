"""Where drafts come from: the row's own text, or a member that writes on by itself."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...members.contexts import PlainContext
from ...members.member import Member
from ...members.state import MemberState
from ...vocabulary.context import MemberContext
from ...vocabulary.token_bytes import NO_TOKEN

NGRAM = "ngram"
"""Name of the drafter that looks up the row's own text."""

_ORDERS = (5, 3, 2)
_MOST_IDS = 32
"""Of how many ids a drafted entry is taken to be at most, so that no work grows with the text."""


class RowText:
    """A row's ids, cut into the entries that they were written as, with an index of what followed each n-gram.

    An entry is given by its column: an id of the primary, or a union id of what only another member has.

    Args:
        ids: The primary's ids of the prompt, each an entry, without padding.
        is_control: Says which of the primary's ids are control tokens; no draft goes beyond one.
    """

    def __init__(self, ids: Sequence[int], is_control: Callable[[int], bool]):
        self._is_control = is_control
        self._ids = list(ids)
        # The column of the entry that starts at each id, None inside an entry.
        self._columns: list[int | None] = list(ids)
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def append(self, column: int, ids: Sequence[int]) -> None:
        """Take in an entry that has been decided."""
        if ids:
            self._ids += ids
            self._columns += [column, *([None] * (len(ids) - 1))]

    def continuation(self, length: int) -> tuple[list[int], int]:
        """Look up what followed the last ids where they stood before.

        Args:
            length: Most entries.

        Returns:
            The entries, none if the ids are new; and how many of the last ids were found.
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
        # Where it reaches the end of the text it goes on into what it has drafted itself.
        stop = start + _MOST_IDS * length
        columns, more = self._columns[start:stop], ids[start:stop]
        draft: list[int] = []
        place = 0
        while len(draft) < length:
            column = columns[place]
            width = 1
            if column is None:
                column = more[place]
            else:
                while place + width < len(columns) and columns[place + width] is None:
                    width += 1
            if self._is_control(column):
                break
            draft.append(column)
            columns += columns[place : place + width]
            more += more[place : place + width]
            place += width
        return draft, found_order


class Draft:
    """What a member drafts for every row; its GPU may still be at it.

    Args:
        ids: The ids, of shape `(longest, num_rows)`, of which a GPU puts the last where they belong only when it is done;
            or a list for each row.
        lengths: For each row, how many of them are wanted.
        is_control: Says which ids are control tokens; no draft goes on with one.
        seconds: How long it took.
        events: When the GPU began, when all but the last ids were there, and when it was done; then that counts.
    """

    def __init__(
        self,
        ids: Sequence[Sequence[int]] | Tensor,
        lengths: Sequence[int],
        is_control: Callable[[int], bool],
        seconds: float = 0.0,
        events: Sequence[torch.cuda.Event] = (),
    ):
        self._ids = ids
        self._lengths = lengths
        self._is_control = is_control
        self.seconds = seconds
        self._events = events

    def read(self) -> Iterator[list[list[int]]]:
        """Wait for the ids of each row: first for all but the last, if they come one by one, then for all."""
        if not isinstance(self._ids, Tensor):
            yield self._wanted(self._ids)
            return
        if self._events:
            began, nearly, done = self._events
            nearly.synchronize()
            yield self._wanted(self._ids[:-1].T.tolist())
            done.synchronize()
            self.seconds = began.elapsed_time(done) / 1e3
        yield self._wanted(self._ids.T.tolist())

    def _wanted(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        return [
            list(itertools.takewhile(lambda i: not self._is_control(i), row[:length]))
            for row, length in zip(ids, self._lengths, strict=True)
        ]


class MemberDrafter:
    """A member that drafts by writing on greedily, one of its own tokens at a time.

    Args:
        member: The member.
    """

    def __init__(self, member: Member):
        self.member = member
        no_token = (member.encoder.token_bytes.kinds == NO_TOKEN).nonzero()[0]
        self._no_token = torch.as_tensor(no_token, device=member.device) if len(no_token) else None

    def draft(self, state: MemberState[MemberContext], lengths: Sequence[int], clock: Callable[[], float]) -> Draft:
        """Let the member write on in its own contexts, which stay as they are.

        Args:
            state: The member's state.
            lengths: For each row, at most how many ids are wanted.
            clock: Gives seconds.

        Returns:
            For each row, the member's ids, up to where it wrote a control token; none where a row has more ids than
            the member has positions.
        """
        start = clock()
        contexts = list(state.contexts)
        limit = self.member.max_positions
        if limit is not None and max(len(context.ids) for context in contexts) > limit:
            return Draft([[] for _ in contexts], lengths, self.member.is_control)
        drafts = [PlainContext(list(context.ids), context.num_kept) for context in contexts]
        active = [n for n, length in enumerate(lengths) if length > 0 and not contexts[n].sits_out]
        state.contexts = drafts  # type: ignore[assignment]
        if state.is_captured and len(active) == len(contexts):
            ids, events = self._write_chained(state, drafts, max(lengths))
            written = Draft(ids, lengths, self.member.is_control, clock() - start, events)
        else:
            rows = self._write_one_by_one(state, drafts, lengths, active)
            written = Draft(rows, lengths, self.member.is_control, clock() - start)
        for context, draft in zip(contexts, drafts, strict=True):
            context.num_kept = min(draft.num_kept, len(context.ids))
        state.contexts = contexts
        return written

    def _write_chained(
        self, state: MemberState[MemberContext], drafts: Sequence[PlainContext], length: int
    ) -> tuple[Tensor, list[torch.cuda.Event]]:
        """Start writing ids, each of which the device passes on to the next step.

        They are written beside all else, so that what is launched meanwhile does not wait for them.

        Returns:
            The ids and the events of `Draft`.
        """
        is_cuda = self.member.device.type == "cuda"
        ids = torch.empty(length, len(drafts), dtype=torch.long, pin_memory=is_cuda)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if is_cuda else []
        if is_cuda:
            events[0].record(torch.cuda.current_stream(self.member.device))
        state.start()
        with state.beside():
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
                    draft.ids.append(0)  # whatever it is
            if is_cuda:
                events[2].record()
        return ids[:num_written], events

    def _write_one_by_one(
        self,
        state: MemberState[MemberContext],
        drafts: Sequence[PlainContext],
        lengths: Sequence[int],
        active: list[int],
    ) -> list[list[int]]:
        limit = self.member.max_positions
        written: list[list[int]] = [[] for _ in drafts]
        while active:
            best = self._best(state.logits(rows=active)).tolist()
            for n in active:
                if not self.member.is_control(best[n]):
                    written[n].append(best[n])
                    drafts[n].ids.append(best[n])
            active = [
                n
                for n in active
                if not self.member.is_control(best[n])
                and len(written[n]) < lengths[n]
                and (limit is None or len(drafts[n].ids) <= limit)
            ]
        return written

    def _best(self, logits: Tensor) -> Tensor:
        if self._no_token is not None:
            logits = logits.index_fill(-1, self._no_token, -torch.inf)
        return logits.argmax(-1)
