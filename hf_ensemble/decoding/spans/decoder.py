"""Decoding by spans: members propose spans of words, score one another's, and the best is written.

From "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models" (2024).
"""

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ... import messages
from ...config import SweetSpanConfig
from ...errors import MemberError
from ...members.contexts import PlainContext
from ...members.member import Member
from ...members.state import MemberState
from ...methods.sweetspan import SpanChoice, choose_span, span_score
from ...vocabulary.context import MemberContext
from ...vocabulary.encoding import split_begun_character
from ...vocabulary.token_bytes import CONTROL, NO_TOKEN, TEXT
from ..prompts import OwnPrompts, expand_prompts, read_prompts
from ..stopping_criteria import SpanStoppingCriteria
from ..text_warnings import warn_of_losses


@dataclass(frozen=True)
class SpanCandidate:
    """A span that was offered in a round.

    Attributes:
        data: What it writes.
        has_eos: Whether the text ends with it.
        proposers: Members that wrote it.
        scores: Every member's score, None for a member that takes no part; None as a whole where there was nothing to
            choose from.
        filtered: Members whose scores did not count.
    """

    data: bytes
    has_eos: bool
    proposers: tuple[int, ...]
    scores: tuple[float | None, ...] | None = None
    filtered: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What it writes, as text."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class SpanRound:
    """One round of one row.

    Attributes:
        candidates: The distinct candidates, in the order of the first member that wrote each.
        winner: Index of the one that was written.
        num_forwards: Each member's forward passes in this round, for all rows together.
    """

    candidates: tuple[SpanCandidate, ...]
    winner: int
    num_forwards: tuple[int, ...]


