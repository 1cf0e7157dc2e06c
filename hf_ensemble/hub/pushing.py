"""Uploading an ensemble to the Hub."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from .in_place import MAY_BE_STALE
from .model_card import model_card
from .planning import SavePlan
from .references import check_token
from .writing import write_files


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
