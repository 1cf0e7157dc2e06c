"""Quantised members: the options, the needed packages, and how a loaded model was quantised."""

import copy
import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from ..config import MemberConfig
from ..members.member_model import is_quantized
from ..optional_packages import not_installed
from .per_member import listed
from .references import name_of

_PACKAGES = ("bitsandbytes", "gguf", "torchao")
"""Methods that are packages of the same name. For others, `transformers` reports what they need."""


def with_quantization(items: Sequence[MemberConfig], given: Any, is_saved: bool) -> list[MemberConfig]:
    """Return the members with the quantisation given in a call.

    Args:
        items: The members.
        given: A quantisation for all loaded members that name none, or a list with one per member; None for no
            quantisation.
        is_saved: Whether the members come from a saved ensemble; then a value for all overrides their own.

    Raises:
        ConfigurationError: If the list does not have one entry per member, or an entry is not a quantisation.
    """
    if given is None:
        return list(items)
    asked = listed("quantization_config", given, len(items))
    if asked is None:
        takes = [item.url is None and (is_saved or item.quantization_config is None) for item in items]
        asked = [given if one else item.quantization_config for item, one in zip(items, takes, strict=True)]
    return [dataclasses.replace(item, quantization_config=one) for item, one in zip(items, asked, strict=True)]


def check_package(item: MemberConfig, config: PreTrainedConfig | None) -> None:
    """Check that the package for a member's quantised weights is installed.

    Args:
        item: The member.
        config: Its model's configuration, which says whether its weights are stored quantised; None if not known yet.

    Raises:
        ConfigurationError: If it is missing.
    """
    method = "gguf" if item.gguf_file else _method_of(item.quantization_config)
    method = method or _method_of(getattr(config, "quantization_config", None))
    if method in _PACKAGES and find_spec(method) is None:
        raise not_installed(f"member {name_of(item)!r} is quantised by {method}", method)


def stock_quantization(item: MemberConfig) -> dict[str, Any]:
    """Return the stock option that quantises a member; empty if its weights are loaded as stored.

    Args:
        item: The member.

    Raises:
        ValueError: If `transformers` does not know the method or an option.
    """
    if item.quantization_config is None:
        return {}
    # It is created again, because models keep it, and some quantisers write into it.
    return {"quantization_config": AutoQuantizationConfig.from_dict(copy.deepcopy(item.quantization_config))}


def quantization_of(model: Any) -> Any:
    """Return how a model was quantised while it loaded; None if it was not, or was stored quantised.

    Args:
        model: The model.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    was_there = quantizer is None or getattr(quantizer, "pre_quantized", True) or is_from_gguf(model)
    return None if was_there else getattr(model.config, "quantization_config", None)


def is_from_gguf(model: Any) -> bool:
    """Whether a model was read from a GGUF file: its weights are unpacked, but it still claims to be quantised."""
    return _method_of(getattr(model.config, "quantization_config", None)) == "gguf"


def is_quantized_by_hand(model: Any) -> bool:
    """Whether a model was quantised after it had been loaded, of which its configuration knows nothing."""
    return getattr(model, "hf_quantizer", None) is None and not is_from_gguf(model) and is_quantized(model)


def is_packed_for_cpu(model: Any) -> bool:
    """Whether bitsandbytes has reordered 4-bit weights for CPU kernels, as it does on their first run.

    Writing them then gives different weights, and changes the model too (0.50.2).
    """
    states = (getattr(weight, "quant_state", None) for weight in model.parameters())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)


def _method_of(quantization: Any) -> str | None:
    is_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_dict else getattr(quantization, "quant_method", None)
    return getattr(method, "value", method)
