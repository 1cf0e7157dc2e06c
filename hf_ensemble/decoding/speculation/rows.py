"""What has been decided of each row, and what of that is still to be handed out."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ... import messages
from ...errors import MemberError
from .drafts import PromptLookup
from .stats import SpeculationRound


class DecidedId(NamedTuple):
    """An id that is to be written.

    Attributes:
        primary_id: The id.
        kept: Its rows of the logits and of the scores that `generate` returns, of shape `(width,)`; None if they are not
            kept, or if the id is forced, as it is not the first of its entry.
    """

    primary_id: int
    kept: tuple[Tensor, Tensor] | None = None


@dataclass
class Row:
    """One row of a call.

    Attributes:
        number: Its number in the call.
        lookup: Its text for prompt look-up; None if nothing is looked up.
        ids: The primary's ids that have been decided.
        num_entries: Number of entries that they were decided as.
        queue: Those of them that are still to be handed out.
        end: What to raise, or to warn of, when the queue is empty; None if nothing.
        rounds: Its rounds so far.
    """

    number: int
    lookup: PromptLookup | None = None
    ids: list[int] = field(default_factory=list)
    num_entries: int = 0
    queue: deque[DecidedId] = field(default_factory=deque)
    end: MemberError | str | None = None
    rounds: list[SpeculationRound] = field(default_factory=list)

    def append(self, column: int, ids: Sequence[int], kept: tuple[Tensor, Tensor] | None) -> None:
        """Take in an entry that has been decided.

        Args:
            column: The entry.
            ids: The primary's ids that write it.
            kept: Its rows of logits and scores; see `DecidedId`.
        """
        self.num_entries += 1
        self.ids += ids
        self.queue += [DecidedId(i, None if n else kept) for n, i in enumerate(ids)]
        if self.lookup is not None:
            self.lookup.append(column, ids)

    def pop(self) -> DecidedId | None:
        """Take the next id from the queue; None if the row ends here.

        Raises:
            MemberError: If that is how it ends.
        """
        if self.queue:
            return self.queue.popleft()
        end, self.end = self.end, None
        if isinstance(end, MemberError):
            raise end
        if end is not None:
            messages.warn(end)
        return None
