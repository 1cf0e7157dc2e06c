"""Quantised members: how it is asked for, whether it can be had here, and what a model says of itself."""

import copy
import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from ..config import MemberConfig
from ..optional_packages import not_installed
from .per_member import listed
from .references import name_of

_PACKAGES = ("bitsandbytes", "gguf", "torchao")
"""Methods that are packages of the same name. Of others `transformers` says what they need."""


def with_quantization(items: Sequence[MemberConfig], given: Any, is_saved: bool) -> list[MemberConfig]:
    """Members with what a call says of their quantisation.

    Args:
        items: The members.
        given: A quantisation for all members that are loaded and name none, or a list with one per member; None for nothing.
        is_saved: Whether the members are a saved ensemble's: then what is given for all counts more than what they name.

    Raises:
        ConfigurationError: If the list does not have one entry per member, or an entry is no quantisation.
    """
    if given is None:
        return list(items)
    asked = listed("quantization_config", given, len(items))
    if asked is None:
        takes = [item.url is None and (is_saved or item.quantization_config is None) for item in items]
        asked = [given if one else item.quantization_config for item, one in zip(items, takes, strict=True)]
    return [dataclasses.replace(item, quantization_config=one) for item, one in zip(items, asked, strict=True)]


def check_package(item: MemberConfig, config: PreTrainedConfig | None) -> None:
    """Check that there is the package that a member's quantised weights need.

    Args:
        item: The member.
        config: Its model's configuration, which says whether its weights lie quantised; None if it is not known yet.

    Raises:
        ConfigurationError: If it is missing.
    """
    method = "gguf" if item.gguf_file else _method_of(item.quantization_config)
    method = method or _method_of(getattr(config, "quantization_config", None))
    if method in _PACKAGES and find_spec(method) is None:
        raise not_installed(f"member {name_of(item)!r} is quantised by {method}", method)


def stock_quantization(item: MemberConfig) -> dict[str, Any]:
    """The option of stock loading that quantises a member; nothing for one that lies as it is to be loaded.

    Args:
        item: The member.

    Raises:
        ValueError: If `transformers` does not know the method or an option.
    """
    if item.quantization_config is None:
        return {}
    # It is made anew, since models keep it, and some quantisers write into it.
    return {"quantization_config": AutoQuantizationConfig.from_dict(copy.deepcopy(item.quantization_config))}


def quantization_of(model: Any) -> Any:
    """How a loaded model was quantised while it was loaded; None if it was not, or lies quantised where it came from.

    Args:
        model: The model.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    was_there = quantizer is None or getattr(quantizer, "pre_quantized", True) or is_from_gguf(model)
    return None if was_there else getattr(model.config, "quantization_config", None)


def is_from_gguf(model: Any) -> bool:
    """Whether a model was read from a GGUF file, so that its weights are unpacked and it still claims to be quantised."""
    return _method_of(getattr(model.config, "quantization_config", None)) == "gguf"


def is_packed_for_cpu(model: Any) -> bool:
    """Whether bitsandbytes has moved 4-bit weights into the order of a CPU's kernels, as it does when they first run.

    Written from there they are other weights, also in the model (0.50.2).
    """
    states = (getattr(weight, "quant_state", None) for weight in model.parameters())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)


def _method_of(quantization: Any) -> str | None:
    is_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_dict else getattr(quantization, "quant_method", None)
    return getattr(method, "value", method)
