"""Speculative decoding for ensembles: drafts of several entries, checked by all members in one forward pass each.

Losslessness needs no probabilities of the draft: at every position the ensemble chooses as it would without a draft, and
a drafted entry is kept where it is what was chosen. The idea of checking drafts in parallel is that of Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding" (https://arxiv.org/abs/2211.17192).
"""

import random
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import messages
from ...errors import MemberError
from ...members.member import Member
from ...members.state import MemberState
from ...methods.base import Mixed, TokenMethod
from ...methods.captured import CapturedMix
from ...mixing import fold
from ...vocabulary.context import MemberContext, Resync, num_common
from ..prompts import OwnPrompts, expand_prompts, read_prompts
from ..row_processors import RowProcessors
from ..text_warnings import warn_of_control, warn_of_losses
from ..token_decoder import without_member
from .draft_length import DraftLength
from .drafts import NGRAM, Draft, MemberDrafter, RowText

_NUM_QUIET = 4
"""Rounds without a draft after which the next one is taken to have none either."""


@dataclass(frozen=True)
class SpeculationRound:
    """One round of one row, in which all drafted entries that were kept and one more were written.

    Attributes:
        drafter: `"ngram"`, or the name of the member that drafted; None where nothing was drafted.
        num_drafted: Number of entries that were drafted and checked.
        num_kept: Number of those that were kept.
    """

    drafter: str | None
    num_drafted: int
    num_kept: int


