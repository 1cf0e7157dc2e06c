"""A batch that rows, each with its own options, join between steps and leave when they end."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..errors import MemberError
from .proposals import RaisedIds
from .shared_decoder import SharedDecoder


@dataclass(frozen=True)
class Written:
    """What a step has written in a row.

    Attributes:
        id: The primary's id; None if the row failed.
        log_prob: Its log-probability by the fused distribution, before any option changes it; None if not requested.
        best: The most likely ids with their log-probabilities, the best first; as many as requested.
        ends: Whether the row ends here.
        error: Why it failed.
    """

    id: int | None
    log_prob: float | None = None
    best: tuple[tuple[int, float], ...] = ()
    ends: bool = False
    error: Exception | None = None


class Row:
    """A row, ready to join a batch.

    Args:
        decoder: The decoder of this row alone.
        ids: Its prompt, the primary's ids of shape `(1, length)`.
        constraints: Its processors up to the last one that is not a warper.
        warpers: Those after them.
        criteria: Its stopping criteria.
        do_sample: Whether its ids are sampled.
        num_best: Number of most likely ids to return at every step; None for no log-probabilities.
        take: Receives what every step writes.
        kind: Equal for rows that may share a batch.
    """

    def __init__(
        self,
        decoder: SharedDecoder,
        ids: Tensor,
        constraints: Sequence[Any],
        warpers: Sequence[Any],
        criteria: StoppingCriteriaList,
        do_sample: bool,
        num_best: int | None,
        take: Callable[[Written], None],
        kind: Hashable = None,
    ):
        self.decoder = decoder
        self.constraints, self.warpers = LogitsProcessorList(constraints), LogitsProcessorList(warpers)
        self.criteria, self.do_sample, self.num_best, self.take = criteria, do_sample, num_best, take
        self.kind = kind
        self._raised = RaisedIds(constraints)
        # Criteria read values on the host, for which a device would have to wait.
        self._ids = ids.cpu()
        self._device = ids.device

    def constrained(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the constraints.

        Args:
            scores: Of shape `(1, width)`.

        Returns:
            Scores of the same shape, and which ids an option raises, of the same shape; None for none.
        """
        ids: Any = self._ids.to(self._device)
        constrained: Tensor = self.constraints(ids, scores)
        return constrained, self._raised.at(ids, constrained)

    @property
    def kind_of_warpers(self) -> Any:
        """Equal for rows whose warpers do the same."""
        return tuple(
            (type(item), tuple(sorted((key, str(value)) for key, value in vars(item).items())))
            for item in self.warpers
        )

    def write(self, new_id: int) -> bool:
        """Take in an id; returns whether the row ends."""
        self._ids = torch.cat([self._ids, torch.tensor([[new_id]])], dim=-1)
        ids: Any = self._ids
        ends: Any = self.criteria(ids, None)
        return bool(ends.any())


class RunningBatch:
    """Writes id by id in all its rows, as long as there are any.

    Args:
        rows: The first rows.
        decoder: Theirs, as `begun` gives it.

    Attributes:
        rows: The rows that write, in the order of the decoder.
    """

    def __init__(self, rows: Sequence[Row], decoder: SharedDecoder):
        self.rows, self.decoder = list(rows), decoder

    @staticmethod
    @torch.no_grad()
    def begun(rows: Sequence[Row], are_joining: bool) -> SharedDecoder:
        """Put rows of one kind together.

        Args:
            rows: The rows.
            are_joining: Whether they will join a batch, so that their prompts are read now.

        Raises:
            MemberError: If a member fails.
        """
        first, *others = (row.decoder for row in rows)
        for other in others:
            first.join(other)
        if are_joining:
            first.rows.read_all()
        return first

    @torch.no_grad()
    def join(self, rows: Sequence[Row], decoder: SharedDecoder) -> None:
        """Let more rows take part in the next step.

        Args:
            rows: The rows.
            decoder: Theirs, as `begun` gives it.
        """
        self.decoder.join(decoder)
        self.rows += rows

    @torch.no_grad()
    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows that were given up."""
        self._keep([place for place, row in enumerate(self.rows) if row not in rows])

    @torch.no_grad()
    def step(self) -> None:
        """Write one id in every row, tell the rows, and drop those that have ended.

        Raises:
            MemberError: If a member fails.
        """
        decoder, rows = self.decoder, self.rows
        device = decoder.method.device
        scores = decoder.fuse(torch.zeros(len(rows), 1, device=device))
        laws: dict[int, Tensor] = {}
        if not decoder.is_writing_entries:
            scores = self._processed(scores, laws)
        asking = [place for place, row in enumerate(rows) if row.num_best is not None]
        if asking:
            found = decoder.law(asking)
            for at, place in enumerate(asking):
                laws.setdefault(place, found[at])
        chosen = decoder.select(scores, [row.do_sample for row in rows]).argmax(-1)
        decoder.run_ahead(chosen[:, None])
        ids = chosen.tolist()
        ends = [row.write(i) for row, i in zip(rows, ids, strict=True)]
        done = decoder.receive(chosen[:, None], torch.tensor(ends, device=chosen.device)).tolist()
        faults = dict(decoder.faults)
        self._keep([place for place, end in enumerate(done) if not end and place not in faults])
        for place, row in enumerate(rows):
            if place in faults:
                row.take(Written(None, ends=True, error=faults[place]))
            else:
                law = laws[place] if row.num_best is not None else None
                row.take(_written(ids[place], done[place], law, row.num_best or 0))

    def _processed(self, scores: Tensor, laws: dict[int, Tensor]) -> Tensor:
        """Apply every row's own processors; `laws` receives the distributions of the decisions."""
        decoder, rows = self.decoder, self.rows
        if decoder.is_constrained:
            scores, raised = scores.clone(), torch.zeros_like(scores, dtype=torch.bool)
            for place, row in enumerate(rows):
                try:
                    constrained, of_row = row.constrained(scores[place : place + 1])
                except Exception as error:
                    decoder.faults[place] = MemberError(f"a logits processor failed: {error}")
                    continue
                scores[place] = constrained[0]
                if of_row is not None:
                    raised[place] = of_row[0]
            if decoder.method.proposes_few:
                scores, decided = decoder.settle_with(scores, raised if bool(raised.any()) else None)
                laws.update(enumerate(decided))
        groups: dict[Any, list[int]] = {}
        for place, row in enumerate(rows):
            if row.warpers:
                groups.setdefault(row.kind_of_warpers, []).append(place)
        for places in groups.values():
            warpers = rows[places[0]].warpers
            ids: Any = torch.zeros(len(places), 1, dtype=torch.long, device=scores.device)
            if len(places) == len(rows):
                scores = warpers(ids, scores)
            else:
                at = torch.tensor(places, device=scores.device)
                scores = scores.index_copy(0, at, warpers(ids, scores[at]))
        return scores

    def _keep(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        if self.rows:
            self.decoder.keep(places)


def _written(new_id: int, ends: bool, law: Tensor | None, num_best: int) -> Written:
    if law is None:
        return Written(new_id, ends=ends)
    values, ids = law.topk(min(num_best, len(law)))
    best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Written(new_id, float(law[new_id]), best, ends)
