"""Decoding by spans: members propose spans of words and score each other's, and the best is written, round by round.

Reference:
    Xu, Chen, Wu and Zhang, "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models"
    (https://arxiv.org/abs/2409.18583).
"""

import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers.generation.utils import GenerateDecoderOnlyOutput

from ... import messages
from ...errors import MemberError
from ...members.member import Member
from ...methods.base import eos_ids_of
from ...methods.sweetspan import SweetSpanConfig, choose_span
from ...recording.decisions import Decisions
from ...recording.spans import SpanCandidate, SpanRound, decisions_of_rounds
from ...vocabulary.encoding import split_begun_character
from ..call import Call, end_ids
from ..loop import Loop
from ..prompts import expand_prompts, read_prompts
from ..text_warnings import warn_of_losses
from .participant import Offer, Participant, Proposal, primary_ids
from .rows import SpanRow
from .served_participant import ServedParticipant

T = TypeVar("T")


@dataclass
class SpanDecoderOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate`.

    Attributes:
        rounds: For each row, its rounds. The last one may have been cut when it was written.
    """

    rounds: list[list[SpanRound]] | None = None


class SpanDecoder:
    """The rows of one `generate` call, decided span by span.

    All rows take part in every round until their text has ended or is long enough, so a row may be decided further
    than it has been written.

    Args:
        call: The call.
        loop: Its loop, whose processors act on every member's logits while it proposes.

    Raises:
        ConfigurationError: If a member has nothing to start from, or not enough positions, or its chat template
            refuses a conversation.

    Reference:
        Xu, Chen, Wu and Zhang, "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models"
        (https://arxiv.org/abs/2409.18583).
    """

    def __init__(self, call: Call, loop: Loop):
        self._members = members = call.members
        self._config: SweetSpanConfig = call.config  # type: ignore[assignment]
        self._loop = loop
        participants, settings = call.weights.participants, loop.settings
        eos_ids = eos_ids_of(members, end_ids(settings))
        self._encoder = members[0].encoder
        self._primary_eos = set(eos_ids[0])
        self._end_ids = [i for i in eos_ids[0] if members[0].is_control(i)]
        # With one generator, all members draw from it in turn.
        self._draws_in_order = settings.do_sample and not call.draws.are_seeded
        self._max_new = loop.max_new_tokens
        min_new_tokens = max(settings.min_new_tokens or 0, (settings.min_length or 0) - loop.input_ids.shape[1])
        prompts = read_prompts(members, participants, "append", loop.input_ids, loop.mask, call.own_prompts)
        self._states = {
            index: _kind_of(members[index])(call, loop, index, eos_ids[index], of_prompts)
            for index, of_prompts in prompts.contexts.items()
        }
        expand_prompts(self._states, prompts.prompt_of_row)
        self._rows = [
            SpanRow(number, split_begun_character(prompts.texts[prompt])[1], min_new_tokens)
            for number, prompt in enumerate(prompts.prompt_of_row)
        ]
        # The rows that take part in the next round. A row's place is its index among them, the same for all members.
        self._live = list(self._rows)
        self._warned_lossy: set[int] = set()
        self._settle()

    @property
    def rounds(self) -> list[list[SpanRound]]:
        """The rounds of each row so far."""
        return [[one for one, _ in row.decided] for row in self._rows]

    def decisions(self) -> Decisions:
        """The decisions that have been written."""
        return decisions_of_rounds(
            self._members,
            [row.written() for row in self._rows],
            self._end_ids,
            self._config.score,
            self._loop.input_ids,
            self._loop.mask,
        )

    def next_ids(self, live: Sequence[bool]) -> list[int | None]:
        """Return the next id of every live row; None if there is none, and the row ends."""
        self._keep([place for place, row in enumerate(self._live) if live[row.number]])
        while any(not row.queue for row in self._live):
            self.decide_round()
        return [row.queue.popleft() if live[row.number] and row.queue else None for row in self._rows]

    def decide_round(self) -> None:
        """Decide one more span in every row that takes part: propose, score, choose, append."""
        before = {one.index: one.num_forwards for one in self._states.values()}
        proposals = self._side_by_side({n: one.propose(self._live) for n, one in self._states.items()})
        offers = [self._offers(place, proposals) for place in range(len(self._live))]
        self._side_by_side({n: one.score(self._live, proposals[n], offers) for n, one in self._states.items()})
        num_forwards = tuple(
            self._states[n].num_forwards - before[n] if n in before else 0 for n in range(len(self._members))
        )
        winners = [self._decide(place, of_row, num_forwards) for place, of_row in enumerate(offers)]
        for one in self._states.values():
            one.follow([None if winner is None else winner.readings[one.index] for winner in winners])
        self._settle()

    def _side_by_side(self, tasks: Mapping[int, Generator[None, None, T]]) -> dict[int, T]:
        """Run a task for every member in steps; each step starts for all members before waiting for any.

        Args:
            tasks: Each member's task, by its index.
        """
        found: dict[int, T] = {}
        # Members that run elsewhere begin first.
        waiting = sorted(tasks, key=lambda index: not self._states[index].caches.run_beside)
        while waiting:
            for index in list(waiting):
                try:
                    next(tasks[index])
                    while self._draws_in_order:
                        next(tasks[index])
                except StopIteration as end:
                    found[index] = end.value
                    waiting.remove(index)
        return {index: found[index] for index in tasks}

    # Candidates

    def _offers(self, place: int, proposals: Mapping[int, Sequence[Proposal]]) -> list[Offer]:
        """The distinct candidates of one row, as all members read them.

        Spans are left out if they write nothing, if the primary cannot write them, or if a member has no position left
        for them. If a row loses all candidates for lack of positions, it ends with a warning.
        """
        taking_part = self._taking_part(place)
        proposers: dict[tuple[bytes, bool], list[int]] = {}
        for one in taking_part:
            span = proposals[one.index][place].span
            if span.data or span.has_eos:
                proposers.setdefault((span.data, span.has_eos), []).append(one.index)
        candidates = [
            SpanCandidate(data, has_eos, tuple(members))
            for (data, has_eos), members in proposers.items()
            if primary_ids(self._encoder, data, proposals[0][place].ids if 0 in members else ()) is not None
            and (self._end_ids or not has_eos)
            and not self._ends_too_early(place, data)
        ]
        if not proposers:
            for one in taking_part:
                if len(one.contexts[place].ids) + len(proposals[one.index][place].ids) >= one.member.max_length:
                    self._warn_of_end(place, one.member)
                    return []
        if not candidates:
            raise self._no_candidate(place, proposers)
        offers = [
            Offer(
                item, {one.index: one.read(place, item, proposals[one.index][place]) for one in self._states.values()}
            )
            for item in candidates
        ]
        for one in taking_part:
            fitting = [
                offer for offer in offers if len(offer.readings[one.index].context.ids) <= one.member.max_length
            ]
            if offers and not fitting:
                self._warn_of_end(place, one.member)
            offers = fitting
        return offers

    def _ends_too_early(self, place: int, data: bytes) -> bool:
        """Whether a span contains an id that ends the primary's text too early."""
        missing = self._live[place].num_missing
        return missing > 0 and not self._primary_eos.isdisjoint((self._encoder.encode(data) or [])[:missing])

    def _no_candidate(self, place: int, proposed: Iterable[tuple[bytes, bool]]) -> MemberError:
        primary = self._members[0].name
        texts = [(data.decode("utf-8", "replace"), has_eos) for data, has_eos in proposed]
        if texts and texts[0][1] and not self._end_ids:
            reason = f"the primary {primary!r} has no id that ends a text. Pass `eos_token_id`."
        elif texts:
            reason = (
                f"the primary {primary!r} cannot write {texts[0][0]!r}, or not before `min_new_tokens`. Make another "
                "member the primary, or lower `min_new_tokens`."
            )
        elif not self._taking_part(place):
            names = ", ".join(repr(one.member.name) for one in self._states.values())
            reason = (
                f"the prompt ends inside a character, which {names} cannot continue. End the prompt with a whole "
                "character."
            )
        else:
            reason = (
                f"no member wrote a whole character within `max_span_tokens={self._config.token_limit}` ids. Raise it."
            )
        return MemberError(f"no member proposed a span that can be written {self._live[place].where}: {reason}")

    def _taking_part(self, place: int) -> list[Participant]:
        """Members that take part in a row: all except those that cannot complete a begun character."""
        return [one for one in self._states.values() if not one.contexts[place].sits_out]

    # Deciding

    def _decide(self, place: int, offers: Sequence[Offer], num_forwards: tuple[int, ...]) -> Offer | None:
        """Choose a row's span, keep a record of the round, and let the primary's ids of it be written."""
        row = self._live[place]
        if not offers:
            row.has_ended = True
            return None
        number, candidates = self._choose(place, offers)
        winner, reading = candidates[number], offers[number].readings.get(0)
        ids = self._encoder.encode_context_bytes(winner.data) if reading is None else reading.ids
        if winner.has_eos:
            row.has_ended = True
            best = None if reading is None else reading.eos_id
            ids = [*ids, self._end_ids[0] if best is None else best]
        row.decide(SpanRound(tuple(candidates), number, num_forwards), ids)
        return offers[number]

    def _choose(self, place: int, offers: Sequence[Offer]) -> tuple[int, list[SpanCandidate]]:
        """The index of the chosen candidate, and all candidates, with their scores if there are several."""
        candidates = [offer.candidate for offer in offers]
        if len(offers) == 1:
            return 0, candidates
        kind, members = self._config.score, {one.index for one in self._taking_part(place)}
        scores = [
            tuple(offer.score(n, kind) if n in members else None for n in range(len(self._members)))
            for offer in offers
        ]
        choice = choose_span(scores, self._config.filter_ratio, kind)
        scored = zip(candidates, scores, choice.filtered, strict=True)
        return choice.winner, [dataclasses.replace(item, scores=row, filtered=out) for item, row, out in scored]

    def _settle(self) -> None:
        """Warn about inexact reading, and keep only the rows that need more."""
        warn_of_losses(self._states, self._warned_lossy)
        self._keep([place for place in range(len(self._live)) if self._goes_on(place)])

    def _goes_on(self, place: int) -> bool:
        """Whether a row takes part in the next round; if members have no positions left for that, a warning says so."""
        row = self._live[place]
        if row.has_ended or row.num_decided >= self._max_new:
            return False
        full = [one for one in self._states.values() if len(one.contexts[place].ids) >= one.member.max_length]
        if full:
            self._warn_of_end(place, full[0].member)
        return not full

    def _warn_of_end(self, place: int, member: Member) -> None:
        row = self._live[place]
        end = messages.no_position_left(member.name, member.max_positions, row.number, row.num_decided)
        messages.warn(end)

    def _keep(self, places: Sequence[int]) -> None:
        """Let only these rows take part from now on."""
        if len(places) == len(self._live):
            return
        self._live = [self._live[place] for place in places]
        for one in self._states.values():
            one.select(places)


def _kind_of(member: Member) -> type[Participant]:
    """How a member takes part: by its logits, or through its server."""
    return ServedParticipant if member.is_served else Participant
