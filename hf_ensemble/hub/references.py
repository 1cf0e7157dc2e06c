"""References to members: paths and Hub ids as users give them, as they are saved, and as they are found again."""

import dataclasses
import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import cached_file  # type: ignore[attr-defined]

from ..config import MemberConfig, is_local, paths_of
from ..errors import ConfigurationError
from .in_place import BUNDLE
from .member_files import check_folder, check_inside, check_link

HUB_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
"""Options of `from_pretrained` for access to the Hub."""


@dataclass(frozen=True)
class Place:
    """A folder: on this machine, or in a repository of the Hub.

    Attributes:
        path: Path or Hub id.
        revision: Branch, tag or commit on the Hub.
        subfolder: Folder within.
    """

    path: str
    revision: str | None
    subfolder: str | None

    @classmethod
    def of_model(cls, item: MemberConfig) -> "Place":
        """Return the place of a member's model, at the commit that was read first."""
        return cls(str(item.path), item.commit or item.revision, item.subfolder)

    @classmethod
    def of_adapter(cls, item: MemberConfig) -> "Place":
        """Return the place of a member's adapter, at the commit that was read first."""
        return cls(str(item.adapter), item.adapter_commit or item.adapter_revision, item.adapter_subfolder)

    def file(self, name: str, hub: Mapping[str, Any]) -> str | None:
        """Return the local path of a file in it; None if it does not exist or cannot be loaded.

        Args:
            name: Of the file.
            hub: Options of Hub access.
        """
        options: dict[str, Any] = {**self.options, **hub}
        try:
            return cached_file(self.path, name, _raise_exceptions_for_missing_entries=False, **options)
        except (OSError, ValueError):
            return None

    def commit(self, name: str, hub: Mapping[str, Any]) -> str | None:
        """Return the commit that a file was just read from, by its place in the Hub's cache; None if unknown.

        Args:
            name: Of the file.
            hub: Options of Hub access.
        """
        pinned: str | None = getattr(self.revision, "resolved", None)
        file = posixpath.join(self.subfolder or "", name)
        try:
            found = try_to_load_from_cache(self.path, file, cache_dir=hub.get("cache_dir"), revision=self.revision)
        except ValueError:
            # Not a Hub id.
            return pinned
        return pinned or (Path(found).parents[file.count("/")].name if isinstance(found, str) else None)

    @property
    def options(self) -> dict[str, str]:
        """`revision` and `subfolder`, if given."""
        given = {"revision": self.revision, "subfolder": self.subfolder}
        return {key: value for key, value in given.items() if value is not None}


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that say how the Hub is reached."""
    return {key: options[key] for key in HUB_OPTIONS if key in options}


def name_of(item: MemberConfig) -> str:
    """Return a member's name in errors before it is loaded."""
    return item.name or item.path or str(item.model)


def check_token(token: Any) -> None:
    """Refuse a token that cannot be sent, because the client's error would show it.

    Raises:
        ConfigurationError: If it is empty or contains white space.
    """
    if isinstance(token, str) and token.split() != [token]:
        raise ConfigurationError("`token` is empty or contains white space, so it cannot be a Hub token.")


def check_place(name: str, place: Place, hub: Mapping[str, Any]) -> None:
    """Refuse a path that cannot hold a model at once; possible Hub ids are left to the Hub.

    Args:
        name: Of the member, for the error.
        place: The given place of the model or adapter.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: Naming the path and the remedy.
    """
    path = place.path
    if os.path.isdir(path):
        return
    what = f"member {name!r} cannot be loaded"
    if path.lower().endswith(".gguf"):
        folder, file = os.path.split(path)
        raise ConfigurationError(
            f"{what}: {path!r} is a file. Name it as `MemberConfig(path={folder or '.'!r}, gguf_file={file!r})`."
        )
    if os.path.isfile(path):
        raise ConfigurationError(f"{what}: {path!r} is a file. Name the folder that contains it.")
    if os.path.isabs(path) or path.startswith("."):
        raise ConfigurationError(f"{what}: there is no folder {path!r}.")
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise ConfigurationError(f"{what}: there is no folder {path!r}, and it is not a Hub id: {error}") from error
    if "/" not in path or os.path.isdir(path.split("/")[0]):
        _check_reachable(place, what, hub)


def _check_reachable(place: Place, what: str, hub: Mapping[str, Any]) -> None:
    """Ask the Hub once for an id that looks like a folder, because the client would retry many times."""
    file = "config.json"
    if place.commit(file, hub) or constants.HF_HUB_OFFLINE or hub.get("local_files_only"):
        return
    try:
        get_hf_file_metadata(hf_hub_url(place.path, file, **place.options), token=hub.get("token"))
    except HfHubHTTPError:
        # The Hub's answer is reported when the member's files are requested.
        return
    except Exception as error:  # of the HTTP library, which differs between versions of the client
        raise ConfigurationError(
            f"{what}: there is no folder {place.path!r}, and the Hub cannot be reached: {error}"
        ) from error


def with_paths(item: MemberConfig, change: Callable[[str], str]) -> MemberConfig:
    """A member with other paths.

    Args:
        item: The member, which is not changed.
        change: Returns the new path, or Hub id, of each.
    """
    # An id loaded from the Hub is not a path, even if a folder with its name exists by now.
    commits = {"path": item.commit, "adapter": item.adapter_commit}
    changed: dict[str, Any] = {key: path if commits.get(key) else change(path) for key, path in paths_of(item).items()}
    return dataclasses.replace(item, **changed)


