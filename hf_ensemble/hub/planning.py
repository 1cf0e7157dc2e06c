"""Plans what to save or upload, and checks it before anything is written."""

import contextlib
import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import GenerationConfig

from ..config import EnsembleConfig, MemberConfig, check_on_hub, normalize_weights, paths_of
from ..errors import ConfigurationError
from ..members.adapted import active_adapters, base_model, identity_of_weights
from ..members.member import Member
from .adapters import obstacle_to_writing
from .in_place import BUNDLE
from .quantized import is_from_gguf, is_packed_for_cpu, is_quantized_by_hand
from .references import Place, saved_path, with_paths

ADAPTER_FOLDER = "adapter"
"""Folder of a bundled member's adapter, within the member's."""


@dataclass(frozen=True)
class Bundled:
    """A member to write.

    Attributes:
        member: The member.
        with_model: Whether its model is written; otherwise only its adapter, because another member has the same
            model.
        with_tokenizer: Whether its tokenizer is written; otherwise the other member has the same one.
    """

    member: Member
    with_model: bool = True
    with_tokenizer: bool = True


@dataclass(frozen=True)
class SavePlan:
    """A save that passed its checks; nothing is written yet.

    Attributes:
        ensemble: The ensemble.
        config: Its configuration, as written.
        bundled: The members to write, by their folder within the ensemble's.
    """

    ensemble: Any
    config: EnsembleConfig
    bundled: dict[str, Bundled] = field(default_factory=dict)


def plan_save(ensemble: Any, include_members: bool, folder: Path) -> SavePlan:
    """Check that an ensemble can be saved to a folder.

    Args:
        ensemble: The ensemble.
        include_members: Whether the members are written too.
        folder: The folder.

    Raises:
        ConfigurationError: If a member without an id or path is not included, cannot be written, or would be
            overwritten; or if the method's options or a generation config cannot be saved.
    """
    for item, member in zip(ensemble.config.members, ensemble.member_views, strict=True):
        subfolders = {"path": item.subfolder, "adapter": item.adapter_subfolder}
        places = {Path(path, subfolders.get(key) or "").resolve() for key, path in paths_of(item).items()}
        if folder in places:
            raise ConfigurationError(
                f"the ensemble cannot be saved to {str(folder)!r}: this is the folder of member {member.name!r}, "
                "whose configuration would be overwritten. Choose another folder."
            )

    ensemble.config.method.check_saveable(is_for_hub=False)

    def reference(item: MemberConfig, member: Member) -> MemberConfig:
        return with_paths(item, lambda path: saved_path(path, folder))

    plan = _plan_bundle(ensemble) if include_members else _plan_references(ensemble, reference)
    plan.config.method = plan.config.method.with_paths(lambda path: saved_path(path, folder))
    config = None
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text("utf-8"))
    is_saved = isinstance(config, dict) and config.get("model_type") == EnsembleConfig.model_type
    there = ["config.json"] if isinstance(config, dict) else []
    there += [place for place in plan.bundled if (folder / place).exists()]
    if there and not is_saved:
        raise ConfigurationError(
            f"the ensemble cannot be saved to {str(folder)!r}: {there[0]!r}, which does not belong to a saved "
            "ensemble, would be overwritten. Choose another folder."
        )
    return plan


def plan_push(ensemble: Any, include_members: bool, api: HfApi) -> SavePlan:
    """Check that an ensemble can be uploaded, and pin the commits of its members.

    Args:
        ensemble: The ensemble.
        include_members: Whether the members are uploaded too.
        api: The Hub, to look up the commit of a member if it is unknown.

    Raises:
        ConfigurationError: If a member is on this machine and not included, or is not found on the Hub; and as for
            `plan_save`.
    """
    ensemble.config.method.check_saveable(is_for_hub=True)

    def reference(item: MemberConfig, member: Member) -> MemberConfig:
        check_on_hub(item, member.name, "Pass `include_members=True`")
        commits: dict[str, Any] = {"revision": item.commit or _commit_on_hub(Place.of_model(item), member, api)}
        if item.adapter is not None:
            commits["adapter_revision"] = item.adapter_commit or _commit_on_hub(Place.of_adapter(item), member, api)
        return dataclasses.replace(item, **commits)

    return _plan_bundle(ensemble) if include_members else _plan_references(ensemble, reference)


