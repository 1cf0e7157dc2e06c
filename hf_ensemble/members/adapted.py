"""Models with adapters such as LoRA: their modules, and models that share weights."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_OF_ADAPTERS = ("base_layer", "original_module", "token_adapter")
"""The name that adapter modules give the module they wrap."""


def base_model(model: Any) -> Any:
    """Return a model without the wrappers of `torch.compile` and `peft`; adapters stay in its modules."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def wrapped_modules(model: Any) -> dict[str, Any]:
    """Return the modules that `peft` wrapped around others, by name."""
    import peft

    kinds = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def active_adapters(model: Any) -> list[str]:
    """Return the names of a model's active adapters."""
    configs = getattr(model, "peft_config", None) or {}
    if any(config.is_prompt_learning for config in configs.values()):
        return list(configs)
    names: set[str] = set()
    for module in wrapped_modules(model).values() if configs else ():
        if not module.disable_adapters:
            names.update(module.active_adapters)
    return sorted(names)


def plain_weights(base: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's weights without its adapters, by their plain names.

    Args:
        base: The model with the adapters.
        weights: Its weights by their names.
    """
    wrapped = wrapped_modules(base)
    named = {_plain_key(key, wrapped): weight for key, weight in weights.items()}
    return {key: weight for key, weight in named.items() if key is not None}


def _plain_key(key: str, wrapped: Mapping[str, Any]) -> str | None:
    """The name that a weight has without adapters; None if it is an adapter's."""
    parts = key.split(".")
    kept = []
    for n, part in enumerate(parts):
        if ".".join(parts[:n]) not in wrapped:
            kept.append(part)
        elif part not in _OF_ADAPTERS:
            return None
    return ".".join(kept)


def identity_of_weights(model: Any) -> frozenset[tuple[str, int]]:
    """Return the identity of a model's own weights, without adapters: equal for models that share them."""
    base = base_model(model)
    weights = dict(base.named_parameters(remove_duplicate=False))
    if getattr(model, "peft_config", None):
        weights = plain_weights(base, weights)
    return frozenset((name, id(weight)) for name, weight in weights.items())


def twin_of(model: Any) -> Any:
    """Return another model of the same modules with the same weight tensors; none is copied.

    Changes to its modules afterwards, such as adding an adapter, affect only this model.
    """
    shared: dict[int, Any] = {}
    for module in model.modules():
        own = vars(module)
        for value in (*own["_parameters"].values(), *own["_buffers"].values(), *own.values()):
            # Quantised layers keep tensors beside their weights.
            if isinstance(value, Tensor) or hasattr(value, "absmax"):
                shared[id(value)] = value
    return copy.deepcopy(model, shared)


def plain_twin(model: Any) -> Any:
    """Return a twin without adapters, of a model from `base_model`."""
    twin = twin_of(model)
    wrapped = wrapped_modules(twin) if getattr(model, "peft_config", None) else {}
    for name, module in wrapped.items():
        if not any(name.startswith(f"{outer}.") for outer in wrapped):
            inner = module
            while isinstance(inner, tuple({type(m) for m in wrapped.values()})):
                inner = next(getattr(inner, key) for key in _OF_ADAPTERS if hasattr(inner, key))
            twin.set_submodule(name, inner)
    if wrapped:
        del twin.peft_config
        twin._hf_peft_config_loaded = False
    return twin


def put_weights(model: torch.nn.Module, new: Mapping[int, torch.nn.Parameter]) -> None:
    """Replace some weights of a model everywhere.

    Args:
        model: The model.
        new: The new weights, by the `id` of those they replace.
    """
    for module in model.modules():
        held = vars(module)["_parameters"]
        held.update({name: new[id(weight)] for name, weight in held.items() if id(weight) in new})


def trained_weights(model: torch.nn.Module) -> list[tuple[Tensor, bool]]:
    """Return a model's weights and whether they are trained, for `restore_trained`."""
    return [(weight, weight.requires_grad) for weight in model.parameters()]


def restore_trained(flags: list[tuple[Tensor, bool]]) -> None:
    """Let the same weights be trained as before."""
    for weight, is_trained in flags:
        weight.requires_grad_(is_trained)


def states_of_weights(model: torch.nn.Module) -> list[tuple[tuple[int, ...], int]]:
    """Return a value that changes when a model's weights are written to or replaced."""
    return [(address_of(weight), weight._version) for weight in model.parameters()]


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors of a weight: those that a quantiser packed it into, or else the weight itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in plain_tensors(getattr(tensor, name))]


def address_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the memory addresses of a weight's tensors."""
    try:
        # A weight that a quantiser packed has no address of its own: PyTorch says 0 for all.
        return tuple(part.data_ptr() for part in plain_tensors(tensor))
    except RuntimeError:  # for tensors without memory
        return (id(tensor),)
