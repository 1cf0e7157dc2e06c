"""Creates an ensemble from loaded models, from a list of members, or from a saved ensemble."""

import copy
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typing_extensions import Self

from .. import messages
from ..config import METHODS, EnsembleConfig, MemberConfig, MethodConfig, is_local, method_config
from ..errors import ConfigurationError
from ..members.adapted import base_model
from ..members.encoder_decoder import EncoderDecoderMember, languages_of
from ..members.local import LocalMember
from ..members.member import Member, refuse_missing_offers
from ..members.ray.member import RayMember
from ..members.shared_weights import join_members
from .actors import check_actor, check_placement, start_actor
from .adapters import check_adapters
from .finding import checked_member, read_source
from .in_place import finish_writing
from .local_models import Listed, load_member, load_models, what_is_loaded
from .member_files import read_generation_config
from .member_tokenizers import load_tokenizer
from .per_member import per_member
from .quantized import quantization_of, with_quantization
from .references import Place, check_token, hub_options, whole_path, with_paths
from .served import check_served, connect

Part: TypeAlias = tuple[PreTrainedModel, PreTrainedTokenizerBase] | Member
"""What was loaded for a member: its model and tokenizer, or the member itself if it runs elsewhere."""


class Loading:
    """Mix-in that creates an ensemble from loaded models, from a list of members, or from a saved ensemble."""

    config: Any
    generation_config: Any
    name_or_path: str

    @classmethod
    def from_members(
        cls,
        models: Sequence[PreTrainedModel],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        method: str | MethodConfig = "unite",
        weights: Sequence[float] | None = None,
        member_configs: Sequence[MemberConfig] | None = None,
    ) -> Self:
        """Create an ensemble from loaded models and tokenizers. None of them is changed.

        Entries with the same model and tokenizer share them. They are one member only if everything else is the same
        too.

        Args:
            models: Causal language models; the first is the primary. Others may be encoder-decoder models.
            tokenizers: Their fast tokenizers.
            method: Name or configuration of the method.
            weights: Mixing weights, one per member. Default: equal weights.
            member_configs: For each member its source, its name, and more ids that end its texts. Default: each
                model's own `name_or_path`.

        Raises:
            ConfigurationError: If the lists do not match, a model is not a language model, or the primary is not causal.
            VocabularyError: If a tokenizer is not supported.
        """
        if not models:
            raise ConfigurationError("an ensemble needs at least one member: got 0.")
        items = member_configs
        if items is None:
            items = [MemberConfig(path=str(model.name_or_path) or None) for model in models]
        for name, values in (("tokenizers", tokenizers), ("member_configs", items)):
            if len(values) != len(models):
                raise messages.wrong_count(name, len(values), len(models))
        return cls._of_parts(list(zip(models, tokenizers, strict=True)), items, method, weights)

    @classmethod
    def _of_parts(
        cls,
        parts: Sequence[Part],
        items: Sequence[MemberConfig],
        method: str | MethodConfig,
        weights: Sequence[float] | None,
        chat_id: str | None = None,
    ) -> Self:
        """Create an ensemble from the loaded members.

        Args:
            parts: For each member its model and tokenizer, or the member itself if it runs elsewhere.
            items: Their configurations.
            method: Name or configuration of the method.
            weights: Mixing weights, one per member; None for equal weights.
            chat_id: That of a saved ensemble; None for a new ensemble.
        """
        first = parts[0]
        config = EnsembleConfig(
            members=[_described(*pair) for pair in zip(parts, items, strict=True)],
            method=method,
            weights=weights,
            primary_config=copy.deepcopy(first.config if isinstance(first, Member) else first[0].config),
            chat_id=chat_id,
        )
        config.method.check_members(len(parts))
        check_adapters([part[0] for part in parts if not isinstance(part, Member)])
        known: dict[Any, LocalMember] = {}
        members: list[Member] = []
        for part, item in zip(parts, config.members, strict=True):
            if isinstance(part, Member):
                members.append(part)
                continue
            model, tokenizer = part
            options = (item.name, tuple(item.eos_token_id), item.chat_template, item.system_prompt)
            key = (id(model), id(tokenizer), *options)
            if key not in known:
                kind = EncoderDecoderMember if model.config.is_encoder_decoder else LocalMember
                known[key] = kind(model, tokenizer, *options)
            members.append(known[key])
        join_members([member for member in known.values() if member.runs_in_loop])
        refuse_missing_offers(members, config.method, range(len(members)))
        return cls(config, members)  # type: ignore[call-arg]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: PreTrainedConfig | None = None,
        method: str | MethodConfig | None = None,
        weights: Sequence[float] | None = None,
        dtype: Any = "auto",
        device_map: Any = None,
        tokenizers: Sequence[Any] | None = None,
        quantization_config: Any = None,
        placement: str | None = None,
        allow_remote: bool = False,
        api_key_env: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Load an ensemble from a list of members, or a saved ensemble.

        Args:
            pretrained_model_name_or_path: A list of members (Hub ids, paths or `MemberConfig`s), the primary first; or
                the id or path of a saved ensemble. The id or path of a single model makes an ensemble of one.
            *model_args: Refused.
            config: Configuration of a saved ensemble, if already loaded.
            method: Name or configuration of the method. Default: as saved, else `"unite"`.
            weights: Mixing weights, one per member. Default: as saved, else equal weights.
            dtype: One dtype for all members, or a list with one per member. Default: as saved, else each checkpoint's.
            device_map: Device of the weights, as in `transformers`: one value for all members, or a list.
            tokenizers: Tokenizers, or their ids or paths, one per member; None if it is beside the model.
            quantization_config: How to quantise the weights while they load: one `TorchAoConfig`, `BitsAndBytesConfig`
                or the like for all members that name none, or a list with one per member (None keeps the weights as
                stored). Default: as saved.
            placement: `"ray"` runs every member in a Ray actor, even if its `MemberConfig` does not say so. Needs
                `ray`.
            allow_remote: Whether a saved ensemble may start its actors and contact its servers. Members that you list
                yourself always may.
            api_key_env: Name of the environment variable with the key for servers of members that ask for one, or a
                list with one per member. Keys for a saved ensemble are sent only if you name them here.
            **kwargs: `revision` and `subfolder` of the ensemble; everything else (`token`, `cache_dir`, `max_memory`
                for all members together, `attn_implementation`, …) is used to load every member.

        Raises:
            ConfigurationError: If a member cannot be found or is not a causal language model, before any weights are read.
            VocabularyError: If a tokenizer is missing or cannot be understood.
        """
        if model_args:
            raise ConfigurationError(f"an ensemble takes no positional model arguments, but got {len(model_args)}.")
        kwargs.pop("adapter_kwargs", None)
        _refuse_method_options(kwargs, method)
        dtype = kwargs.pop("torch_dtype", dtype)
        hub = hub_options(kwargs)
        check_token(hub.get("token"))
        source, located = pretrained_model_name_or_path, dict[str, Any]()
        if isinstance(source, (str, os.PathLike)):
            source = os.fspath(source)
            located = {key: kwargs.pop(key) for key in ("revision", "subfolder") if key in kwargs}
            if finish_writing(Path(source, located.get("subfolder") or "")):
                config = None
        asked, is_saved = read_source(source, config, located, hub)
        if not asked.members:
            raise ConfigurationError("an ensemble needs at least one member: got an empty list.")
        method = asked.method.imported(bool(kwargs.get("trust_remote_code"))) if method is None else method
        weights = asked.weights if weights is None else weights
        members = with_quantization(asked.members, quantization_config, is_saved)
        asked = EnsembleConfig(members=members, method=method, weights=weights, chat_id=asked.chat_id)
        asked.method.check_members(len(asked.members))
        for item in asked.members if is_saved and dtype not in (None, "auto") else ():
            item.dtype = None
        check_served(asked.members, api_key_env, is_saved, allow_remote)
        check_placement(asked.members, placement, is_saved, allow_remote)
        found = [
            (item, None) if item.url is not None else checked_member(number, item, hub)
            for number, item in enumerate(asked.members)
        ]
        items = [item for item, _ in found]
        parts = _load_members(items, [own for _, own in found], dtype, device_map, tokenizers, kwargs)
        try:
            ensemble = cls._of_parts(parts, items, asked.method, asked.weights, asked.chat_id)
        except BaseException:
            for part in parts:
                if isinstance(part, Member):
                    part.close()
            raise
        if isinstance(source, str):
            ensemble.name_or_path = ensemble.config.name_or_path = source
        if is_saved:
            own = read_generation_config(f"the ensemble {source!r}", source, {**located, **hub})
            ensemble.generation_config = own or ensemble.generation_config  # else its primary's
        return ensemble


def _refuse_method_options(given: Iterable[str], method: str | MethodConfig | None) -> None:
    """Refuse options of methods, which would reach the loading of every member."""
    asked = method_config(method or "unite").name
    for name in set(given) - {"variant"}:  # which is also one of weights
        kinds = [kind for kind in METHODS.values() if any(name == option.name for option in dataclasses.fields(kind))]
        if kinds:
            kind = next((kind for kind in kinds if kind.name == asked), kinds[0])
            raise ConfigurationError(
                f"`{name}` is an option of the method {kind.name!r}, not of loading. Give it with the method: "
                f"`method={kind.__name__}({name}=...)`."
            )


def _described(part: Part, item: MemberConfig) -> MemberConfig:
    """The member's configuration, completed from its model and tokenizer."""
    item = with_paths(item, whole_path)
    if isinstance(part, Member):
        if item.tokenizer is None:
            item.tokenizer = whole_path(part.tokenizer.name_or_path) or None
        return item
    model, tokenizer = part
    if item.quantization_config is None and (quantization := quantization_of(base_model(model))) is not None:
        item = dataclasses.replace(item, quantization_config=quantization)
    if item.dtype is None:
        item.dtype = str(model.dtype).removeprefix("torch.")
    beside = {whole_path(str(getattr(model, "name_or_path", ""))), item.path, item.adapter}
    if item.tokenizer is None and tokenizer.name_or_path and whole_path(tokenizer.name_or_path) not in beside:
        item.tokenizer = whole_path(tokenizer.name_or_path)
    if languages := languages_of(tokenizer):
        item.tokenizer_kwargs = {**(item.tokenizer_kwargs or {}), **languages}
    if item.commit is None and item.path and not is_local(item.path):
        # Transformers 5.17 keeps the commit in the configuration.
        kept = getattr(model.config, "_commit_hash", None)
        item.commit = kept or Place.of_model(item).commit("config.json", {})
    return item


