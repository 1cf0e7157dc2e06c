"""Whether and how an ensemble can be saved or uploaded: all that is checked before anything is written."""

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..config import EnsembleConfig, MemberConfig, normalize_weights
from ..errors import ConfigurationError
from ..members.member import Member
from .adapters import active_adapters, base_model, obstacle_to_writing
from .in_place import BUNDLE
from .references import PLACES, Place, is_local, place_of_adapter, place_of_model, saved_path, with_paths

ADAPTER_FOLDER = "adapter"
"""Folder of a bundled member's adapter, within the member's."""


@dataclass(frozen=True)
class EnsembleParts:
    """What is saved of an ensemble."""

    config: EnsembleConfig
    generation_config: GenerationConfig
    members: Sequence[Member]
    tokenizer: PreTrainedTokenizerBase
    """The primary's, as the ensemble hands it out."""

    architecture: str
    """Name of the ensemble's class."""

    tags: Sequence[str]
    """Of the README."""


@dataclass(frozen=True)
class SavePlan:
    """A save that has been found possible: all checks are done, nothing is written."""

    parts: EnsembleParts
    config: EnsembleConfig
    """As it is written."""

    bundled: dict[str, Member] = field(default_factory=dict)
    """The members to write, by their folder within the ensemble's."""


def plan_save(parts: EnsembleParts, include_members: bool, folder: Path) -> SavePlan:
    """Check that an ensemble can be saved to a folder.

    Args:
        parts: The ensemble.
        include_members: Whether the members are written too.
        folder: Where to.

    Raises:
        ConfigurationError: If a member came from nowhere and is not to be written, cannot be written, or would be
            overwritten; or if a generation config cannot be saved.
    """
    if include_members:
        return _plan_bundle(parts)
    items = []
    for item, member in zip(parts.config.members, parts.members, strict=True):
        _check_reference(item, member)
        if any(path and Path(path).resolve() == folder for path in _paths_of(item).values()):
            raise ConfigurationError(
                f"the ensemble cannot be saved to {str(folder)!r}: member {member.name!r} lies there, and its "
                "configuration would be overwritten. Choose another folder."
            )
        items.append(with_paths(item, lambda path: saved_path(path, folder)))
    return SavePlan(parts, _checked_config(parts, items))


def plan_push(parts: EnsembleParts, include_members: bool, api: HfApi) -> SavePlan:
    """Check that an ensemble can be uploaded, and pin the commits of its members.

    Args:
        parts: The ensemble.
        include_members: Whether the members are uploaded too.
        api: The Hub, asked for the commit of a member whose own is not known.

    Raises:
        ConfigurationError: If a member lies on this machine and is not to be uploaded, or is not found on the Hub; and
            as for `plan_save`.
    """
    if include_members:
        return _plan_bundle(parts)
    items = []
    for item, member in zip(parts.config.members, parts.members, strict=True):
        _check_reference(item, member)
        for key, path in _paths_of(item).items():
            if path is not None and is_local(path):
                what = "member" if key == "path" else f"the {key} of member"
                raise ConfigurationError(
                    f"{what} {member.name!r} lies in a folder of this machine, so others could not load what is pushed. "
                    "Pass `include_members=True`, or load the member by its Hub id."
                )
        pinned = dataclasses.replace(item, revision=_commit_on_hub(place_of_model(item), member, api, item.commit))
        if item.adapter is not None:
            commit = _commit_on_hub(place_of_adapter(item), member, api, item.adapter_commit)
            pinned = dataclasses.replace(pinned, adapter_revision=commit)
        items.append(pinned)
    return SavePlan(parts, _checked_config(parts, items))


def _paths_of(item: MemberConfig) -> dict[str, str | None]:
    return {key: getattr(item, key) for key in PLACES}


