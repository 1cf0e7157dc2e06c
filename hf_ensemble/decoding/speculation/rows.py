"""The rows of a call: what has been decided, what is still to be written, and the drafts that members follow."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ... import messages
from ...errors import MemberError
from ...members.member import Member
from ...vocabulary.context import MemberContext, num_common
from ..step import FusedStep
from .drafts import PromptLookup
from .stats import SpeculationRound

KeptRows = tuple[Tensor, Tensor]
"""The rows of the logits and of the scores that `generate` returns for an id, each of shape `(width,)`."""


class EntryWriter:
    """Writes entries: as ids of the primary, and into every member's context.

    An entry is given by its column: an id of the primary, or a union id of what only another member has.

    Args:
        step: The fused step, which knows what a column stands for.
        deciding: Indices of the members that decide. Others only draft, and stop when they have no position left.
    """

    def __init__(self, step: FusedStep, deciding: Collection[int]):
        self.step = step
        self._members = step.members
        self._deciding = sorted(deciding)

    def entries_of(self, ids: Sequence[int], member: int) -> list[int]:
        """Return the entries that the ensemble is likely to write for a member's draft.

        Args:
            ids: Its draft, in its own ids.
            member: Its number.
        """
        if not self.step.is_wide:
            return self._members[0].encoder.encode(self._members[member].encoder.token_bytes.write(ids)) or []
        union, columns = self.step.method.union, []
        for column in union.member_to_union[member][list(ids)].tolist():
            if column < 0 or union.union_to_first[0][column] < 0:
                break
            columns.append(column)
        return columns

    def write(self, contexts: Mapping[int, MemberContext], column: int) -> dict[int, MemberContext]:
        """Return copies of every member's context, after one more entry.

        Args:
            contexts: The contexts, by member.
            column: The entry.
        """
        ids, data = self.step.entry(column)
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
            if len(contexts[index].ids) > self._members[index].max_length:
                return self._members[index]
        return None


@dataclass
class Row:
    """One row of a call.

    Attributes:
        number: Its number in the call.
        lookup: Its text for prompt look-up; None if nothing is looked up.
        ids: The primary's ids that have been decided.
        num_entries: Number of entries that they were decided as.
        queue: The ids still to be written, each with its kept rows; None if nothing is kept, or if the id is forced
            because it is not the first of its entry.
        end: The error to raise, or the warning to give, when the queue is empty; None for neither.
        rounds: Its rounds so far.
        contexts: Of this round: every member's context before the draft, and after each of its entries.
        columns: The drafted entries, which all members follow.
        positions: The numbers of the contexts among those of all rows.
        used: The positions at which something was written: up to where the row departed from its draft, or ended.
        found: What look-up has found.
        found_by: By how many ids.
        room: The largest number of entries that may be drafted.
    """

    number: int
    lookup: PromptLookup | None = None
    ids: list[int] = field(default_factory=list)
    num_entries: int = 0
    queue: deque[tuple[int, KeptRows | None]] = field(default_factory=deque)
    end: MemberError | str | None = None
    rounds: list[SpeculationRound] = field(default_factory=list)
    contexts: list[dict[int, MemberContext]] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    positions: range = range(0)
    used: range = range(0)
    found: list[int] = field(default_factory=list)
    found_by: int = 0
    room: int = 0

    @property
    def where(self) -> str:
        """The position of the row, for errors."""
        return f"in row {self.number} at step {len(self.ids) + 1}"

    def begin(self, contexts: dict[int, MemberContext]) -> None:
        """Begin a round.

        Args:
            contexts: Every member's context after what has been decided, by member.
        """
        self.contexts, self.columns = [contexts], []
        self.positions = self.used = range(0)

    def follow(self, draft: Sequence[int], writer: EntryWriter) -> None:
        """Let every member follow a draft, as far as all deciding members have positions for it.

        Args:
            draft: The entries. The part in common with the last draft has been followed already.
            writer: Writes entries.
        """
        num_same = num_common(self.columns, draft)
        del self.columns[num_same:], self.contexts[num_same + 1 :]
        for column in draft[num_same:]:
            contexts = writer.write(self.contexts[-1], column)
            if writer.full_member(contexts) is not None:
                break
            self.columns.append(column)
            self.contexts.append(contexts)

    def ids_after(self, num_entries: int) -> list[int]:
        """The primary's ids that the row has after so many entries of the draft, without its prompt."""
        prompt_length = len(self.contexts[0][0].ids) - len(self.ids)
        return self.contexts[num_entries][0].ids[prompt_length:]

    def append(self, column: int, ids: Sequence[int], kept: KeptRows | None) -> None:
        """Take in an entry that has been decided.

        Args:
            column: The entry.
            ids: The primary's ids that write it.
            kept: The kept rows of the first of them.
        """
        self.num_entries += 1
        self.ids += ids
        self.queue += [(i, None if n else kept) for n, i in enumerate(ids)]
        if self.lookup is not None:
            self.lookup.append(column, ids)

    def pop(self) -> tuple[int, KeptRows | None] | None:
        """Take the next id from the queue; None if the row ends here.

        Raises:
            MemberError: If the row ends with an error.
        """
        if self.queue:
            return self.queue.popleft()
        end, self.end = self.end, None
        if isinstance(end, MemberError):
            raise end
        if end is not None:
            messages.warn(end)
        return None
