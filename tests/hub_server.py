"""A small Hub on the loopback interface, that answers the calls the real client makes: nothing leaves the machine.

It knows users by their tokens, public, private and gated repositories, branches, commits, pull requests, LFS, and the
errors that the Hub gives. Large files (`.safetensors`) go through LFS and are served from another host, as on the Hub.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.loopback import listening


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


class HubError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str | None = None, message: str = ""):
        self.status, self.code, self.message = status, code, message


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        parts = [str(len(self.commits)), *(f"{path}{hashlib.sha1(data).hexdigest()}" for path, data in files.items())]
        sha = hashlib.sha1("".join(parts).encode()).hexdigest()
        self.commits[sha], self.messages[sha], self.branches[branch] = dict(files), message, sha
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(revision)]


class HubServer:
    """The Hub's state. `requests` holds the method, path and token of every request, in order."""

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.endpoint = ""
        self.storage = ""

    def add(self, repo_id: str, folder: Path | None = None, **options: Any) -> Repository:
        """Make a repository of what lies in a folder."""
        repository = Repository(**options)
        repository.commit(read(folder) if folder else {".gitattributes": b""})
        self.repositories[repo_id] = repository
        return repository


def read(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@contextmanager
def hub(users: dict[str, str]) -> Iterator[HubServer]:
    """A running Hub, for users given as token and name."""
    server = HubServer(users)
    with listening(functools.partial(_Handler, server)) as port:
        server.endpoint = f"http://127.0.0.1:{port}"
        # Another name of this machine: the client sends no token to other hosts.
        server.storage = f"http://localhost:{port}"
        yield server


def connect(monkeypatch: Any, server: HubServer, cache: Path) -> None:
    """Point the installed client at the server, with an empty cache and no token of this machine."""
    from huggingface_hub import close_session, constants
    from transformers.utils import hub as transformers_hub

    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    close_session()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or head and body of an answer wait for one another

    def __init__(self, server: HubServer, *args: Any):
        self.hub = server
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.user = self.hub.users.get(token or "")
        self.hub.requests.append((self.command, url.path, token))
        try:
            if token is not None and self.user is None:
                raise HubError(401, None, "Invalid credentials in Authorization header")
            self._route([unquote(part) for part in url.path.strip("/").split("/")])
        except HubError as error:
            headers = {"X-Error-Message": error.message}
            if error.code is not None:
                headers["X-Error-Code"] = error.code
            commit = getattr(error, "commit", None)
            if commit is not None:
                headers["X-Repo-Commit"] = commit
            self._send(error.status, {"error": error.message}, headers)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self, parts: list[str]) -> None:
        match parts:
            case ["api", "whoami-v2"]:
                self._require_user()
                self._send(200, {"name": self.user, "type": "user", "orgs": []})
            case ["api", "repos", "create"]:
                self._create()
            case ["api", "validate-yaml"]:
                self._validate_yaml()
            case ["api", "models", owner, name, *rest]:
                self._model(f"{owner}/{name}", rest)
            case [owner, name, "info", "lfs", "objects", "batch"]:
                self._repository(f"{owner}/{name.removesuffix('.git')}", writes=True)
                self._offer_uploads()
            case ["lfs", oid]:
                self._object(oid)
            case [owner, name, "resolve", revision, *path]:
                self._resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                raise HubError(404, None, f"no such page: {self.path}")

    def _require_user(self) -> None:
        if self.user is None:
            raise HubError(401, None, "Invalid username or password.")

    def _repository(self, repo_id: str, writes: bool = False) -> Repository:
        repository = self.hub.repositories.get(repo_id)
        is_owner = self.user is not None and self.user == repo_id.split("/")[0]
        if repository is None or (repository.private and not is_owner):
            # The Hub does not tell strangers what there is.
            raise HubError(401 if self.user is None else 404, "RepoNotFound", "Repository not found")
        if writes:
            self._require_user()
            if not is_owner and not self.query.get("create_pr"):
                raise HubError(403, None, "Forbidden: you must have write access to this repository")
        return repository

    def _create(self) -> None:
        self._require_user()
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        if owner != self.user:
            raise HubError(403, None, f"You don't have the rights to create a model under the namespace {owner!r}")
        repo_id = f"{owner}/{asked['name']}"
        status = 409 if repo_id in self.hub.repositories else 200
        if status == 200:
            self.hub.add(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        self._send(status, {"url": f"{self.hub.endpoint}/{repo_id}", "id": repo_id})

    def _validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        metadata = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else None
        if not isinstance(metadata, dict):
            self._send(200, {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
        else:
            self._send(200, {"errors": [], "warnings": []})

    def _model(self, repo_id: str, rest: list[str]) -> None:
        match rest:
            case [] | ["revision", _]:
                self._info(repo_id, rest[1] if rest else "main")
            case ["tree", revision, *_]:
                files = self._repository(repo_id).files(revision)
                self._send(200, [_entry(path, data) for path, data in files.items()])
            case ["branch", branch]:
                repository = self._repository(repo_id, writes=True)
                if branch in repository.branches:
                    raise HubError(409, None, "Reference already exists")
                repository.branches[branch] = repository.branches["main"]
                self._send(200, {})
            case ["preupload", revision]:
                repository = self._repository(repo_id, writes=True)
                files = repository.files(revision)
                paths = [file["path"] for file in json.loads(self.body)["files"]]
                answer = [
                    {
                        "path": path,
                        "uploadMode": "lfs" if is_large(path) else "regular",
                        "shouldIgnore": False,
                        "oid": _entry(path, files[path])["oid"] if path in files else None,
                    }
                    for path in paths
                ]
                self._send(200, {"files": answer})
            case ["commit", revision]:
                self._commit(repo_id, revision)
            case _:
                raise HubError(404, None, f"no such call: {rest}")

    def _info(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id)
        sha = repository.resolve(revision)
        files = repository.commits[sha]
        readme = files.get("README.md", b"").decode()
        card = yaml.safe_load(readme.split("---")[1]) if readme.startswith("---") else None
        answer = {
            "id": repo_id,
            "sha": sha,
            "private": repository.private,
            "gated": "auto" if repository.gated else False,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
            "pipeline_tag": (card or {}).get("pipeline_tag"),
            "cardData": card,
        }
        self._send(200, answer)

    def _offer_uploads(self) -> None:
        asked = json.loads(self.body)["objects"]
        offered = []
        for one in asked:
            action = {"upload": {"href": f"{self.hub.storage}/lfs/{one['oid']}", "header": {}}}
            is_known = one["oid"] in self.hub.objects
            offered.append({**one, "authenticated": True, **({} if is_known else {"actions": action})})
        self._send(200, {"transfer": "basic", "objects": offered})

    def _object(self, oid: str) -> None:
        if self.command == "PUT":
            assert hashlib.sha256(self.body).hexdigest() == oid
            self.hub.objects[oid] = self.body
            self._send(200, {})
        else:
            self._send_file(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206, data[start:], headers)
        else:
            self._send(200, data, headers)

    def _commit(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id, writes=True)
        files = dict(repository.files(revision))
        message = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        answer: dict[str, Any] = {}
        if self.query.get("create_pr"):
            number = sum(branch.startswith("refs/pr/") for branch in repository.branches) + 1
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/{number}"
        sha = repository.commit(files, revision, message)
        answer |= {"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}", "commitOid": sha}
        self._send(200, answer)

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self._repository(repo_id)
        if repository.gated and self.user is None:
            raise HubError(401, "GatedRepo", "Access to this model is restricted.")
        sha = repository.resolve(revision)
        files = repository.commits[sha]
        if path not in files:
            error = HubError(404, "EntryNotFound", "Entry not found")
            error.commit = sha  # type: ignore[attr-defined]
            raise error
        data = files[path]
        headers = {"X-Repo-Commit": sha}
        if is_large(path):
            oid = hashlib.sha256(data).hexdigest()
            self.hub.objects[oid] = data
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
            self._send(302, b"", {**headers, "Location": f"{self.hub.storage}/lfs/{oid}"})
        else:
            self._send_file(data, {**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
