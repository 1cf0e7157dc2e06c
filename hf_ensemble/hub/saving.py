"""Saving an ensemble to a folder, and uploading it to the Hub, with references to its members or with the members."""

import copy
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from transformers import GenerationConfig

from ..config import EnsembleConfig, MemberConfig, normalize_weights
from ..errors import ConfigurationError
from ..members.member import Member
from .adapters import active_adapters, base_model, obstacle_to_writing
from .in_place import BUNDLE, MAY_BE_STALE, write_in_place
from .model_card import model_card
from .references import (
    Place,
    check_token,
    is_local,
    paths_of,
    place_of_adapter,
    place_of_model,
    saved_path,
    with_paths,
)
from .writing import ADAPTER_FOLDER, EnsembleParts, SavePlan, is_from_gguf, write_files


@dataclass(frozen=True)
class PushOptions:
    """Options of `push_to_hub`."""

    commit_message: str | None = None
    commit_description: str | None = None
    private: bool | None = None
    token: bool | str | None = None
    revision: str | None = None
    create_pr: bool = False
    tags: str | Sequence[str] | None = None

    def connect(self) -> HfApi:
        """The Hub, with the token.

        Raises:
            ConfigurationError: If the token cannot be sent.
        """
        check_token(self.token)
        return HfApi(token=self.token, library_name="hf_ensemble")


def save_ensemble(
    parts: EnsembleParts,
    save_directory: str | os.PathLike[str],
    include_members: bool,
    max_shard_size: int | str,
    push_to_hub: bool,
    push_options: dict[str, Any],
) -> None:
    """Save an ensemble to a folder, and upload it too if that is asked for.

    Args:
        parts: The ensemble.
        save_directory: Folder to write to.
        include_members: Whether to write the members too.
        max_shard_size: Most bytes of a file of an included member, or a size like `"5GB"`.
        push_to_hub: Whether to upload it.
        push_options: `repo_id` (default: the folder's name) and `PushOptions`.

    Raises:
        ConfigurationError: If it cannot be saved or uploaded, or an option is unknown. Nothing is written then.
    """
    known = {"repo_id", *(option.name for option in dataclasses.fields(PushOptions))}
    if push_options and not (push_to_hub and known.issuperset(push_options)):
        raise ConfigurationError(
            f"`save_pretrained` of an ensemble has no option {min(set(push_options) - known)!r}."
            if push_to_hub
            else f"options {sorted(push_options)} do nothing without `push_to_hub=True`."
        )
    folder = Path(save_directory).resolve()
    if folder.is_file():
        raise ConfigurationError(f"{str(folder)!r} is a file; an ensemble is saved to a folder.")
    repo_id = push_options.pop("repo_id", folder.name)
    options = PushOptions(**push_options)
    plan = plan_save(parts, include_members, folder)
    pushed = plan_push(parts, include_members, options.connect()) if push_to_hub else None
    card = model_card(plan, folder.name, folder.name, parts.tags, api=None)
    write_in_place(folder, lambda new: write_files(plan, new, max_shard_size, card))
    if pushed is not None:
        push_plan(pushed, repo_id, max_shard_size, options)


def push_plan(plan: SavePlan, repo_id: str, max_shard_size: int | str, options: PushOptions) -> CommitInfo:
    """Upload what was planned, in one commit. A README that is there stays, with the tags added.

    Args:
        plan: What to upload.
        repo_id: Repository, made if there is none.
        max_shard_size: Most bytes of a file of a bundled member, or a size like `"5GB"`.
        options: The token, the branch, what the commit says, and the like.
    """
    api, revision = options.connect(), options.revision
    tags = [*plan.parts.tags, *([options.tags] if isinstance(options.tags, str) else options.tags or ())]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(plan, folder, max_shard_size, card=None)
        repo_id = api.create_repo(repo_id, private=options.private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            _make_branch(api, repo_id, revision, options.create_pr)
        readme = _remote_card(api, repo_id, revision, tags)
        if readme is None:
            title = repo_id.rsplit("/", 1)[-1]
            readme = model_card(plan, title, repo_id, tags, api)
        (folder / "README.md").write_text(readme, "utf-8")
        files = sorted(str(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file())
        prefixes = tuple(f"{place}/" for place in plan.bundled)
        stale = [
            file
            for file in api.list_repo_files(repo_id, revision=revision)
            if file not in files and (file in MAY_BE_STALE or (prefixes and file.startswith(prefixes)))
        ]
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(path_in_repo=file) for file in stale),
                *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(folder / file)) for file in files),
            ],
            commit_message=options.commit_message or "Upload ensemble",
            commit_description=options.commit_description,
            revision=revision,
            create_pr=options.create_pr,
        )


def _make_branch(api: HfApi, repo_id: str, revision: str, create_pr: bool) -> None:
    try:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    except HfHubHTTPError as error:
        # Who may not make branches may still propose a commit to one that is there.
        if not (create_pr and error.response.status_code == 403):
            raise


def _remote_card(api: HfApi, repo_id: str, revision: str | None, tags: Sequence[str]) -> str | None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = api.hf_hub_download(repo_id, "README.md", revision=revision, local_dir=folder)
            card = ModelCard.load(file)
    except EntryNotFoundError:
        return None
    known = card.data.tags or []
    if added := [tag for tag in tags if tag not in known]:
        card.data.tags = [*known, *added]
    return str(card)


# Planning: all that is checked before anything is written


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
    for item, member in zip(parts.config.members, parts.members, strict=True):
        if not include_members:
            _check_reference(item, member)
        subfolders = {"path": item.subfolder, "adapter": item.adapter_subfolder}
        places = {Path(path, subfolders.get(key) or "").resolve() for key, path in paths_of(item).items()}
        if folder in places:
            raise ConfigurationError(
                f"the ensemble cannot be saved to {str(folder)!r}: member {member.name!r} lies there, and its "
                "configuration would be overwritten. Choose another folder."
            )
    if include_members:
        plan = _plan_bundle(parts)
    else:
        items = [with_paths(item, lambda path: saved_path(path, folder)) for item in parts.config.members]
        plan = SavePlan(parts, _checked_config(parts, items))
    _check_folder(folder, plan)
    return plan


def _check_folder(folder: Path, plan: SavePlan) -> None:
    """Refuse to write over what is no saved ensemble."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    if isinstance(config, dict) and config.get("model_type") == EnsembleConfig.model_type:
        return
    there = ["config.json"] if isinstance(config, dict) else []
    there += [place for place in plan.bundled if (folder / place).exists()]
    if there:
        raise ConfigurationError(
            f"the ensemble cannot be saved to {str(folder)!r}: {there[0]!r} lies there, is part of no saved ensemble, and "
            "would be overwritten. Choose another folder."
        )


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
        for key, path in paths_of(item).items():
            if is_local(path):
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
        bundled_item = MemberConfig(path=f"./{places[key]}", adapter=adapter)
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
    # Members may have been cast since they were loaded.
    dtypes = [str(member.model.dtype).removeprefix("torch.") for member in parts.members]
    config.members = [dataclasses.replace(item, dtype=dtype) for item, dtype in zip(items, dtypes, strict=True)]
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
