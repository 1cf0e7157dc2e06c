"""Loading the models and tokenizers of members that run in this process, each model once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .. import messages
from ..config import MemberConfig
from ..errors import ConfigurationError, VocabularyError
from ..members.local import LocalMember
from .adapters import add_adapter, can_share, with_adapter
from .finding import model_class, source_options
from .placement import check_memory, remaining_memory
from .quantized import stock_quantization
from .references import HUB_OPTIONS, Place, name_of

Listed = tuple[MemberConfig, Any, Any, Any, Any]
"""A member with its configuration (None if it is served), dtype, device map and tokenizer, as a user asks for them."""

_PYTHON_TOKENIZERS = {"marian": "MarianTokenizer", "m2m_100": "M2M100Tokenizer"}
"""Tokenizers that are SentencePiece models with Python code around them, by the model type that they are the default of."""

_REMEDY = "Set `MemberConfig(tokenizer=...)`, or pass `tokenizers=[...]` with one per member."


def load_models(
    listed: Mapping[str, Listed], kwargs: dict[str, Any]
) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """Load distinct members. Those that are one model, or adapters on it, share its weights.

    Args:
        listed: The members, by a key.
        kwargs: Passed on to every member's loading.

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
    """Load a member into this process: the actor's, where that is called.

    Args:
        item: The member.
        device_map: Where its weights go; None for nowhere in particular.
        config: Its model's configuration.
        dtype: Their dtype; None or "auto" for the checkpoint's.
        tokenizer: Its tokenizer, or the id or path of it; None for that beside the model.
        kwargs: Other options of its loading.
    """
    model = _load_model(item, config, dtype, device_map, kwargs)
    loaded = load_tokenizer(item, tokenizer, kwargs)
    return LocalMember(model, loaded, item.name, item.eos_token_id, item.chat_template, item.system_prompt)


def what_is_loaded(item: MemberConfig) -> MemberConfig:
    """The member without what says only how it is used, so that equal ones can be loaded once."""
    return dataclasses.replace(item, name=None, eos_token_id=[], chat_template=None, system_prompt=None)


def _without_adapter(item: MemberConfig) -> MemberConfig:
    """The member's model alone."""
    return dataclasses.replace(item, adapter=None, adapter_revision=None, adapter_subfolder=None, adapter_commit=None)


def _load_model(
    item: MemberConfig, config: PreTrainedConfig, dtype: Any, device_map: Any, kwargs: dict[str, Any]
) -> PreTrainedModel:
    hub = hub_options(kwargs)
    # The stock loader looks for an adapter beside the model, by these options only.
    options = {**source_options(item), **kwargs, "dtype": "auto" if dtype is None else dtype, "adapter_kwargs": hub}
    if device_map is not None:
        options["device_map"] = device_map
    if item.gguf_file is None:
        options["use_safetensors"] = True
    # The last is for a dtype that torch has not. Of what is wrong with weights quantisers say anything.
    errors = (OSError, ValueError, ImportError, AttributeError) if item.quantization_config is None else (Exception,)
    try:
        options.update(stock_quantization(item))
        model: PreTrainedModel = model_class(config).from_pretrained(str(item.path), **options)
    except errors as error:
        raise ConfigurationError(f"member {name_of(item)!r} cannot be loaded: {error}") from error
    if item.adapter is not None:
        add_adapter(model, item, hub)
    return model


def load_tokenizer(
    item: MemberConfig, given: Any, kwargs: dict[str, Any], known: dict[Any, PreTrainedTokenizerBase] | None = None
) -> PreTrainedTokenizerBase:
    """Load a member's tokenizer.

    Args:
        item: The member.
        given: A tokenizer, or the id or path of one; None for that of the member.
        kwargs: Options of its loading.
        known: Tokenizers that have been loaded, by where they lie, for others to share. Extended in place.

    Raises:
        VocabularyError: If there is none.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    hub = hub_options(kwargs)
    source = given or item.tokenizer
    options: dict[str, Any] = {}
    if source is None and item.path is None:
        raise VocabularyError(
            f"member {name_of(item)!r} is behind a server, which does not provide a tokenizer. {_REMEDY}"
        )
    if source is None:
        # What an adapter was trained with lies beside it.
        beside = Place.of_adapter(item)
        is_beside = item.adapter is not None and beside.file("tokenizer_config.json", hub) is not None
        source, options = (beside.path, beside.options) if is_beside else (item.path, source_options(item))
    known = {} if known is None else known
    options |= item.tokenizer_kwargs or {}
    key = str(source), repr(options)
    if key not in known:
        known[key] = _read_tokenizer(item, source, {**options, **hub})
    return known[key]


def _read_tokenizer(item: MemberConfig, source: Any, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        class_name = _python_class(source, options)
        if class_name is not None:
            raise messages.python_tokenizer(name_of(item), class_name) from error
        raise VocabularyError(
            f"member {name_of(item)!r} has no tokenizer that can be loaded: {error} {_REMEDY}"
        ) from error
    if len(tokenizer) == 0:
        raise VocabularyError(f"member {name_of(item)!r} has an empty tokenizer. {_REMEDY}")
    return tokenizer


def _python_class(source: Any, options: dict[str, Any]) -> str | None:
    """The class of a tokenizer that cannot be loaded, if it is one that no member can have."""
    try:
        name = get_tokenizer_config(source, **options).get("tokenizer_class")
        name = name or _PYTHON_TOKENIZERS.get(AutoConfig.from_pretrained(source, **options).model_type)
    except (OSError, ValueError, TypeError):
        return None
    return name if name in _PYTHON_TOKENIZERS.values() else None


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that say how the Hub is reached."""
    return {key: options[key] for key in HUB_OPTIONS if key in options}
