"""A member's model, for its caches."""

import inspect
import itertools
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .. import messages
from ..config import last_part
from ..errors import ConfigurationError
from .adapted import address_of, plain_tensors

_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")

_POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings")
"""Names of the number of positions in configurations; the last two if encoder and decoder differ."""

_PACKED = (torch.int8, torch.uint8)
"""What quantisers keep weights in."""


class MemberModel:
    """A causal language model that runs on ids, their positions and a cache. It is never changed.

    Args:
        model: A causal language model.
        name: Name in errors. Default: the last part of the model's `name_or_path`, else its class.

    Attributes:
        vocab_size: Width of the model's logits.
        cache_keyword: The name of the cache in its forward.
        cache_obstacles: Why faster cache modes were not chosen, by mode, after the trial.

    Raises:
        ConfigurationError: If the model is not a decoder-only causal language model.
    """

    has_encoder: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, name: str | None = None):
        self.model = model
        self.name = name or last_part(str(getattr(model, "name_or_path", "") or "")) or type(model).__name__
        if model.config.is_encoder_decoder != self.has_encoder:
            kinds = ("a decoder-only model", "an encoder-decoder model")
            raise ConfigurationError(
                f"member {self.name!r} is {kinds[not self.has_encoder]} ({type(model).__name__}), but has to be "
                f"{kinds[self.has_encoder]}."
            )
        if model.get_output_embeddings() is None:
            raise ConfigurationError(
                f"member {self.name!r} ({type(model).__name__}) has no language-modelling head. Load it with "
                "AutoModelForCausalLM."
            )
        adapters: dict[str, Any] = getattr(model, "peft_config", None) or {}
        for adapter, config in adapters.items():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigurationError(
                    f"adapter {adapter!r} of member {self.name!r} ({type(config).__name__}) puts virtual tokens "
                    "before every text, which the caches of an ensemble cannot handle. Use an adapter that changes "
                    "the weights (LoRA)."
                )
        if any(weight.is_meta for weight in model.parameters()) and not _is_offloaded(model):
            raise ConfigurationError(
                f"member {self.name!r} has weights on the meta device, which have no values. Load it with "
                "`from_pretrained`, or pass its path to `EnsembleForCausalLM.from_pretrained`."
            )
        self.vocab_size = self._width_of_head()
        self.cache_obstacles: dict[str, str] = {}
        self._parameters = _forward_parameters(model)
        self.cache_keyword = next((key for key in _CACHE_KEYWORDS if key in self._parameters), _CACHE_KEYWORDS[0])

    @property
    def device(self) -> torch.device:
        """The device that the member's input ids go to."""
        return input_device(self.model)

    @cached_property
    def max_positions(self) -> int | None:
        """How many ids fit the member's learned position embeddings; None if there is no limit."""
        return self._positions_of(self.model)

    def _positions_of(self, part: torch.nn.Module) -> int | None:
        """How many learned positions a part of the model has; None for none."""
        config = self.model.config.get_text_config(decoder=True)
        limits = {limit for name in _POSITIONS if (limit := getattr(config, name, None)) is not None}
        token_embeddings = {id(self.model.get_input_embeddings()), id(self.model.get_output_embeddings())}
        tables = [
            module.num_embeddings
            for module in part.modules()
            if isinstance(module, torch.nn.Embedding) and id(module) not in token_embeddings
        ]
        # OPT and similar models have two more rows than positions.
        return min((limit for limit in limits if {limit, limit + 2} & set(tables)), default=None)

    def check_size(self) -> None:
        """Check that the model still has the vocabulary that the ensemble was created with.

        Raises:
            ConfigurationError: If it does not.
        """
        self._check_width(self._width_of_head())

    def _check_width(self, width: int) -> None:
        if width != self.vocab_size:
            raise ConfigurationError(
                f"member {self.name!r} returns logits of {width} ids, but had {self.vocab_size} when the ensemble was "
                "created: its embeddings have been resized. Create the ensemble again."
            )

    def _width_of_head(self) -> int:
        head: Any = self.model.get_output_embeddings()
        # It may be narrower than the embeddings. Packed weights have another shape.
        width: int | None = getattr(head, "out_features", None)
        return width or int(self.model.config.get_text_config(decoder=True).vocab_size)

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
        in_place_of_model: Any = None,
    ) -> Tensor:
        """Run the model.

        Args:
            input_ids: New ids of shape `(batch_size, num_new)`.
            position_ids: Their positions, of the same shape.
            attention_mask: Over cache and new ids, of shape `(batch_size, num_cached + num_new)`; None for all ones.
            cache: The cache, extended in place; None to use none.
            num_logits: Number of last positions whose logits are wanted.
            in_place_of_model: Another model that computes the same. Default: the member's.

        Returns:
            Logits of shape `(batch_size, num_logits, vocab_size)`, on the member's device.

        Raises:
            MemberError: If the model raises.
            ConfigurationError: If its embeddings have been resized.
        """
        kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": cache is not None, "return_dict": True}
        if cache is not None:
            kwargs[self.cache_keyword] = cache
        optional = {"position_ids": position_ids, "attention_mask": attention_mask, "logits_to_keep": num_logits}
        # A mixture-of-experts model saved from training would compute an auxiliary loss, and fail on padding.
        optional["output_router_logits"] = False
        kwargs.update((key, value) for key, value in optional.items() if self.accepts(key) and value is not None)
        try:
            logits: Tensor = (in_place_of_model or self.model)(**kwargs).logits
        except Exception as error:
            raise messages.failed_pass(self.name, error) from error
        self._check_width(logits.shape[-1])
        return logits[:, -num_logits:].to(self.device)

    def fingerprint(self) -> tuple[Any, ...]:
        """A value that changes when the model's weights are moved, cast or replaced, or its modules change behaviour."""
        kind = self.device.type
        found: list[Any] = [
            self.model.config._attn_implementation,
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        ]
        for module in self.model.modules():
            own = vars(module)
            for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
                if tensor is not None:
                    found += address_of(tensor), tensor.dtype
            found += id(module), module.training, *own["_forward_hooks"], *own["_forward_pre_hooks"]
            # Replaced by hand or by accelerate, and which adapters are active.
            found += id(own.get("forward")), own.get("_disable_adapters"), str(own.get("_active_adapter"))
        return tuple(found)

    def warn_uncaptured(self, reason: str) -> None:
        """Warn that the member's steps do not run as CUDA graphs, and why."""
        messages.warn(
            f"steps of member {self.name!r} ({type(self.model).__name__}) are not captured as CUDA graphs, so they take "
            f"longer: {reason}."
        )