def _load_members(
    items: Sequence[MemberConfig],
    configs: Sequence[PreTrainedConfig | None],
    dtype: Any,
    device_map: Any,
    tokenizers: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> list[Part]:
    """Load every member's model and tokenizer; a member listed twice is loaded once.

    Args:
        items: The members.
        configs: Their models' configurations; None for served members.
        dtype: One for all members that name none, or a list with one per member.
        device_map: One for all members that name none, or a list with one per member.
        tokenizers: Tokenizers, or their ids or paths, one per member; None if it is beside the model.
        kwargs: Options of loading for every member.

    Returns:
        Models and tokenizers, or members that run elsewhere.

    Raises:
        ConfigurationError: If a list does not have one entry per member, the members do not fit into memory, the
            weights cannot be read, or an actor or a server is not available.
        VocabularyError: If a tokenizer is missing.
    """
    dtypes = per_member("dtype", dtype, [item.dtype for item in items])
    device_maps = per_member("device_map", device_map, [item.device_map for item in items])
    given = per_member("tokenizers", None if tokenizers is None else list(tokenizers), [None] * len(items))
    keys = []
    distinct: dict[str, Listed] = {}
    for of_member in zip(items, configs, dtypes, device_maps, given, strict=True):
        item, config, own_dtype, own_map, tokenizer = of_member
        if item.ray is not None and config is not None:
            check_actor(item, config)
        source = item if item.is_elsewhere else what_is_loaded(item)  # a member elsewhere is a whole member
        keys.append(repr((source, own_dtype, own_map, id(tokenizer))))
        distinct.setdefault(keys[-1], of_member)
    of_elsewhere = {key: value for key, value in kwargs.items() if key != "max_memory"}  # which is for devices here
    elsewhere: dict[str, Member] = {}
    try:
        # Quick checks come first. Actors load while the others do.
        for key, (item, _, _, _, tokenizer) in distinct.items():
            if item.url is not None:
                elsewhere[key] = connect(item, load_tokenizer(item, tokenizer, kwargs), hub_options(kwargs))
        for key, (item, config, own_dtype, own_map, tokenizer) in distinct.items():
            if item.ray is not None:
                elsewhere[key] = start_actor(item, own_map, load_member, config, own_dtype, tokenizer, of_elsewhere)
        own = {key: of_member for key, of_member in distinct.items() if not of_member[0].is_elsewhere}
        loaded: dict[str, Part] = {**load_models(own, kwargs), **elsewhere}
        for key, actor in elsewhere.items():
            item, _, _, _, tokenizer = distinct[key]
            if isinstance(actor, RayMember):
                actor.finish(load_tokenizer(item, tokenizer, of_elsewhere), item.chat_template, item.system_prompt)
    except BaseException:
        for member in elsewhere.values():
            member.close()
        raise
    for item, tokenizer in zip(items, given, strict=True):
        if tokenizer is not None:
            item.tokenizer = getattr(tokenizer, "name_or_path", None) or str(tokenizer)
    return [loaded[key] for key in keys]
