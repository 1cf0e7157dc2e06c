"""The token-level ensemble as a plain logits processor."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..config import MethodConfig, method_config
from ..errors import ConfigurationError
from ..members.local import LocalMember
from ..messages import nothing_left, wrong_count
from .call import Call, Kept
from .step_weights import StepWeights, WeightsLike
from .token_decoder import TokenDecoder


class EnsembleLogitsProcessor(LogitsProcessor):
    """The token-level ensemble as a plain logits processor for any model's own `generate`.

    The model that generates is the primary; the others run inside the processor. Entries that the primary's vocabulary
    lacks count for the first id that writes them. Pad ids at the beginning of a row are padding. A column with score
    `-inf`, or the smallest possible number, stays at `-inf`. Put this processor first in the list; a repetition
    penalty that `generate` itself adds still acts on the primary before it.

    Args:
        models: The members' models; the first is the one that generates.
        tokenizers: Their fast tokenizers.
        method: Name or configuration of a token-level method.
        weights: Mixing weights, as for the ensemble's `generate`. Default: equal weights.
        pad_token_id: Id of padding in prompts. Default: that of the primary's generation config or tokenizer.

    Example:
        ```python
        processor = EnsembleLogitsProcessor([model_a, model_b], [tokenizer_a, tokenizer_b], method="unite")
        model_a.generate(**inputs, logits_processor=[processor], max_new_tokens=32)
        ```
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        method: str | MethodConfig = "unite",
        weights: WeightsLike | None = None,
        pad_token_id: int | None = None,
    ):
        if len(models) != len(tokenizers):
            raise wrong_count("tokenizers", len(tokenizers), len(models), "model")
        self._kept = Kept([LocalMember(model, tokenizer) for model, tokenizer in zip(models, tokenizers, strict=True)])
        self._config = method_config(method)
        if self._config.decides != "tokens":
            what = "spans of several tokens" if self._config.decides == "spans" else "whole answers"
            raise ConfigurationError(
                f"method {self._config.name!r} decides over {what}, which a logits processor cannot do. Use "
                "`EnsembleForCausalLM`."
            )
        if self._config.draws_one or self._config.greedy_only:
            raise ConfigurationError(
                f"these options of method {self._config.name!r} need to know how the token is chosen, but a logits "
                "processor does not know. Use `EnsembleForCausalLM`."
            )
        self._config.check_members(len(models))
        self._weights = weights
        self._step_weights()
        sources = (getattr(models[0], "generation_config", None), tokenizers[0])
        found = [pad_token_id, *(getattr(source, "pad_token_id", None) for source in sources)]
        self._pad = next((i for i in found if i is not None), None)
        self._decoder: TokenDecoder | None = None

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Turn the primary's logits (or log-probabilities) into fused ones, of the same shape."""
        if self._decoder is None or not self._decoder.follow_beams(input_ids):
            self._decoder = self._start(input_ids, scores)
        is_banned = scores <= torch.finfo(scores.dtype).min / 2  # `remove_invalid_values` writes bans this way too
        self._decoder.is_constrained = self._decoder.method.proposes_few and bool(is_banned.any())
        # Only their own normalizer shows whether these are logits or log-probabilities (as in beam search).
        fused = self._decoder.fuse(scores, add_level=False) + scores.float().logsumexp(-1, keepdim=True)
        self._decoder.check_finite()
        settled = self._decoder.settle(input_ids, fused.masked_fill(is_banned, -torch.inf))
        # A row without any candidate, for example of a dead beam, stays as it is.
        is_lost = (settled == -torch.inf).all(-1) & ~is_banned.all(-1)
        if bool(is_lost.any()):
            raise nothing_left(self._config.name, self._decoder.rows.where(int(is_lost.nonzero()[0, 0])))
        return settled  # type: ignore[return-value]

    def reset(self) -> None:
        """Forget the rows, so that the next call starts a new generation even if it continues the last one's ids."""
        self._decoder = None

    def _start(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> TokenDecoder:
        for member in self._kept.members:
            member.check_size()
        mask = None if self._pad is None else (input_ids != self._pad).long().cummax(-1).values
        eos_ids = self._kept.members[0].eos_token_ids
        method = self._kept.method(self._config, eos_ids, scores.device)
        weights = self._step_weights()
        # A prompt may have several consecutive rows.
        num_rows = len(input_ids)
        copies = num_rows // weights.num_rows if num_rows % weights.num_rows == 0 else 1
        weights.expand(num_rows // copies, copies)
        # A row that has ended is filled with padding, which the primary has not written.
        silent_ids = [*eos_ids, *([] if self._pad is None else [self._pad])]
        call = Call(self._kept, self._config, weights)
        return TokenDecoder(call, method, input_ids, mask, silent_ids, is_wide=False)

    def _step_weights(self) -> StepWeights:
        return StepWeights(self._weights, len(self._kept.members), self._config.takes_weights_as_given)
