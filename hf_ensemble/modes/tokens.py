"""Deciding token by token: the stock loop, in which the primary's scores become the ensemble's."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteriaList

from ..decoding.call import end_ids, keeps_rows
from ..decoding.loop import Loop
from ..decoding.refusals import Obstacle, refuse
from ..decoding.row_processors import split_at_warpers, without_padding
from ..decoding.token_decoder import TokenDecoder
from ..errors import ConfigurationError
from ..members.shared_weights import can_share_pass
from ..methods.base import TokenMethod
from ..recording.recorder import DecisionRecorder
from ..scoring.likelihoods import Batch, Found
from ..scoring.token_batch import TokenBatch
from .base import Mode
from .stock_loop import FollowingCriteriaList, Hook, waiting

_MIXTURE = (
    '`strategy="mixture_sampling"` draws one member per token, which gives texts of the mixture\'s distribution only'
)


class TokenMode(Mode):
    """A token-level method decides every token."""

    decoder: TokenDecoder

    def refuse(self) -> None:
        """Refuse sampling and beams if the method's options allow neither."""
        config, settings = self.call.config, self.call.settings
        beams = settings.num_beams
        why = f"{config.greedy_only}. Pass `do_sample=False` and `num_beams=1`"
        asked = [
            Obstacle(settings.do_sample, f"`do_sample={settings.do_sample}`", why),
            Obstacle(beams not in (None, 1), f"`num_beams={beams}`", why),
        ]
        refuse(asked if config.greedy_only else (), f"these options of method {config.name!r}")
        if config.draws_one and (not settings.do_sample or beams not in (None, 1)):
            found = "greedy decoding" if beams in (None, 1) else "beam search"
            raise ConfigurationError(f"{_MIXTURE} if texts are sampled, but this is {found}. Pass `do_sample=True`.")

    def processors(self, stock: Sequence[Any], prompt_ids: Tensor, prompt_mask: Tensor | None) -> Sequence[Any]:
        """Put the fusion first, and the decision over the union vocabulary last."""
        call, settings = self.call, self.call.settings
        do_sample = settings.do_sample
        if call.config.draws_one:
            refuse_processors(stock)
        is_beam_search = settings.num_beams > 1
        constraints, warpers = split_at_warpers(stock)
        method = call.method()
        is_wide = not is_beam_search and not constraints and method.is_wide
        entries = call.num_decision_entries
        if entries is not None:
            self.recorder = DecisionRecorder(
                call.members,
                method.maps,
                prompt_ids,
                prompt_mask,
                entries,
                is_wide,
                method.reads_first_ids,
                None if method.build_at_start is None else method.at_start.maps,
            )
        decoder = self.decoder = TokenDecoder(
            call,
            method,
            prompt_ids,
            prompt_mask,
            # The stock loop does not warn about control tokens.
            range(call.members[0].vocab_size) if call.is_by_primary else end_ids(settings),
            is_wide=is_wide,
            constraints=constraints,
            runs_primary=self._primary_can_wait(method),
            keep_rows=keeps_rows(settings),
            recorder=self.recorder,
            max_new_tokens=settings.max_length - prompt_ids.shape[1],
        )
        constraints = [without_padding(item, prompt_mask) for item in constraints]
        # Proposals decide alone if the last constraint allows some of them.
        settling = [Hook(decoder.settle)] if constraints and method.proposes_few else []
        if is_beam_search:
            first = Hook(decoder.fuse_beams)
            last = Hook(lambda _, scores: decoder.check_candidates(scores, settings.num_beams))
        else:
            first = Hook(lambda _, scores: decoder.fuse(scores))
            last = Hook(lambda _, scores: decoder.select(scores, do_sample))
        return [first, *constraints, *settling, *warpers, last]

    def criteria(self, stock: StoppingCriteriaList) -> StoppingCriteriaList:
        """Let the decoder follow the written ids, unless rows move, as beams do."""
        if self.call.settings.num_beams > 1:
            return stock
        return FollowingCriteriaList(stock, self.decoder.receive, self.decoder.run_ahead)

    def sample(self, loop: Loop) -> Any:
        """Run the stock loop, without the primary's own passes if its state runs it."""
        if self.decoder.rows.runs_primary:
            loop.kwargs = waiting(loop.kwargs)
        if self.call.draws.are_seeded:
            # Only one id is left to draw, and torch's generator is not advanced.
            loop.settings.do_sample = False
        return loop.run()

    def score_batch(self, batch: Batch, end_ids: Sequence[int]) -> Found:
        """Score by the fused distribution of every step."""
        call = self.call
        method = call.kept.method(call.config, end_ids)
        return TokenBatch(call, method, batch).score()

    def _primary_can_wait(self, method: TokenMethod) -> bool:
        """Whether the primary need not run in the decoding loop.

        This is so if some steps do without it, its steps are captured, or they are part of others' forward passes.
        """
        call = self.call
        if not call.members[0].runs_in_loop:
            return True
        gate = call.config.gate_rule
        needs_it = gate[0] == 0 if gate else 0 in call.weights.participants and not call.config.draws_one
        needs_it |= method.starts_from_primary
        if call.needs_stock_passes:
            return False
        others = [call.members[n] for n in call.participants]
        return not needs_it or call.members[0].is_captured or can_share_pass(call.members[0], others)


def refuse_processors(stock: Sequence[LogitsProcessor]) -> None:
    """Refuse processors if one member is drawn for each token.

    Raises:
        ConfigurationError: If there are any.
    """
    if stock:
        name = type(stock[0]).__name__
        raise ConfigurationError(
            f"{_MIXTURE} without processors, but there is a {name}. Pass `top_k=0`, `top_p=1.0` and "
            "`temperature=1.0`, and no other processors."
        )