def _plan_references(ensemble: Any, reference: Callable[[MemberConfig, Member], MemberConfig]) -> SavePlan:
    """References to all members, if their configurations name exactly these members."""
    items = []
    for item, member in zip(ensemble.config.members, ensemble.member_views, strict=True):
        if not (item.path or item.url):
            raise ConfigurationError(
                f"member {member.name!r} was passed as an object without an id or path, so a reference to it cannot "
                "be saved. Pass `include_members=True`, or save it separately first and load the ensemble from there."
            )
        if member.model is not None and is_quantized_by_hand(member.model):
            raise ConfigurationError(
                f"member {member.name!r} was quantised after it had been loaded, and its reference {item.path!r} would "
                "load it unquantised. Let it be quantised while it loads: `MemberConfig(quantization_config=...)`."
            )
        adapters = active_adapters(member.model)
        if len(adapters) > (item.adapter is not None):
            raise ConfigurationError(
                f"member {member.name!r} carries adapters ({', '.join(adapters)}) that its reference {item.path!r} "
                "does not name, so they would be lost. Pass `include_members=True`, or name the adapter: "
                "`MemberConfig(adapter=...)`."
            )
        items.append(reference(item, member))
    return SavePlan(ensemble, _checked_config(ensemble, items))


def _plan_bundle(ensemble: Any) -> SavePlan:
    """The distinct pairs of model and tokenizer, each in a folder named after the member; adapters share their model."""
    places: dict[tuple[int, int], tuple[str, str]] = {}
    bundled: dict[str, Bundled] = {}
    of_weights: dict[Any, tuple[str, Member]] = {}
    items = []
    for item, member in zip(ensemble.config.members, ensemble.member_views, strict=True):
        key = (id(member.model), id(member.tokenizer))
        has_adapter = bool(active_adapters(member.model))
        if key not in places:
            _check_writable(member)
            place = _free_place(member.name, bundled)
            weights = identity_of_weights(member.model)
            home, first = of_weights.setdefault(weights, (place, member))
            has_same_tokenizer = first.tokenizer is member.tokenizer
            if first is not member and (has_adapter or has_same_tokenizer):
                places[key] = home, place
                if has_adapter:
                    bundled[place] = Bundled(member, with_model=False, with_tokenizer=not has_same_tokenizer)
            else:
                places[key] = place, place
                bundled[place] = Bundled(member)
        home, own = places[key]
        adapter = f"./{own}/{ADAPTER_FOLDER}" if has_adapter else None
        kept = {
            key: getattr(item, key)
            for key in ("name", "tokenizer_kwargs", "eos_token_id", "chat_template", "system_prompt")
        }
        items.append(MemberConfig(path=f"./{home}", adapter=adapter, **kept))
    return SavePlan(ensemble, _checked_config(ensemble, items), bundled)


def _free_place(name: str, bundled: Iterable[str]) -> str:
    """A folder for a member that no other member has."""
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "member"
    # Some file systems ignore the case of names.
    taken = {place.casefold() for place in bundled}
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(place for name in names if (place := f"{BUNDLE}/{name}").casefold() not in taken)


def _check_writable(member: Member) -> None:
    if member.model is None:
        raise ConfigurationError(
            f"member {member.name!r} cannot be included: it is {member.kind}, so its weights are not in this process. "
            "Save a reference to it: `include_members=False`."
        )
    model = base_model(member.model)
    quantizer = getattr(model, "hf_quantizer", None)
    obstacle = obstacle_to_writing(member.model)
    if obstacle is None and quantizer is not None and not is_from_gguf(model) and not quantizer.is_serializable():
        obstacle = "is quantised in a way that cannot be written. Name it by its Hub id or path instead"
    if obstacle is None and is_quantized_by_hand(model):
        obstacle = (
            "was quantised after it had been loaded, and would not be loaded so again. Let it be quantised while it "
            "loads: `MemberConfig(quantization_config=...)`"
        )
    if obstacle is None and is_packed_for_cpu(model):
        obstacle = (
            "has run on a CPU, after which bitsandbytes writes wrong 4-bit weights. Save it after loading, before it "
            "runs"
        )
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


def _checked_config(ensemble: Any, items: list[MemberConfig]) -> EnsembleConfig:
    config: EnsembleConfig = copy.deepcopy(ensemble.config)
    # Members may have been cast since they were loaded.
    pairs = zip(items, ensemble.member_views, strict=True)
    config.members = [
        item if item.url is not None else dataclasses.replace(item, dtype=member.dtype) for item, member in pairs
    ]
    config.architectures = [type(ensemble).__name__]
    if config.weights is not None:
        normalize_weights(config.weights, len(items), config.method.takes_weights_as_given)
        config.weights = [float(weight) for weight in config.weights]
    _check_generation_config(ensemble.generation_config, "the ensemble's")
    return config


def _commit_on_hub(place: Place, member: Member, api: HfApi) -> str | None:
    """The current commit on the Hub."""
    try:
        return api.model_info(place.path, revision=place.revision).sha
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigurationError(
            f"member {member.name!r} cannot be pinned: the Hub does not return a commit of {place.path!r}: {error} "
            "Check the id, `MemberConfig.revision` and `token`, or pass `include_members=True`."
        ) from error
