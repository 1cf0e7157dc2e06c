"""One call that decides token by token: fuse, settle, select, and follow the text."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LogitsProcessor

from .. import messages
from ..errors import MemberError
from ..members.transfer import sent
from ..methods.base import TokenMethod
from ..recording.recorder import DecisionRecorder
from .allowed import with_allowed
from .call import Call
from .call import end_ids as end_ids_of
from .live_rows import LiveRows
from .progress import RowProgress
from .proposals import Proposals, RaisedIds
from .step import Fused, FusedStep


class TokenDecoder:
    """Turns the primary's logits of every step into the ensemble's, for the rows of one `generate` call.

    The phases of a step are: `fuse` (fused log-probabilities of every row), `settle` if constraints act on few
    proposals, `select` if the decision is over the union vocabulary, `run_ahead` (the primary's next step starts, if
    possible), and `receive` (the chosen ids reach the host in one transfer, and every member's context follows the
    text). A GPU waits for everything launched before `run_ahead`, so checks that can run later do.

    Args:
        call: The call; its weights are expanded to the rows.
        method: The method, made for its members.
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        end_ids: The primary's ids that end a text, and others that cause no warning when they are written.
        is_wide: Whether the decision is made over the union vocabulary.
        constraints: The processors that are not warpers, between `fuse` and `settle`.
        runs_primary: Whether the primary runs here when needed, instead of in the decoding loop at every step.
        keep_rows: Whether to keep the rows of `scores` and `logits` that `generate` returns.
        recorder: Records the decisions; None for no records.
        max_new_tokens: Largest number of ids that a row can take, if known.

    Attributes:
        rows: The rows, and the members' states of them.
        faults: Rows that had to end at this step, and why, if others continue; otherwise the error is raised.
        is_constrained: Whether constraints act between `fuse` and `settle` and may allow none of the proposals.
        logits_rows, scores_rows: The kept rows over the primary's ids, before and after the processors.
    """

    kind_of_rows = LiveRows

    def __init__(
        self,
        call: Call,
        method: TokenMethod,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        end_ids: Collection[int],
        *,
        is_wide: bool,
        constraints: Sequence[LogitsProcessor] = (),
        runs_primary: bool = False,
        keep_rows: bool = False,
        recorder: DecisionRecorder | None = None,
        max_new_tokens: int = 0,
    ):
        self.call, self.members, self.method = call, call.members, method
        gate = call.config.gate_rule
        draws = self._draws = call.draws
        self._step = FusedStep(
            call.members, method, is_wide=is_wide, gate=gate, draws=draws if call.config.draws_one else None
        )
        self.is_wide = self._step.is_wide
        self.rows = self.kind_of_rows(
            call,
            method,
            prompt_ids,
            prompt_mask,
            end_ids,
            runs_primary,
            max_new_tokens,
            self._step.listed,
            needs_whole_rows=(bool(constraints) and method.proposes_few) or recorder is not None,
        )
        self._max_new: float = max_new_tokens
        self.faults: dict[int, MemberError] = {}
        self._keeps_rows = keep_rows
        # Without an id that ends a text, the stock loop continues every row until all rows are done.
        self._writes_on = call.settings is not None and not end_ids_of(call.settings)
        self._recorder = recorder
        self._keeps_fused = recorder is not None
        self.is_constrained = bool(constraints)
        self._raised = RaisedIds(constraints)
        self.logits_rows: list[Tensor] = []
        self.scores_rows: list[Tensor] = []
        self._width = call.members[0].vocab_size
        self._input_ids = prompt_ids
        self._progress = [RowProgress() for _ in range(len(prompt_ids))]
        self._num_primary_forwards = 0
        self._recorded: Fused | None = None
        self._fused: Fused | None = None  # for members that list few ids and are asked for others afterwards
        self._proposals: Proposals | None = None
        self._normalizers: Tensor | None = None
        self._queued: list[int] = []
        self._last_plan: Tensor | None = None
        self._chosen: Tensor | None = None
        self._selected_from: Tensor | None = None

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Each member's forward passes so far."""
        states = self.rows.states
        counts = [states[n].num_forwards if n in states else 0 for n in range(len(self.members))]
        if not self.rows.runs_primary:
            counts[0] = self._num_primary_forwards
        return tuple(counts)

    @property
    def share_in_one_request(self) -> tuple[float | None, ...] | None:
        """For each member the share of rows and steps in which one request to its server was enough; see `LiveRows`."""
        return self.rows.share_in_one_request

    @property
    def share_ensembled(self) -> list[float]:
        """For each row, the share of its choices so far that no gate made alone."""
        return [row.num_ensembled / max(row.num_decided, 1) for row in self._progress]

    # Fusing

    def fuse(self, scores: Tensor, add_level: bool = True) -> Tensor:
        """Fuse the logits of one step.

        Args:
            scores: The primary's logits of shape `(batch_size, primary_vocab_size)`.
            add_level: Whether to add the members' weighted logsumexp, on which penalties depend: not in beam search,
                which passes on log-probabilities, nor if the primary alone decides, whose logits stay unchanged.

        Returns:
            Fused log-probabilities, plus that logsumexp if it is added, in float32, of shape `(batch_size, union_size)` if the
            decision is made over the union vocabulary, else `(batch_size, primary_vocab_size)`.

        Raises:
            MemberError: If a member fails, or the gate member returned NaN or infinite logits.
        """
        self._num_primary_forwards += 1
        live = self.rows.live
        self._queued = [row for row in live if self._progress[row].to_write]
        if live and len(self._queued) == len(live):
            return scores
        raised = self._raised.at(self._input_ids, scores) if self.rows.lists_few else None
        wanted = {} if raised is None else {row: raised[row].nonzero()[:, 0].tolist() for row in live}
        self.rows.begin(scores.float(), wanted)
        weights = self.call.weights.at(self.rows.num_steps, self._input_ids)
        deciding = [row for row in live if not self._progress[row].to_write]
        fused = self._step.run(self.rows, weights, deciding, self.is_constrained)
        for row in deciding:
            self._progress[row].num_decided += 1
            self._progress[row].num_ensembled += fused.closed is None or row not in fused.closed
        self._last_plan = fused.plan
        self._normalizers = fused.normalizers
        self._fused = fused if self.rows.lists_few else None
        if self._keeps_fused:
            self._recorded = fused
        if self._keeps_rows:
            self.logits_rows.append(self._step.folded(fused.logprobs))
        self._proposals = None if fused.whole is None else Proposals(fused.logprobs, fused.whole)
        rows = fused.logprobs if self._proposals is None else self._proposals.offered
        return rows + fused.level if add_level else rows

    def fuse_beams(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let the contexts follow the beams, and fuse the log-probabilities of one step.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
            scores: The primary's log-probabilities, of shape `(batch_size, primary_vocab_size)`.

        Raises:
            MemberError: If a member fails, returned NaN or infinite logits, or has no position left.
        """
        self.follow_beams(input_ids)
        fused = self.fuse(scores, add_level=False)
        self.check_finite()
        return fused

    def settle(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let the proposals decide alone in rows where the processors allow some of them.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
            scores: The result of `fuse` after the processors, of shape `(batch_size, primary_vocab_size)`.

        Returns:
            Scores of the same shape.
        """
        if self._proposals is None:
            return scores
        settled, decided = self.settle_with(scores, self._raised.at(input_ids, scores))
        if self._keeps_rows:
            self.logits_rows[-1] = decided
        if self._recorded is not None:
            self._recorded = replace(self._recorded, logprobs=decided)
        return settled

    def settle_with(self, scores: Tensor, raised: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same as `settle`, given which ids an option raises; also returns the log-probabilities of the decision.

        All are of shape `(batch_size, primary_vocab_size)`.
        """
        assert self._proposals is not None
        if self._fused is not None:
            self._proposals, scores = with_allowed(
                self.rows, self._step, self._fused, self._proposals, scores, self._queued
            )
        settled, falls_back = self._proposals.settled(scores, raised)
        return settled, self._proposals.decided(falls_back)

    # Choosing

    def select(self, scores: Tensor, do_sample: bool | Sequence[bool]) -> Tensor:
        """Choose each row's entry, and return its first id, or the next id of the entry in progress.

        Args:
            scores: Processed scores from `fuse`.
            do_sample: Whether to draw from the softmax of `scores`, for all rows or per row; otherwise the best is
                taken.

        Returns:
            Scores over the primary's ids. If the decision was made here, over the union vocabulary or by the row's own
            draws, they are 0 for the id to write and `-inf` elsewhere.
        """
        next_ids = [self._progress[row].to_write[0] for row in self._queued]
        if self._queued and len(self._queued) == len(self.rows.live):
            forced = torch.zeros(scores.shape[0], dtype=torch.long)
            forced[self._queued] = torch.tensor(next_ids)
            self._chosen = None
            one_hot = self._one_hot(forced.to(scores.device))
            if self._keeps_rows:
                self.logits_rows.append(one_hot)
                self.scores_rows.append(one_hot)
            return one_hot
        if self._recorder is not None and (fused := self._recorded) is not None:
            said = fused.logits, fused.logprobs, fused.plan, fused.needed, fused.closed
            self._recorder.take(*said, self._queued, self.rows.normalizers(), fused.starts)
            self._recorded = None
        self._selected_from = scores
        draws = [do_sample] * len(scores) if isinstance(do_sample, bool) else do_sample
        if any(draws) or self._keeps_rows:
            # A row with nothing left, or with NaN, is reported at the next host check; until then it gets harmless
            # scores.
            scores = scores.masked_fill(_is_empty(scores)[:, None], 0.0)
        if not self.is_wide and not (any(draws) and self._draws.are_seeded):
            return scores
        chosen = self._draws.choose(scores.softmax(-1), self._drawing(draws)) if any(draws) else scores.argmax(-1)
        if any(draws) and not all(draws):
            chosen = torch.where(sent(draws, chosen.device), chosen, scores.argmax(-1))
        self._chosen = chosen
        ids = self.method.primary_ids(chosen)
        if self._queued:
            rows = torch.tensor(self._queued, device=ids.device)
            ids[rows] = torch.tensor(next_ids, device=ids.device)
            chosen[rows] = ids[rows]
        one_hot = self._one_hot(ids)
        if self._keeps_rows:
            self.scores_rows.append(self._step.folded(scores))
            if self._queued:
                self.scores_rows[-1] = self.scores_rows[-1].index_copy(0, rows, one_hot[rows])
                self.logits_rows[-1] = self.logits_rows[-1].index_copy(0, rows, one_hot[rows])
        return one_hot

    def _drawing(self, draws: Sequence[bool]) -> list[int | None]:
        """The rows that are sampled, each at its index."""
        drawing = set(self.rows.live) - set(self._queued)
        return [row if draw and row in drawing else None for row, draw in enumerate(draws)]

    def _one_hot(self, ids: Tensor) -> Tensor:
        rows = torch.full((len(ids), self._width), -torch.inf, device=ids.device)
        return rows.scatter_(1, ids[:, None], 0.0)

    def check_finite(self) -> None:
        """Raise if a member returned NaN or infinite logits in this step, at the cost of a synchronisation.

        Raises:
            MemberError: If one did.
        """
        if self._normalizers is not None:
            self._check_members((~self._normalizers.isfinite()).flatten().tolist())
            self._normalizers = None

    def check_candidates(self, scores: Tensor, num_beams: int) -> Tensor:
        """Raise if processors left no candidate to any beam of a prompt, at the cost of a synchronisation.

        Args:
            scores: Of shape `(batch_size * num_beams, primary_vocab_size)`.
            num_beams: Number of beams.

        Returns:
            `scores`, from which `generate` itself chooses.

        Raises:
            MemberError: If so.
        """
        has_none = (scores.amax(-1) == -torch.inf).view(-1, num_beams).all(-1)
        if bool(has_none.any()):
            row = int(has_none.nonzero()[0, 0]) * num_beams
            raise messages.nothing_left(self.call.config.name, self.rows.where(row))
        return scores

    def _check_members(self, is_not_finite: Sequence[int]) -> None:
        """Raise if a member's logits are not finite in a live row. The flags have one column per member."""
        count = len(self.members)
        for row in self.rows.live:
            for index, member in enumerate(self.members):
                if is_not_finite and is_not_finite[row * count + index]:
                    self._fault(row, member.not_finite(self.rows.where(row)))

    def _fault(self, row: int, error: MemberError) -> None:
        """End the row, and with it the call."""
        raise error

    # Following the text

    def run_ahead(self, input_ids: Tensor) -> None:
        """Start the primary's next step, whose input is known on the device, before the host and the others follow.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
        """
        live, needed = self.rows.live, self._needed_next(1)
        if not self.rows.runs_primary or needed is None or any(self._progress[row].to_write for row in live):
            return
        if bool(needed[live, 0].all()):
            last_ids = input_ids[:, -1]
            all_live = len(live) == len(last_ids)
            self.rows.states[0].run_ahead(last_ids if all_live else last_ids[sent(live, last_ids.device)])

    def receive(self, input_ids: Tensor, done: Tensor) -> Tensor:
        """Take the ids chosen in this step to the host and let the members' contexts follow.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
            done: Rows that end here, of shape `(batch_size,)`.

        Returns:
            `done`, and the rows in which a member has no position left.

        Raises:
            MemberError: If a member returned NaN or infinite logits, or every entry of a row was filtered out.
        """
        self._input_ids = input_ids
        last = input_ids[:, -1]
        batch_size = len(last)
        packed = [last, last if self._chosen is None else self._chosen, done]
        packed.append(torch.zeros_like(last) if self._selected_from is None else _is_empty(self._selected_from))
        if self._normalizers is not None:
            packed.append(~self._normalizers.isfinite().flatten())
        host = torch.cat([part.to(last.device, torch.long) for part in packed]).tolist()
        ids, chosen, ends, is_empty = (host[n * batch_size : (n + 1) * batch_size] for n in range(4))
        self._check_members(host[4 * batch_size :])
        if self._writes_on and not all(ends):
            ends = [0] * batch_size
        for row in self.rows.live:
            if is_empty[row]:
                self._fault(row, messages.nothing_left(self.call.config.name, self.rows.where(row)))
        for row in self.faults:
            ends[row] = 1
        self._selected_from = self._normalizers = None
        self.rows.num_steps += 1
        for row in self.rows.live:
            if not ends[row]:
                self._follow(row, ids[row], chosen[row])
        self.rows.warn_of_losses()
        full = self.rows.without_room(ends)
        self.rows.drop({row for row in self.rows.live if ends[row]} | full)
        needed = self._needed_next(0)
        if needed is not None:
            self.rows.start_assistants(needed.tolist())
        if full:
            done = done | torch.tensor([row in full for row in range(batch_size)], device=done.device)
        if self._recorder is not None:
            self._recorder.choose(last if self._chosen is None else self._chosen, done)
        self._chosen = None
        return done

    def _needed_next(self, num_more: int) -> Tensor | None:
        """Which members each row needs `num_more` steps after the next one; None if no step follows, or if unknown."""
        is_last = self.rows.num_steps + num_more >= self._max_new
        if self._last_plan is None or not self.rows.is_expanded or is_last:
            return None
        decides = [not row.to_write for row in self._progress]
        return self._step.needed_next(self._last_plan, decides, self.call.weights.varies)

    def follow_beams(self, input_ids: Tensor) -> bool:
        """Let the contexts follow rows that may have moved: each continues the row whose ids it extends by one.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.

        Returns:
            False if the ids do not continue those of the last step.

        Raises:
            MemberError: If a member has no position left.
        """
        before = self._input_ids
        if input_ids.shape != (before.shape[0], before.shape[1] + 1):
            return False
        same = (input_ids[:, None, :-1] == before.to(input_ids.device)[None]).all(-1)  # (B, B)
        if self.call.own_prompts is not None:
            same &= self.call.own_prompts.shared_by_rows(len(before)).to(same.device)
        host = torch.stack(
            [same.any(-1).long(), same.long().argmax(-1), same.diagonal().long(), input_ids[:, -1]]
        ).tolist()
        found, first, stays, last = host
        if not all(found):
            return False
        self.rows.move([row if stays[row] else first[row] for row in range(len(last))])
        self.rows.num_steps += 1
        self._input_ids = input_ids
        for row, primary_id in enumerate(last):
            self.rows.write(row, primary_id)
        self.rows.warn_of_losses()
        self.rows.check_room()
        return True

    def _follow(self, row: int, primary_id: int, chosen: int) -> None:
        """Let one row's contexts follow an id, at once or when its entry is complete."""
        entry = self._progress[row]
        if not entry.to_write and chosen >= self._width:
            ids, entry.data = self._step.entry(chosen)
            entry.to_write, entry.written = deque(ids), []
        if entry.to_write and entry.to_write[0] == primary_id:
            entry.written.append(entry.to_write.popleft())
            self.rows.append(row, primary_id)
            if not entry.to_write:
                self.rows.write_bytes(row, entry.data)
            return
        if entry.to_write:
            # Another id was written than the one that was due: the part of the entry written so far stays.
            for written in entry.written:
                self.rows.write_bytes(row, self.members[0].encoder.token_bytes.write([written]))
            entry.to_write.clear()
        self.rows.write(row, primary_id)


def _is_empty(scores: Tensor) -> Tensor:
    """Which rows have nothing left to choose, or NaN."""
    return ~(scores.amax(-1) > -torch.inf)
