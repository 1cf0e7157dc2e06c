"""Saves an ensemble to a folder or uploads it to the Hub, with references to its members or with the members."""

import inspect
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from ..errors import ConfigurationError
from .in_place import MAY_BE_STALE, write_in_place
from .model_card import model_card
from .planning import SavePlan, plan_push, plan_save
from .references import check_token
from .writing import write_files


class Saving:
    """Mix-in that writes an ensemble to a folder and uploads it to the Hub."""

    model_tags: list[str] | None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        *,
        include_members: bool = False,
        safe_serialization: bool = True,
        **push_options: Any,
    ) -> None:
        """Save the ensemble's configuration, generation configuration, the primary's tokenizer and a README.

        Members are saved as references (Hub ids, or paths relative to the folder) or, with `include_members`, in their
        current state. A save that fails leaves an older ensemble in the folder unchanged.

        Args:
            save_directory: Folder to write to.
            is_main_process: Whether this process writes.
            state_dict: Refused: members have their own weights.
            push_to_hub: Whether to upload the ensemble too.
            max_shard_size: Largest size of a file of an included member, in bytes or as `"5GB"`.
            include_members: Whether to write every distinct member too, with its tokenizer, into a folder in
                `members/`.
            safe_serialization: Weights are always safetensors; False is refused.
            **push_options: Options of `push_to_hub`, including `repo_id` (default: the folder's name).

        Raises:
            ConfigurationError: If a member without an id or path is not included, cannot be written or would be
                overwritten; if a generation configuration cannot be saved; or if an option is unknown. Nothing is
                written in these cases.
        """
        if state_dict is not None or not safe_serialization:
            raise ConfigurationError(
                "an ensemble takes neither `state_dict` nor `safe_serialization=False`: with `include_members=True` its "
                "members are written with their own weights, as safetensors."
            )
        if not is_main_process:
            return
        # Stock wrappers pass on a token of None.
        given = {key: value for key, value in push_options.items() if key != "token" or value is not None}
        known = set(inspect.signature(self.push_to_hub).parameters)
        if given and not (push_to_hub and known.issuperset(given)):
            raise ConfigurationError(
                f"`save_pretrained` of an ensemble has no option {min(set(given) - known)!r}."
                if push_to_hub
                else f"options {sorted(given)} have no effect without `push_to_hub=True`."
            )
        folder = Path(save_directory).resolve()
        if folder.is_file():
            raise ConfigurationError(f"{str(folder)!r} is a file; an ensemble is saved to a folder.")
        repo_id = given.pop("repo_id", folder.name)
        plan = plan_save(self, include_members, folder)
        if push_to_hub:
            # An ensemble that cannot be uploaded is not written either.
            api = _connect(given.pop("token", None))
            pushed = plan_push(self, include_members, api)
        card = model_card(plan, folder.name, self.model_tags or (), api=None)
        write_in_place(folder, lambda new: write_files(plan, new, max_shard_size, card))
        if push_to_hub:
            _upload(pushed, api, repo_id, max_shard_size, **given)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        include_members: bool = False,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: str | Sequence[str] | None = None,
    ) -> CommitInfo:
        """Upload the ensemble to the Hub in one commit, with the files of `save_pretrained` and a README.

        Members are named by their Hub ids and the loaded commits, or uploaded too. Nothing that belongs to this
        machine is uploaded. An existing README in the repository stays.

        Args:
            repo_id: Repository; created if it does not exist.
            include_members: Whether to upload the members too. Needed for members that are not Hub ids.
            commit_message: First line of the commit.
            commit_description: Description of the commit.
            private: Whether a new repository is private.
            token: Token of the Hub. Default: that of `hf auth login`.
            revision: Branch to upload to; created if it does not exist.
            create_pr: Whether to propose the commit as a pull request.
            max_shard_size: Largest size of a file of an included member, in bytes or as `"5GB"`.
            tags: More tags for the README.

        Returns:
            The commit.

        Raises:
            ConfigurationError: If a member is on this machine and not included, or its commit cannot be found, before
                anything is uploaded. Otherwise as in `save_pretrained`.
            huggingface_hub.errors.HfHubHTTPError: If the Hub refuses.
        """
        api = _connect(token)
        return _upload(
            plan_push(self, include_members, api),
            api,
            repo_id,
            max_shard_size,
            commit_message=commit_message,
            commit_description=commit_description,
            private=private,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )


def _upload(
    plan: SavePlan,
    api: HfApi,
    repo_id: str,
    max_shard_size: int | str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: str | Sequence[str] | None = None,
) -> CommitInfo:
    """Upload a plan in one commit; see `Saving.push_to_hub`."""
    all_tags = [*(plan.ensemble.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(plan, folder, max_shard_size, card=None)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            try:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            except HfHubHTTPError as error:
                # Users who may not create branches can still propose a commit to an existing one.
                if not (create_pr and error.response.status_code == 403):
                    raise
        readme = _remote_card(api, repo_id, revision, all_tags) or model_card(plan, repo_id, all_tags, api)
        (folder / "README.md").write_text(readme, "utf-8")
        files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        bundled = tuple(f"{place}/" for place in plan.bundled)
        there = set(api.list_repo_files(repo_id, revision=revision)).difference(files)
        stale = sorted(file for file in there if file in MAY_BE_STALE or file.startswith(bundled))
        deleted = [CommitOperationDelete(path_in_repo=file) for file in stale]
        added = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=str(folder / file)) for file in files]
        return api.create_commit(
            repo_id,
            [*deleted, *added],
            commit_message=commit_message or "Upload ensemble",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _connect(token: bool | str | None) -> HfApi:
    check_token(token)
    return HfApi(token=token, library_name="hf_ensemble")


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
