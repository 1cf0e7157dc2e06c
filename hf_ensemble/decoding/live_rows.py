"""The rows of a call that still write, and the states of the members that run in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from .. import messages
from ..errors import MemberError
from ..members.member import Member
from ..members.state import MemberState
from ..members.transfer import sent
from ..methods.base import TokenMethod
from .call import Call
from .few_entries import FewEntries
from .listed_ids import ListedIds
from .member_seconds import MemberSeconds
from .prompts import expand_prompts, read_prompts
from .text_warnings import warn_of_control, warn_of_losses


class LiveRows:
    """Lets members follow the rows, and gives their logits to the fused step.

    A member that no row needs at a step is not run: its state stays, and catches up in one forward pass when it is
    needed. If only some rows need it, the others are carried along in its batch.

    Args:
        call: The call.
        method: The method, made for its members.
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        silent_ids: The primary's control tokens that do not cause a warning when they are written.
        runs_primary: Whether the primary runs here when needed, instead of in the decoding loop at every step.
        max_new_tokens: Largest number of ids that a row can take, if known.
        listed: Which of the primary's columns the members' ids count for.
        needs_whole_rows: Whether more is read than the entries that the method asks for.

    Attributes:
        live: Numbers of the rows that still write.
        states: The state of each member that runs, by member index, with a row for each live row.
        num_steps: Number of steps so far.
        seconds: Seconds spent starting members or waiting for them.
    """

    def __init__(
        self,
        call: Call,
        method: TokenMethod,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        silent_ids: Collection[int],
        runs_primary: bool,
        max_new_tokens: int,
        listed: ListedIds,
        needs_whole_rows: bool = False,
    ):
        self.members = members = call.members
        self.runs_primary = runs_primary
        self._method = method
        self.live = list(range(len(prompt_ids)))
        self.num_steps = 0
        self._num_rows = len(prompt_ids)
        self._place_of = {row: row for row in self.live}
        running = call.participants | {0} if runs_primary else call.participants - {0}
        prompts = read_prompts(members, running, method.resync, prompt_ids, prompt_mask, call.own_prompts)
        self._prompt_of_row: list[int] | None = prompts.prompt_of_row
        self._prompt_lengths = [len(prompts.ids[prompt]) for prompt in prompts.prompt_of_row]
        self._begun_at = [0] * len(prompt_ids)
        self.states = {
            # An assistant may cut the text finer.
            index: MemberState(members[index], rows, num_expected=max_new_tokens * (5 if index else 4) // 4)
            for index, rows in prompts.contexts.items()
        }
        self.seconds = MemberSeconds(self.states)
        self._device = prompt_ids.device
        self._said: dict[int, Tensor | None] = {}
        # Members that send only a few entries.
        self._sparse = {
            index
            for index in self.states
            if method.num_entries is not None and members[index].sends_entries(needs_whole_rows)
        }
        self._few = FewEntries(members, method, self.states, listed, self._num_rows)
        # By member: the step that was started ahead of the loop, and for which places. It may turn out not to be needed.
        self._begun: dict[int, tuple[int, list[int]]] = {}
        self._silent_ids = silent_ids
        self._warned_control: set[int] = set()
        self._warned_lossy: set[int] = set()
        self.warn_of_losses()

    # What the fused step reads

    def begin(self, scores: Tensor, wanted: Mapping[int, Sequence[int]]) -> None:
        """Begin a step; the decoding loop gives the primary's logits, or zeros if the primary runs here.

        Args:
            scores: In float32, of shape `(batch_size, primary_vocab_size)`.
            wanted: By row, columns of the primary's whose probabilities are needed.
        """
        self._device = scores.device
        self._said = {} if self.runs_primary else {0: scores}
        self._few.begin(wanted, scores.device)

    def where(self, position: int) -> str:
        """Say where a row is at this step."""
        return f"in row {position} at step {self.num_steps - self._begun_at[position] + 1}"

    def sitting_out(self) -> dict[int, list[int]]:
        """The live rows that each member cannot follow at the moment."""
        places = self._place_of if self._prompt_of_row is None else self._prompt_of_row
        return {
            index: [row for row in self.live if state.contexts[places[row]].sits_out]
            for index, state in self.states.items()
        }

    def losing_space(self) -> list[int]:
        """The live rows at the beginning of a text, where some members' entries have lost a leading space."""
        places = self._place_of if self._prompt_of_row is None else self._prompt_of_row
        return [
            row
            for row in self.live
            if any(state.contexts[places[row]].loses_space for index, state in self.states.items() if index)
        ]

    def read(self, needed: Tensor) -> list[Tensor | None]:
        """Run the needed members that have not been read at this step; returns all rows, including ended ones."""
        is_needed = needed.T.tolist()
        self.read_prompts({index for index in self.states if not any(is_needed[index])})
        places_of = {
            index: [place for place, row in enumerate(self.live) if is_needed[index][row]]
            for index in self.states
            if self._said.get(index) is None and index not in self._few.normalizers
        }
        # All are started before waiting for any; members of this process may block the host until they are done.
        to_start = [index for index, places in places_of.items() if places]
        for index in sorted(to_start, key=lambda index: not self._runs_beside(index)):
            with self.seconds.of(index):
                self._start(index, places_of[index])
        for index, places in places_of.items():
            if index not in self._sparse:
                with self.seconds.of(index):
                    self._said[index] = self._logits(index, places) if places else None
        found = [self._said.get(index) for index in range(len(self.members))]
        if not self._sparse:
            return found
        for index, places in places_of.items():
            if places and index in self._sparse:
                with self.seconds.of(index):
                    self._few.take(index, [self.live[place] for place in places])
        starts = [] if self._method.build_at_start is None else self.losing_space()
        return self._few.read(found, needed, self.live, starts)

    def read_prompts(self, waiting: Collection[int] = ()) -> None:
        """Let members read shared prompts, and give each row its own state.

        Args:
            waiting: Members that are not run yet.
        """
        if self._prompt_of_row is not None:
            expand_prompts(self.states, self._prompt_of_row, waiting)
            self._prompt_of_row = None

    def normalizers(self) -> dict[int, Tensor | None]:
        """The normalizers of members that send only a few entries."""
        return self._few.normalizers

    def _start(self, index: int, places: list[int]) -> None:
        if self._begun.pop(index, None) == (self.num_steps, places):
            return
        if index in self._sparse:
            assert self._method.num_entries is not None
            entry_ids = self._method.maps[index].entry_ids
            self.states[index].where = lambda place: self.where(self.live[place])
            self.states[index].start_entries(self._method.num_entries, places, entry_ids)
        else:
            self.states[index].start(rows=places)

    def ask(
        self, found: Sequence[Tensor | None], needed: Tensor, columns: Mapping[int, Sequence[int]]
    ) -> list[Tensor | None]:
        """Ask members that list few ids for all ids that count for the given columns of the primary.

        Args:
            found: All rows, from `read`.
            needed: Which member takes part in which row, of shape `(batch_size, num_members)`, on the CPU.
            columns: By row, the columns.

        Raises:
            MemberError: If these are more than `MAX_ALLOWED` for a row and member, or a member fails.
        """
        return self._few.ask(found, needed, self.live, columns, self.where)

    def _logits(self, index: int, places: Sequence[int]) -> Tensor:
        """A member's logits in these of the live rows, of shape `(batch_size, vocab_size)`."""
        # In the member's own dtype, which may be half as large to transfer.
        logits = self.states[index].logits(rows=places).to(self._device).float()
        if len(logits) == self._num_rows:
            return logits
        at = sent(self.live, logits.device)
        return logits.new_zeros(self._num_rows, logits.shape[-1]).index_copy_(0, at, logits)

    @property
    def lists_few(self) -> bool:
        """Whether there is a member that lists few ids of a row, even if more are read."""
        return bool(self._sparse)

    @property
    def share_in_one_request(self) -> tuple[float | None, ...] | None:
        """For each member, the share of rows and steps for which one request to its server was enough.

        None for a member without a server; a single None if no member has one.
        """
        if not any(member.is_served for member in self.members):
            return None
        return tuple(
            self.states[n].caches.share_in_one_request if n in self.states and member.is_served else None
            for n, member in enumerate(self.members)
        )

    # Running ahead of the decoding loop

    @property
    def is_expanded(self) -> bool:
        """Whether the prompts have been read."""
        return self._prompt_of_row is None

    def start_assistants(self, is_needed: Sequence[Sequence[bool]]) -> None:
        """Start the next step of members that run beside the host, ahead of the decoding loop.

        Args:
            is_needed: For each row, which members it needs.
        """
        for index in self.states:
            places = [place for place, row in enumerate(self.live) if is_needed[row][index]]
            is_begun_elsewhere = index == 0 and self.members[0].runs_in_loop
            if places and not is_begun_elsewhere and self._runs_beside(index):
                self._start(index, places)
                self._begun[index] = self.num_steps, places

    def _runs_beside(self, index: int) -> bool:
        return self.states[index].caches.run_beside

    # Following the text

    def append(self, row: int, primary_id: int) -> None:
        """Take in one of the primary's ids; `write_bytes` follows when its entry is complete."""
        if self.runs_primary:
            self.states[0].contexts[self._place_of[row]].ids.append(primary_id)

    def write(self, row: int, primary_id: int) -> None:
        """Take in one of the primary's ids, and let the assistants follow what it writes."""
        self.append(row, primary_id)
        if self.members[0].is_control(primary_id):
            warn_of_control(self.members[0], primary_id, self._silent_ids, self._warned_control)
        self.write_bytes(row, self.members[0].encoder.token_bytes.write([primary_id]))

    def write_bytes(self, row: int, data: bytes) -> None:
        """Let the assistants' contexts of a row follow what has been written."""
        place = self._place_of[row]
        for index, state in self.states.items():
            if index > 0:
                state.contexts[place].write(data)

    def warn_of_losses(self) -> None:
        """Warn once about every member whose view of the text so far has lost something."""
        warn_of_losses(self.states, self._warned_lossy)

    def move(self, parents: Sequence[int]) -> None:
        """Let every row continue from former row `parents[row]`."""
        if list(parents) != list(range(len(parents))):
            for state in self.states.values():
                state.select(parents, [state.contexts[parent].copy() for parent in parents])

    def drop(self, rows: Collection[int]) -> None:
        """Let rows end."""
        if not rows:
            return
        kept = [place for place, row in enumerate(self.live) if row not in rows]
        self.live = [self.live[place] for place in kept]
        self._place_of = {row: place for place, row in enumerate(self.live)}
        for state in self.states.values():
            state.select(kept)

    def without_room(self, ends: Sequence[int]) -> set[int]:
        """Rows that have to end because a member has no position left for the last id; a warning says so.

        Args:
            ends: For each row, whether it ends anyway.
        """
        full: set[int] = set()
        for row, member, limit in self._full_rows():
            if not ends[row]:
                full.add(row)
                messages.warn(messages.no_position_left(member.name, limit, row, self.num_steps - self._begun_at[row]))
        return full

    def check_room(self) -> None:
        """Raise if a member has no position left in some row, when rows cannot end one by one.

        Raises:
            MemberError: If so.
        """
        for _, member, limit in self._full_rows():
            raise MemberError(
                f"member {member.name!r} has positions for {limit} ids, which are used up after {self.num_steps} new "
                "ids. Ask for fewer new ids."
            )

    def _full_rows(self) -> Iterator[tuple[int, Member, int]]:
        """Rows in which a running member has more ids than positions, with the member and the number of these."""
        for index, member in enumerate(self.members):
            limit = member.max_positions
            if limit is not None and (index == 0 or index in self.states):
                for place, row in enumerate(self.live):
                    of_primary = self._prompt_lengths[row] + self.num_steps - self._begun_at[row]
                    if (len(self.states[index].contexts[place].ids) if index else of_primary) > limit:
                        yield row, member, limit
