"""Saving an ensemble to a folder, and uploading it to the Hub, with references to its members or with the members."""

import copy
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from huggingface_hub.repocard import metadata_load
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..config import EnsembleConfig, MemberConfig, normalize_weights
from ..errors import ConfigurationError
from ..members.member import Member
from .model_card import CardMember, model_card

BUNDLE = "members"
"""Folder of bundled members, within the ensemble's."""

_OF_ONE_MACHINE = ("token", "cache_dir", "local_files_only", "force_download", "proxies", "is_local", "name_or_path")
"""What tokenizers may write of how they were loaded."""

_MAY_BE_STALE = ("chat_template.jinja",)
"""Files that change what is loaded if an older save leaves them behind."""


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
        _require_path(item, member)
        path = _from_folder(item.path, folder)
        if path == "./.":
            raise ConfigurationError(
                f"the ensemble cannot be saved to {str(folder)!r}: member {member.name!r} lies there, and its "
                "configuration would be overwritten. Choose another folder."
            )
        items.append(dataclasses.replace(item, path=path, tokenizer=_from_folder(item.tokenizer, folder)))
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
        path = _require_path(item, member)
        for what, place in (("member", path), ("the tokenizer of member", item.tokenizer)):
            if place is not None and is_local(place):
                raise ConfigurationError(
                    f"{what} {member.name!r} lies in a folder of this machine, so others could not load what is pushed. "
                    "Pass `include_members=True`, or load the member by its Hub id."
                )
        items.append(dataclasses.replace(item, revision=item.commit or _commit_on_hub(item, member, api)))
    return SavePlan(parts, _checked_config(parts, items))


def write_ensemble(plan: SavePlan, folder: Path, max_shard_size: int | str, card: str) -> None:
    """Write what was planned: first all of it beside its place, then into place, the configuration last.

    A save that fails leaves what was in the folder as it was. Files of other names stay, and so does a README.

    Args:
        plan: What to write.
        folder: Where to.
        max_shard_size: Most bytes of a file of a bundled member, or a size like `"5GB"`.
        card: Text of the README.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            new, old = Path(temporary, "new"), Path(temporary, "old")
            _write(plan, new, max_shard_size, card)
            _move(new, old, folder)
    except BaseException:
        if is_new:
            shutil.rmtree(folder)
        raise


def push_ensemble(
    plan: SavePlan,
    api: HfApi,
    repo_id: str,
    *,
    max_shard_size: int | str,
    commit_message: str | None,
    commit_description: str | None,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    tags: Sequence[str],
) -> CommitInfo:
    """Upload what was planned, in one commit. A README that is there stays, with `tags` added.

    Args:
        plan: What to upload.
        api: The Hub, with the token.
        repo_id: Repository, made if there is none.
        max_shard_size: Most bytes of a file of a bundled member, or a size like `"5GB"`.
        commit_message: First line of the commit.
        commit_description: Its description.
        private: Whether a new repository is private.
        revision: Branch, made if there is none. Default: the main one.
        create_pr: Whether the commit is proposed as a pull request.
        tags: Tags for the README's metadata.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write(plan, folder, max_shard_size, card=None)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            _make_branch(api, repo_id, revision, create_pr)
        readme = _remote_card(api, repo_id, revision, tags)
        if readme is None:
            title = repo_id.rsplit("/", 1)[-1]
            readme = model_card(title, repo_id, plan.config, _card_members(plan, api), tags)
        (folder / "README.md").write_text(readme, "utf-8")
        files = sorted(str(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file())
        prefixes = tuple(f"{place}/" for place in plan.bundled)
        stale = [
            file
            for file in api.list_repo_files(repo_id, revision=revision)
            if file not in files and (file in _MAY_BE_STALE or (prefixes and file.startswith(prefixes)))
        ]
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(path_in_repo=file) for file in stale),
                *(CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(folder / file)) for file in files),
            ],
            commit_message=commit_message or "Upload ensemble",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def local_card(plan: SavePlan, folder: Path, tags: Sequence[str]) -> str:
    """The README of an ensemble that is saved to a folder; nothing is asked of the Hub."""
    return model_card(folder.name, folder.name, plan.config, _card_members(plan, None), tags)


def is_local(path: str) -> bool:
    """Whether a member's path is a folder of this machine, not a Hub id."""
    return os.path.isabs(path) or path.startswith((".", "~")) or os.path.exists(path)


# Planning


def _require_path(item: MemberConfig, member: Member) -> str:
    if not item.path:
        raise ConfigurationError(
            f"member {member.name!r} was given as an object without an id or path, so there is nothing to save a "
            "reference to. Pass `include_members=True`, or save it by itself first and load the ensemble from there."
        )
    return item.path


