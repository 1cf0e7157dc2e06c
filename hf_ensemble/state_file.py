"""Resumable work: finished parts, one JSON line each, in a file that identifies the work."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .config import MethodConfig
from .errors import ConfigurationError

_Part = TypeVar("_Part")


class StateFile:
    """A file of finished parts of one piece of work.

    A line is added in one go when a part is finished. If a killed process left an incomplete line, it is cut off on
    reading, so the file always holds complete parts.

    Args:
        path: The file; created with the first part.
        settings: What all parts depend on, as JSON values by name. Parts with other settings are refused.
        work: The name of the work in errors.

    Raises:
        ConfigurationError: If the file cannot be written, or settings cannot be written as JSON.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any], work: str = "search"):
        self.path = Path(path)
        self.work = work
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ConfigurationError(
                f"`state_file` {self.path} cannot be written: it is a folder, or its folder does not exist."
            )
        self.key = {}
        for name, part in settings.items():
            try:
                self.key[name] = hash_of(part)
            except TypeError as error:
                raise ConfigurationError(
                    f"the {name} of this {work} cannot be written as JSON, so a state file could not be told apart "
                    f"from that of another {work}: {error}. Leave out `state_file`, or use values that JSON supports."
                ) from error

    def read(self, parse: Callable[[dict[str, Any]], _Part]) -> list[_Part]:
        """Return the finished parts in the order in which they were added.

        Args:
            parse: Converts a line's JSON; raises ValueError, KeyError or TypeError if it is damaged.

        Raises:
            ConfigurationError: If the file belongs to something else, or has other settings.
        """
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        article = "an" if self.work[0] in "aeiou" else "a"
        foreign = f"`state_file` {self.path} is not a file of {article} {self.work}"
        parts: list[_Part] = []
        for n, line in enumerate(whole.splitlines(), start=1):
            try:
                part = json.loads(line)
                key = dict(part.pop(self.work))
                if key == self.key:
                    parts.append(parse(part))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"{foreign}: line {n} cannot be read ({error!r}). Name another file."
                ) from error
            if key != self.key:
                differing = [name for name in self.key if key.get(name) != self.key[name]]
                raise ConfigurationError(
                    f"`state_file` {self.path} belongs to another {self.work}, with other {', '.join(differing)}. "
                    "Name another file, or delete this one."
                )
        if len(whole) < len(data):
            if not whole and not data.startswith(b'{"%s":' % self.work.encode()):
                raise ConfigurationError(f"{foreign}. Name another file.")
            os.truncate(self.path, len(whole))
        return parts

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a finished part."""
        line = json.dumps({self.work: self.key, **part}) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def hash_of(value: Any) -> str:
    """Return a short hash of a JSON value.

    Raises:
        TypeError: If the value cannot be written as JSON.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def can_be_found_again(method: MethodConfig) -> bool:
    """Whether a method's options identify it completely, so that its results can be found again by them."""
    try:
        method.check_saveable(is_for_hub=False)
    except ConfigurationError:
        return False
    return True


def describe_method(method: MethodConfig) -> dict[str, Any]:
    """Return a method's name and options, and a value that changes with a judge's or fuser's folder."""
    files = {
        path: [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(Path(path).iterdir())]
        for path in method.models
        if os.path.isdir(path)
    }
    return {**method.to_dict(), "files": files} if files else method.to_dict()


def describe_generation_config(model: Any) -> dict[str, Any]:
    """Return the settings of a model's generation config, without the version that wrote them."""
    config = getattr(model, "generation_config", None)
    settings: dict[str, Any] = {} if config is None else config.to_dict()
    settings.pop("transformers_version", None)
    return settings