def input_device(model: Any) -> torch.device:
    """The device that a model's input ids go to."""
    weight = model.get_input_embeddings().weight
    if weight.is_meta:
        # Weights on disk or in the host's memory are moved to the others' device.
        tensors = itertools.chain(model.parameters(), model.buffers())
        weight = next(tensor for tensor in tensors if not tensor.is_meta)
    device: torch.device = weight.device
    return device


def window_of(config: Any, kind: str | None) -> int | None:
    """Return how many ids a query sees in the layers of a kind, its own included; None for all.

    Args:
        config: The configuration of the decoder.
        kind: One of its `layer_types`; None if it has none, so that all layers are alike.
    """
    return None if kind == "full_attention" else getattr(config, "sliding_window", None)


def tensors_of(models: Iterable[torch.nn.Module]) -> list[Tensor]:
    """The tensors of models' weights and buffers, each once."""
    weights = {id(weight): weight for model in models for weight in (*model.parameters(), *model.buffers())}
    return [tensor for weight in weights.values() for tensor in plain_tensors(weight)]


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether a model computes with quantised weights, whoever quantised them: `transformers` or its user."""
    if getattr(model, "is_quantized", False):
        return True
    if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules()):
        return True  # their weights are no tensors of the model
    return any(part.dtype in _PACKED for part in tensors_of([model]))


def _is_offloaded(model: torch.nn.Module) -> bool:
    """Whether weights are offloaded, so that accelerate loads them when a module runs."""
    return any("_hf_hook" in vars(module) for module in model.modules())


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that memory has run out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
            return True
        error = error.__cause__
    return False


def _forward_parameters(model: torch.nn.Module) -> set[str]:
    """The named parameters of a model's forward, through all wrappers."""
    names: set[str] = set()
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        names |= set(parameters)
        hands_on = any(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters.values()
        )
        if not hands_on or not names.isdisjoint(_CACHE_KEYWORDS):
            break
    return names