@dataclass
class SpanDecoderOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate`.

    Attributes:
        rounds: For each row, its rounds. The last may have been cut where it was written.
    """

    rounds: list[list[SpanRound]] | None = None


@dataclass
class _Proposals:
    """What one member wrote in a round: for each row, its ids, and at each of them some log-probabilities.

    Attributes:
        ids: The ids.
        log_probs: That of each id.
        eos_log_probs: That of all EOS ids together, in place of each id.
        best_eos: The best EOS id in place of each id.
        first_log_probs: Log-probabilities of the first id, of shape `(num_rows, vocab_size)`.
        criterion: What says where a span ends.
    """

    ids: list[list[int]]
    log_probs: list[list[float]]
    eos_log_probs: list[list[float]]
    best_eos: list[list[int]]
    first_log_probs: Tensor
    criterion: SpanStoppingCriteria


@dataclass
class _Reading:
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

    @property
    def known_log_prob(self) -> float:
        """The log-probability, when it must be known by now."""
        if self.log_prob is None:
            raise AssertionError("a candidate was not scored")
        return self.log_prob


class SpanDecoder:
    """The rows of one `generate` call, decided span by span.

    All rows take part in every round until their text has ended or holds as many ids as were asked for, so a row may be
    decided further than it has been written.

    Args:
        members: The members; the first is the primary, whose ids are written.
        participants: Numbers of the members that take part.
        config: The method's options.
        eos_ids: For each member, the ids that end a text.
        prompt_ids: The primary's prompt ids, of shape `(batch_size, prompt_length)`.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        processors: Processors of every member's logits while it proposes.
        do_sample: Whether proposals are sampled.
        max_new_tokens: Number of ids after which a row needs no more.
        min_new_tokens: Number of the primary's ids before which no text may end.
        use_cache: Whether members keep caches.
        own_prompts: What members read in place of the text of the prompt ids.

    Attributes:
        rounds: The rounds of each row so far.
        num_ids: For each row, how many of the primary's ids each round comes to.
        end_ids: The primary's control tokens that end a text.
    """

    def __init__(
        self,
        members: Sequence[Member],
        participants: Collection[int],
        config: SweetSpanConfig,
        eos_ids: Sequence[Sequence[int]],
        prompt_ids: Tensor,
        prompt_mask: Tensor | None,
        processors: LogitsProcessorList,
        do_sample: bool,
        max_new_tokens: int,
        min_new_tokens: int,
        use_cache: bool,
        own_prompts: OwnPrompts | None = None,
    ):
        self.members = list(members)
        self.config = config
        self._encoder = members[0].encoder
        self._eos_ids = [list(ids) for ids in eos_ids]
        self.end_ids = [i for i in eos_ids[0] if members[0].is_control(i)]
        self._processors = processors
        self._do_sample = do_sample
        self._max_new = max_new_tokens
        self._min_new = min_new_tokens
        prompts = read_prompts(members, participants, "append", prompt_ids, prompt_mask, own_prompts)
        contexts = dict(prompts.contexts)
        if 0 in participants:
            contexts = {0: [MemberContext.of_ids(self._encoder, ids) for ids in prompts.ids], **contexts}
        mode = None if use_cache else "recompute"
        self._states: dict[int, MemberState[Any]] = {
            index: MemberState(members[index], rows, mode) for index, rows in contexts.items()
        }
        self._masks = {index: _Masks(members[index], eos_ids[index]) for index in contexts}
        expand_prompts(self._states, prompts.prompt_of_row)
        self._contexts = {index: list(state.contexts) for index, state in self._states.items()}
        self._begun = [split_begun_character(prompts.texts[prompt])[1] for prompt in prompts.prompt_of_row]
        # Rows that still take part, in the order of the states' rows.
        self._rows = list(range(len(prompts.prompt_of_row)))
        self._queues: list[deque[int]] = [deque() for _ in self._rows]
        self._num_decided = [0] * len(self._rows)
        self._warned_lossy: set[int] = set()
        self.num_ids: list[list[int]] = [[] for _ in self._rows]
        self.rounds: list[list[SpanRound]] = [[] for _ in self._rows]
        self._keep([place for place in range(len(self._rows)) if self._has_room(place)])
        warn_of_losses(self.members, self._contexts, self._warned_lossy)

    def next_ids(self, live: Sequence[bool]) -> list[int | None]:
        """Return the id to write next in every live row; None where there is none, and the row ends."""
        self._keep([place for place, row in enumerate(self._rows) if live[row]])
        while any(not self._queues[row] for row in self._rows):
            self.decide_round()
        return [queue.popleft() if alive and queue else None for alive, queue in zip(live, self._queues, strict=True)]

    def num_written(self) -> list[int]:
        """Return for each row how many ids `next_ids` has handed out."""
        return [sum(counts) - len(queue) for counts, queue in zip(self.num_ids, self._queues, strict=True)]

    def decide_round(self) -> None:
        """Decide one more span in every row that takes part: propose, score, choose, append."""
        before = {index: state.num_forwards for index, state in self._states.items()}
        proposals = {index: self._propose(index) for index in self._states}
        candidates = [self._candidates(place, proposals) for place in range(len(self._rows))]
        readings = {index: self._read(index, proposals[index], candidates) for index in self._states}
        self._drop_too_long(candidates, readings)
        forks = {index: self._score(index, proposals[index], readings[index]) for index in self._states}
        forwards = [0] * len(self.members)
        for index, state in self._states.items():
            forwards[index] = state.num_forwards - before[index] + (fork.num_forwards if (fork := forks[index]) else 0)
        winners = [self._choose(place, row, readings, forwards) for place, row in enumerate(candidates)]
        self._append(winners, candidates, readings, forks)

    # Proposing

    def _propose(self, index: int) -> _Proposals:
        """Let one member write a span in every row."""
        member, state, masks = self.members[index], self._states[index], self._masks[index]
        begun = [self._begun[row] for row in self._rows]
        criterion = SpanStoppingCriteria(
            member.encoder.token_bytes,
            self.config.span_length,
            self.config.max_span_tokens,
            eos_token_id=self._eos_ids[index],
            start=0,
            begun=begun,
        )
        logits = state.logits()
        state.hold()
        drafts = [PlainContext(list(context.ids)) for context in self._contexts[index]]
        room = [None if member.max_positions is None else member.max_positions - len(draft.ids) for draft in drafts]
        state.follow(drafts)
        ids = torch.empty(len(drafts), 0, dtype=torch.long, device=logits.device)
        first_log_probs: Tensor | None = None
        steps: list[Tensor] = []
        lengths = [0] * len(drafts)
        while True:
            log_probs = masks.log_probs(logits)
            if first_log_probs is None:
                first_log_probs = log_probs
            chosen, is_empty = self._choose_ids(index, logits, drafts, ids)
            eos_log_probs, best_eos = masks.eos(log_probs)
            ids = torch.cat([ids, chosen[:, None]], dim=-1)
            steps.append(
                torch.stack(
                    [
                        log_probs.gather(-1, chosen[:, None])[:, 0].double(),
                        eos_log_probs.double(),
                        best_eos.double(),
                        log_probs.amax(-1).isnan().double(),
                        is_empty.double(),
                    ]
                )
            )
            done = criterion(ids, None).tolist()  # type: ignore[arg-type]
            # Rows that are done write on, so that all caches grow alike, as long as they have positions.
            for place, written in enumerate(ids[:, -1].tolist()):
                has_room = room[place] is None or ids.shape[1] < room[place]  # type: ignore[operator]
                if has_room:
                    drafts[place].ids.append(written)
                if not lengths[place] and (done[place] or not has_room):
                    lengths[place] = ids.shape[1]
            if all(lengths):
                break
            logits = state.logits()
        values = torch.stack(steps, dim=-1).tolist()  # 5 lists of (num_rows, num_steps)
        written_ids = ids.tolist()
        for place, row in enumerate(self._rows):
            written_ids[place] = written_ids[place][: lengths[place]]
            if any(values[3][place][: lengths[place]]):
                raise self._not_finite(member, row)
            if any(values[4][place][: lengths[place]]):
                raise MemberError(
                    f"nothing is left for member {member.name!r} to choose from in row {row}, round "
                    f"{len(self.rounds[row]) + 1}: processors and filters removed every id. Loosen them."
                )
        best = [[int(i) for i in row] for row in values[2]]
        return _Proposals(written_ids, values[0], values[1], best, first_log_probs, criterion)

    def _choose_ids(
        self, index: int, logits: Tensor, drafts: Sequence[PlainContext], written: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the next id of every row, and say in which rows there is none."""
        scores = self._masks[index].allowed(logits)
        if self._min_new:
            scores = self._ban_early_ends(index, scores, written)
        if self._processors:
            # Row by row, because contexts are of unlike length.
            rows = [
                self._processors(torch.tensor([draft.ids], device=scores.device), scores[place : place + 1])  # type: ignore[arg-type]
                for place, draft in enumerate(drafts)
            ]
            scores = torch.cat(rows)
        is_empty = ~(scores.amax(-1) > -torch.inf)
        if not self._do_sample:
            return scores.argmax(-1), is_empty
        # Rows that cannot be drawn from are reported when the host next looks; until then nothing may trip over them.
        probs = scores.masked_fill(~scores.amax(-1, keepdim=True).isfinite(), 0.0).softmax(-1)
        return torch.multinomial(probs, 1)[:, 0], is_empty

    def _ban_early_ends(self, index: int, scores: Tensor, written: Tensor) -> Tensor:
        """Let no text end before it has as many of the primary's ids as it must."""
        token_bytes = self.members[index].encoder.token_bytes
        early = []
        for place, ids in enumerate(written.tolist()):
            missing = self._min_new - self._num_decided[self._rows[place]]
            if missing > 0:
                count = len(ids) if index == 0 else len(self._encoder.encode_context_bytes(token_bytes.write(ids)))
                if count < missing:
                    early.append(place)
        if early and self._eos_ids[index]:
            scores[torch.tensor(early)[:, None], torch.tensor(self._eos_ids[index])] = -torch.inf
        return scores

    # Scoring

    def _candidates(self, place: int, proposals: Mapping[int, _Proposals]) -> list[SpanCandidate]:
        """The distinct candidates of one row: those that write something, and that the primary can write."""
        proposers: dict[tuple[bytes, bool], list[int]] = {}
        for index in self._taking_part(place):
            span = proposals[index].criterion.read(place, proposals[index].ids[place])
            if span.data or span.has_eos:
                proposers.setdefault((span.data, span.has_eos), []).append(index)
        candidates = [
            SpanCandidate(data, has_eos, tuple(members))
            for (data, has_eos), members in proposers.items()
            if self._can_be_written(data, proposals[0].ids[place] if 0 in members else None)
            and (self.end_ids or not has_eos)
            and not self._ends_too_early(place, data)
        ]
        if not proposers:
            for index in self._taking_part(place):
                limit, ids = self.members[index].max_positions, self._contexts[index][place].ids
                if limit is not None and len(ids) + len(proposals[index].ids[place]) >= limit:
                    self._warn_of_end(place, self.members[index])
                    return []
        if not candidates:
            raise self._no_candidate(place, proposers)
        return candidates

    def _can_be_written(self, data: bytes, own: Sequence[int] | None) -> bool:
        """Whether the primary's tokenizer writes a span, or the primary itself has, with these ids."""
        return self._encoder.encode(data) is not None or (own is not None and self._written_as(own, data) is not None)

    def _no_candidate(self, place: int, proposed: Iterable[tuple[bytes, bool]]) -> MemberError:
        row, primary = self._rows[place], self.members[0].name
        texts = [(data.decode("utf-8", "replace"), has_eos) for data, has_eos in proposed]
        if texts and texts[0][1] and not self.end_ids:
            reason = f"the primary {primary!r} has no id that ends a text. Pass `eos_token_id`."
        elif texts:
            reason = (
                f"the primary {primary!r} cannot write {texts[0][0]!r}, or not before `min_new_tokens`. Make another "
                "member the primary, or ask for fewer."
            )
        elif not self._taking_part(place):
            names = ", ".join(repr(self.members[index].name) for index in self._contexts)
            reason = f"the prompt ends inside a character, which {names} cannot continue. Give a whole character."
        else:
            reason = f"none wrote a whole character within `max_span_tokens={self.config.token_limit}` ids. Raise it."
        return MemberError(
            f"no member proposed a span that can be written in row {row}, round {len(self.rounds[row]) + 1}: {reason}"
        )

    def _ends_too_early(self, place: int, data: bytes) -> bool:
        """Whether a span holds an id that ends the primary's text before it may end."""
        missing = self._min_new - self._num_decided[self._rows[place]]
        return missing > 0 and not set(self._eos_ids[0]).isdisjoint((self._encoder.encode(data) or [])[:missing])

    def _read(
        self, index: int, proposed: _Proposals, candidates: Sequence[Sequence[SpanCandidate]]
    ) -> list[list[_Reading]]:
        """Let one member read every candidate after its prefix; what it wrote in the same ids is scored already."""
        readings: list[list[_Reading]] = []
        for place, prefix in enumerate(self._contexts[index]):
            own, log_probs = proposed.ids[place], proposed.log_probs[place]
            readings.append([])
            for candidate in candidates[place]:
                context = prefix.copy()
                if index == 0 and self._encoder.encode(candidate.data) is None:
                    # What its tokenizer would never encode like that is written as the primary itself wrote it.
                    context.ids += self._written_as(own, candidate.data) or []
                else:
                    context.write(candidate.data)
                new = context.ids[len(prefix.ids) :]
                reading = _Reading(context, new, len(new) + candidate.has_eos)
                if own[: len(new)] == new and len(own) >= reading.num_tokens:
                    reading.log_prob = sum(log_probs[: len(new)])
                    if candidate.has_eos:
                        reading.log_prob += proposed.eos_log_probs[place][len(new)]
                        reading.eos_id = proposed.best_eos[place][len(new)]
                elif candidate.has_eos and index in candidate.proposers:
                    # In case it is not scored, since all agree.
                    reading.eos_id = proposed.best_eos[place][len(own) - 1]
                readings[-1].append(reading)
        return readings

    def _written_as(self, ids: Sequence[int], data: bytes) -> list[int] | None:
        """The first of the primary's ids that write `data`; None where it ends inside what one of them writes."""
        counts = range(len(ids) + 1)
        return next((list(ids[:n]) for n in counts if self._encoder.token_bytes.write(ids[:n]) == data), None)

    def _drop_too_long(
        self, candidates: Sequence[list[SpanCandidate]], readings: Mapping[int, Sequence[list[_Reading]]]
    ) -> None:
        """Drop candidates for which a member has no positions left; a row without any other ends, with a warning."""
        for place, row in enumerate(candidates):
            for index in self._taking_part(place):
                limit = self.members[index].max_positions
                fits = [limit is None or len(item.context.ids) <= limit for item in readings[index][place]]
                if all(fits):
                    continue
                row[:] = [item for item, fit in zip(row, fits, strict=True) if fit]
                for of_member in readings.values():
                    of_member[place][:] = [item for item, fit in zip(of_member[place], fits, strict=True) if fit]
                if not row:
                    self._warn_of_end(place, self.members[index])
                    break

    def _score(
        self, index: int, proposed: _Proposals, readings: Sequence[Sequence[_Reading]]
    ) -> MemberState[Any] | None:
        """Score what one member has not scored yet, in at most one forward pass for all rows and candidates.

        Returns:
            The state that read the candidates, if there was a forward pass.
        """
        todo = [
            (place, reading)
            for place, row in enumerate(readings)
            if len(row) > 1 and not self._contexts[index][place].sits_out
            for reading in row
            if reading.log_prob is None
        ]
        if not todo:
            return None
        member, masks, first = self.members[index], self._masks[index], proposed.first_log_probs
        reads = [(place, reading) for place, reading in todo if reading.num_tokens > 1]
        fork: MemberState[Any] | None = None
        logits = first
        if reads:
            fork = self._states[index].fork([place for place, _ in reads])
            fork.follow([reading.context for _, reading in reads])
            logits = fork.logits([max(2, len(reading.ids)) for _, reading in reads])
            for n, (_, reading) in enumerate(reads):
                reading.fork_row = n
        sums = []
        for place, reading in todo:
            new = torch.tensor(reading.ids, device=first.device)
            total = first[place, new[:1]].double().sum()
            best_eos = total.new_tensor(-1.0)
            if reading.fork_row is not None:
                log_probs = masks.log_probs(logits[reading.fork_row, -len(new) :])
                total = total + log_probs[:-1].gather(-1, new[1:, None]).double().sum()
                if reading.num_tokens > len(new):
                    eos_log_probs, best = masks.eos(log_probs[-1:])
                    total, best_eos = total + eos_log_probs.double()[0], best[0].double()
                # So that NaN shows wherever it arose.
                total = torch.where(log_probs.isnan().any(), torch.nan, total)
            sums.append(torch.stack([total, best_eos]))
        for (place, reading), (log_prob, best) in zip(todo, torch.stack(sums).tolist(), strict=True):
            if math.isnan(log_prob):
                raise self._not_finite(member, self._rows[place])
            reading.log_prob = log_prob
            if best >= 0:
                reading.eos_id = int(best)
        return fork

    def _choose(
        self,
        place: int,
        candidates: Sequence[SpanCandidate],
        readings: Mapping[int, Sequence[Sequence[_Reading]]],
        num_forwards: Sequence[int],
    ) -> int | None:
        """Choose a row's span by the scores of all members that take part in it, and keep a record of the round."""
        if not candidates:
            return None
        choice, scored = SpanChoice(0, ((),)), list(candidates)
        if len(candidates) > 1:
            members = self._taking_part(place)
            scores = [
                [
                    span_score(
                        readings[index][place][n].known_log_prob,
                        readings[index][place][n].num_tokens,
                        len(candidate.data) + candidate.has_eos,
                        self.config.score,
                    )
                    for index in members
                ]
                for n, candidate in enumerate(candidates)
            ]
            choice = choose_span(scores, self.config.filter_ratio, self.config.score)
            for n, candidate in enumerate(candidates):
                of_member = dict(zip(members, scores[n], strict=True))
                scored[n] = dataclasses.replace(
                    candidate,
                    scores=tuple(of_member.get(index) for index in range(len(self.members))),
                    filtered=tuple(members[dropped] for dropped in choice.filtered[n]),
                )
        self.rounds[self._rows[place]].append(SpanRound(tuple(scored), choice.winner, tuple(num_forwards)))
        return choice.winner

    # Writing

    def _append(
        self,
        winners: Sequence[int | None],
        candidates: Sequence[Sequence[SpanCandidate]],
        readings: Mapping[int, Sequence[Sequence[_Reading]]],
        forks: Mapping[int, MemberState[Any] | None],
    ) -> None:
        """Let the chosen spans be written, and every member continue after them."""
        for index, state in self._states.items():
            chosen = [None if n is None else readings[index][place][n] for place, n in enumerate(winners)]
            old = self._contexts[index]
            self._contexts[index] = [item.context if item else old[place] for place, item in enumerate(chosen)]
            fork, fork_rows = forks[index], [item.fork_row if item else None for item in chosen]
            if fork is not None and any(row is not None for row in fork_rows):
                state.adopt(fork, fork_rows)
            state.follow(self._contexts[index])
        warn_of_losses(self.members, self._contexts, self._warned_lossy)
        kept = []
        for place, (row, number) in enumerate(zip(self._rows, winners, strict=True)):
            if number is None:
                continue
            winner = candidates[place][number]
            ids = readings[0][place][number].ids if 0 in readings else self._encoder.encode_context_bytes(winner.data)
            if winner.data:
                self._begun[row] = b""
            if winner.has_eos:
                best = readings[0][place][number].eos_id if 0 in readings else None
                ids = [*ids, self.end_ids[0] if best is None else best]
            self._queues[row].extend(ids)
            self.num_ids[row].append(len(ids))
            self._num_decided[row] += len(ids)
            if not winner.has_eos and self._num_decided[row] < self._max_new and self._has_room(place):
                kept.append(place)
        self._keep(kept)

    def _has_room(self, place: int) -> bool:
        """Whether every member has positions for more in a row; a warning says if not."""
        for index in self._contexts:
            member, length = self.members[index], len(self._contexts[index][place].ids)
            if member.max_positions is not None and length >= member.max_positions:
                self._warn_of_end(place, member)
                return False
        return True

    def _warn_of_end(self, place: int, member: Member) -> None:
        row = self._rows[place]
        end = messages.no_position_left(member.name, member.max_positions, row, self._num_decided[row])
        warnings.warn(end, stacklevel=2)

    def _keep(self, places: Sequence[int]) -> None:
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        for index, state in self._states.items():
            self._contexts[index] = [self._contexts[index][place] for place in places]
            state.select(places, self._contexts[index])

    def _taking_part(self, place: int) -> list[int]:
        """Members that take part in a row: all but those that cannot follow a character that has begun."""
        return [index for index, contexts in self._contexts.items() if not contexts[place].sits_out]

    def _not_finite(self, member: Member, row: int) -> MemberError:
        return member.not_finite(f"in row {row}, round {len(self.rounds[row]) + 1}")


class _Masks:
    """Which of a member's ids may be proposed, and which are scored."""

    def __init__(self, member: Member, eos_ids: Sequence[int]):
        kinds = member.encoder.token_bytes.kinds
        device = member.device
        self._eos = [i for i in eos_ids if i < len(kinds) and kinds[i] == CONTROL]
        may_be_written = kinds == TEXT
        may_be_written[self._eos] = True
        self._is_no_token = torch.as_tensor(kinds == NO_TOKEN, device=device)
        self._is_no_text = torch.as_tensor(~may_be_written, device=device)
        self._eos_ids = torch.tensor(self._eos, dtype=torch.long, device=device)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities over all ids with a token, of shape `(batch_size, vocab_size)`."""
        return logits.float().masked_fill(self._is_no_token, -torch.inf).log_softmax(-1)

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits of what may be proposed: text and the end of it, of shape `(batch_size, vocab_size)`."""
        return logits.float().masked_fill(self._is_no_text, -torch.inf)

    def eos(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of all EOS ids together, and the best of them, each of shape `(batch_size,)`."""
        if not self._eos:
            nothing = log_probs[:, 0]
            return torch.full_like(nothing, -torch.inf), torch.full_like(nothing, -1, dtype=torch.long)
        at_eos = log_probs[:, self._eos_ids]
        return at_eos.logsumexp(-1), self._eos_ids[at_eos.argmax(-1)]
