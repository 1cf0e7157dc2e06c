"""Loads the models and tokenizers of members that run in this process, each model once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..config import MemberConfig
from ..errors import ConfigurationError
from ..members.local import LocalMember
from ..members.member_model import is_out_of_memory
from .adapters import add_adapter, can_share, with_adapter
from .checked_weights import check_weights
from .finding import model_class, source_options
from .member_tokenizers import load_tokenizer
from .placement import check_memory, remaining_memory
from .quantized import stock_quantization
from .references import hub_options, name_of

Listed = tuple[MemberConfig, Any, Any, Any, Any]
"""A member with its model's configuration (None if it is served), and the requested dtype, device map and tokenizer.
"""


def load_models(
    listed: Mapping[str, Listed], kwargs: dict[str, Any]
) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """Load distinct members. Members with the same model, or adapters on it, share its weights.

    Args:
        listed: The members, by a key.
        kwargs: Options of loading for every member.

    Returns:
        Each one's model and tokenizer.

    Raises:
        ConfigurationError: If they do not fit into memory, or weights cannot be read.
        VocabularyError: If a tokenizer is missing.
    """
    hub = hub_options(kwargs)
    of_models: dict[str, list[str]] = {}
    for key, (item, _, dtype, device_map, _) in listed.items():
        source = dataclasses.replace(
            what_is_loaded(_without_adapter(item)), tokenizer=None, tokenizer_kwargs=None, dtype=None, device_map=None
        )
        shares = can_share(item, hub)
        of_models.setdefault(repr((source, dtype, device_map)) if shares else key, []).append(key)
    max_memory = kwargs.get("max_memory")
    check_memory([listed[keys[0]][:-1] for keys in of_models.values()], max_memory)
    loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
    for keys in of_models.values():
        item, config, dtype, device_map, _ = listed[keys[0]]
        if max_memory is not None:
            left = remaining_memory(max_memory, [model for model, _ in loaded.values()])
            kwargs = {**kwargs, "max_memory": left}
        is_shared = len(keys) > 1
        model = _load_model(_without_adapter(item) if is_shared else item, config, dtype, device_map, kwargs)
        known: dict[Any, PreTrainedTokenizerBase] = {}
        for key in keys:
            item, *_, tokenizer = listed[key]
            own = with_adapter(model, item, hub) if is_shared and item.adapter is not None else model
            loaded[key] = own, load_tokenizer(item, tokenizer, kwargs, known)
    return loaded


def load_member(
    item: MemberConfig, device_map: Any, config: PreTrainedConfig, dtype: Any, tokenizer: Any, kwargs: dict[str, Any]
) -> LocalMember:
    """Load a member into the current process, which may be an actor's.

    Args:
        item: The member.
        device_map: Device of its weights; None for the default.
        config: Its model's configuration.
        dtype: Their dtype; None or "auto" for the checkpoint's.
        tokenizer: Its tokenizer, or an id or path; None for the one beside the model.
        kwargs: Other options of its loading.
    """
    model = _load_model(item, config, dtype, device_map, kwargs)
    loaded = load_tokenizer(item, tokenizer, kwargs)
    return LocalMember(model, loaded, item.name, item.eos_token_id, item.chat_template, item.system_prompt)


def what_is_loaded(item: MemberConfig) -> MemberConfig:
    """The member without options that concern only its use, so that equal members are loaded once."""
    return dataclasses.replace(item, name=None, eos_token_id=[], chat_template=None, system_prompt=None)


def _without_adapter(item: MemberConfig) -> MemberConfig:
    """The member's model alone."""
    return dataclasses.replace(item, adapter=None, adapter_revision=None, adapter_subfolder=None, adapter_commit=None)


def _load_model(
    item: MemberConfig, config: PreTrainedConfig, dtype: Any, device_map: Any, kwargs: dict[str, Any]
) -> PreTrainedModel:
    hub = hub_options(kwargs)
    # The stock loader looks for an adapter beside the model, by these options only.
    options = {
        **source_options(item),
        "trust_remote_code": False,
        **kwargs,
        "dtype": "auto" if dtype is None else dtype,
        "adapter_kwargs": hub,
    }
    if device_map is not None:
        options["device_map"] = device_map
    if item.gguf_file is None:
        options["use_safetensors"] = True
    check_weights(item, config, hub)
    model: PreTrainedModel
    try:
        options.update(stock_quantization(item))
        model, found = model_class(config).from_pretrained(str(item.path), **options, output_loading_info=True)
    except Exception as error:  # of what is wrong with a file, a dtype or a quantisation it may say anything
        if is_out_of_memory(error):
            raise
        raise ConfigurationError(f"member {name_of(item)!r} cannot be loaded: {error}") from error
    _check_complete(item, model, found)
    if item.adapter is not None:
        add_adapter(model, item, hub)
    return model


def _check_complete(item: MemberConfig, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Refuse a model if its files lack weights, which the stock loader draws at random."""
    if item.gguf_file is not None or getattr(model, "hf_quantizer", None) is not None:
        return
    # Transformers 5.17 lists those of an adapter in the same folder too, which it loads separately.
    adapters = set(getattr(model, "peft_config", None) or ())
    own = (name for name, _ in model.named_parameters() if adapters.isdisjoint(name.split(".")))
    missing = sorted(set(found["missing_keys"]).intersection(own))
    if missing:
        raise ConfigurationError(
            f"member {name_of(item)!r} cannot be loaded: its files lack {len(missing)} of its weights ({missing[0]!r}, …), which "
            "would be random. Download the files again, or save the model again."
        )