@dataclass(frozen=True)
class SpeculationStats:
    """What came of the drafts of one call.

    Attributes:
        rounds: For each row, its rounds. A row may have been decided further than it was written.
    """

    rounds: list[list[SpeculationRound]]

    @property
    def num_rounds(self) -> int:
        """Number of rounds of all rows."""
        return sum(map(len, self.rounds))

    @property
    def drafted(self) -> dict[str, int]:
        """For each drafter, how many entries it drafted that were checked."""
        return self._counted("num_drafted")

    @property
    def kept(self) -> dict[str, int]:
        """For each drafter, how many of its entries were kept."""
        return self._counted("num_kept")

    @property
    def entries_per_round(self) -> float:
        """How many entries a round of a row wrote on average: 1 without speculation."""
        return 1 + sum(self.kept.values()) / max(self.num_rounds, 1)

    def _counted(self, what: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for row in self.rounds:
            for item in row:
                if item.drafter is not None:
                    counts[item.drafter] += getattr(item, what)
        return dict(counts)


class PrimaryAlone(TokenMethod):
    """The primary's own logits, as they are."""

    resync: Resync = "append"
    is_wide = False
    is_capturable = False

    def mix(self, logits: Sequence[Tensor | None], weights: Tensor) -> Mixed:
        """Return the primary's logits; see `TokenMethod.mix`."""
        primary = logits[0]
        assert primary is not None
        return Mixed(primary, torch.zeros_like(weights))


@dataclass
class _Decided:
    """An id that is to be written, with its rows of what `generate` returns; None for an id that an entry forces."""

    primary_id: int
    logits: Tensor | None = None
    scores: Tensor | None = None


@dataclass
class _Row:
    """What has been decided of one row."""

    ids: list[int] = field(default_factory=list)
    queue: deque[_Decided] = field(default_factory=deque)
    num_entries: int = 0
    end: MemberError | str | None = None
    """What is to be raised, or warned of, once the queue is empty."""


class _Chain:
    """A row's verified text, and what every member reads after each entry of a draft.

    Attributes:
        columns: The drafted entries.
        ids: For each of them, the primary's ids that write it.
        contexts: For each member, its context before the draft and after each of its entries.
    """

    def __init__(self, contexts: dict[int, MemberContext]):
        self.columns: list[int] = []
        self.ids: list[list[int]] = []
        self.contexts = {index: [context] for index, context in contexts.items()}

    def after(self, position: int) -> dict[int, MemberContext]:
        """Every member's context after so many entries."""
        return {index: contexts[position] for index, contexts in self.contexts.items()}

    def append(self, column: int, ids: list[int], contexts: dict[int, MemberContext]) -> None:
        self.columns.append(column)
        self.ids.append(ids)
        for index, context in contexts.items():
            self.contexts[index].append(context)


@dataclass
class _BegunDraft:
    """Drafts of a round, at which a GPU may still be.

    Attributes:
        guesses: For each row what was found in its text, and the number of ids by which it was found.
        room: For each row, the most entries that may be drafted.
        looked_up: For each row, what is drafted from its text.
        asked: The member that drafts, if there is none, its drafts' length, and what it drafts.
    """

    guesses: list[tuple[list[int], int]]
    room: list[int]
    looked_up: list[list[int]]
    asked: tuple[str, int, Draft] | None = None


@dataclass
class _Read:
    """What one member was made to read in a round.

    Attributes:
        contexts: The contexts of its state's rows.
        num_kept: How many of their ids were cached before.
        rows: For each place, the rows of the state that were read for it; empty if the member was not needed there.
        num_last: For each row, after how many of its last ids logits are wanted.
        at: For each position at which logits are wanted, the row and the place where the state will give them, of shape
            `(2, num_wanted)`, on the member's device.
        positions: The numbers of these positions, on the mixing device; None for all.
        logits: The member's logits, of shape `(num_positions, vocab_size)`; None if no position needs it.
    """

    contexts: list[MemberContext]
    num_kept: list[int]
    rows: list[list[int]]
    num_last: list[int]
    at: Tensor | None = None
    positions: Tensor | None = None
    logits: Tensor | None = None

    @property
    def wanted_rows(self) -> list[int]:
        """The rows of the state that are read."""
        return sorted(row for of_place in self.rows for row in of_place)


@dataclass
class _Choices:
    """What was chosen at each position; meaningless beyond where a row departs from its draft.

    Attributes:
        columns: The chosen entries.
        is_empty: Where nothing was left to choose from.
        not_finite: For each position, whether each member's logits were not finite.
        best: For each member that may draft, its own best id at each position.
        logits, scores: Rows over the primary's ids before and after the processors; None unless they are kept.
    """

    columns: list[int]
    is_empty: list[int]
    not_finite: list[list[int]]
    best: dict[int, list[int]]
    logits: Tensor | None
    scores: Tensor | None


class SpeculativeDecoder:
    """The rows of one `generate` call, decided round by round: some drafted entries, and one more.

    All rows take part in every round until their text has ended or holds as many ids as were asked for, so a row may be
    decided further than it has been written. Every member reads a row's text and its draft in one forward pass; where
    its context after an entry does not begin its context after the draft, it is one more row of that pass.

    Sampled entries are drawn with noise that depends on the call's seed, the row and the entry's number only, so that
    the text is the same whatever is drafted.

    Args:
        members: The members; the first is the primary.
        method: The method, made for these members.
        method_name: Its name, for errors.
        weights: Mixing weights of each row, of shape `(batch_size, num_members)`.
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        processors: The call's processors.
        do_sample: Whether to draw from the softmax of the scores; else the best is taken.
        max_new_tokens: Number of ids after which a row needs no more.
        end_ids: The primary's ids that end a text.
        drafters: Numbers of the members that may draft, in order of preference.
        uses_ngrams: Whether drafts are looked up in the text; before members are asked.
        draft_length: Chooses the drafter and how much is drafted.
        keep_rows: Whether to keep the rows of `scores` and `logits` that `generate` returns.
        filler: The id that stands in rows that have ended.
        own_prompts: What members read in place of the text of the prompt ids.

    Attributes:
        states: The state of each member that may run, by member index.
        rounds: For each row, its rounds so far.
        logits_rows, scores_rows: What was kept: rows over the primary's ids, one `(batch_size, width)` a column.
    """

    def __init__(
        self,
        members: Sequence[Member],
        method: TokenMethod,
        method_name: str,
        weights: Tensor,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        processors: RowProcessors,
        do_sample: bool,
        max_new_tokens: int,
        end_ids: Sequence[int],
        drafters: Sequence[int],
        uses_ngrams: bool,
        draft_length: DraftLength,
        keep_rows: bool = False,
        filler: int = 0,
        own_prompts: OwnPrompts | None = None,
    ):
        self.members = list(members)
        self.method = method
        self._method_name = method_name
        self._weights = weights
        self._processors = processors
        self._is_wide = method.is_wide and not processors.read_ids
        self._do_sample = do_sample
        self._max_new = max_new_tokens
        self._end_ids = set(end_ids)
        self._length = draft_length
        self._keeps_rows = keep_rows
        self._filler = filler
        self._encoder = members[0].encoder
        self._width = members[0].vocab_size
        self._device = method.device
        # Graphs are kept for each number of positions, of which a batch has too many.
        self._mix = CapturedMix(method) if len(prompt_ids) == 1 else method.mix
        self._deciding = {0, *(weights != 0).any(0).nonzero()[:, 0].tolist()}
        participants = self._deciding.union(drafters)
        prompts = read_prompts(members, participants, method.resync, prompt_ids, prompt_mask, own_prompts)
        # The primary stands in for members that sit out, whatever its weight.
        contexts = {0: [MemberContext.of_ids(self._encoder, ids) for ids in prompts.ids], **prompts.contexts}
        self.states: dict[int, MemberState[MemberContext]] = {
            index: MemberState(members[index], rows, num_expected=max_new_tokens * 5 // 4 + draft_length.longest)
            for index, rows in contexts.items()
        }
        expand_prompts(self.states, prompts.prompt_of_row)
        prompt_of_row = [prompts.ids[prompt] for prompt in prompts.prompt_of_row]
        self._prompt_lengths = [len(ids) for ids in prompt_of_row]
        self._rows = [_Row() for _ in prompt_of_row]
        self._live = list(range(len(prompt_of_row)))
        self._texts = [RowText(ids, members[0].is_control) for ids in prompt_of_row] if uses_ngrams else None
        self._drafters = {members[index].name: (index, MemberDrafter(members[index])) for index in drafters}
        self._is_first_round = True
        self._begun: _BegunDraft | None = None
        self._num_quiet = 0
        self._is_primary_ahead = False
        seed = int(torch.randint(2**62, (1,))) if do_sample else 0
        self._seeds = [random.Random(f"{seed} {row}") for row in self._live]
        self._seeds_of_row: list[list[int]] = [[] for _ in self._live]
        self._generator: torch.Generator | None = None
        self._warned_control: set[int] = set()
        self._warned_lossy: set[int] = set()
        self.rounds: list[list[SpeculationRound]] = [[] for _ in self._live]
        self.logits_rows: list[Tensor] = []
        self.scores_rows: list[Tensor] = []
        self._warn_of_losses()

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Each member's forward passes so far."""
        return tuple(self.states[n].num_forwards if n in self.states else 0 for n in range(len(self.members)))

    @property
    def share_ensembled(self) -> list[float]:
        """For each row, the share of its choices so far that were the ensemble's: all, where there are any."""
        return [float(row.num_entries > 0) for row in self._rows]

    @property
    def stats(self) -> SpeculationStats:
        """What came of the drafts so far."""
        return SpeculationStats(self.rounds)

    def next_ids(self, live: Sequence[bool]) -> list[int | None]:
        """Return the id to write next in every live row; None where there is none, and the row ends.

        Raises:
            MemberError: If a member fails, or gave NaN or infinite logits where an id is due, or everything was
                filtered out there.
        """
        self._keep([place for place, row in enumerate(self._live) if live[row]])
        while any(not self._rows[row].queue for row in self._live):
            self.decide_round()
        column: list[_Decided | None] = []
        for row, alive in zip(self._rows, live, strict=True):
            column.append(row.queue.popleft() if alive and row.queue else None)
            if alive and column[-1] is None and row.end is not None:
                end, row.end = row.end, None
                if isinstance(end, MemberError):
                    raise end
                warnings.warn(end, stacklevel=2)
        if self._keeps_rows and any(item is not None for item in column):
            self.logits_rows.append(torch.stack([self._row_of(item, item and item.logits) for item in column]))
            self.scores_rows.append(torch.stack([self._row_of(item, item and item.scores) for item in column]))
        return [None if item is None else item.primary_id for item in column]

    def decide_round(self) -> None:
        """Decide some more entries in every row that takes part: draft, read, choose, keep what agrees."""
        clock = self._length.clock
        begun = self._begun or self._begin_draft()
        self._begun = None
        drafts, chains, drafter = self._read_draft(begun)
        start = clock()
        places = [place for place, chain in enumerate(chains) for _ in range(len(chain.columns) + 1)]
        first = [0]
        for chain in chains:
            first.append(first[-1] + len(chain.columns) + 1)
        plan = self._plan(chains, places)
        weights = _sent(plan, self._device)
        needed = plan != 0
        needed[:, 0] |= self.method.starts_from_primary
        # All members are started before one is waited for.
        reads = {index: self._start_reading(index, chains, first, needed[:, index].tolist()) for index in self.states}
        for index, read in reads.items():
            read.logits = self._logits_of(index, read, len(plan))
        choices = self._choose(reads, weights, chains, first)
        used = self._accept(chains, first, choices, drafter, reads)
        if not self._is_first_round:  # that one reads the prompts
            self._length.checked(max(len(chain.columns) for chain in chains), clock() - start)
        self._is_first_round = False
        self._judge(choices, used, plan, drafter, drafts, begun.guesses)
        if self._live and any(self.states[index].is_captured for index, _ in self._drafters.values()):
            # A GPU drafts while what has been decided is handed out.
            self._begun = self._begin_draft()

    def close(self) -> None:
        """Wait for a draft that nobody reads, since a GPU would go on with what is given to others by then."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.asked is not None:
            deque(begun.asked[2].read(), maxlen=0)

    # Drafting

    def _begin_draft(self) -> _BegunDraft:
        """Begin to draft for every row that takes part."""
        guesses: list[tuple[list[int], int]] = [([], 0)] * len(self._live)
        if self._texts is not None:
            guesses = [self._texts[row].continuation(self._length.longest) for row in self._live]
        room = [max(0, self._max_new - len(self._rows[row].ids) - 1) for row in self._live]
        begun = _BegunDraft(guesses, room, [[] for _ in room])
        if self._is_first_round:
            return begun
        counts = Counter(found_by for guess, found_by in guesses if guess)
        lengths = {n: self._length.choose([_look_up(n)], count / len(guesses))[1] for n, count in counts.items()}
        begun.looked_up = [
            guess[: min(lengths.get(n, 0), most)] for (guess, n), most in zip(guesses, room, strict=True)
        ]
        if not any(begun.looked_up) and self._drafters and any(room):
            name, length = self._length.choose(list(self._drafters))
            if length:
                index, drafter = self._drafters[name]
                most = [min(length, most) for most in room]
                begun.asked = name, length, drafter.draft(self.states[index], most, self._length.clock)
        return begun

    def _read_draft(self, begun: _BegunDraft) -> tuple[list[list[int]], list[_Chain], str | None]:
        """Wait for what is drafted, and follow it as it comes.

        Returns:
            For each row its draft, and how members follow it; and who drafted.
        """
        drafts = begun.looked_up
        chains = [self._chain(place, draft) for place, draft in enumerate(drafts)]
        if begun.asked is None:
            return drafts, chains, NGRAM if any(drafts) else None
        name, length, draft = begun.asked
        for ids in draft.read():
            rows = zip(ids, begun.room, strict=True)
            drafts = [self._as_entries(self._drafters[name][0], row)[:most] for row, most in rows]
            chains = [
                self._chain(place, row, chain) for (place, row), chain in zip(enumerate(drafts), chains, strict=True)
            ]
        self._length.drafted(name, length, draft.seconds)
        return drafts, chains, name if any(drafts) else None

    def _as_entries(self, index: int, ids: Sequence[int]) -> list[int]:
        """The entries that the ensemble is likely to write what a member drafted with."""
        if not self._is_wide:
            data = self.members[index].encoder.token_bytes.write(ids)
            return self._encoder.encode(data) or []
        columns: list[int] = []
        for column in self.method.union.member_to_union[index][list(ids)].tolist():
            if column < 0 or self.method.union.union_to_first[0][column] < 0:
                break
            columns.append(column)
        return columns

    def _chain(self, place: int, draft: Sequence[int], begun: _Chain | None = None) -> _Chain:
        """Let every member's context follow a draft, as far as all have positions for it; from where it has been begun."""
        chain = begun or _Chain({index: state.contexts[place] for index, state in self.states.items()})
        if draft[: len(chain.columns)] != chain.columns:
            return self._chain(place, draft)
        for column in draft[len(chain.columns) :]:
            ids, data = self._entry(column)
            contexts = self._written(chain.after(-1), ids, data)
            if any(self._is_full(index, len(context.ids)) for index, context in contexts.items()):
                break
            chain.append(column, ids, contexts)
        return chain

    def _entry(self, column: int) -> tuple[list[int], bytes]:
        """The primary's ids that write an entry, and the bytes that it writes."""
        if column < self._width:
            return [column], self._encoder.token_bytes.write([column])
        return self.method.union.continuation(column, 0) or [], self.method.union.entry(column)

    def _written(
        self, contexts: dict[int, MemberContext], ids: Sequence[int], data: bytes
    ) -> dict[int, MemberContext]:
        """Copies of these contexts, after one more entry."""
        after = {index: context.copy() for index, context in contexts.items()}
        for index, context in after.items():
            if index == 0:
                context.ids += ids
            else:
                context.write(data)
        return after

    def _is_full(self, index: int, length: int) -> bool:
        """Whether so many ids are too many for a member. One that only drafts stops drafting then."""
        limit = self.members[index].max_positions
        return limit is not None and length > limit and index in self._deciding

    # Reading

    def _plan(self, chains: Sequence[_Chain], places: Sequence[int]) -> Tensor:
        """The weights of every position, of shape `(num_positions, num_members)`, on the CPU."""
        plan = self._weights[[self._live[place] for place in places]]
        for index in self.states:
            contexts = (context for chain in chains for context in chain.contexts[index])
            sitting_out = [position for position, context in enumerate(contexts) if context.sits_out]
            if sitting_out:
                plan = without_member(plan, index, sitting_out)
        return plan

    def _start_reading(
        self, index: int, chains: Sequence[_Chain], first: Sequence[int], needed: Sequence[bool]
    ) -> _Read:
        """Start one member's reading of every row and its draft, in one forward pass."""
        state = self.states[index]
        contexts = [chain.contexts[index][0] for chain in chains]
        parents, num_last = list(range(len(chains))), [1] * len(chains)
        rows: list[list[int]] = [[] for _ in chains]
        wanted: list[tuple[int, int, int]] = []  # position, row, place from the right edge
        for place, chain in enumerate(chains):
            for at, context in reversed(list(enumerate(chain.contexts[index]))):
                if not needed[first[place] + at]:
                    continue
                row = next((n for n in rows[place] if contexts[n].ids[: len(context.ids)] == context.ids), None)
                if row is None and not rows[place]:
                    row, contexts[place] = place, context
                elif row is None:
                    row = len(contexts)
                    contexts.append(context)
                    parents.append(place)
                    num_last.append(1)
                if row not in rows[place]:
                    rows[place].append(row)
                behind = len(contexts[row].ids) - len(context.ids)
                num_last[row] = max(num_last[row], behind + 1)
                wanted.append((first[place] + at, row, behind))
        read = _Read(contexts, [context.num_kept for context in contexts], rows, num_last)
        if wanted:
            positions, at_rows, from_edge = zip(*sorted(wanted), strict=True)
            columns = [max(num_last) - 1 - behind for behind in from_edge]
            read.at = _sent([at_rows, columns], self.members[index].device)
            if len(wanted) < len(needed):
                read.positions = _sent(positions, self._device)
            if len(contexts) > len(chains):
                state.select(parents, contexts)
            else:
                state.contexts = contexts
            state.start(num_last, rows=read.wanted_rows)
        return read

    def _logits_of(self, index: int, read: _Read, num_positions: int) -> Tensor | None:
        """A member's logits at all positions, of shape `(num_positions, vocab_size)`; None if none needs it."""
        if read.at is None:
            return None
        logits = self.states[index].logits(read.num_last, rows=read.wanted_rows)
        if logits.ndim == 2:
            logits = logits[:, None]
        taken = logits[read.at[0], read.at[1]].to(self._device).float()
        if read.positions is not None:
            spread = taken.new_zeros(num_positions, taken.shape[-1])
            taken = spread.index_copy_(0, read.positions, taken)
        return taken

    # Choosing

    def _choose(
        self, reads: dict[int, _Read], weights: Tensor, chains: Sequence[_Chain], first: Sequence[int]
    ) -> _Choices:
        """Fuse and choose at all positions; what is chosen reaches the host in one transfer."""
        logits = [reads[index].logits if index in reads else None for index in range(len(self.members))]
        best = {
            index: torch.zeros(len(weights), dtype=torch.long, device=self._device)
            if logits[index] is None
            else self.method.masked(logits[index], index).argmax(-1)  # type: ignore[arg-type]
            for index, _ in self._drafters.values()
        }
        if logits[0] is None:
            logits[0] = torch.zeros(len(weights), self._width, device=self._device)
        mixed = self._mix(logits, weights)
        takes_part = weights != 0
        takes_part[:, 0] |= self.method.starts_from_primary
        normalizers = torch.where(takes_part, mixed.normalizers, 0.0)
        fused = mixed.logprobs if self._is_wide else self._folded(mixed.logprobs)
        scores = fused + (weights * normalizers).sum(-1, keepdim=True)
        if self._processors.read_ids:
            columns, is_empty, scores = self._choose_one_by_one(scores, chains, first)
        else:
            scores = self._processors.everywhere(scores)
            numbers = [
                (row, self._rows[row].num_entries + at)
                for row, chain in zip(self._live, chains, strict=True)
                for at in range(len(chain.columns) + 1)
            ]
            columns, is_empty = self._pick(scores, numbers)
            self._run_primary_ahead(chains, columns)
        parts = [columns, is_empty, (~normalizers.isfinite()).flatten(), *best.values()]
        host = torch.cat([part.long() for part in parts]).tolist()
        count, num_members = len(weights), len(self.members)
        bests = host[count * (2 + num_members) :]
        return _Choices(
            columns=host[:count],
            is_empty=host[count : 2 * count],
            not_finite=[host[n : n + num_members] for n in range(2 * count, (2 + num_members) * count, num_members)],
            best={index: bests[n * count : (n + 1) * count] for n, index in enumerate(best)},
            logits=self._folded(fused) if self._keeps_rows else None,
            scores=self._folded(scores) if self._keeps_rows else None,
        )

    def _run_primary_ahead(self, chains: Sequence[_Chain], columns: Tensor) -> None:
        """Where nothing is drafted, start the primary's next step before the host and the others follow."""
        self._num_quiet = 0 if any(chain.columns for chain in chains) else self._num_quiet + 1
        goes_on = any(len(self._rows[row].ids) + 1 < self._max_new for row in self._live)
        if self._num_quiet >= _NUM_QUIET and goes_on:
            ids = self.method.primary_ids(columns) if self._is_wide else columns
            self._is_primary_ahead = self.states[0].run_ahead(ids.to(self.members[0].device))

    def _choose_one_by_one(
        self, scores: Tensor, chains: Sequence[_Chain], first: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Process and choose position by position, up to where each row departs from its draft."""
        columns = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        is_empty = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        processed = torch.zeros_like(scores)
        for place, (row, chain) in enumerate(zip(self._live, chains, strict=True)):
            ids = list(self._rows[row].ids)
            for at in range(len(chain.columns) + 1):
                here = slice(first[place] + at, first[place] + at + 1)
                processed[here] = self._processors.at(row, ids, scores[here])
                columns[here], is_empty[here] = self._pick(processed[here], [(row, self._rows[row].num_entries + at)])
                if at == len(chain.columns) or int(columns[here]) != chain.columns[at]:
                    break
                ids += chain.ids[at]
        return columns, is_empty, processed

    def _pick(self, scores: Tensor, numbers: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Choose a column of every row of scores, given the row and number of each entry; say where there is none."""
        is_empty = ~(scores.amax(-1) > -torch.inf)
        scores = scores.masked_fill(is_empty[:, None], 0.0)
        if not self._do_sample:
            return scores.argmax(-1), is_empty
        if self._generator is None:
            self._generator = torch.Generator(scores.device)
        probs = scores.softmax(-1)
        noise = torch.empty_like(probs)
        for of_entry, (row, number) in zip(noise, numbers, strict=True):
            seeds = self._seeds_of_row[row]
            while len(seeds) <= number:
                seeds.append(self._seeds[row].getrandbits(62))
            of_entry.exponential_(generator=self._generator.manual_seed(seeds[number]))
        # The first of exponential clocks that run at these speeds is drawn with these probabilities.
        return (probs / noise).argmax(-1), is_empty

    def _folded(self, rows: Tensor) -> Tensor:
        if rows.shape[-1] == self._width:
            return rows
        return fold(rows, self.method.first_ids_beyond_primary, self._width)

    # Following the text

    def _accept(
        self,
        chains: Sequence[_Chain],
        first: Sequence[int],
        choices: _Choices,
        drafter: str | None,
        reads: dict[int, _Read],
    ) -> list[list[int]]:
        """Take over what was chosen, up to where each row departs from its draft.

        Returns:
            For each row, the positions that were used.
        """
        used: list[list[int]] = []
        kept: list[int] = []
        settled: list[dict[int, MemberContext]] = []
        for place, (row, chain) in enumerate(zip(self._live, chains, strict=True)):
            used.append([])
            num_kept = 0
            contexts = chain.after(0)
            for position in range(first[place], first[place + 1]):
                self._rows[row].end = self._failure(row, position, choices)
                if self._rows[row].end is not None:
                    break
                used[-1].append(position)
                column = choices.columns[position]
                ids, data = self._entry(column)
                at = position - first[place]
                is_drafted = at < len(chain.columns) and chain.columns[at] == column
                num_kept += is_drafted
                contexts = chain.after(at + 1) if is_drafted else self._written(chain.after(at), ids, data)
                if self._decide(row, column, ids, position, choices, contexts):
                    break
                if not is_drafted:
                    kept.append(place)
                    settled.append(contexts)
                    break
            is_draft = bool(chain.columns)
            self.rounds[row].append(SpeculationRound(drafter if is_draft else None, len(chain.columns), num_kept))
        self._settle(kept, settled, reads)
        self._warn_of_losses()
        return used

    def _failure(self, row: int, position: int, choices: _Choices) -> MemberError | None:
        where = f"in row {row} at step {len(self._rows[row].ids) + 1}"
        for member, is_wrong in zip(self.members, choices.not_finite[position], strict=True):
            if is_wrong:
                return member.not_finite(where)
        return messages.nothing_left(self._method_name, where) if choices.is_empty[position] else None

    def _decide(
        self,
        row: int,
        column: int,
        ids: list[int],
        position: int,
        choices: _Choices,
        contexts: dict[int, MemberContext],
    ) -> bool:
        """Put an entry into a row's queue, and say whether the row needs no more."""
        state = self._rows[row]
        state.num_entries += 1
        if self._texts is not None:
            self._texts[row].append(column, ids)
        limit = self.members[0].max_positions
        if limit is not None:
            # The id for which there is no position is the last.
            ids = ids[: limit + 1 - self._prompt_lengths[row] - len(state.ids)]
        for n, primary_id in enumerate(ids):
            logits = scores = None
            if n == 0 and choices.logits is not None and choices.scores is not None:
                logits, scores = choices.logits[position].clone(), choices.scores[position].clone()
            state.queue.append(_Decided(primary_id, logits, scores))
        state.ids += ids
        if len(ids) == 1 and self.members[0].is_control(ids[0]):
            warn_of_control(self.members[0], ids[0], self._end_ids, self._warned_control)
        if not self._end_ids.isdisjoint(ids) or len(state.ids) >= self._max_new:
            return True
        lengths = {index: len(context.ids) for index, context in contexts.items()}
        lengths[0] = self._prompt_lengths[row] + len(state.ids)
        full = next((index for index, length in sorted(lengths.items()) if self._is_full(index, length)), None)
        if full is not None:
            member = self.members[full]
            state.end = messages.no_position_left(member.name, member.max_positions, row, len(state.ids))
        return full is not None

    def _settle(
        self, places: Sequence[int], settled: Sequence[dict[int, MemberContext]], reads: dict[int, _Read]
    ) -> None:
        """Let the states follow the texts of the rows that go on, each from the row that has read the most of it."""
        for index, read in reads.items():
            parents = []
            for place, contexts in zip(places, settled, strict=True):
                context, parent = contexts[index], place
                if read.rows[place]:
                    # What all of these had cached before, and the verified text keeps, they have in common.
                    start = min(context.num_kept, *(read.num_kept[row] for row in read.rows[place]))
                    common = {
                        row: start + num_common(read.contexts[row].ids[start:], context.ids[start:])
                        for row in read.rows[place]
                    }
                    parent = max(common, key=lambda row: common[row])
                    context.num_kept = common[parent] + (index == 0 and self._is_primary_ahead)
                parents.append(parent)
            self._select(index, parents, [contexts[index] for contexts in settled], len(read.contexts))
        self._live = [self._live[place] for place in places]
        self._is_primary_ahead = False

    def _select(self, index: int, rows: Sequence[int], contexts: list[MemberContext], num_rows: int) -> None:
        if list(rows) == list(range(num_rows)):
            self.states[index].contexts = contexts
        else:
            self.states[index].select(rows, contexts)

    def _keep(self, places: Sequence[int]) -> None:
        if len(places) < len(self._live):
            self.close()  # what is begun is for other rows
            for index, state in self.states.items():
                self._select(index, places, [state.contexts[place] for place in places], len(self._live))
            self._live = [self._live[place] for place in places]

    def _judge(
        self,
        choices: _Choices,
        used: Sequence[Sequence[int]],
        plan: Tensor,
        drafter: str | None,
        drafts: Sequence[Sequence[int]],
        guesses: Sequence[tuple[list[int], int]],
    ) -> None:
        """Say how good the drafts were, and how good those would have been that nobody asked for."""
        judged: dict[str, list[int]] = {}
        for draft, (guess, found_by), positions in zip(drafts, guesses, used, strict=True):
            if not positions:
                continue
            if draft and drafter is not None:
                num_kept = len(positions) - 1
                counts = judged.setdefault(_look_up(found_by) if drafter == NGRAM else drafter, [0, 0])
                counts[0] += num_kept
                counts[1] += num_kept < len(draft)
            if guess and not (draft and drafter == NGRAM):
                judged.setdefault(_look_up(found_by), [0, 0])[choices.columns[positions[0]] != guess[0]] += 1
        for name, (index, _) in self._drafters.items():
            if name != drafter:
                token_bytes = self.members[index].encoder.token_bytes
                heard = [position for positions in used for position in positions if plan[position, index] != 0]
                for position in heard:
                    own, data = (
                        token_bytes.entry(choices.best[index][position]),
                        self._entry(choices.columns[position])[1],
                    )
                    agrees = bool(own and data) and (own.startswith(data) or data.startswith(own))
                    judged.setdefault(name, [0, 0])[not agrees] += 1
        for name, counts in judged.items():
            self._length.judged(name, *counts)

    def _row_of(self, item: _Decided | None, row: Any) -> Tensor:
        """A row of scores; where an id is forced, 0 there and `-inf` elsewhere."""
        if isinstance(row, Tensor):
            return row
        forced = torch.full((self._width,), -torch.inf, device=self._device)
        forced[self._filler if item is None else item.primary_id] = 0.0
        return forced

    def _warn_of_losses(self) -> None:
        warn_of_losses(
            self.members, {index: state.contexts for index, state in self.states.items()}, self._warned_lossy
        )


def _sent(numbers: Any, device: torch.device) -> Tensor:
    """Numbers of the host, on a device, without waiting for what the device does."""
    there = torch.as_tensor(numbers)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.to(device)


def _look_up(num_ids: int) -> str:
    """What the policy calls look-up by so many ids: the more there are, the more of it is kept."""
    return f"{NGRAM}, {num_ids} ids"