def _from_folder(path: str | None, folder: Path) -> str | None:
    """How a path is written in a configuration that lies in a folder: relative to it where it lies inside."""
    if path is None or not Path(path).exists():
        return path
    whole = Path(path).resolve()
    return f"./{whole.relative_to(folder).as_posix()}" if whole.is_relative_to(folder) else str(whole)


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
        own = {"dtype": str(member.model.dtype).removeprefix("torch."), "path": f"./{places[key]}"}
        nothing: dict[str, Any] = dict.fromkeys(("revision", "subfolder", "gguf_file", "tokenizer", "commit"))
        items.append(dataclasses.replace(item, **own, **nothing))
    return SavePlan(parts, _checked_config(parts, items), bundled)


def _check_writable(member: Member) -> None:
    model: Any = member.model
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not _is_from_gguf(model) and not quantizer.is_serializable():
        raise ConfigurationError(
            f"member {member.name!r} cannot be included: it is quantised in a way that cannot be written. Name it by its "
            "Hub id or path instead."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigurationError(
            f"member {member.name!r} cannot be included: it carries adapters, which are written apart from the model. "
            "Merge them into it first."
        )
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


def _commit_on_hub(item: MemberConfig, member: Member, api: HfApi) -> str | None:
    try:
        return api.model_info(str(item.path), revision=item.revision).sha
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigurationError(
            f"member {member.name!r} cannot be pinned: the Hub does not give a commit of {item.path!r}: {error} Check "
            "the id, `MemberConfig.revision` and `token`, or pass `include_members=True`."
        ) from error


# Writing


def _write(plan: SavePlan, folder: Path, max_shard_size: int | str, card: str | None) -> None:
    parts = plan.parts
    folder.mkdir(exist_ok=True)
    for place, member in plan.bundled.items():
        _write_member(member, folder / place, max_shard_size)
    parts.generation_config.save_pretrained(folder)
    _write_tokenizer(parts.tokenizer, folder)
    if card is not None:
        (folder / "README.md").write_text(card, "utf-8")
    plan.config.save_pretrained(folder)


def _write_member(member: Member, folder: Path, max_shard_size: int | str) -> None:
    model = _without_gguf(member.model)
    with _as_before(model.config):
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    _write_tokenizer(member.tokenizer, folder)


def _write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    values = json.loads(file.read_text("utf-8"))
    kept = {key: value for key, value in values.items() if key not in _OF_ONE_MACHINE}
    file.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _move(new: Path, old: Path, folder: Path) -> None:
    """Put files and bundled members where they belong, and what they replace into `old`."""
    old.mkdir()
    members = [path.relative_to(new) for path in sorted((new / BUNDLE).glob("*"))]
    files = [path.relative_to(new) for path in sorted(new.iterdir()) if path.is_file()]
    if (folder / "README.md").exists():
        files = [file for file in files if file.name != "README.md"]
    for file in _MAY_BE_STALE:
        if (folder / file).is_file() and not (new / file).exists():
            (folder / file).replace(old / file)
    if members:
        (folder / BUNDLE).mkdir(exist_ok=True)
        (old / BUNDLE).mkdir()
    for path in [*members, *sorted(files, key=lambda file: file.name == "config.json")]:
        if (folder / path).is_dir():
            (folder / path).replace(old / path)
        (new / path).replace(folder / path)


@contextmanager
def _as_before(config: Any) -> Iterator[None]:
    """Undo what saving a model writes into its configuration."""
    before = config.architectures, config.dtype
    try:
        yield
    finally:
        config.architectures, config.dtype = before


def _is_from_gguf(model: Any) -> bool:
    found = getattr(model.config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return getattr(method, "value", method) == "gguf"


def _without_gguf(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or one with the same weights that does not claim to be quantised: those of a GGUF file are unpacked."""
    if not _is_from_gguf(model):
        return model
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    return plain


# The Hub


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


def _card_members(plan: SavePlan, api: HfApi | None) -> list[CardMember]:
    found = []
    for item, given, member in zip(plan.config.members, plan.parts.config.members, plan.parts.members, strict=True):
        hub_id = given.path if given.path and not is_local(given.path) else None
        revision = given.commit or given.revision if plan.bundled else item.revision
        found.append(
            CardMember(
                name=member.name,
                hub_id=hub_id,
                revision=revision,
                license=_license(given.path, revision, api),
                num_parameters=member.model.num_parameters(),
                is_bundled=bool(plan.bundled),
            )
        )
    return found


def _license(path: str | None, revision: str | None, api: HfApi | None) -> str | None:
    """A member's licence, by the metadata of its README; None if that cannot be told."""
    if path is None:
        return None
    try:
        if is_local(path):
            metadata: Any = metadata_load(Path(path, "README.md")) or {}
        elif api is not None:
            metadata = api.model_info(path, revision=revision).card_data or {}
        else:
            return None
    except (OSError, ValueError):
        return None
    license = metadata.get("license")
    if license == "other":
        license = metadata.get("license_name")
    return license if isinstance(license, str) else None
