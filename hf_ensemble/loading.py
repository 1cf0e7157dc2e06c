"""Finding, checking and loading the members of an ensemble."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .config import EnsembleConfig, MemberConfig
from .errors import ConfigurationError, VocabularyError

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


def check_members(items: Sequence[MemberConfig], folder: Path | None, hub: dict[str, Any]) -> None:
    """Check that every member is a causal language model that can be found, before any weight is read.

    Args:
        items: The members.
        folder: Folder of the saved ensemble, for relative paths; None for a list.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: Naming the first member that fails, and why.
    """
    for place, item in enumerate(items):
        if not item.path:
            raise ConfigurationError(f"member {place} has no `path`: give a Hub id or a path.")
        path = locate(item, folder)
        name = item.name or item.path
        local = Path(path)
        if (local.is_absolute() or path.startswith(".")) and not local.is_dir():
            raise ConfigurationError(f"member {name!r} cannot be loaded: there is no folder {path!r}.")
        if local.is_dir() and item.gguf_file is None:
            weights = local / (item.subfolder or "")
            if not any(any(weights.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
                raise ConfigurationError(
                    f"member {name!r} cannot be loaded: {path!r} holds no safetensors weights. Save the model with "
                    "`save_pretrained`."
                )
        options = {"revision": item.revision, "subfolder": item.subfolder, "gguf_file": item.gguf_file}
        try:
            config = AutoConfig.from_pretrained(path, **{k: v for k, v in options.items() if v is not None}, **hub)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"member {name!r} cannot be loaded: {error}") from error
        if isinstance(config, EnsembleConfig):
            raise ConfigurationError(f"member {name!r} is an ensemble itself. List its members instead.")
        if config.is_encoder_decoder:
            raise ConfigurationError(
                f"member {name!r} is an encoder-decoder model ({config.model_type}), which an ensemble cannot hold. Use "
                "decoder-only causal language models."
            )
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not _has_head(config):
            raise ConfigurationError(
                f"member {name!r} is no causal language model: its configuration says {config.model_type!r}, "
                f"architectures {config.architectures}."
            )


def load_members(
    items: Sequence[MemberConfig],
    folder: Path | None,
    dtype: Any,
    device_map: Any,
    tokenizers: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> tuple[list[PreTrainedModel], list[PreTrainedTokenizerBase]]:
    """Load every member's model and tokenizer; a member that is listed twice is loaded once.

    Args:
        items: The members.
        folder: Folder of the saved ensemble, for relative paths; None for a list.
        dtype: One for all members that name none, or a list with one per member.
        device_map: One for all members that name none, or a list with one per member.
        tokenizers: Tokenizers, or their ids or paths, one per member; None where it is beside the model.
        kwargs: Passed on to every member's loading.

    Returns:
        The models and the tokenizers.

    Raises:
        ConfigurationError: If a list does not have one entry per member, or the weights cannot be read.
        VocabularyError: If a tokenizer is missing.
    """
    dtypes = _per_member("dtype", dtype, len(items))
    device_maps = _per_member("device_map", device_map, len(items))
    tokenizers = [None] * len(items) if tokenizers is None else _per_member("tokenizers", list(tokenizers), len(items))
    loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
    pairs = []
    for place, item in enumerate(items):
        own_dtype = dtypes[place] if isinstance(dtype, (list, tuple)) or item.dtype is None else item.dtype
        has_own_map = item.device_map is not None and not isinstance(device_map, (list, tuple))
        own_map = item.device_map if has_own_map else device_maps[place]
        source = dataclasses.replace(item, name=None, eos_token_id=[], chat_template=None, system_prompt=None)
        key = repr((source, own_dtype, own_map, id(tokenizers[place])))
        if key not in loaded:
            path = locate(item, folder)
            model = _load_model(item, path, own_dtype, own_map, kwargs)
            loaded[key] = model, _load_tokenizer(item, path, tokenizers[place], kwargs)
        pairs.append(loaded[key])
        given = tokenizers[place]
        if given is not None:
            item.tokenizer = getattr(given, "name_or_path", None) or str(given)
    return [model for model, _ in pairs], [tokenizer for _, tokenizer in pairs]


def locate(item: MemberConfig, folder: Path | None) -> str:
    """Where a member lies: its path within the folder of the saved ensemble if there is one, else as it is given."""
    assert item.path is not None
    if folder is not None and (folder / item.path).is_dir():
        return str(folder / item.path)
    return item.path


def _load_model(item: MemberConfig, path: str, dtype: Any, device_map: Any, kwargs: dict[str, Any]) -> PreTrainedModel:
    options = {**_source_options(item), **kwargs, "dtype": "auto" if dtype is None else dtype}
    if device_map is not None:
        options["device_map"] = device_map
    if item.gguf_file is None:
        options["use_safetensors"] = True
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"member {item.name or item.path!r} cannot be loaded: {error}") from error
    return model


def _load_tokenizer(item: MemberConfig, path: str, given: Any, kwargs: dict[str, Any]) -> PreTrainedTokenizerBase:
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    source = given or item.tokenizer
    options = {} if source else _source_options(item)
    options.update((key, kwargs[key]) for key in ("token", "cache_dir", "local_files_only") if key in kwargs)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source or path, **options)
    except Exception as error:
        raise VocabularyError(
            f"member {item.name or item.path!r} has no tokenizer that can be loaded: {error} Set "
            "`MemberConfig(tokenizer=...)`, or pass `tokenizers=[...]` with one per member."
        ) from error
    if len(tokenizer) == 0:
        raise VocabularyError(
            f"member {item.name or item.path!r} has an empty tokenizer. Set `MemberConfig(tokenizer=...)`, or pass "
            "`tokenizers=[...]` with one per member."
        )
    return tokenizer


def _source_options(item: MemberConfig) -> dict[str, Any]:
    options = {"revision": item.revision, "subfolder": item.subfolder, "gguf_file": item.gguf_file}
    return {key: value for key, value in options.items() if value is not None}


def _has_head(config: Any) -> bool:
    """Whether a checkpoint names a class with a language-modelling head (one that names none is believed)."""
    names = config.architectures or []
    return not names or any(
        name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names
    )


def _per_member(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigurationError(f"`{name}` must have one entry per member: got {len(value)} for {count} members.")
    return list(value)
