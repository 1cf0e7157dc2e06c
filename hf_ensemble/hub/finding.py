"""Finding the members of an ensemble, and checking them before any weight is read."""

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from ..config import EnsembleConfig, MemberConfig
from ..errors import ConfigurationError
from .adapters import find_adapter
from .member_files import check_folder, check_json, read_generation_config
from .quantized import check_package
from .references import Place, check_place, found_members, found_path, name_of, whole_path, with_paths

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def read_source(
    source: Any, config: PreTrainedConfig | None, located: dict[str, Any], hub: Mapping[str, Any]
) -> tuple[EnsembleConfig, bool]:
    """Read the members from what the user passed.

    Args:
        source: A list of members, or the id or path of a saved ensemble or of a single model.
        config: Its configuration, if already loaded.
        located: `revision` and `subfolder`.
        hub: Options of Hub access.

    Returns:
        An ensemble's configuration, which the caller may change, and whether it was saved.

    Raises:
        ConfigurationError: If the members are invalid, or were not saved by this library.
    """
    if not isinstance(source, str):
        return EnsembleConfig(members=_listed_members(source)), False
    alone = MemberConfig(path=source, **located)
    if config is None:
        check_place(source, Place.of_model(alone), hub)
        _check_files(repr(source), Place.of_model(alone), hub)
        # Failures are reported when it is checked as a member.
        config, problem = _read_config(source, {**located, **hub})
        if isinstance(problem, ConfigurationError):
            raise problem
    if not isinstance(config, EnsembleConfig):
        return EnsembleConfig(members=[alone]), False
    folder = Path(source, located.get("subfolder") or "")
    check_folder(f"the ensemble {source!r}", folder, within=folder)
    saved = copy.deepcopy(config)
    # Older versions saved none, neither with the ensemble nor with its tokenizer.
    saved.chat_id = saved.chat_id or ""
    saved.members = found_members(saved.members, source, located, hub)
    saved.method = saved.method.with_paths(lambda path: found_path(path, source, located))
    return saved, True


def _listed_members(source: Any) -> list[MemberConfig]:
    is_list = isinstance(source, Iterable) and not isinstance(source, (dict, nn.Module))
    entries = list(source) if is_list else [source]
    for place, entry in enumerate(entries):
        if not is_list or not isinstance(entry, (str, os.PathLike, MemberConfig)):
            raise ConfigurationError(
                "`from_pretrained` takes a list of Hub ids, paths and `MemberConfig`s, or the id or path of a saved "
                f"ensemble, but {f'entry {place}' if is_list else 'this'} is of type {type(entry).__name__}. Pass "
                "loaded models and their tokenizers to `EnsembleForCausalLM.from_members(models, tokenizers)`."
            )
    return [
        dataclasses.replace(e) if isinstance(e, MemberConfig) else MemberConfig(path=os.fspath(e)) for e in entries
    ]


