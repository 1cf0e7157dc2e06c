"""Speculative decoding for ensembles: drafts of several entries, verified by all members in one forward pass each.

Losslessness needs no probabilities of the draft: at every position the ensemble chooses as it would without a draft,
and a drafted entry is accepted if it equals that choice. The idea of verifying drafts in parallel is that of Leviathan
et al., "Fast Inference from Transformers via Speculative Decoding" (https://arxiv.org/abs/2211.17192).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ... import messages
from ...errors import MemberError
from ...members.state import MemberState
from ...methods.base import TokenMethod
from ...vocabulary.context import MemberContext
from ..call import Call, end_ids, keeps_rows
from ..loop import Loop
from ..prompts import expand_prompts, read_prompts
from ..proposals import Proposals
from ..row_processors import RowProcessors
from ..step import Fused, FusedStep
from ..text_warnings import warn_of_control, warn_of_losses
from .choosing import Choices, Chooser
from .draft_length import DraftLength
from .drafting import Drafting
from .drafts import MemberDrafter, PromptLookup
from .reading import Reading
from .rows import EntryWriter, KeptRows, Row
from .stats import SpeculationRound, SpeculationStats

_NUM_QUIET = 4
"""Number of rounds without a draft after which the next one is assumed to have none either."""


class SpeculativeDecoder:
    """The rows of one `generate` call, decided round by round: some drafted entries, and one more.

    All rows take part in every round until their text has ended or is long enough, so a row may be decided further
    than it has been written.

    Args:
        call: The call; its weights are expanded to the rows.
        loop: Its loop.
        method: The method, made for its members.
        drafters: Indices of the members that may draft, in order of preference.
        uses_ngrams: Whether drafts are looked up in the text first, before asking members.
        draft_length: Chooses the drafter and how much is drafted.

    Attributes:
        states: The state of each member that may run, by member index.
        logits_rows, scores_rows: The kept rows over the primary's ids, of shape `(batch_size, width)` per column.
    """

    def __init__(
        self,
        call: Call,
        loop: Loop,
        method: TokenMethod,
        drafters: Sequence[int],
        uses_ngrams: bool,
        draft_length: DraftLength,
    ):
        self.members = members = call.members
        self.method = method
        self._method_name = call.config.name
        self._weights = weights = call.weights.at(0, loop.input_ids)
        self._processors = processors = RowProcessors(loop.processors, loop.input_ids, loop.mask)
        self._max_new = loop.max_new_tokens
        self._end_ids = set(end_ids(loop.settings))
        self._keeps_rows = keeps_rows(loop.settings)
        self._filler = loop.filler or 0
        # Graphs are kept for each number of positions, and a batch has too many different ones.
        captures = len(loop.input_ids) == 1
        self._step = FusedStep(members, method, is_wide=not processors.read_ids, captures=captures)
        # The primary stands in for members that sit out, whatever its weight.
        deciding = {0, *(weights != 0).any(0).nonzero()[:, 0].tolist()}
        running = deciding.union(drafters)
        prompts = read_prompts(members, running, method.resync, loop.input_ids, loop.mask, call.own_prompts)
        num_expected = self._max_new * 5 // 4 + draft_length.longest
        self.states: dict[int, MemberState] = {
            index: MemberState(members[index], rows, num_expected=num_expected)
            for index, rows in prompts.contexts.items()
        }
        expand_prompts(self.states, prompts.prompt_of_row)
        self._rows = [
            Row(number, PromptLookup(prompts.ids[prompt], members[0].is_control) if uses_ngrams else None)
            for number, prompt in enumerate(prompts.prompt_of_row)
        ]
        self._live = list(self._rows)
        self._writer = EntryWriter(self._step, deciding)
        self._drafters = [MemberDrafter(index, self.states[index]) for index in drafters]
        self._drafting = Drafting(self._drafters, self._writer, draft_length, self._max_new)
        self._chooser = Chooser(processors, bool(loop.settings.do_sample), len(self._rows))
        self._readings: dict[int, Reading] = {}  # of each member in this round
        self._has_begun = False
        self._num_quiet = 0
        self._warned_control: set[int] = set()
        self._warned_lossy: set[int] = set()
        self.logits_rows: list[Tensor] = []
        self.scores_rows: list[Tensor] = []
        warn_of_losses(self.states, self._warned_lossy)

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Each member's forward passes so far."""
        return tuple(self.states[n].num_forwards if n in self.states else 0 for n in range(len(self.members)))

    @property
    def share_ensembled(self) -> list[float]:
        """For each row, the share of its choices so far that the ensemble made: all of them, if there are any."""
        return [float(row.num_entries > 0) for row in self._rows]

    @property
    def stats(self) -> SpeculationStats:
        """The statistics of the drafts so far."""
        return SpeculationStats([row.rounds for row in self._rows])

    def next_ids(self, live: Sequence[bool]) -> list[int | None]:
        """Return the next id of every live row; None if there is none, and the row ends.

        Raises:
            MemberError: If a member fails, or returned NaN or infinite logits for the next id, or everything was
                filtered out there.
        """
        self._keep([index for index, row in enumerate(self._live) if live[row.number]])
        while any(not row.queue for row in self._live):
            self.decide_round()
        column = [row.pop() if is_live else None for row, is_live in zip(self._rows, live, strict=True)]
        if self._keeps_rows and any(column):
            shown = [item or (self._filler, None) for item in column]
            logits, scores = zip(*(kept or self._forced(i) for i, kept in shown), strict=True)
            self.logits_rows.append(torch.stack(logits))
            self.scores_rows.append(torch.stack(scores))
        return [None if item is None else item[0] for item in column]

    def decide_round(self) -> None:
        """Decide some more entries in every live row: draft, read, choose, and accept what agrees."""
        if not self._has_begun:
            self._begin()
        self._has_begun = False
        rows = self._live
        drafter = self._drafting.finish(rows)
        start = self._drafting.length.clock()
        num_positions = 0
        for row in rows:
            row.positions = range(num_positions, num_positions + len(row.contexts))
            num_positions = row.positions.stop
        weights = self._weights[[row.number for row in rows for _ in row.positions]]
        fused = self._step.run(self, weights, is_constrained=self._processors.read_ids)
        choices = self._choose(fused)
        is_first = not any(row.rounds for row in rows)
        self._accept(choices, drafter)
        if not is_first:  # which reads the prompts
            length = self._drafting.length
            longest = max(len(row.columns) for row in rows)
            length.verified(longest, length.clock() - start, sum(len(row.used) for row in rows) / len(rows))
        self._drafting.judge(rows, choices, fused.plan, drafter)
        if self._live and any(self.states[drafter.index].is_captured for drafter in self._drafters):
            # A GPU drafts while the decided ids are written.
            self._begin()

    def close(self) -> None:
        """Wait for a draft that is no longer needed."""
        self._has_begun = False
        self._drafting.close()

    def _begin(self) -> None:
        """Begin a round of the live rows with their drafts."""
        for index, row in enumerate(self._live):
            row.begin({member: state.contexts[index] for member, state in self.states.items()})
        self._drafting.begin(self._live)
        self._has_begun = True

    # What the fused step reads

    def where(self, position: int) -> str:
        """Return which row a position is in."""
        return next(row.where for row in self._live if position in row.positions)

    def sitting_out(self) -> dict[int, list[int]]:
        """The positions at which each member cannot speak."""
        texts = [contexts for row in self._live for contexts in row.contexts]
        return {
            index: [position for position, contexts in enumerate(texts) if contexts[index].sits_out]
            for index in self.states
        }

    def losing_space(self) -> list[int]:
        """The positions at the beginning of a text, where some members' entries have lost a leading space."""
        texts = [contexts for row in self._live for contexts in row.contexts]
        return [
            position
            for position, contexts in enumerate(texts)
            if any(context.loses_space for context in contexts.values())
        ]

    def normalizers(self) -> Mapping[int, Tensor | None]:
        """None: whole rows are read."""
        return {}

    def read(self, needed: Tensor) -> list[Tensor | None]:
        """Let every member read all rows and their drafts in one forward pass."""
        is_needed = needed.T.tolist()
        # All members are started before waiting for any.
        self._readings = {
            index: Reading(index, state, self._live, is_needed[index], self.method.device)
            for index, state in self.states.items()
        }
        return [self._readings[n].logits() if n in self._readings else None for n in range(len(self.members))]

    # Choosing and accepting

    def _choose(self, fused: Fused) -> Choices:
        """Choose at all positions; the choices reach the host in one transfer."""
        best = {
            drafter.index: self.method.masked(of_member, drafter.index).argmax(-1)
            for drafter in self._drafters
            if (of_member := fused.logits[drafter.index]) is not None
        }
        proposals = None if fused.whole is None else Proposals(fused.logprobs, fused.whole)
        offered = fused.logprobs if proposals is None else proposals.offered
        chosen = self._chooser.choose(offered + fused.level, self._live, proposals)
        if not self._processors.read_ids:
            self._run_primary_ahead(chosen.columns)
        parts = [chosen.columns, chosen.is_empty.long(), *fused.is_not_finite.long().T, *best.values()]
        columns, is_empty, *rest = torch.stack(parts).tolist()
        not_finite, of_drafters = rest[: len(self.members)], rest[len(self.members) :]
        choices = Choices(columns, is_empty, not_finite, dict(zip(best, of_drafters, strict=True)))
        if self._keeps_rows:
            decided = fused.logprobs
            if proposals is not None and chosen.falls_back is not None:
                decided = proposals.decided(chosen.falls_back)
            choices.kept = self._step.folded(decided), self._step.folded(chosen.scores)
        return choices

    def _run_primary_ahead(self, columns: Tensor) -> None:
        """If nothing is drafted now or in the next round, start the primary's next step before the host follows."""
        is_quiet = not any(row.columns for row in self._live)
        self._num_quiet = self._num_quiet + 1 if is_quiet else 0
        goes_on = any(len(row.ids) + 1 < self._max_new for row in self._live)
        if is_quiet and goes_on and (self._drafting.pause(self._live) or self._num_quiet >= _NUM_QUIET):
            ids = self.method.primary_ids(columns) if self._step.is_wide else columns
            self.states[0].run_ahead(ids.to(self.members[0].device))

    def _accept(self, choices: Choices, drafter: str | None) -> None:
        """Accept the choices up to where each row departs from its draft. A row that ends is no longer live."""
        after = {n: self._accept_row(row, choices, drafter) for n, row in enumerate(self._live)}
        going_on = {n: contexts for n, contexts in after.items() if contexts is not None}
        for member, reading in self._readings.items():
            reading.settle({n: contexts[member] for n, contexts in going_on.items()})
        self._live = [self._live[n] for n in going_on]
        warn_of_losses(self.states, self._warned_lossy)

    def _accept_row(self, row: Row, choices: Choices, drafter: str | None) -> dict[int, MemberContext] | None:
        """Accept the choices of one row, and return every member's context after them; None if the row ends."""
        contexts = row.contexts[0]
        num_used = num_accepted = 0
        goes_on = True
        for position, drafted in zip(row.positions, [*row.columns, None], strict=True):
            row.end = self._failure(row, position, choices)
            goes_on = row.end is None
            if not goes_on:
                break
            before, column = contexts, choices.columns[position]
            is_accepted = column == drafted
            num_used += 1
            num_accepted += is_accepted
            contexts = row.contexts[num_used] if is_accepted else self._writer.write(before, column)
            ids = contexts[0].ids[len(before[0].ids) :]
            kept = choices.kept and (choices.kept[0][position].clone(), choices.kept[1][position].clone())
            goes_on = self._write(row, column, ids, contexts, kept)
            if not (goes_on and is_accepted):
                break
        num_drafted = len(row.columns)
        row.rounds.append(SpeculationRound(drafter if num_drafted else None, num_drafted, num_accepted))
        row.used = row.positions[:num_used]
        return contexts if goes_on else None

    def _failure(self, row: Row, position: int, choices: Choices) -> MemberError | None:
        for member, is_wrong in zip(self.members, choices.not_finite, strict=True):
            if is_wrong[position]:
                return member.not_finite(row.where)
        return messages.nothing_left(self._method_name, row.where) if choices.is_empty[position] else None

    def _write(
        self, row: Row, column: int, ids: list[int], contexts: Mapping[int, MemberContext], kept: KeptRows | None
    ) -> bool:
        """Write an entry, given the contexts after it, and say whether the row goes on."""
        primary = self.members[0]
        if primary.max_positions is not None:
            # The id for which there is no position is the last.
            ids = ids[: len(ids) - max(0, len(contexts[0].ids) - primary.max_positions - 1)]
        row.append(column, ids, kept)
        if len(ids) == 1 and primary.is_control(ids[0]):
            warn_of_control(primary, ids[0], self._end_ids, self._warned_control)
        if not self._end_ids.isdisjoint(ids) or len(row.ids) >= self._max_new:
            return False
        full = self._writer.full_member(contexts)
        if full is not None:
            row.end = messages.no_position_left(full.name, full.max_positions, row.number, len(row.ids))
        return full is None

    def _keep(self, indices: Sequence[int]) -> None:
        """Let only these of the live rows be live."""
        if len(indices) < len(self._live):
            self.close()  # the begun step is for other rows
            for state in self.states.values():
                state.select(indices)
            self._live = [self._live[index] for index in indices]

    def _forced(self, primary_id: int) -> KeptRows:
        """The rows of logits and scores for an id that is forced: 0 there and `-inf` elsewhere."""
        row = torch.full((self.members[0].vocab_size,), -torch.inf, device=self.method.device)
        row[primary_id] = 0.0
        return row, row
