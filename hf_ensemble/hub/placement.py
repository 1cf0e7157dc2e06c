"""Checks that the members fit on their devices, and computes the memory left for the next one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import MemberConfig
from ..errors import ConfigurationError
from ..members.member_model import tensors_of
from .finding import model_class

_PLANNED = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` that let `accelerate` place a model."""


def check_memory(
    members: Sequence[tuple[MemberConfig, PreTrainedConfig, Any, Any]], max_memory: Mapping[Any, Any] | None
) -> None:
    """Check that the members' weights fit, before reading any.

    Members are loaded one after the other, so each one's plan sees what the earlier ones take. This checks the sums:
    per device, for members that go to one device as a whole, and over all devices, for members spread by a plan.
    Members that are quantised, or placed module by module, are left out.

    Args:
        members: Each distinct member with its configuration, dtype and device map.
        max_memory: Bytes (or sizes like `"10GB"`) that all members together may take, by device. None: the free
            memory.

    Raises:
        ConfigurationError: Naming the device, the sizes and the remedy.
    """
    placed = [(*member, _target(member[3])) for member in members if member[3] is not None]
    if not placed:
        return
    budget = free_memory(max_memory)
    needs: dict[Any, list[tuple[str, int]]] = {}
    for item, config, dtype, _, target in placed:
        can_say = item.quantization_config is None and (target in budget or target in _PLANNED)
        size = _size(config, dtype) if can_say else None
        if size is not None:
            needs.setdefault(target, []).append((item.name or str(item.path), size))
    for target, sizes in needs.items():
        is_planned = target in _PLANNED
        available = sum(budget.values()) if is_planned else budget[target]
        needed = sum(size for _, size in sizes)
        if needed > available:
            parts = ", ".join(f"{name!r} {_gigabytes(size)}" for name, size in sizes)
            where = "all devices together have" if is_planned else f"device {target!r} has"
            raise ConfigurationError(
                f"the members do not fit: their weights take {_gigabytes(needed)} ({parts}), but {where} "
                f"{_gigabytes(available)} free. Use a smaller `dtype`, a quantised member, or another `device_map`."
            )


def free_memory(max_memory: Mapping[Any, Any] | None) -> dict[Any, int]:
    """Return the bytes that may be used, by device: the free memory, or the allowed.

    Args:
        max_memory: Bytes (or sizes like `"10GB"`) by device. None: the free memory.
    """
    # Slow to import, and not needed for a model without a device map.
    from accelerate.utils import get_max_memory

    found: dict[Any, int] = get_max_memory(None if max_memory is None else dict(max_memory))
    return found


def remaining_memory(max_memory: Mapping[Any, Any], models: Sequence[PreTrainedModel]) -> dict[Any, int]:
    """Return what is left of `max_memory`, which is for all members, after loading these.

    Args:
        max_memory: Bytes (or sizes like `"10GB"`) by device.
        models: The loaded members.

    Returns:
        Bytes by device.
    """
    left = free_memory(max_memory)
    for tensor in tensors_of(models):
        key = _key(tensor.device)
        if key in left:
            left[key] = max(0, left[key] - tensor.nbytes)
    return left


def _target(device_map: Any) -> Any:
    """The plan, or the single device as `accelerate` names it; None for a map by modules."""
    if isinstance(device_map, Mapping):
        places = set(device_map.values())
        return _target(places.pop()) if len(places) == 1 else None
    if isinstance(device_map, int) or device_map in _PLANNED:
        return device_map
    try:
        return _key(torch.device(device_map))
    except (RuntimeError, TypeError):
        return None


def _key(device: torch.device) -> Any:
    return device.type if device.type in ("cpu", "mps", "meta") else device.index or 0


def _size(config: PreTrainedConfig, dtype: Any) -> int | None:
    """Bytes of a model's weights; None if they are quantised."""
    if getattr(config, "quantization_config", None) is not None:
        return None
    if dtype in (None, "auto"):
        dtype = config.dtype or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model: nn.Module = model_class(config).from_config(config, dtype=dtype)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
