"""What every member reads after an entry."""

from collections.abc import Collection, Mapping, Sequence

from ...members.member import Member
from ...methods.base import TokenMethod
from ...vocabulary.context import MemberContext


class EntryWriter:
    """Writes entries: as ids of the primary, and into every member's context.

    An entry is given by its column: an id of the primary, or a union id of what only another member has.

    Args:
        members: The members; the first is the primary.
        method: The method.
        is_wide: Whether entries are chosen over the union vocabulary.
        deciding: Numbers of the members that decide. Others only draft, and stop where they have no position left.
    """

    def __init__(self, members: Sequence[Member], method: TokenMethod, is_wide: bool, deciding: Collection[int]):
        self._members = members
        self._union = method.union
        self._is_wide = is_wide
        self._deciding = sorted(deciding)

    def entry(self, column: int) -> tuple[list[int], bytes]:
        """The primary's ids that write an entry, and the bytes that it writes."""
        primary = self._members[0]
        if column < primary.vocab_size:
            return [column], primary.encoder.token_bytes.write([column])
        return self._union.continuation(column, 0) or [], self._union.entry(column)

    def entries_of(self, ids: Sequence[int], member: int) -> list[int]:
        """The entries as which the ensemble is likely to write what a member drafted.

        Args:
            ids: What it drafted, as its own ids.
            member: Its number.
        """
        if not self._is_wide:
            return self._members[0].encoder.encode(self._members[member].encoder.token_bytes.write(ids)) or []
        columns: list[int] = []
        for column in self._union.member_to_union[member][list(ids)].tolist():
            if column < 0 or self._union.union_to_first[0][column] < 0:
                break
            columns.append(column)
        return columns

    def write(self, contexts: Mapping[int, MemberContext], column: int) -> dict[int, MemberContext]:
        """Copies of every member's context, after one more entry.

        Args:
            contexts: The contexts, by member.
            column: The entry.
        """
        ids, data = self.entry(column)
        after = {index: context.copy() for index, context in contexts.items()}
        for index, context in after.items():
            if index == 0:
                context.ids += ids
            else:
                context.write(data)
        return after

    def full_member(self, contexts: Mapping[int, MemberContext]) -> Member | None:
        """The first of the deciding members whose context has more ids than it has positions; None if there is none."""
        for index in self._deciding:
            limit = self._members[index].max_positions
            if limit is not None and len(contexts[index].ids) > limit:
                return self._members[index]
        return None