def _check_reference(item: MemberConfig, member: Member) -> None:
    """Check that what a member's configuration names is the member."""
    if not item.path:
        raise ConfigurationError(
            f"member {member.name!r} was given as an object without an id or path, so there is nothing to save a "
            "reference to. Pass `include_members=True`, or save it by itself first and load the ensemble from there."
        )
    adapters = active_adapters(member.model)
    if len(adapters) > (item.adapter is not None):
        raise ConfigurationError(
            f"member {member.name!r} carries adapters ({', '.join(adapters)}) that its reference {item.path!r} does not "
            "name, so they would be lost. Pass `include_members=True`, or name the one: `MemberConfig(adapter=...)`."
        )


def _plan_bundle(parts: EnsembleParts) -> SavePlan:
    """Every distinct pair of model and tokenizer once, in a folder named after the member."""
    places: dict[tuple[int, int], str] = {}
    bundled: dict[str, Member] = {}
    items = []
    for item, member in zip(parts.config.members, parts.members, strict=True):
        key = (id(member.model), id(member.tokenizer))
        if key not in places:
            _check_writable(member)
            name = re.sub(r"[^\w.-]+", "-", member.name).strip(".-") or "member"
            names = [name, *(f"{name}-{number}" for number in range(2, len(parts.members) + 2))]
            # Some file systems take names that differ in case for the same.
            taken = {place.casefold() for place in bundled}
            place = next(place for name in names if (place := f"{BUNDLE}/{name}").casefold() not in taken)
            places[key] = place
            bundled[place] = member
        adapter = f"./{places[key]}/{ADAPTER_FOLDER}" if active_adapters(member.model) else None
        bundled_item = MemberConfig(
            path=f"./{places[key]}", adapter=adapter, dtype=str(member.model.dtype).removeprefix("torch.")
        )
        own = {key: getattr(item, key) for key in ("name", "eos_token_id", "chat_template", "system_prompt")}
        items.append(dataclasses.replace(bundled_item, **own))
    return SavePlan(parts, _checked_config(parts, items), bundled)


def _check_writable(member: Member) -> None:
    model = base_model(member.model)
    quantizer = getattr(model, "hf_quantizer", None)
    obstacle = obstacle_to_writing(member.model)
    if obstacle is None and quantizer is not None and not is_from_gguf(model) and not quantizer.is_serializable():
        obstacle = "is quantised in a way that cannot be written. Name it by its Hub id or path instead"
    if obstacle is not None:
        raise ConfigurationError(f"member {member.name!r} cannot be included: it {obstacle}.")
    _check_generation_config(getattr(model, "generation_config", None), f"member {member.name!r}'s")


def _check_generation_config(config: GenerationConfig | None, whose: str) -> None:
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        raise ConfigurationError(
            f"{whose} generation config cannot be saved: {error} Change its `generation_config` first."
        ) from error


def _checked_config(parts: EnsembleParts, items: list[MemberConfig]) -> EnsembleConfig:
    config = copy.deepcopy(parts.config)
    config.members = items
    config.architectures = [parts.architecture]
    if config.weights is not None:
        normalize_weights(config.weights, len(items), config.method.takes_weights_as_given)
        config.weights = [float(weight) for weight in config.weights]
    _check_generation_config(parts.generation_config, "the ensemble's")
    return config


def _commit_on_hub(place: Place, member: Member, api: HfApi, loaded: str | None) -> str | None:
    """The commit that was loaded, else the one that the Hub gives now."""
    if loaded is not None:
        return loaded
    try:
        return api.model_info(place.path, revision=place.revision).sha
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigurationError(
            f"member {member.name!r} cannot be pinned: the Hub does not give a commit of {place.path!r}: {error} Check "
            "the id, `MemberConfig.revision` and `token`, or pass `include_members=True`."
        ) from error


def is_from_gguf(model: Any) -> bool:
    """Whether a model was read from a GGUF file, so that its weights are unpacked and it still claims to be quantised."""
    found = getattr(model.config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return getattr(method, "value", method) == "gguf"