def checked_member(number: int, item: MemberConfig, hub: Mapping[str, Any]) -> tuple[MemberConfig, PreTrainedConfig]:
    """Check that a member is a language model that can be found; the first has to be causal.

    Args:
        number: Its index in the list.
        item: The member.
        hub: Options of Hub access.

    Returns:
        The member, with its adapter named separately and the commits to read its files from, and its model's
        configuration.

    Raises:
        ConfigurationError: Naming the member, and why.
    """
    if not item.path:
        raise ConfigurationError(f"member {number} has no `path`: give a Hub id or a path.")
    item = with_paths(item, whole_path)
    name, place = name_of(item), Place.of_model(item)
    check_place(name, place, hub)
    check_package(item, None)
    _check_files(f"member {name!r}", place, hub)
    config, problem = _read_config(place.path, {**source_options(item), **hub})
    if isinstance(config, EnsembleConfig):
        raise ConfigurationError(f"member {name!r} is an ensemble itself. List its members instead.")
    if config is not None and not os.path.isdir(place.path):
        item = dataclasses.replace(item, commit=place.commit(item.gguf_file or "config.json", hub))
    found = find_adapter(item, config is not None, hub)
    if found.path != item.path:
        if item.adapter is not None:
            raise ConfigurationError(
                f"member {name!r} cannot be loaded: {item.path!r} is an adapter itself, so it cannot take another "
                "adapter. Name the model: `MemberConfig(path=<the model>, adapter=...)`."
            )
        try:
            return checked_member(number, found, hub)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"member {name!r} is an adapter of the model {found.path!r}: {error} If the model is elsewhere, name "
                f"it: `MemberConfig(path=<the model>, adapter={item.path!r})`."
            ) from error
    local = Path(place.path, place.subfolder or "")
    if local.is_dir() and item.gguf_file is None and not any(any(local.glob(p)) for p in _WEIGHT_PATTERNS):
        raise ConfigurationError(
            f"member {name!r} cannot be loaded: {place.path!r} holds no safetensors weights. Save the model with "
            "`save_pretrained`."
        )
    if config is None:
        asked = {"revision": item.revision, "subfolder": item.subfolder, "gguf_file": item.gguf_file}
        inside = "".join(f", {key} {value!r}" for key, value in asked.items() if value is not None)
        no_folder = "" if local.is_dir() else f" (And there is no folder {place.path!r} here.)"
        raise ConfigurationError(
            f"member {name!r}{inside} cannot be loaded: {_own_code(problem) or problem}{no_folder}"
        ) from problem
    _check_kind(name, config, is_primary=number == 0)
    if local.is_dir():
        read_generation_config(f"member {name!r}", place.path, place.options)
    check_package(item, config)
    return found, config


def source_options(item: MemberConfig) -> dict[str, Any]:
    """Options with the source of a member's model and tokenizer."""
    options = Place.of_model(item).options
    return options if item.gguf_file is None else {**options, "gguf_file": item.gguf_file}


def _read_config(path: str, options: dict[str, Any]) -> tuple[PreTrainedConfig | None, Exception | None]:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options), None
    except Exception as error:  # what the classes of configurations check of their values they say in many ways
        return None, error


def _own_code(problem: Exception | None) -> str | None:
    """What to say of a model that only code beside its weights can make."""
    if "trust_remote_code" not in str(problem):
        return None
    return (
        "it comes with code of its own (`auto_map` in its config.json), which is never run for a member. If you trust that "
        "code, load the model yourself and pass it to `EnsembleForCausalLM.from_members(models, tokenizers)`."
    )


def _check_files(name: str, place: Place, hub: Mapping[str, Any]) -> None:
    """Look at the files that a configuration is made of, before it is."""
    folder = Path(place.path, place.subfolder or "")
    if folder.is_dir():
        check_folder(name, folder)
    elif (file := place.file("config.json", hub)) is not None:
        check_json(name, Path(file))


def model_class(config: PreTrainedConfig) -> Any:
    """The class that loads a member's model."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _check_kind(name: str, config: PreTrainedConfig, is_primary: bool) -> None:
    if config.is_encoder_decoder:
        if is_primary:
            raise ConfigurationError(
                f"member {name!r} is an encoder-decoder model ({config.model_type}), which cannot be the primary: its decoder "
                "reads no prompt. Put a decoder-only causal language model first."
            )
        if type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            raise ConfigurationError(
                f"member {name!r} is not a language model for text: its configuration says {config.model_type!r}, "
                f"architectures {config.architectures}."
            )
        return
    # A checkpoint that names no class is accepted.
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"member {name!r} cannot be loaded: its config.json says `architectures` is {names!r:.200}, but it has to be a list of names."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (names and not any(n.endswith(_HEADS) for n in names)):
        raise ConfigurationError(
            f"member {name!r} is not a causal language model: its configuration says {config.model_type!r}, "
            f"architectures {config.architectures}."
        )
