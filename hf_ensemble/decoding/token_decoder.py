"""One call's token-level fusion: the assistants' states, what has been written, and what is still queued."""

import math
import warnings
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .. import messages
from ..config import MethodConfig
from ..errors import MemberError
from ..members.member import Member
from ..members.state import MemberState
from ..methods.base import TokenMethod
from ..methods.captured import CapturedMix
from ..mixing import fold
from ..recording.recorder import DecisionRecorder
from ..vocabulary.context import MemberContext
from .prompts import OwnPrompts, expand_prompts, read_prompts
from .step_weights import MixingWeights
from .text_warnings import warn_of_control, warn_of_losses


class TokenFusion:
    """Turns the primary's logits of every step into the ensemble's, for the rows of one `generate` call.

    Every step goes: `fuse` (fused log-probabilities of every row), then, where the decision is made over the union
    vocabulary, `select`, then `receive` (the chosen ids reach the host, in one transfer, and every assistant's context
    follows the text).

    A member that no row needs at a step is not run: its states stay, and catch up in one forward pass when they are
    needed. Where only some rows need it, the others wait too, but are carried along in its batch.

    Args:
        members: The members; the first is the primary.
        method: The method, made for these members.
        config: The method's options.
        weights: Mixing weights, expanded to the rows.
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        is_wide: Whether the decision is made over the union vocabulary.
        runs_primary: Whether the primary runs here, where it is needed, instead of in the decoding loop at every step.
        keep_rows: Whether to keep the rows of `scores` and `logits` that `generate` returns.
        own_prompts: What members read in place of the text of the prompt ids.
        recorder: What records the decisions; None if nothing does.
        max_new_tokens: Most ids that a row can take, where that is known.

    Attributes:
        states: The state of each member that runs here, by member index.
        logits_rows, scores_rows: What was kept: rows over the primary's ids, before and after the processors.
    """

    def __init__(
        self,
        members: Sequence[Member],
        method: TokenMethod,
        config: MethodConfig,
        weights: MixingWeights,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        is_wide: bool,
        runs_primary: bool = False,
        keep_rows: bool = False,
        own_prompts: OwnPrompts | None = None,
        recorder: DecisionRecorder | None = None,
        max_new_tokens: int = 0,
    ):
        self.members = list(members)
        self.method = method
        self._method_name = config.name
        self._gate = config.gate_rule
        self._draws = config.draws_one
        self._mix = CapturedMix(method)
        self.is_wide = is_wide and method.is_wide
        self.keep_rows = keep_rows
        self._recorder = recorder
        self._closed: set[int] = set()
        self.logits_rows: list[Tensor] = []
        self.scores_rows: list[Tensor] = []
        self.num_steps = 0
        self._weights = weights
        self._last_plan: Tensor | None = None
        self._last_plan_there: Tensor | None = None
        self._num_primary_forwards = 0
        self._num_decided = [0] * prompt_ids.shape[0]
        self._num_ensembled = [0] * prompt_ids.shape[0]
        self._primary_bytes = members[0].encoder.token_bytes
        self._width = members[0].vocab_size
        self._input_ids = prompt_ids
        self._live = list(range(prompt_ids.shape[0]))
        self._place_of = {row: row for row in self._live}
        self._queues: list[deque[int]] = [deque() for _ in self._live]
        self._written: list[list[int]] = [[] for _ in self._live]
        self._entries = [b""] * len(self._live)
        self._chosen: Tensor | None = None
        self._empty: Tensor | None = None
        self._normalizers: Tensor | None = None
        self._warned_control: set[int] = set()
        participants = weights.participants if self._gate is None else weights.participants | {self._gate[0]}
        prompts = read_prompts(members, participants, method.resync, prompt_ids, prompt_mask, own_prompts)
        self._prompt_of_row: list[int] | None = prompts.prompt_of_row
        self._lengths = [len(prompts.ids[prompt]) for prompt in prompts.prompt_of_row]
        contexts = dict(prompts.contexts)
        if runs_primary:
            contexts[0] = [MemberContext.of_ids(members[0].encoder, ids) for ids in prompts.ids]
        self.runs_primary = runs_primary
        self._max_new = max_new_tokens
        # An assistant may cut the text finer.
        expected = {index: max_new_tokens if index == 0 else max_new_tokens * 5 // 4 for index in contexts}
        self.states = {
            index: MemberState(members[index], rows, None, expected[index]) for index, rows in contexts.items()
        }
        self._warned_lossy: set[int] = set()
        self._warn_of_losses()

    # Fusing

    def fuse(self, scores: Tensor, normalize: bool = True) -> Tensor:
        """Fuse the logits of one step.

        Args:
            scores: The primary's logits of shape `(batch_size, primary_vocab_size)`.
            normalize: Whether the primary's are raw logits, so that the fused scores shall carry the members'
                logsumexp, on which penalties depend; not so in beam search, which hands on log-probabilities.

        Returns:
            Fused log-probabilities plus the weighted logsumexp, in float32, of shape `(batch_size, union_size)` if the
            decision is made over the union vocabulary, else `(batch_size, primary_vocab_size)`.
        """
        self._num_primary_forwards += 1
        if self.is_wide and self._live and all(self._queues[row] for row in self._live):
            return scores
        primary = scores.float()
        logits: list[Tensor | None] = [None if self.runs_primary else primary, *([None] * (len(self.members) - 1))]
        plan = self._plan(logits)
        needed = plan != 0
        needed[:, 0] |= self.method.starts_from_primary
        if self._prompt_of_row is not None:
            waiting = {index for index in self.states if not needed[:, index].any()}
            self._expand_prompts(waiting)
        rows_of = {
            index: [row for row in self._live if needed[row, index]] for index in self.states if logits[index] is None
        }
        for index, rows in rows_of.items():
            if rows:
                # All are started before one is waited for.
                self.states[index].start(rows=[self._place_of[row] for row in rows])
        for index, rows in rows_of.items():
            logits[index] = self._run(index, rows, primary.device)
        if plan is not self._last_plan:
            self._last_plan, self._last_plan_there = plan, plan.to(primary.device)
        weights = self._last_plan_there
        assert weights is not None
        for index, member_logits in enumerate(logits):
            if member_logits is not None and not needed[:, index].all():
                # What a member says of a row in which it has no weight must not count, not even as NaN. For a primary
                # without weight this also means that EOS is written as its first EOS id.
                logits[index] = member_logits.masked_fill(weights[:, index, None] == 0, 0.0)
        if logits[0] is None:
            logits[0] = torch.zeros_like(primary)
        mixed = self._mix(logits, weights)
        takes_part = weights != 0
        takes_part[:, 0] |= self.method.starts_from_primary
        self._normalizers = torch.where(takes_part, mixed.normalizers, 0.0)
        fused = mixed.logprobs if self.is_wide else self.folded(mixed.logprobs)
        if self.keep_rows:
            self.logits_rows.append(self.folded(fused))
        if self._recorder is not None:
            queued = [row for row in self._live if self.is_wide and self._queues[row]]
            self._recorder.take(logits, fused, plan, needed, self._closed if self._gate else None, queued)
        return fused + (weights * self._normalizers).sum(-1, keepdim=True) if normalize else fused

    def _plan(self, logits: list[Tensor | None]) -> Tensor:
        """Decide who decides: the weights of this step, of shape `(batch_size, num_members)`, on the CPU.

        A gate member is run for it, and its logits put in their place.
        """
        plan = self._weights.at(self.num_steps, self._input_ids)
        for index, state in self.states.items():
            places = self._place_of if self._prompt_of_row is None else self._prompt_of_row
            sitting_out = [row for row in self._live if state.contexts[places[row]].sits_out]
            if sitting_out:
                plan = without_member(plan, index, sitting_out)
        deciding = [row for row in self._live if not (self.is_wide and self._queues[row])]
        for row in deciding:
            self._num_decided[row] += 1
        if len(deciding) < len(plan) and (self._draws or self._gate is not None or not self._live):
            # Rows that do not choose need nobody; the primary stands for them, so that there is something to mix.
            idle = torch.ones(len(plan), dtype=torch.bool)
            idle[deciding] = False
            plan = torch.where(idle[:, None], torch.eye(len(self.members))[0], plan)
        if self._draws and deciding:
            drawn = torch.multinomial(plan[deciding], 1)[:, 0]
            plan = plan.clone()
            plan[deciding] = torch.eye(len(self.members))[drawn]
        self._closed = set()
        if self._gate is not None and deciding:
            self._closed = self._closed_rows(deciding, logits)
            plan = plan.clone()
            plan[list(self._closed)] = torch.eye(len(self.members))[self._gate[0]]
        for row in deciding:
            self._num_ensembled[row] += row not in self._closed
        return plan

    def _closed_rows(self, rows: Sequence[int], logits: list[Tensor | None]) -> set[int]:
        """The rows of which the gate member is so sure that it decides alone."""
        assert self._gate is not None
        gate, threshold = self._gate
        if self._prompt_of_row is not None:
            self._expand_prompts(set(self.states) - {gate})
        if gate in self.states:
            contexts = self.states[gate].contexts
            rows = [row for row in rows if not contexts[self._place_of[row]].sits_out]
            logits[gate] = self._run(gate, rows, self.method.device)
        gate_logits = logits[gate]
        if not rows or gate_logits is None:
            return set()
        confidence = self.method.confidence(gate_logits, gate).tolist()
        for row in rows:
            if math.isnan(confidence[row]):
                raise self.members[gate].not_finite(f"in row {row} at step {self.num_steps + 1}")
        return {row for row in rows if confidence[row] > threshold}

    def _run(self, index: int, rows: Sequence[int], device: torch.device) -> Tensor | None:
        """A member's logits in these rows, of shape `(batch_size, vocab_size)`; None for no row."""
        if not rows:
            return None
        places = [self._place_of[row] for row in rows]
        # In the member's own dtype, of which half as much may travel.
        return self._spread(self.states[index].logits(rows=places).to(device).float())

    def _expand_prompts(self, waiting: Collection[int]) -> None:
        assert self._prompt_of_row is not None
        expand_prompts(self.states, self._prompt_of_row, waiting)
        self._prompt_of_row = None

    def folded(self, rows: Tensor) -> Tensor:
        """Fold rows over the union vocabulary onto the primary's ids; others as they are."""
        if rows.shape[-1] == self._width:
            return rows
        return fold(rows, self.method.first_ids_beyond_primary, self._width)

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Each member's forward passes so far."""
        counts = [self.states[n].num_forwards if n in self.states else 0 for n in range(len(self.members))]
        if not self.runs_primary:
            counts[0] = self._num_primary_forwards
        return tuple(counts)

    @property
    def share_ensembled(self) -> list[float]:
        """For each row, the share of its choices so far that were not a gate's alone."""
        pairs = zip(self._num_ensembled, self._num_decided, strict=True)
        return [ensembled / max(decided, 1) for ensembled, decided in pairs]

    # Choosing

    def select(self, scores: Tensor, do_sample: bool) -> Tensor:
        """Choose each row's entry, and hand out its first id or the next queued one.

        Args:
            scores: Processed scores, as `fuse` gave them.
            do_sample: Whether to draw from the softmax of `scores`; else the best is taken.

        Returns:
            Scores over the primary's ids: where the decision was made over the union vocabulary, 0 for the id to write
            and `-inf` elsewhere.
        """
        queued = {row: self._queues[row][0] for row in self._live if self._queues[row]} if self.is_wide else {}
        if len(queued) == len(self._live) and queued:
            forced = torch.zeros(scores.shape[0], dtype=torch.long)
            forced[list(queued)] = torch.tensor(list(queued.values()))
            self._chosen = None
            one_hot = self._one_hot(forced.to(scores.device))
            if self.keep_rows:
                self.logits_rows.append(one_hot)
                self.scores_rows.append(one_hot)
            return one_hot
        # Nothing is left to choose from, or NaN: reported when the host next looks; until then nothing may trip over it.
        self._empty = ~(scores.amax(-1) > -torch.inf)
        scores = scores.masked_fill(self._empty[:, None], 0.0)
        if not self.is_wide:
            return scores
        chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(-1)
        self._chosen = chosen
        ids = self.method.primary_ids(chosen)
        if queued:
            rows = torch.tensor(list(queued), device=ids.device)
            ids[rows] = torch.tensor(list(queued.values()), device=ids.device)
            chosen[rows] = ids[rows]
        one_hot = self._one_hot(ids)
        if self.keep_rows:
            self.scores_rows.append(self.folded(scores))
            if queued:
                self.scores_rows[-1] = self.scores_rows[-1].index_copy(0, rows, one_hot[rows])
                self.logits_rows[-1] = self.logits_rows[-1].index_copy(0, rows, one_hot[rows])
        return one_hot

    def check_finite(self) -> None:
        """Raise if a member gave NaN or infinite logits in this step, at the cost of a synchronisation."""
        if self._normalizers is not None:
            self._check_members((~self._normalizers.isfinite()).flatten().tolist(), self.num_steps + 1)
            self._normalizers = None

    def check_candidates(self, scores: Tensor, num_beams: int) -> None:
        """Raise if processors left no candidate to any beam of a prompt, at the cost of a synchronisation."""
        has_none = (scores.amax(-1) == -torch.inf).view(-1, num_beams).all(-1)
        if bool(has_none.any()):
            row = int(has_none.nonzero()[0, 0]) * num_beams
            raise messages.nothing_left(self._method_name, f"in row {row} at step {self.num_steps + 1}")

    # Following the text

    def receive(self, input_ids: Tensor, done: Tensor) -> Tensor:
        """Take the ids chosen in this step to the host and let the assistants' contexts follow.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
            done: Rows that end here, of shape `(batch_size,)`.

        Returns:
            `done`, and the rows in which a member has no position left.

        Raises:
            MemberError: If a member gave NaN or infinite logits, or every entry of a row was filtered out.
        """
        self.num_steps += 1
        self._input_ids = input_ids
        last = input_ids[:, -1]
        batch_size = len(last)
        packed = [last, last if self._chosen is None else self._chosen, done.long()]
        packed.append(torch.zeros_like(last) if self._empty is None else self._empty.long())
        if self._normalizers is not None:
            packed.append((~self._normalizers.isfinite()).long().flatten())
        on_device = torch.cat([part.to(last.device) for part in packed])
        self._run_primary_ahead(last)
        host = on_device.tolist()
        ids, chosen, ends, empty = (host[n * batch_size : (n + 1) * batch_size] for n in range(4))
        self._check_members(host[4 * batch_size :], self.num_steps)
        for row in self._live:
            if empty[row]:
                raise messages.nothing_left(self._method_name, f"in row {row} at step {self.num_steps}")
        self._empty = self._normalizers = None
        for row in self._live:
            if not ends[row]:
                self._follow(row, ids[row], chosen[row])
        full = self._rows_without_room(ends)
        self._drop([row for row in self._live if ends[row] or row in full])
        self._start_assistants()
        if full:
            done = done | torch.tensor([row in full for row in range(batch_size)], device=done.device)
        if self._recorder is not None:
            self._recorder.choose(last if self._chosen is None else self._chosen, done)
        self._chosen = None
        return done

    @property
    def _weights_stay(self) -> bool:
        """Whether who is needed at the next step is known before it, and there is one."""
        return (
            self._gate is None
            and not self._draws
            and not self._weights.varies
            and self._prompt_of_row is None
            and self.num_steps < self._max_new
        )

    def _run_primary_ahead(self, last_ids: Tensor) -> None:
        """Start the primary's next step, whose input is known on the device, before the host and the others follow."""
        if not self.runs_primary or not self._weights_stay or any(self._queues[row] for row in self._live):
            return
        if self._last_plan is not None and bool((self._last_plan[self._live, 0] != 0).all()):
            live = torch.tensor(self._live, device=last_ids.device) if len(self._live) < len(last_ids) else slice(None)
            self.states[0].run_ahead(last_ids[live])

    def _start_assistants(self) -> None:
        """Start the next step of members that run beside the host, before the decoding loop comes to it."""
        if not self._weights_stay or self._last_plan is None:
            return
        for index, state in self.states.items():
            places = [place for place, row in enumerate(self._live) if self._last_plan[row, index] != 0]
            if index and places and state.is_captured:
                state.start(rows=places)

    def follow_beams(self, input_ids: Tensor) -> bool:
        """Let the contexts follow rows that may have moved: each continues the row whose ids it extends by one.

        Returns:
            False if the ids are no continuation of those of the last step.
        """
        before = self._input_ids
        if input_ids.shape != (before.shape[0], before.shape[1] + 1):
            return False
        same = (input_ids[:, None, :-1] == before.to(input_ids.device)[None]).all(-1)  # (B, B)
        host = torch.stack(
            [same.any(-1).long(), same.long().argmax(-1), same.diagonal().long(), input_ids[:, -1]]
        ).tolist()
        found, first, stays, last = host
        if not all(found):
            return False
        parents = [row if stays[row] else first[row] for row in range(len(last))]
        if parents != list(range(len(parents))):
            for state in self.states.values():
                state.select(parents, [state.contexts[parent].copy() for parent in parents])
            self._lengths = [self._lengths[parent] for parent in parents]
        self.num_steps += 1
        self._input_ids = input_ids
        for row, primary_id in enumerate(last):
            self._write(row, primary_id)
        for member, longest in self._lengths_by_member():
            if member.max_positions is not None and longest > member.max_positions:
                raise MemberError(
                    f"member {member.name!r} has positions for {member.max_positions} ids, which are used up after "
                    f"{self.num_steps} new ids. Ask for fewer."
                )
        return True

    def _follow(self, row: int, primary_id: int, chosen: int) -> None:
        """Let one row's contexts follow an id: at once, or when the entry that it belongs to is complete."""
        queue = self._queues[row]
        if queue:
            if queue[0] == primary_id:
                queue.popleft()
                self._written[row].append(primary_id)
                self._append(row, primary_id)
                if not queue:
                    self._written[row] = []
                    self._write_bytes(row, self._entries[row])
                return
            # Somebody wrote another id than the queued one: what was written of the entry stands as it is.
            queue.clear()
            for written in self._written[row]:
                self._write_bytes(row, self._primary_bytes.write([written]))
            self._written[row] = []
        elif chosen >= self._width:
            ids = self.method.union.continuation(chosen, 0) or []
            if ids and ids[0] == primary_id:
                self._append(row, primary_id)
                if len(ids) == 1:
                    self._write_bytes(row, self.method.union.entry(chosen))
                else:
                    queue.extend(ids[1:])
                    self._entries[row] = self.method.union.entry(chosen)
                    self._written[row] = [primary_id]
                return
        self._write(row, primary_id)

    def _append(self, row: int, primary_id: int) -> None:
        self._lengths[row] += 1
        if self.runs_primary:
            self.states[0].contexts[self._place_of[row]].ids.append(primary_id)

    def _write(self, row: int, primary_id: int) -> None:
        self._append(row, primary_id)
        if self.members[0].is_control(primary_id):
            warn_of_control(self.members[0], primary_id, self.method.maps[0].eos_ids.tolist(), self._warned_control)
        self._write_bytes(row, self._primary_bytes.write([primary_id]))

    def _write_bytes(self, row: int, data: bytes) -> None:
        place = self._place_of[row]
        for index, state in self.states.items():
            if index > 0:
                state.contexts[place].write(data)
        self._warn_of_losses()

    def _drop(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        dropped = set(rows)
        kept = [place for place, row in enumerate(self._live) if row not in dropped]
        self._live = [self._live[place] for place in kept]
        self._place_of = {row: place for place, row in enumerate(self._live)}
        for state in self.states.values():
            state.select(kept, [state.contexts[place] for place in kept])

    def _spread(self, logits: Tensor) -> Tensor:
        """Put the live rows' logits at their places among all rows; zeros elsewhere."""
        if logits.shape[0] == len(self._queues):
            return logits
        rows = torch.tensor(self._live, device=logits.device)
        return logits.new_zeros(len(self._queues), logits.shape[-1]).index_copy_(0, rows, logits)

    def _one_hot(self, ids: Tensor) -> Tensor:
        rows = torch.full((len(ids), self._width), -torch.inf, device=ids.device)
        return rows.scatter_(1, ids[:, None], 0.0)

    # Checking

    def _warn_of_losses(self) -> None:
        contexts = {index: state.contexts for index, state in self.states.items()}
        warn_of_losses(self.members, contexts, self._warned_lossy)

    def _check_members(self, not_finite: Sequence[int], step: int) -> None:
        """Raise if a member's logits are not finite in a live row. The flags are row by row, a member each."""
        count = len(self.members)
        for row in self._live:
            for index, member in enumerate(self.members):
                if not_finite and not_finite[row * count + index]:
                    raise member.not_finite(f"in row {row} at step {step}")

    def _lengths_by_member(self) -> list[tuple[Member, int]]:
        """Each running member and the number of its ids in the longest row."""
        lengths = [(self.members[0], max(self._lengths, default=0))]
        for index, state in self.states.items():
            if index == 0:
                continue
            lengths.append((self.members[index], max((len(context.ids) for context in state.contexts), default=0)))
        return lengths

    def _rows_without_room(self, ends: Sequence[int]) -> set[int]:
        """Rows that have to end because a member has no position left for what was just written."""
        full: set[int] = set()
        for index, member in enumerate(self.members):
            limit = member.max_positions
            if limit is None or (index > 0 and index not in self.states):
                continue
            for place, row in enumerate(self._live):
                length = self._lengths[row] if index == 0 else len(self.states[index].contexts[place].ids)
                if not ends[row] and length > limit:
                    full.add(row)
                    warnings.warn(messages.no_position_left(member.name, limit, row, self.num_steps), stacklevel=2)
        return full


def without_member(plan: Tensor, member: int, rows: Sequence[int]) -> Tensor:
    """Take a member out of some rows, and scale the other weights there to the sum that they had with it."""
    kept = plan.clone()
    kept[list(rows), member] = 0.0
    before, after = plan.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    # Where some are negative they are no shares of anything, and stay as given.
    is_share = (plan >= 0).all(-1, keepdim=True) & (after > 0)
    kept = torch.where(is_share, kept * before / after, kept)
    # Where nobody else has a weight, the primary goes on until the member can.
    kept[(kept == 0).all(-1), 0] = 1.0
    return kept
