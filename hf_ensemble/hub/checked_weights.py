"""Check that a member's weights files fit the model in its configuration, before any memory is allocated."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_files

from ..config import MemberConfig
from ..errors import ConfigurationError
from .finding import model_class
from .member_files import LAYERS, check_json
from .references import Place, name_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS_PER_BYTE = 8
"""Maximum number of weights per byte."""
_SLACK = 1 << 20
"""Weights that files may omit: they are computed, or equal to other weights."""


def check_weights(item: MemberConfig, config: PreTrainedConfig, hub: Mapping[str, Any]) -> None:
    """Check the headers of a member's weights files.

    Args:
        item: The member.
        config: Its model's configuration.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If a file is damaged, or its configuration describes a model that is far too large for its files.
    """
    if item.gguf_file is not None:
        return
    name = f"member {name_of(item)!r} cannot be loaded"
    files = _files(item, hub)
    if not files:
        return
    num_tensors = sum(_num_tensors(name, file) for file in files)
    layers = max((count for part in _parts(config.to_dict()) for count in _layers(part)), default=0)
    remedy = "One of them is damaged: get both again from a source that you trust"
    if layers > num_tensors:
        raise ConfigurationError(
            f"{name}: its config.json describes {layers} layers, but its files hold {num_tensors} tensors. {remedy}."
        )
    if item.quantization_config is not None or getattr(config, "quantization_config", None) is not None:
        return
    size = sum(os.path.getsize(file) for file in files)
    try:
        with torch.device("meta"):
            model: nn.Module = model_class(config).from_config(copy.deepcopy(config), trust_remote_code=False)
        num_weights = sum(weight.numel() for weight in model.parameters())
    except Exception as error:
        raise ConfigurationError(f"{name}: no model can be made from its config.json: {error}") from error
    if num_weights > _WEIGHTS_PER_BYTE * size + _SLACK:
        raise ConfigurationError(
            f"{name}: its config.json describes {num_weights} weights, but its files have {size} bytes. {remedy}."
        )


def _files(item: MemberConfig, hub: Mapping[str, Any]) -> Sequence[str]:
    """Return a member's weights files, downloaded from the Hub if necessary; empty if they have other names."""
    place = Place.of_model(item)
    if hub.get("force_download") and not os.path.isdir(place.path):
        return []  # each look would download them again
    single = place.file(_SINGLE, hub)
    if single is not None:
        return [single]
    index = place.file(_INDEX, hub)
    if index is None:
        return []
    names = sorted(set(check_json(f"member {name_of(item)!r}", Path(index))["weight_map"].values()))
    options: dict[str, Any] = {**place.options, **hub}
    try:
        return cached_files(place.path, names, **options) or []
    except OSError as error:
        raise ConfigurationError(f"member {name_of(item)!r} cannot be loaded: {error}") from error


def _num_tensors(name: str, file: str) -> int:
    try:
        with safe_open(file, "pt") as weights:
            return len(weights.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(
            f"{name}: {file!r} is damaged or not a safetensors file ({error}). Download it again, or save the model again."
        ) from error


def _parts(values: Any) -> Iterator[dict[str, Any]]:
    if isinstance(values, dict):
        yield values
        for value in values.values():
            yield from _parts(value)


def _layers(part: dict[str, Any]) -> Iterator[int]:
    return (value for key, value in part.items() if LAYERS.search(str(key)) and isinstance(value, int))
