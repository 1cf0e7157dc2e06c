"""Finding, checking and loading the members of an ensemble."""

import dataclasses
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..config import EnsembleConfig, MemberConfig
from ..errors import ConfigurationError, VocabularyError
from ..messages import wrong_count
from .placement import check_memory, remaining_memory

HUB_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Options of `from_pretrained` that say how the Hub is reached."""

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


def resolve_members(
    items: Sequence[MemberConfig], source: str, located: dict[str, Any], hub: dict[str, Any]
) -> list[MemberConfig]:
    """The members of a saved ensemble, so that they are found from anywhere.

    Paths within its folder become whole paths. Paths within its repository become that repository, the commit that its
    configuration was read from, and a subfolder.

    Args:
        items: The members as saved.
        source: Folder or Hub id of the ensemble.
        located: `revision` and `subfolder` of the ensemble.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If a path leads out of the repository.
    """
    base = located.get("subfolder") or ""
    if os.path.isdir(source):
        return [
            dataclasses.replace(
                item, path=_within(source, base, item.path), tokenizer=_within(source, base, item.tokenizer)
            )
            for item in items
        ]
    revision = located.get("revision")
    commit = loaded_commit(source, posixpath.join(base, "config.json"), revision, hub.get("cache_dir"))
    resolved = []
    for item in items:
        if (item.path or "").startswith("."):
            subfolder = posixpath.normpath(posixpath.join(base, str(item.path), item.subfolder or ""))
            if subfolder.startswith(".."):
                raise ConfigurationError(
                    f"the ensemble {source!r} names a member outside its repository: {item.path!r}."
                )
            found = dataclasses.replace(item, path=source, revision=commit or revision, subfolder=subfolder)
            resolved.append(dataclasses.replace(found, name=item.name or posixpath.basename(subfolder)))
        else:
            resolved.append(item)
    return resolved


def _within(source: str, base: str, path: str | None) -> str | None:
    if path is None:
        return None
    inside = Path(source, base, path)
    return os.path.abspath(inside) if path.startswith(".") or inside.is_dir() else path


def loaded_commit(repo_id: str, file: str, revision: str | None, cache_dir: Any) -> str | None:
    """The commit that a file was just read from, by where it lies in the Hub's cache; None if that cannot be told.

    Args:
        repo_id: Of the repository.
        file: Path of the file in it.
        revision: Branch, tag or commit that was asked for.
        cache_dir: Of the cache, if not the usual one.
    """
    pinned: str | None = getattr(revision, "resolved", None)
    if pinned is not None:
        return pinned
    try:
        found = try_to_load_from_cache(repo_id, file, cache_dir=cache_dir, revision=revision)
    except ValueError:
        # No Hub id at all.
        return None
    return Path(found).parents[file.count("/")].name if isinstance(found, str) else None


def check_token(token: Any) -> None:
    """Refuse a token that cannot be sent: the error of the client would show it.

    Raises:
        ConfigurationError: If it is empty or holds white space.
    """
    if isinstance(token, str) and token.split() != [token]:
        raise ConfigurationError("`token` is empty or holds white space, as no token of the Hub does.")


def check_members(items: Sequence[MemberConfig], hub: dict[str, Any]) -> list[PreTrainedConfig]:
    """Check that every member is a causal language model that can be found, before any weight is read.

    Args:
        items: The members. Their `commit` is set, so that all files of a member are read from the same one.
        hub: Options of Hub access.

    Returns:
        The members' configurations.

    Raises:
        ConfigurationError: Naming the first member that fails, and why.
    """
    configs = []
    for place, item in enumerate(items):
        if not item.path:
            raise ConfigurationError(f"member {place} has no `path`: give a Hub id or a path.")
        path = item.path
        name = item.name or path
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
            inside = "".join(f", {key} {value!r}" for key, value in options.items() if value is not None)
            no_folder = "" if local.is_dir() else f" (There is no folder {path!r} here either.)"
            raise ConfigurationError(f"member {name!r}{inside} cannot be loaded: {error}{no_folder}") from error
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
        if not local.is_dir():
            file = posixpath.join(item.subfolder or "", item.gguf_file or "config.json")
            item.commit = loaded_commit(path, file, item.revision, hub.get("cache_dir"))
        configs.append(config)
    return configs


def load_members(
    items: Sequence[MemberConfig],
    configs: Sequence[PreTrainedConfig],
    dtype: Any,
    device_map: Any,
    tokenizers: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> tuple[list[PreTrainedModel], list[PreTrainedTokenizerBase]]:
    """Load every member's model and tokenizer; a member that is listed twice is loaded once.

    Args:
        items: The members.
        configs: Their configurations.
        dtype: One for all members that name none, or a list with one per member.
        device_map: One for all members that name none, or a list with one per member.
        tokenizers: Tokenizers, or their ids or paths, one per member; None where it is beside the model.
        kwargs: Passed on to every member's loading.

    Returns:
        The models and the tokenizers.

    Raises:
        ConfigurationError: If a list does not have one entry per member, the members do not fit into memory, or the
            weights cannot be read.
        VocabularyError: If a tokenizer is missing.
    """
    dtypes = _per_member("dtype", dtype, len(items))
    device_maps = _per_member("device_map", device_map, len(items))
    tokenizers = [None] * len(items) if tokenizers is None else _per_member("tokenizers", list(tokenizers), len(items))
    loaded: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}
    options = []
    for place, item in enumerate(items):
        own_dtype = dtypes[place] if isinstance(dtype, (list, tuple)) or item.dtype is None else item.dtype
        has_own_map = item.device_map is not None and not isinstance(device_map, (list, tuple))
        own_map = item.device_map if has_own_map else device_maps[place]
        source = dataclasses.replace(item, name=None, eos_token_id=[], chat_template=None, system_prompt=None)
        key = repr((source, own_dtype, own_map, id(tokenizers[place])))
        options.append((key, own_dtype, own_map))
    distinct = {key: (item, config, *rest) for item, config, (key, *rest) in zip(items, configs, options, strict=True)}
    max_memory = kwargs.get("max_memory")
    check_memory(list(distinct.values()), max_memory)
    pairs = []
    for place, (item, (key, own_dtype, own_map)) in enumerate(zip(items, options, strict=True)):
        if key not in loaded:
            if max_memory is not None:
                kwargs = {
                    **kwargs,
                    "max_memory": remaining_memory(max_memory, [model for model, _ in loaded.values()]),
                }
            model = _load_model(item, own_dtype, own_map, kwargs)
            loaded[key] = model, _load_tokenizer(item, tokenizers[place], kwargs)
        pairs.append(loaded[key])
        given = tokenizers[place]
        if given is not None:
            item.tokenizer = getattr(given, "name_or_path", None) or str(given)
    return [model for model, _ in pairs], [tokenizer for _, tokenizer in pairs]


def _load_model(item: MemberConfig, dtype: Any, device_map: Any, kwargs: dict[str, Any]) -> PreTrainedModel:
    assert item.path is not None
    options = {**_source_options(item), **kwargs, "dtype": "auto" if dtype is None else dtype}
    if device_map is not None:
        options["device_map"] = device_map
    if item.gguf_file is None:
        options["use_safetensors"] = True
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(item.path, **options)
    except (OSError, ValueError, ImportError, AttributeError) as error:  # the last for a dtype that torch has not
        raise ConfigurationError(f"member {item.name or item.path!r} cannot be loaded: {error}") from error
    return model


def _load_tokenizer(item: MemberConfig, given: Any, kwargs: dict[str, Any]) -> PreTrainedTokenizerBase:
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    source = given or item.tokenizer
    options = {} if source else _source_options(item)
    options.update((key, kwargs[key]) for key in HUB_OPTIONS if key in kwargs)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source or item.path, **options)
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
    revision = item.commit or item.revision
    options = {"revision": revision, "subfolder": item.subfolder, "gguf_file": item.gguf_file}
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
        raise wrong_count(name, len(value), count)
    return list(value)