def whole_path(path: str) -> str:
    """Return an absolute path; a Hub id stays unchanged."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def saved_path(path: str, folder: Path) -> str:
    """Return a path relative to the folder of its configuration.

    So things that are moved together still load, and the path does not reveal a home folder. It stays absolute only if
    the two share nothing but the root of the disk.

    Args:
        path: Path or Hub id.
        folder: The folder, all links resolved.
    """
    if not os.path.exists(path):
        return path
    given = Path(os.path.abspath(path))
    # A link belongs to its folder, wherever it points.
    whole = given.parent.resolve() / given.name
    if whole.anchor != folder.anchor or os.path.commonpath([whole, folder]) == whole.anchor:
        return str(whole)
    relative = Path(os.path.relpath(whole, folder)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def found_members(
    items: list[MemberConfig], source: str, located: Mapping[str, Any], hub: Mapping[str, Any]
) -> list[MemberConfig]:
    """Return the members of a saved ensemble with references that work from anywhere.

    Paths relative to its folder become absolute. Paths within its repository become that repository, the commit of its
    configuration, and a subfolder.

    Args:
        items: The members as saved.
        source: Folder or Hub id of the ensemble.
        located: `revision` and `subfolder` of the ensemble.
        hub: Options of Hub access.

    Raises:
        ConfigurationError: If a path leads out of the repository, or above the root of the disk.
    """
    base = located.get("subfolder") or ""
    if os.path.isdir(source):
        root = Path(source, base).resolve()
        for item in items:
            _check_within(item, source, root)
        return [with_paths(item, lambda path: _from_folder(path, root)) for item in items]
    place = Place(source, located.get("revision"), base)
    revision = place.commit("config.json", hub) or place.revision
    return [_from_repository(item, source, base, revision) for item in items]


def found_path(path: str, source: str, located: Mapping[str, Any]) -> str:
    """Return the path of a model that the method of a saved ensemble names.

    Args:
        path: Its path or Hub id, as saved.
        source: Folder or Hub id of the ensemble.
        located: `revision` and `subfolder` of the ensemble.

    Raises:
        ConfigurationError: If it is a path in a repository, or leads above the root of the disk.
    """
    if os.path.isdir(source):
        return _from_folder(path, Path(source, located.get("subfolder") or "").resolve())
    if is_local(path):
        raise ConfigurationError(
            f"the method of the ensemble {source!r} uses the model {path!r}, a folder, but an ensemble from the Hub "
            "may only name Hub ids. Pass another `method`."
        )
    return path


def _check_within(item: MemberConfig, source: str, root: Path) -> None:
    """Refuse what leads out of a folder that it is said to lie in: of references only those that are meant to."""
    named = {key: getattr(item, key) for key in ("subfolder", "adapter_subfolder", "gguf_file")}
    named["tokenizer's subfolder"] = (item.tokenizer_kwargs or {}).get("subfolder")
    for key, path in named.items():
        check_inside(f"the ensemble {source!r} names the {key} of a member as", path)
    for key, path in paths_of(item).items():
        if Path(os.path.normpath(path)).parts[:1] == (BUNDLE,):
            check_link(f"the ensemble {source!r} names, as the {key} of a member,", root / path, root)
            check_folder(f"the ensemble {source!r}", root / path, within=root)


def _from_folder(path: str, root: Path) -> str:
    if not (path.startswith(".") or os.path.isdir(root / path)):
        return path
    if os.path.normpath(path).split(os.sep).count("..") >= len(root.parts):
        raise ConfigurationError(f"the ensemble in {str(root)!r} names a folder above the root of the disk: {path!r}.")
    return os.path.normpath(root / path)


def _from_repository(item: MemberConfig, source: str, base: str, revision: str | None) -> MemberConfig:
    """The member with its parts in the ensemble's repository located there, and no path of this machine."""

    def inside(*parts: str | None) -> str:
        place = posixpath.normpath(posixpath.join(*(part or "" for part in parts)))
        if place.startswith(("..", "/")) or "\\" in place:
            raise ConfigurationError(f"the ensemble {source!r} names a member outside its repository: {place!r}.")
        return place

    changes: dict[str, Any] = {}
    for key, prefix in (("path", ""), ("adapter", "adapter_")):
        path, subfolder = getattr(item, key) or "", getattr(item, f"{prefix}subfolder")
        if path.startswith("."):
            place = inside(base, path, subfolder)
            changes |= {key: source, f"{prefix}revision": revision, f"{prefix}subfolder": place}
        else:
            inside(path), inside(subfolder)
    if (item.tokenizer or "").startswith("."):
        raise ConfigurationError(
            f"the ensemble {source!r} names a tokenizer by the path {item.tokenizer!r}, which cannot be found in a "
            "repository. Save the ensemble with `include_members=True` before it is uploaded."
        )
    inside(item.tokenizer)
    inside(item.gguf_file)
    inside((item.tokenizer_kwargs or {}).get("subfolder"))
    if "path" in changes:
        changes["name"] = item.name or posixpath.basename(str(changes["subfolder"]))
    return dataclasses.replace(item, **changes)
