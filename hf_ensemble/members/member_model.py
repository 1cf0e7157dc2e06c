"""A member's model, as its caches see it."""

import inspect
import warnings
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .. import messages
from ..errors import ConfigurationError, MemberError

_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


class MemberModel:
    """A causal language model that is run on ids, their positions and a cache. It is never changed.

    Args:
        model: A causal language model.
        name: Name used in errors. Default: the last part of the model's `name_or_path`, else its class.

    Attributes:
        vocab_size: Width of the model's logits.
        cache_keyword: What its forward calls the cache.

    Raises:
        ConfigurationError: If the model is no decoder-only causal language model.
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None):
        self.model = model
        path = str(getattr(model, "name_or_path", "") or "").rstrip("/")
        self.name = name or path.rsplit("/", 1)[-1] or type(model).__name__
        if model.config.is_encoder_decoder:
            raise ConfigurationError(
                f"member {self.name!r} is an encoder-decoder model ({type(model).__name__}), which an ensemble cannot "
                "hold. Use decoder-only causal language models."
            )
        if model.get_output_embeddings() is None:
            raise ConfigurationError(
                f"member {self.name!r} ({type(model).__name__}) has no language-modelling head. Load it with "
                "AutoModelForCausalLM."
            )
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_keyword = next((key for key in _CACHE_KEYWORDS if key in parameters), _CACHE_KEYWORDS[0])
        self._parameters = set(parameters)

    @property
    def device(self) -> torch.device:
        """The device that the member's input ids go to."""
        weight: Any = self.model.get_input_embeddings().weight
        device: torch.device = weight.device
        return device

    @cached_property
    def max_positions(self) -> int | None:
        """How many ids fit the member's learned position embeddings; None where nothing breaks beyond a length."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None:
            return None
        token_embeddings = {id(self.model.get_input_embeddings()), id(self.model.get_output_embeddings())}
        tables = [
            module.num_embeddings
            for module in self.model.modules()
            if isinstance(module, torch.nn.Embedding) and id(module) not in token_embeddings
        ]
        # OPT and its relatives keep two rows more than they have positions.
        return limit if {limit, limit + 2} & set(tables) else None

    def accepts(self, keyword: str) -> bool:
        """Whether the model's forward has a parameter of this name."""
        return keyword in self._parameters

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        num_logits: int,
    ) -> Tensor:
        """Run the model.

        Args:
            input_ids: New ids of shape `(batch_size, num_new)`.
            position_ids: Their positions, of the same shape.
            attention_mask: Over cache and new ids, of shape `(batch_size, num_cached + num_new)`; None for all ones.
            cache: The cache, extended in place; None to use none.
            num_logits: Number of last positions whose logits are wanted.

        Returns:
            Logits of shape `(batch_size, num_logits, vocab_size)`, on the member's device.

        Raises:
            MemberError: If the model raises.
        """
        kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": cache is not None, "return_dict": True}
        if cache is not None:
            kwargs[self.cache_keyword] = cache
        optional = {"position_ids": position_ids, "attention_mask": attention_mask, "logits_to_keep": num_logits}
        # A mixture-of-experts model saved from training would compute an auxiliary loss, and fail on padding.
        optional["output_router_logits"] = False
        kwargs.update((key, value) for key, value in optional.items() if self.accepts(key) and value is not None)
        try:
            logits: Tensor = self.model(**kwargs).logits
        except Exception as error:
            raise MemberError(f"member {self.name!r} failed in its forward pass: {error}") from error
        return logits[:, -num_logits:].to(self.device)

    def fingerprint(self) -> tuple[Any, ...]:
        """What changes when somebody moves, casts or replaces the model's weights, or changes what its modules do."""
        model = self.model
        tensors = tuple((t.data_ptr(), t.dtype) for some in (model.parameters(), model.buffers()) for t in some)
        modules = tuple(
            (
                id(module),
                module.training,
                len(module._forward_hooks) + len(module._forward_pre_hooks),
                # Of adapters: which are on.
                module.__dict__.get("_disable_adapters"),
                str(module.__dict__.get("_active_adapter")),
            )
            for module in model.modules()
        )
        return tensors, modules, model.config._attn_implementation

    def not_finite(self, where: str) -> MemberError:
        """Make the error for NaN or infinite logits; `where` goes on "in row 0 at step 1"."""
        return messages.not_finite(self.name, self.model.dtype, where)

    def warn_uncaptured(self, reason: str) -> None:
        """Say that the member's steps do not run as CUDA graphs, and why."""
        warnings.warn(
            f"steps of member {self.name!r} ({type(self.model).__name__}) are not captured as CUDA graphs, so they take "
            f"longer: {reason}.",
            stacklevel=2,
        )
