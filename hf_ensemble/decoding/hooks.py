"""The ensemble as logits processors."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..config import MethodConfig, SweetSpanConfig, method_config
from ..errors import ConfigurationError
from ..members.member import Member
from ..messages import wrong_count
from ..methods import build_method
from ..methods.base import TokenMethod, eos_ids_of
from ..vocabulary.union import UnionVocabulary
from .step_weights import MixingWeights, WeightsLike
from .token_decoder import TokenFusion


class FusionProcessor(LogitsProcessor):
    """First processor of an ensemble's call: the primary's logits in, the fused scores out.

    Args:
        fusion: The call's fusion.
        is_beam_search: Whether rows move between steps and scores arrive as log-probabilities.
    """

    def __init__(self, fusion: TokenFusion, is_beam_search: bool):
        self._fusion = fusion
        self._is_beam_search = is_beam_search
        self._is_first = True

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        if self._is_beam_search and not self._is_first:
            self._fusion.follow_beams(input_ids)
        self._is_first = False
        fused = self._fusion.fuse(scores, normalize=not self._is_beam_search)
        if self._is_beam_search:
            self._fusion.check_finite()
        return fused  # type: ignore[return-value]


class SelectionProcessor(LogitsProcessor):
    """Last processor of an ensemble's call: chooses over the union vocabulary where the decision is made there.

    Args:
        fusion: The call's fusion.
        do_sample: Whether to sample.
        num_beams: Number of beams; above 1, `generate` itself chooses.
    """

    def __init__(self, fusion: TokenFusion, do_sample: bool, num_beams: int):
        self._fusion = fusion
        self._do_sample = do_sample
        self._num_beams = num_beams

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        if self._num_beams > 1:
            self._fusion.check_candidates(scores, self._num_beams)
            return scores
        return self._fusion.select(scores, self._do_sample)  # type: ignore[return-value]


class UnpaddedPenalty(LogitsProcessor):
    """A repetition penalty that does not count padding, as the stock one of transformers 5.17 does.

    Args:
        penalty: The penalty.
        prompt_mask: 1 for ids of the prompt and 0 for padding, of shape `(batch_size, prompt_length)`.
    """

    def __init__(self, penalty: LogitsProcessor, prompt_mask: torch.Tensor):
        self._penalty = penalty
        self._is_prompt = prompt_mask != 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(batch_size, width)`."""
        length = self._is_prompt.shape[1]
        # In place of padding an id that the row holds anyway: a penalty asks only which ids there are.
        present = input_ids.gather(1, self._is_prompt.long().argmax(-1, keepdim=True))
        prompt = torch.where(self._is_prompt, input_ids[:, :length], present)
        return self._penalty(torch.cat([prompt, input_ids[:, length:]], dim=-1), scores)  # type: ignore[no-any-return]


class EnsembleLogitsProcessor(LogitsProcessor):
    """The token-level ensemble as a plain logits processor beside any model's own `generate`.

    The model that generates is the primary; the others run inside the processor. Entries that the primary's vocabulary
    lacks count for the first id that writes them. The leading run of pad ids in a row is padding. A column that arrives
    at `-inf` leaves at `-inf`. Put it first in the list: a repetition penalty that `generate` itself adds acts on the
    primary before it.

    Args:
        models: The members' models; the first is the one that generates.
        tokenizers: Their fast tokenizers.
        method: Name or configuration of a token-level method.
        weights: Mixing weights, as for the ensemble's `generate`. Default: the same for all.
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
        self._members = [Member(model, tokenizer) for model, tokenizer in zip(models, tokenizers, strict=True)]
        self._union = UnionVocabulary([member.encoder for member in self._members])
        self._config = method_config(method)
        if isinstance(self._config, SweetSpanConfig):
            raise ConfigurationError(
                "method 'sweetspan' decides over spans of several tokens, which no logits processor can do. Use "
                "`EnsembleForCausalLM`."
            )
        if self._config.draws_one or self._config.greedy_only:
            raise ConfigurationError(
                f"these options of method {self._config.name!r} need to know how the token is chosen, which no logits "
                "processor does. Use `EnsembleForCausalLM`."
            )
        self._method: TokenMethod | None = None
        self._config.check_members(len(models))
        self._weights = weights
        self._mixing_weights()
        sources = (getattr(models[0], "generation_config", None), tokenizers[0])
        found = (getattr(source, "pad_token_id", None) for source in sources)
        self._pad = pad_token_id if pad_token_id is not None else next((i for i in found if i is not None), None)
        self._fusion: TokenFusion | None = None

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Turn the primary's logits (or log-probabilities) into fused ones, of the same shape."""
        if self._fusion is None or not self._fusion.follow_beams(input_ids):
            self._fusion = self._start(input_ids, scores)
        # Whether these are logits or log-probabilities (as in beam search) shows in their own normalizer only.
        fused = self._fusion.fuse(scores, normalize=False) + scores.float().logsumexp(-1, keepdim=True)
        self._fusion.check_finite()
        return fused.masked_fill(scores == -torch.inf, -torch.inf)  # type: ignore[return-value]

    def reset(self) -> None:
        """Forget the rows, so that the next call starts a new generation even if it continues the last one's ids."""
        self._fusion = None

    def _start(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> TokenFusion:
        for member in self._members:
            member.check_size()
        mask = None
        if self._pad is not None:
            mask = (input_ids != self._pad).long().cummax(-1).values
        eos_ids = eos_ids_of(self._members, self._members[0].eos_token_ids)
        if self._method is None or self._method.device != scores.device or self._method.is_stale:
            self._method = build_method(self._config, self._members, self._union, eos_ids, scores.device)
        weights = self._mixing_weights()
        # Of one prompt there may be several rows, one after the other.
        num_rows = len(input_ids)
        copies = num_rows // weights.num_rows if num_rows % weights.num_rows == 0 else 1
        weights.expand(num_rows // copies, copies)
        return TokenFusion(self._members, self._method, self._config, weights, input_ids, mask, is_wide=False)

    def _mixing_weights(self) -> MixingWeights:
        return MixingWeights(self._weights, len(self._members), self._config.takes_weights_as_given)
