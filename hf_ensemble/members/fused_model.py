"""A model that shares a member's weights and runs short steps with few kernels."""

import copy
import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from ..errors import MemberError
from .member_model import MemberModel, window_of

_KNOWN = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}
"""Model types whose attention and norms compute the same as this module, and their classes' prefixes."""

_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


def fused_model(member: MemberModel) -> Any:
    """Make a model with a member's weights that runs attention, norms and products with a single vector by our kernels.

    The model takes a cache with `slots`, `positions` and `layer`, and reads no mask. The member does not change.

    Args:
        member: The member.

    Raises:
        MemberError: If the kind of model is unknown, or cannot run like this.
    """
    model, kernels = member.model, _kernels(member.device)
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise MemberError(f"the forward of its module {name!r} has been replaced")
    dtypes = {weight.dtype for weight in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= _DTYPES:
        raise MemberError(f"its weights are of {sorted(map(str, dtypes))}")
    if model.training or torch.is_autocast_enabled(member.device.type):
        raise MemberError("it is in training mode" if model.training else "autocast is on")
    attentions, norms = (_classes(ending) for ending in ("Attention", "RMSNorm"))
    twin: Any = _twin(model, {})
    num_layers = 0
    for part in twin.modules():
        if type(part) in attentions:
            _run_by(part, _attention, kernels, _window(part))
            num_layers += 1
        elif type(part) in norms:
            _run_by(part, _norm, kernels)
        elif type(part) is torch.nn.Linear:
            if _is_plain(part.weight):
                _run_by(part, _linear, kernels)
            elif (scaled := _int8_matrix(part.weight)) is not None:
                _run_by(part, _int8_linear, kernels, *scaled)
    if num_layers != model.config.get_text_config(decoder=True).num_hidden_layers:
        raise MemberError(f"not all of its layers have the attention of {', '.join(_KNOWN.values())}")
    return twin


def _kernels(device: torch.device) -> Any:
    if device.type != "cuda":
        raise MemberError(f"it is on {device}, and kernels are for GPUs")
    try:
        return importlib.import_module(".kernels", __package__)
    except ImportError as error:
        raise MemberError(f"its kernels need the package triton ({error})") from error


def _classes(ending: str) -> set[type]:
    """The classes of the known kinds that are imported; a model cannot have a class that is not."""
    found = set()
    for folder, name in _KNOWN.items():
        module = sys.modules.get(f"transformers.models.{folder}.modeling_{folder}")
        if module is not None:
            found.add(getattr(module, name + ending))
    return found


def _twin(module: torch.nn.Module, made: dict[int, Any]) -> Any:
    """Copy a module and its submodules, with the same weights, buffers and hooks."""
    if id(module) not in made:
        made[id(module)] = twin = copy.copy(module)
        vars(twin)["_modules"] = {
            name: None if part is None else _twin(part, made) for name, part in vars(module)["_modules"].items()
        }
    return made[id(module)]


def _run_by(module: Any, forward: Any, *settings: Any) -> None:
    """Let a module run by another forward, which gets the module and `settings` first."""
    # Not by a forward of its own: that would be a cycle, and keep the weights until the garbage collector comes.
    vars(module)["_settings"] = settings
    kind: Any = type(module)
    module.__class__ = _class_run_by(kind, forward)


@functools.cache
def _class_run_by(kind: Any, forward: Any) -> Any:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *self._settings, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": run})


def _is_plain(weight: Tensor) -> bool:
    return type(weight) is torch.nn.Parameter and weight.is_contiguous()


def _int8_matrix(weight: Any) -> tuple[Tensor, Tensor] | None:
    """The int8 matrix of torchao's `Int8WeightOnlyConfig`, and one scale or one for each row; None for other weights."""
    # torchao's other kinds of int8 change the activations, too.
    of_activations = ("act_quant_kwargs", "act_pre_scale")
    if type(weight).__name__ != "Int8Tensor" or any(
        getattr(weight, name, None) is not None for name in of_activations
    ):
        return None
    numbers, scale = weight.qdata, weight.scale
    is_known = scale.numel() == 1 or scale.numel() == len(scale) == len(numbers)
    return (numbers, scale) if is_known and numbers.ndim == 2 and numbers.is_contiguous() else None


def _window(attention: Any) -> int | None:
    """Return how many slots a query of a layer sees; None for all."""
    config, width = attention.config, attention.head_dim
    if width & (width - 1) or width < 16:
        raise MemberError(f"its heads are {width} wide, which is no power of two from 16 on")
    if getattr(attention, "attn_logit_softcapping", None) is not None or not attention.is_causal:
        raise MemberError("its attention caps scores, or looks ahead")
    kinds = getattr(config, "layer_types", None)
    return window_of(config, kinds[attention.layer_idx] if kinds else None)


def _attention(
    attention: Any,
    kernels: Any,
    window: int | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]
    query, key, value = (
        project(hidden_states).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    keys, values = cache.layer(attention.layer_idx, key.transpose(1, 2), value.transpose(1, 2))
    query = kernels.rotate_and_keep(query, key, value, *position_embeddings, keys, values, cache.slots)
    found = kernels.attend(query, keys, values, cache.positions, attention.scaling, window)
    return attention.o_proj(found.flatten(2)), None


def _norm(norm: Any, kernels: Any, states: Tensor) -> Tensor:
    # Gemma's norm has another name for epsilon, and scales by one more than its weight.
    adds_one = not hasattr(norm, "variance_epsilon")
    found: Tensor = kernels.rms_norm(states, norm.weight, norm.eps if adds_one else norm.variance_epsilon, adds_one)
    return found


def _linear(linear: Any, kernels: Any, states: Tensor) -> Tensor:
    if states.numel() == states.shape[-1]:
        found: Tensor = kernels.product(states, linear.weight, linear.bias)
        return found
    return torch.nn.functional.linear(states, linear.weight, linear.bias)


def _int8_linear(linear: Any, kernels: Any, numbers: Tensor, scale: Tensor, states: Tensor) -> Tensor:
    # torchao writes out the whole matrix in the dtype of the states, which only many vectors are worth.
    if states.numel() <= kernels.MOST_VECTORS * states.shape[-1]:
        # Usually a view. Weights that are loaded in place change the scale, too.
        scale = scale.float().flatten().expand(len(numbers)).contiguous()
        found: Tensor = kernels.product(states, numbers, linear.bias, scale)
        return found
    return torch.nn.functional.linear(states, linear.weight, linear.bias)
