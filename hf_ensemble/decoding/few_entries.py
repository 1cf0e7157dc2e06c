"""The entries of a step, for members that send only a few: the best ones, and those that the others propose."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import messages
from ..members.entries import Entries
from ..members.member import Member
from ..members.state import MemberState
from ..methods.base import TokenMethod
from .listed_ids import MAX_ALLOWED, ListedIds


class FewEntries:
    """What members that send only a few entries have said at a step.

    Args:
        members: All members.
        method: The method, which determines what to ask for.
        states: The states of members that run in this call.
        listed: Which of the primary's columns the members' ids count for.
        num_rows: Number of rows, ended ones included.

    Attributes:
        num_rows: Number of rows.
        normalizers: By member that was asked, logsumexp of all its logits, of shape `(num_rows,)`; None if it did not
            send it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        method: TokenMethod,
        states: Mapping[int, MemberState],
        listed: ListedIds,
        num_rows: int,
    ):
        self._members, self._method, self._states = members, method, states
        self._listed, self.num_rows = listed, num_rows
        self.begin({}, torch.device("cpu"))

    def begin(self, wanted: Mapping[int, Sequence[int]], device: torch.device) -> None:
        """Begin a step.

        Args:
            wanted: By row, columns of the primary's whose probabilities are needed.
            device: Device of the rows.
        """
        self._wanted, self._device = wanted, device
        self._entries: dict[int, Entries] = {}
        self._contenders: dict[int, dict[int, Sequence[int]]] = {}  # by member and row
        self.normalizers: dict[int, Tensor | None] = {}

    def take(self, member: int, rows: Sequence[int]) -> None:
        """Wait for a member's best entries in some rows."""
        best = self._states[member].entries()
        self._entries[member] = self._placed(best, rows)
        self._contenders[member] = dict(zip(rows, best.contenders, strict=False))
        known = best.normalizers
        self.normalizers[member] = None if known is None else _at_rows(known, rows, self.num_rows, 0)

    def read(
        self, found: Sequence[Tensor | None], needed: Tensor, live: Sequence[int], starts: Sequence[int]
    ) -> list[Tensor | None]:
        """Return all members' rows, after asking these members for the others' proposals and the wanted columns.

        Args:
            found: The other members' rows.
            needed: Which member takes part in which row, of shape `(num_rows, num_members)`, on the CPU.
            live: Rows that still write.
            starts: Rows at the beginning of a text, where some members' entries have lost a leading space.
        """
        found = list(found)
        for member in self._entries:
            found[member] = self._spread(member)
        if not self._entries:
            return found
        asked = self._method.asked(found, needed, self._contenders)
        if starts:
            at_start = self._method.at_start.asked(found, needed, self._contenders)
            for member, row in itertools.product(self._entries, starts):
                asked[member][row] = at_start[member][row]
        ids = {
            member: {row: [*asked[member][row], *of_rows.get(row, ())] for row in live}
            for member, of_rows in self._ids_of(self._wanted).items()
        }
        return self._with_asked(found, needed, live, ids)

    def ask(
        self,
        found: Sequence[Tensor | None],
        needed: Tensor,
        live: Sequence[int],
        columns: Mapping[int, Sequence[int]],
        where: Callable[[int], str],
    ) -> list[Tensor | None]:
        """Ask for all ids that count for some of the primary's columns; see `LiveRows.ask`."""
        ids = {
            member: {row: of_row for row, of_row in of_rows.items() if needed[row, member]}
            for member, of_rows in self._ids_of(columns).items()
        }
        for member, of_rows in ids.items():
            for row, of_row in of_rows.items():
                if len(of_row) > MAX_ALLOWED:
                    raise messages.too_many_allowed(self._members[member].name, len(of_row), MAX_ALLOWED, where(row))
        return self._with_asked(found, needed, live, ids)

    def _ids_of(self, columns: Mapping[int, Sequence[int]]) -> dict[int, dict[int, list[int]]]:
        """For each of these members and each row, its ids that count for some of the primary's columns."""
        return {
            member: {row: self._listed.ids_of(member, of_row) for row, of_row in columns.items()}
            for member in self._entries
        }

    def _with_asked(
        self,
        found: Sequence[Tensor | None],
        needed: Tensor,
        live: Sequence[int],
        ids: Mapping[int, Mapping[int, Sequence[int]]],
    ) -> list[Tensor | None]:
        """All rows, once members have been asked for these ids of their rows, as far as they are not known yet."""
        found = list(found)
        waiting: dict[int, list[int]] = {}
        for member, of_rows in ids.items():
            rows = [row for row in live if needed[row, member]]
            known = self._entries[member].ids.tolist()
            missing = [sorted(set(of_rows.get(row, ())).difference(known[row])) for row in rows]
            if any(missing):
                self._states[member].start_logits_of(missing)
                waiting[member] = rows
        for member, rows in waiting.items():
            more = self._placed(self._states[member].logits_of(), rows)
            self._entries[member] = self._entries[member].beside(more)
            found[member] = self._spread(member)
        return found

    def _spread(self, member: int) -> Tensor:
        """A member's rows of logits, as far as they are known."""
        return self._entries[member].spread(self._members[member].vocab_size, self._device)

    def _placed(self, entries: Entries, rows: Sequence[int]) -> Entries:
        """Entries of some rows among all."""
        return Entries(
            _at_rows(entries.ids, rows, self.num_rows, -1), _at_rows(entries.logits, rows, self.num_rows, -1)
        )


def _at_rows(values: Tensor, rows: Sequence[int], num_rows: int, filler: float) -> Tensor:
    """Values of some rows at their places among all, of shape `(num_rows, ...)`."""
    placed = values.new_full((num_rows, *values.shape[1:]), filler)
    placed[list(rows)] = values
    return placed
