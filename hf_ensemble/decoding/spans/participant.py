"""One member in the rounds of a call: it writes spans, reads those of others, and scores them."""

import dataclasses
import math
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...errors import MemberError
from ...members.cuda_graphs import Captured
from ...members.state import MemberState, PlainContext
from ...members.transfer import sent
from ...methods.sweetspan import SpanScore, SweetSpanConfig, span_score
from ...recording.spans import SpanCandidate
from ...vocabulary.context import MemberContext
from ...vocabulary.encoding import ByteEncoder
from ...vocabulary.token_bytes import TEXT
from ...vocabulary.words import Span, read_span
from ..call import Call
from ..loop import Loop
from ..teacher_forcing import OwnLogProbs
from .rows import SpanRow


@dataclass
class Proposal:
    """What a member wrote in one row.

    Attributes:
        span: The span.
        ids: The ids that it wrote, up to the one that completed the span.
        log_probs: The log-probability of each id.
        eos_log_probs: The log-probability of all EOS ids together, at each id's position.
        best_eos: The best EOS id at each id's position.
        first_log_probs: Log-probabilities of the first id, of shape `(vocab_size,)`.
        last_logits: The logits from which the last id was chosen, of the same shape.
    """

    span: Span
    ids: list[int]
    log_probs: list[float]
    eos_log_probs: list[float]
    best_eos: list[int]
    first_log_probs: Tensor
    last_logits: Tensor


@dataclass
class Reading:
    """A candidate as one member reads it after its prefix.

    Attributes:
        context: The member's context, candidate included.
        ids: The ids that it reads.
        num_tokens: Their number, EOS included.
        log_prob: Its log-probability, once known.
        eos_id: The best EOS id after it, once known.
        fork_row: Row of the member's fork that has read it, if it took a forward pass.
    """

    context: MemberContext
    ids: list[int]
    num_tokens: int
    log_prob: float | None = None
    eos_id: int | None = None
    fork_row: int | None = None


@dataclass
class Offer:
    """A candidate in one row.

    Attributes:
        candidate: The candidate.
        readings: How the members read it, by their indices.
    """

    candidate: SpanCandidate
    readings: dict[int, Reading]

    def score(self, member: int, score: SpanScore) -> float | None:
        """A member's score of the candidate, EOS counted as one byte; None if it reads no token of it.

        Args:
            member: The member's number.
            score: Which score.
        """
        reading = self.readings[member]
        if not reading.num_tokens:
            return None
        assert reading.log_prob is not None
        num_bytes = len(self.candidate.data) + self.candidate.has_eos
        return span_score(reading.log_prob, reading.num_tokens, num_bytes, score)


