"""Where drafts come from: the row's own text, or a member that writes on by itself."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cached_rows import PlainContext
from ..member import Member, MemberState
from ..vocabulary.context import MemberContext
from ..vocabulary.token_bytes import NO_TOKEN

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


class MemberDrafter:
    """A member that drafts by writing on greedily, one of its own tokens at a time.

    Args:
        member: The member.
    """

    def __init__(self, member: Member):
        self.member = member
        self._token_bytes = member.encoder.token_bytes
        no_token = (self._token_bytes.kinds == NO_TOKEN).nonzero()[0]
        self._no_token = torch.as_tensor(no_token, device=member.device) if len(no_token) else None

    def draft(self, state: MemberState[MemberContext], lengths: Sequence[int]) -> list[list[int]]:
        """Let the member write on in its own contexts, which stay as they are.

        Args:
            state: The member's state.
            lengths: For each row, at most how many ids are wanted.

        Returns:
            For each row, the member's ids, up to where it wrote a control token; none where a row has more ids than
            the member has positions.
        """
        contexts = list(state.contexts)
        limit = self.member.max_positions
        if limit is not None and max(len(context.ids) for context in contexts) > limit:
            return [[] for _ in contexts]
        drafts = [PlainContext(list(context.ids), context.num_kept) for context in contexts]
        active = [n for n, length in enumerate(lengths) if length > 0 and not contexts[n].sits_out]
        state.contexts = drafts  # type: ignore[assignment]
        if self.member.is_captured and len(active) == len(contexts):
            written = self._write_chained(state, drafts, lengths)
        else:
            written = self._write_one_by_one(state, drafts, lengths, active)
        for context, draft in zip(contexts, drafts, strict=True):
            context.num_kept = min(draft.num_kept, len(context.ids))
        state.contexts = contexts
        return written

    def _write_chained(
        self, state: MemberState[MemberContext], drafts: Sequence[PlainContext], lengths: Sequence[int]
    ) -> list[list[int]]:
        """Write ids that the host sees only at the end, so that no step waits for it."""
        starts = [len(draft.ids) for draft in drafts]
        best = [self._best(state.logits())]
        while len(best) < max(lengths) and state.run_ahead(best[-1]):
            for draft in drafts:
                draft.ids.append(0)  # until it is known
            best.append(self._best(state.logits()))
        written = torch.stack(best, dim=-1).tolist()
        for draft, start, ids in zip(drafts, starts, written, strict=True):
            draft.ids[start:] = ids[:-1]
        is_control = self.member.is_control
        return [
            list(itertools.takewhile(lambda i: not is_control(i), ids[:length]))
            for ids, length in zip(written, lengths, strict=True)
        ]

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
