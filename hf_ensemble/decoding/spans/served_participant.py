"""A member behind a server in the rounds of a call: its spans come id by id, and one request scores a candidate."""

import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ConfigurationError
from ...members.served.threads import collected
from ...vocabulary.context import MemberContext
from ...vocabulary.token_bytes import CONTROL
from ..call import Call
from ..loop import Loop
from .participant import Offer, Participant, Proposal, Reading
from .rows import SpanRow

if TYPE_CHECKING:
    from ...members.served.completions import WrittenId

_KNOWN_TO_SERVERS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}
"""Processors of options that servers support too."""

_NEVER = -100.0
"""Added to the logit of a forbidden id; the smallest value that servers accept."""


class ServedParticipant(Participant):
    """A member behind a server, in the rounds of one call; see `Participant`.

    Raises:
        ConfigurationError: If there is a processor that its server does not support.
    """

    def __init__(self, call: Call, loop: Loop, index: int, eos_ids: Sequence[int], contexts: Sequence[MemberContext]):
        super().__init__(call, loop, index, eos_ids, contexts)
        self._served: Any = self.member
        self._settings = loop.settings
        for name in (type(item).__name__ for item in loop.processors):
            if name not in _KNOWN_TO_SERVERS:
                raise ConfigurationError(
                    f"member {self.member.name!r} writes its spans at its server, which does not support the logits "
                    f"processor {name}. Leave it out, or load the member into this process."
                )
        # Others hardly ever occur, and are forbidden after the first time.
        control = (self.member.encoder.token_bytes.kinds == CONTROL).nonzero()[0].tolist()
        self._forbidden = set(control).difference(self.eos_ids)
        self._control_eos_ids: list[int] = self._control_eos.tolist()

    # Writing

    def propose(self, rows: Sequence[SpanRow]) -> Generator[None, None, list[Proposal]]:
        """Let the server write a span in every live row; see `Participant.propose`."""
        submit = self._served.server.client.submit
        seeds = [
            None if self._draws is None else self._draws.seed(row.number, len(row.decided), len(context.ids))
            for row, context in zip(rows, self.contexts, strict=True)
        ]
        writing = [
            submit(self._write, row, list(context.ids), seed)
            for row, context, seed in zip(rows, self.contexts, seeds, strict=True)
        ]
        self.num_forwards += len(rows)
        yield
        return collected(writing)

    def _write(self, row: SpanRow, prompt: Sequence[int], seed: int | None) -> Proposal:
        """Write a span in a row. If a forbidden id comes, ask the server again from there."""
        most = max(1, int(min(self.member.max_length - len(prompt), self._config.token_limit)))
        written: list[WrittenId] = []
        forbidden = set(self._forbidden)
        while len(written) < most and not self._is_complete(row, written):
            is_early = self._is_early(row, _ids(written))
            banned = forbidden.union(self.eos_ids if is_early else ())
            options = {
                **self._served.sampling_of(self._settings, None if seed is None else (seed + len(written)) % 2**63),
                "max_tokens": most - len(written),
                "logit_bias": {str(i): _NEVER for i in sorted(banned)},
            }
            text = [*prompt, *_ids(written)]
            with self._served.server.stream(text, options, self._control_eos_ids, row.where) as parts:
                for one in parts:
                    if one.id in banned or self._is_no_text[one.id]:
                        forbidden |= {one.id} if self._is_no_text[one.id] else set()
                        break
                    written.append(one)
                    is_allowed = is_early and not self._is_early(row, _ids(written))
                    if is_allowed or self._is_complete(row, written):
                        break
        return self._proposal(row, written)

    def _is_complete(self, row: SpanRow, written: "Sequence[WrittenId]") -> bool:
        return bool(written) and self._span(row, _ids(written)).is_complete

    def _proposal(self, row: SpanRow, written: "Sequence[WrittenId]") -> Proposal:
        eos = [self._eos_of(one.others) for one in written]
        return Proposal(
            self._span(row, _ids(written)),
            _ids(written),
            [one.log_prob for one in written],
            [log_prob for log_prob, _ in eos],
            [best for _, best in eos],
            Tensor(),
            Tensor(),
        )

    def _eos_of(self, others: Mapping[int, float]) -> tuple[float, int]:
        """Log-probability of all EOS ids together, and the best of them; -1 for none."""
        if not self._control_eos_ids:
            return -math.inf, -1
        found = [others[i] for i in self._control_eos_ids]
        best = max(zip(found, self._control_eos_ids, strict=True), key=lambda pair: pair[0])[1]
        return torch.tensor(found).double().logsumexp(0).item(), best

    # Reading

    def _read(self, prompt: Sequence[int], reading: Reading, where: str) -> tuple[float, int | None]:
        has_eos = reading.num_tokens > len(reading.ids)
        asked = self._control_eos_ids if has_eos else ()
        found = self._served.server.read([*prompt, *reading.ids], len(prompt), asked, where)
        total = math.fsum(one.log_prob for one in found.ids)
        if not has_eos:
            return total, None
        log_prob, best = self._eos_of(found.others)
        return total + log_prob, best

    def score(
        self, rows: Sequence[SpanRow], proposals: Sequence[Proposal], offers: Sequence[Sequence[Offer]]
    ) -> Generator[None, None, None]:
        """Ask the server for the likelihood of every candidate that it did not write; see `Participant.score`."""
        todo = self._unscored(offers)
        submit = self._served.server.client.submit
        reading = [submit(self._read, list(self.contexts[place].ids), one, rows[place].where) for place, one in todo]
        self.num_forwards += len(reading)
        yield
        for (_, one), (log_prob, best) in zip(todo, collected(reading), strict=True):
            one.log_prob = log_prob
            if best is not None and best >= 0:
                one.eos_id = best


def _ids(written: "Sequence[WrittenId]") -> list[int]:
    return [one.id for one in written]