class Participant(MemberState):
    """A member's state in the rounds of one call. Its contexts hold everything decided so far in each live row.

    Args:
        call: The call.
        loop: Its loop, whose processors act on the member's logits while it proposes.
        index: The member's number.
        eos_ids: The ids that end its texts.
        contexts: What it reads of each prompt.

    Attributes:
        log_probs: Turns its logits into log-probabilities over its ids.
    """

    def __init__(self, call: Call, loop: Loop, index: int, eos_ids: Sequence[int], contexts: Sequence[MemberContext]):
        member, settings = call.members[index], loop.settings
        mode = None if settings.use_cache is not False else "recompute"
        self._config: SweetSpanConfig = call.config  # type: ignore[assignment]
        super().__init__(member, contexts, mode, loop.max_new_tokens + 2 * self._config.span_length)
        self.index = index
        self.eos_ids = list(eos_ids)
        self.log_probs = OwnLogProbs(member)
        self._primary = call.members[0].encoder
        self._processors = LogitsProcessorList(loop.processors)
        self._draws = call.draws.of_member(index) if settings.do_sample else None
        control_eos = [i for i in eos_ids if member.is_control(i)]
        may_be_written = member.encoder.token_bytes.kinds == TEXT
        may_be_written[control_eos] = True
        self._is_no_text = torch.as_tensor(~may_be_written, device=member.device)
        self._control_eos = torch.tensor(control_eos, dtype=torch.long, device=member.device)
        self._fork: MemberState | None = None
        own = weakref.proxy(self)  # or the buffers of its caches would wait for the garbage collector
        self._best = Captured(lambda logits: own._best_of(logits), can_capture=self.member.is_captured)
        self._proposals: Sequence[Proposal] = ()

    # Writing

    def propose(self, rows: Sequence[SpanRow]) -> Generator[None, None, list[Proposal]]:
        """Write a span in every live row, after everything decided there.

        Args:
            rows: The live rows.

        Yields:
            After a forward pass is started, before it is waited for.

        Returns:
            A proposal for each live row.

        Raises:
            MemberError: If the member returns NaN, or has nothing left to choose from.
        """
        self.start()
        yield
        logits = self.logits()
        self.caches.hold()
        contexts = self.contexts
        self.contexts = drafts = [PlainContext(list(context.ids)) for context in contexts]
        num_free = [self.member.max_length - len(draft.ids) for draft in drafts]
        first_log_probs: Tensor | None = None
        steps: list[Tensor] = []
        written: list[list[int]] = [[] for _ in rows]
        lengths = [0] * len(rows)
        last_logits: dict[int, Tensor] = {}
        while True:
            chosen, seen, log_probs = self._choose_ids(rows, logits, written, lengths)
            first_log_probs = log_probs if first_log_probs is None else first_log_probs
            steps.append(seen)
            for place, i in enumerate(chosen.tolist()):
                written[place].append(i)
                # A complete row continues as long as it has positions, so that all rows' caches grow together.
                has_room = len(written[place]) < num_free[place]
                if has_room:
                    drafts[place].ids.append(i)
                if not lengths[place] and (not has_room or self._span(rows[place], written[place]).is_complete):
                    lengths[place], last_logits[place] = len(steps), logits[place]
            if all(lengths):
                break
            self.start()
            yield
            logits = self.logits()
        self.contexts = contexts
        proposals = []
        for place, seen in enumerate(torch.stack(steps, dim=-1).transpose(0, 1).tolist()):
            length, where = lengths[place], rows[place].where
            own, eos, best_eos, is_nan, is_empty = (values[:length] for values in seen)
            if any(is_nan):
                raise self.member.not_finite(where)
            if any(is_empty):
                raise MemberError(
                    f"member {self.member.name!r} has nothing left to choose from {where}: processors and filters "
                    "removed every id. Loosen them."
                )
            ids = written[place][:length]
            span = self._span(rows[place], ids)
            if contexts[place].loses_space:
                # Its tokenizer's space before a first word.
                span = dataclasses.replace(span, data=span.data.removeprefix(b" ") or span.data)
            found = own, eos, list(map(int, best_eos)), first_log_probs[place], last_logits[place]
            proposals.append(Proposal(span, ids, *found))
        self._proposals = proposals
        return proposals

    def _span(self, row: SpanRow, ids: Sequence[int]) -> Span:
        token_bytes, config = self.member.encoder.token_bytes, self._config
        return read_span(ids, token_bytes, self.eos_ids, config.span_length, config.token_limit, row.begun)

    def _choose_ids(
        self, rows: Sequence[SpanRow], logits: Tensor, written: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the next id of every row.

        Nothing is drawn for complete spans, whose length is not 0.

        Returns:
            The ids, of shape `(num_rows,)`; what `_seen` says of them; log-probabilities of all ids.
        """
        early = [place for place, ids in enumerate(written) if self._is_early(rows[place], ids)]
        if not (early or self._processors or self._draws):
            return self._best(logits)  # type: ignore[return-value]
        scores = logits.float().masked_fill(self._is_no_text, -torch.inf)
        if early and self.eos_ids:
            scores[torch.tensor(early)[:, None], torch.tensor(self.eos_ids)] = -torch.inf
        if self._processors:
            # One row at a time, because contexts differ in length.
            of_rows = [
                self._processors(torch.tensor([draft.ids], device=scores.device), scores[place : place + 1])  # type: ignore[arg-type]
                for place, draft in enumerate(self.contexts)
            ]
            scores = torch.cat(of_rows)
        chosen = scores.argmax(-1)
        if self._draws is not None:
            # The draw fails for all rows if one has no finite score. Such a row draws anything here, and `propose` raises.
            probs = scores.masked_fill(~scores.amax(-1, keepdim=True).isfinite(), 0.0).softmax(-1)
            drawing = [None if length else row.number for row, length in zip(rows, lengths, strict=True)]
            chosen = self._draws.choose(probs, drawing)
        log_probs = self.log_probs(logits)
        return chosen, self._seen(log_probs, chosen, scores), log_probs

    def _best_of(self, logits: Tensor) -> tuple[Tensor, ...]:
        """What `_choose_ids` does where nothing acts on the logits."""
        scores = logits.float().masked_fill(self._is_no_text, -torch.inf)
        chosen, log_probs = scores.argmax(-1), self.log_probs(logits)
        return chosen, self._seen(log_probs, chosen, scores), log_probs

    def _is_early(self, row: SpanRow, ids: Sequence[int]) -> bool:
        """Whether a row has too few of the primary's ids for its text to end."""
        missing = row.num_missing
        if missing > 0 and self.index > 0:
            ids = self._primary.encode_context_bytes(self.member.encoder.token_bytes.write(ids))
        return len(ids) < missing

    def _seen(self, log_probs: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """What the host reads of a step when the span is complete, of shape `(5, num_rows)`; see `propose`."""
        is_empty = ~(scores.amax(-1) > -torch.inf)
        eos_log_probs, best_eos = self._eos_log_probs(log_probs)
        of_chosen = log_probs.gather(-1, chosen[:, None])[:, 0]
        seen = [of_chosen, eos_log_probs, best_eos, log_probs.amax(-1).isnan(), is_empty]
        return torch.stack([values.double() for values in seen])

    def _eos_log_probs(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of all EOS ids together, and the best of them (-1 for none), each of shape `(batch_size,)`."""
        if not len(self._control_eos):
            nothing = log_probs[:, 0]
            return torch.full_like(nothing, -torch.inf), torch.full_like(nothing, -1, dtype=torch.long)
        at_eos = log_probs[:, self._control_eos]
        return at_eos.logsumexp(-1), self._control_eos[at_eos.argmax(-1)]

    # Reading

    def read(self, place: int, candidate: SpanCandidate, own: Proposal) -> Reading:
        """Read a candidate in a row. If the member wrote it itself, in the same ids, it is already scored.

        Args:
            place: The place of the row among the live ones.
            candidate: The candidate.
            own: The member's own proposal.
        """
        context = self.contexts[place].copy()
        if self.index == 0:
            context.ids += primary_ids(self._primary, candidate.data, own.ids) or []
        else:
            context.write(candidate.data)
        new = context.ids[len(self.contexts[place].ids) :]
        reading = Reading(context, new, len(new) + candidate.has_eos)
        if own.ids[: len(new)] == new and len(own.ids) >= reading.num_tokens:
            reading.log_prob = sum(own.log_probs[: len(new)])
            if candidate.has_eos:
                reading.log_prob += own.eos_log_probs[len(new)]
                reading.eos_id = own.best_eos[len(new)]
        elif candidate.has_eos and self.index in candidate.proposers:
            # If it is the only candidate, it is not scored, and this id ends the text.
            reading.eos_id = own.best_eos[-1]
        return reading

    def _unscored(self, offers: Sequence[Sequence[Offer]]) -> list[tuple[int, Reading]]:
        """The readings to score, each with its row's place: only rows with more than one candidate."""
        return [
            (place, reading)
            for place, of_row in enumerate(offers)
            if len(of_row) > 1 and not self.contexts[place].sits_out
            for reading in (offer.readings[self.index] for offer in of_row)
            if reading.log_prob is None
        ]

    def score(
        self, rows: Sequence[SpanRow], proposals: Sequence[Proposal], offers: Sequence[Sequence[Offer]]
    ) -> Generator[None, None, None]:
        """Score all unscored candidates, in at most one forward pass for all rows.

        Rows of that pass branch off from the candidates' rows.

        Args:
            rows: The live rows.
            proposals: For each live row, the member's proposal.
            offers: For each live row, its candidates.

        Yields:
            After the forward pass is started, before it is waited for.

        Raises:
            MemberError: If the member returns NaN.
        """
        todo = self._unscored(offers)
        if not todo:
            return
        beside = [(place, reading) for place, reading in todo if reading.num_tokens > 1]
        if beside:
            fork = self._fork = self.fork([place for place, _ in beside], [reading.context for _, reading in beside])
            num_last = [len(reading.ids) for _, reading in beside]
            fork.start(num_last)
            yield
            logits = fork.logits(num_last)
            self.num_forwards += fork.num_forwards
            for n, (_, reading) in enumerate(beside):
                reading.fork_row = n
        sums = []
        for place, reading in todo:
            first = proposals[place].first_log_probs
            new = sent(torch.tensor(reading.ids, dtype=torch.long), first.device)
            total = first[new[:1]].double().sum()
            best_eos = total.new_tensor(-1.0)
            if reading.fork_row is not None:
                log_probs = self.log_probs(logits[reading.fork_row, -len(new) :])
                total = total + log_probs[:-1].gather(-1, new[1:, None]).double().sum()
                if reading.num_tokens > len(new):
                    eos_log_probs, best = self._eos_log_probs(log_probs[-1:])
                    total, best_eos = total + eos_log_probs.double()[0], best[0].double()
                # NaN anywhere is an error, even if no id is read there.
                total = torch.where(log_probs.isnan().any(), torch.nan, total)
            sums.append(torch.stack([total, best_eos]))
        for (place, reading), (log_prob, eos_id) in zip(todo, torch.stack(sums).tolist(), strict=True):
            if math.isnan(log_prob):
                raise self.member.not_finite(rows[place].where)
            reading.log_prob = log_prob
            if eos_id >= 0:
                reading.eos_id = int(eos_id)

    def follow(self, chosen: Sequence[Reading | None]) -> None:
        """Continue every live row after its chosen candidate; None for none."""
        rows = [item.fork_row if item else None for item in chosen]
        if self._fork is not None and any(row is not None for row in rows):
            self.adopt(self._fork, rows)
        self._fork = None
        begun = [len(context.ids) for context in self.contexts]
        self.contexts = [item.context if item else old for item, old in zip(chosen, self.contexts, strict=True)]
        for place, own in enumerate(self._proposals):
            item = chosen[place]
            # The last id mostly only showed that the span was complete.
            if item and rows[place] is None and item.context.ids[begun[place] :] == own.ids[:-1]:
                self.know(place, own.last_logits)
        self._proposals = ()


def primary_ids(encoder: ByteEncoder, data: bytes, own: Sequence[int] = ()) -> list[int] | None:
    """Return the primary's ids for a span: its tokenizer's, or else the first that it wrote itself.

    Args:
        encoder: The primary's encoder.
        data: The span.
        own: The primary's own proposals.

    Returns:
        The ids; None if there are none, for example if the span ends inside one of `own`.
    """
    ids = encoder.encode(data)
    if ids is not None:
        return ids
    return next((list(own[:n]) for n in range(len(own) + 1) if encoder.token_bytes.write(own[:n]) == data), None)
