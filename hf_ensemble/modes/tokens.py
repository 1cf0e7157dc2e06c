"""Deciding token by token: the stock loop, in which the primary's scores become the ensemble's."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from ..decoding.call import end_ids, keeps_rows
from ..decoding.hooks import FollowingCriteriaList, Hook
from ..decoding.loop import Loop
from ..decoding.refusals import refuse_all_but_greedy
from ..decoding.row_processors import split_at_warpers
from ..decoding.token_decoder import TokenDecoder
from ..decoding.unpadded_penalty import UnpaddedPenalty
from ..errors import ConfigurationError
from ..methods.base import TokenMethod
from ..recording.recorder import DecisionRecorder
from ..scoring.likelihoods import Batch, Found
from ..scoring.token_batch import TokenBatch
from .base import Mode
from .stock_loop import WAITS


class TokenMode(Mode):
    """A token-level method decides every token."""

    _decoder: TokenDecoder

    def refuse(self, settings: GenerationConfig, arguments: Mapping[str, Any]) -> None:
        """Refuse sampling and beams where the method's options allow neither."""
        refuse_all_but_greedy(settings, self.call.config)

    def processors(
        self, stock: Sequence[Any], settings: Any, prompt_ids: Tensor, prompt_mask: Tensor | None
    ) -> Sequence[Any]:
        """Put the fusion first, and the decision over the union vocabulary last."""
        call = self.call
        if call.config.draws_one:
            _refuse_all_but_plain_sampling(settings, stock)
        is_beam_search = settings.num_beams > 1
        constraints, warpers = split_at_warpers(stock)
        method = call.method(settings)
        is_wide = not is_beam_search and not constraints and method.is_wide
        if call.num_decision_entries is not None:
            self.recorder = DecisionRecorder(
                call.members,
                method.maps,
                prompt_ids,
                prompt_mask,
                call.num_decision_entries,
                is_wide,
                method.reads_first_ids,
            )
        self._decoder = TokenDecoder(
            call,
            method,
            prompt_ids,
            prompt_mask,
            end_ids(settings),
            is_wide=is_wide,
            constraints=constraints,
            runs_primary=self._primary_can_wait(settings, method),
            keep_rows=keeps_rows(settings),
            recorder=self.recorder,
            max_new_tokens=settings.max_length - prompt_ids.shape[1],
        )
        if prompt_mask is not None:
            constraints = [
                UnpaddedPenalty(item, prompt_mask) if isinstance(item, RepetitionPenaltyLogitsProcessor) else item
                for item in constraints
            ]
        decoder = self._decoder
        # Proposals decide alone wherever the last constraint leaves some of them.
        settling = [Hook(decoder.settle)] if constraints and method.proposes_few else []
        if is_beam_search:
            first = Hook(decoder.fuse_beams)
            last = Hook(lambda _, scores: decoder.check_candidates(scores, settings.num_beams))
        else:
            first = Hook(lambda _, scores: decoder.fuse(scores))
            last = Hook(lambda _, scores: decoder.select(scores, settings.do_sample))
        return [first, *constraints, *settling, *warpers, last]

    def criteria(self, stock: StoppingCriteriaList, settings: GenerationConfig) -> StoppingCriteriaList:
        """Let the decoder follow what is written, unless rows move, as beams do."""
        if settings.num_beams is not None and settings.num_beams > 1:
            return stock
        return FollowingCriteriaList(stock, self._decoder.receive)

    def sample(self, loop: Loop) -> Any:
        """Run the stock loop; the primary's own passes are left out where its state runs it."""
        if self._decoder.rows.runs_primary:
            for key in ("past_key_values", "cache"):
                loop.kwargs.pop(key, None)
            loop.kwargs[WAITS] = True
        return loop.run()

    def fill(self, output: Any, settings: GenerationConfig) -> None:
        """Put in the ensemble's scores and logits, forward passes, shares and decisions."""
        if settings.output_logits:
            output["logits"] = tuple(self._decoder.logits_rows)
        if settings.output_scores and self._decoder.scores_rows:
            output["scores"] = tuple(self._decoder.scores_rows)
        output["num_forwards"] = self._decoder.num_forwards
        if settings.num_beams in (None, 1):
            output["share_ensembled"] = self._decoder.share_ensembled
        super().fill(output, settings)

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score by the fused distribution of every step."""
        call = self.call
        method = call.kept.method(call.config, end_ids)
        return TokenBatch(call, method, batch).score()

    def _primary_can_wait(self, settings: Any, method: TokenMethod) -> bool:
        """Whether the primary need not run in the decoding loop: not every step needs it, or its steps are captured."""
        call = self.call
        gate = call.config.gate_rule
        needs_it = gate[0] == 0 if gate else 0 in call.weights.participants and not call.config.draws_one
        needs_it |= method.starts_from_primary
        # What only its own pass through the decoding loop can give.
        outputs = settings.output_attentions or settings.output_hidden_states
        return not (
            (needs_it and not call.members[0].is_captured)
            or call.has_cache
            or settings.num_beams > 1
            or settings.use_cache is False
            or settings.prefill_chunk_size is not None
            or settings.cache_implementation not in (None, "dynamic")
            or (settings.return_dict_in_generate and outputs)
        )


def _refuse_all_but_plain_sampling(settings: Any, stock: Sequence[LogitsProcessor]) -> None:
    rule = "draws one member for each token, which gives texts of the mixture's law only"
    if not settings.do_sample or settings.num_beams > 1:
        found = "beam search" if settings.num_beams > 1 else "greedy decoding"
        raise ConfigurationError(
            f'`strategy="mixture_sampling"` {rule} if texts are sampled, but this is {found}. Pass `do_sample=True`.'
        )
    if stock:
        name = type(stock[0]).__name__
        raise ConfigurationError(
            f'`strategy="mixture_sampling"` {rule} without processors, but there is a {name}. Pass `top_k=0`, '
            "`top_p=1.0` and `temperature=1.0`, and no others."
        )
