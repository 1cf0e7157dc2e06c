"""Proposing: a member writes a span in every live row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...errors import MemberError
from ...members.state import PlainContext
from ...methods.sweetspan import SweetSpanConfig
from ...vocabulary.encoding import ByteEncoder
from ...vocabulary.words import Span, read_span
from .state import Participant, SpanRow


@dataclass
class Proposal:
    """What a member wrote in one row.

    Attributes:
        span: The span.
        ids: The ids that it wrote, up to the one that completed the span.
        log_probs: That of each id.
        eos_log_probs: That of all EOS ids together, in place of each id.
        best_eos: The best EOS id in place of each id.
        first_log_probs: Log-probabilities of the first id, of shape `(vocab_size,)`.
    """

    span: Span
    ids: list[int]
    log_probs: list[float]
    eos_log_probs: list[float]
    best_eos: list[int]
    first_log_probs: Tensor


@dataclass
class Proposer:
    """Lets members write spans, by the options of a call.

    Attributes:
        primary: The primary's encoder.
        config: The method's options.
        processors: Processors of every member's logits.
        do_sample: Whether ids are sampled.
        min_new_tokens: Number of the primary's ids before which no text may end.
    """

    primary: ByteEncoder
    config: SweetSpanConfig
    processors: LogitsProcessorList
    do_sample: bool
    min_new_tokens: int

    def propose(self, one: Participant, rows: Sequence[SpanRow]) -> list[Proposal]:
        """Let a member write a span in every live row, after all that was decided there.

        Args:
            one: The member.
            rows: The live rows.

        Raises:
            MemberError: If the member gives NaN, or nothing is left for it to choose from.
        """
        logits = one.state.logits()
        one.state.hold()
        drafts = [PlainContext(list(context.ids)) for context in one.contexts]
        num_free = [one.max_length - len(draft.ids) for draft in drafts]
        one.state.contexts = drafts
        first_log_probs = log_probs = one.log_probs(logits)
        steps: list[Tensor] = []
        written: list[list[int]] = [[] for _ in rows]
        lengths = [0] * len(rows)
        while True:
            chosen, is_empty = self._choose_ids(one, rows, logits, drafts, written)
            steps.append(_seen(one, log_probs, chosen, is_empty))
            for place, i in enumerate(chosen.tolist()):
                written[place].append(i)
                # A complete row writes on as long as it has positions, so that all rows' caches grow alike.
                has_room = len(written[place]) < num_free[place]
                if has_room:
                    drafts[place].ids.append(i)
                if not lengths[place] and (not has_room or self._span(one, rows[place], written[place]).is_complete):
                    lengths[place] = len(steps)
            if all(lengths):
                break
            logits = one.state.logits()
            log_probs = one.log_probs(logits)
        proposals = []
        for place, seen in enumerate(torch.stack(steps, dim=-1).transpose(0, 1).tolist()):
            length, where = lengths[place], rows[place].where
            own, eos, best_eos, is_nan, is_empty = (values[:length] for values in seen)
            if any(is_nan):
                raise one.member.not_finite(where)
            if any(is_empty):
                raise MemberError(
                    f"nothing is left for member {one.member.name!r} to choose from {where}: processors and filters "
                    "removed every id. Loosen them."
                )
            ids = written[place][:length]
            span = self._span(one, rows[place], ids)
            proposals.append(Proposal(span, ids, own, eos, list(map(int, best_eos)), first_log_probs[place]))
        return proposals

    def _span(self, one: Participant, row: SpanRow, ids: Sequence[int]) -> Span:
        token_bytes = one.member.encoder.token_bytes
        return read_span(ids, token_bytes, one.eos_ids, self.config.span_length, self.config.token_limit, row.begun)

    def _choose_ids(
        self,
        one: Participant,
        rows: Sequence[SpanRow],
        logits: Tensor,
        drafts: Sequence[PlainContext],
        written: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Choose the next id of every row, and say in which rows there was none to choose, each `(num_rows,)`."""
        scores = one.allowed(logits)
        if self.min_new_tokens and one.eos_ids:
            early = [place for place, ids in enumerate(written) if self._is_early(one, rows[place], ids)]
            scores[torch.tensor(early, dtype=torch.long)[:, None], torch.tensor(one.eos_ids)] = -torch.inf
        if self.processors:
            # One row at a time, because contexts differ in length.
            of_rows = [
                self.processors(torch.tensor([draft.ids], device=scores.device), scores[place : place + 1])  # type: ignore[arg-type]
                for place, draft in enumerate(drafts)
            ]
            scores = torch.cat(of_rows)
        best = scores.amax(-1, keepdim=True)
        is_empty = ~(best[:, 0] > -torch.inf)
        if not self.do_sample:
            return scores.argmax(-1), is_empty
        # The draw fails for all rows if one has no finite score. Such a row draws anything here, and `propose` raises.
        probs = scores.masked_fill(~best.isfinite(), 0.0).softmax(-1)
        return torch.multinomial(probs, 1)[:, 0], is_empty

    def _is_early(self, one: Participant, row: SpanRow, ids: Sequence[int]) -> bool:
        """Whether a row holds fewer of the primary's ids than it must before its text may end."""
        missing = self.min_new_tokens - row.num_decided
        if missing > 0 and one.index > 0:
            ids = self.primary.encode_context_bytes(one.member.encoder.token_bytes.write(ids))
        return len(ids) < missing


def _seen(one: Participant, log_probs: Tensor, chosen: Tensor, is_empty: Tensor) -> Tensor:
    """What the host reads of a step when the span is complete, of shape `(5, num_rows)`; see `propose`."""
    eos_log_probs, best_eos = one.eos_log_probs(log_probs)
    of_chosen = log_probs.gather(-1, chosen[:, None])[:, 0]
    seen = [of_chosen, eos_log_probs, best_eos, log_probs.amax(-1).isnan(), is_empty]
    return torch.stack([values.double() for values in seen])
