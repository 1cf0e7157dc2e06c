"""Files that are read or written whole, or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigurationError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which takes the file's name when everything is written; whoever stops it leaves the old file.

    Raises:
        ConfigurationError: If the name is empty or that of a folder.
    """
    # A link stays a link.
    target = Path(path).resolve()
    if not os.fspath(path) or target.is_dir():
        raise ConfigurationError(f"{path!r} is not the name of a file that can be written.")
    if target.exists() and not target.is_file():
        # A device or a pipe cannot be replaced.
        yield target
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def check_ending(path: Path, endings: Sequence[str]) -> str:
    """Return the ending of a file to be written.

    Args:
        path: The file.
        endings: The endings that it may have.

    Raises:
        ConfigurationError: If it is none of these, or the folder does not exist.
    """
    if path.suffix not in endings:
        raise ConfigurationError(f"the file name has to end in {', '.join(endings)}, but is {path.name!r}.")
    check_place(path)
    return path.suffix


def check_place(path: Path) -> None:
    """Check that a file can be written there, before the work that gives what is to be written.

    Raises:
        ConfigurationError: If it is a folder, or lies in none that exists.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} cannot be written: it is a folder.")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: the folder does not exist.")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error


def read_json_lines(path: str | os.PathLike[str]) -> list[Any]:
    """The values of a file with one JSON value a line; empty lines count for nothing.

    Raises:
        ConfigurationError: If it cannot be read, naming the line if one is no JSON.
    """
    values = []
    # Not `splitlines`, which also splits at characters that JSON may hold within a text.
    for n, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ConfigurationError(f"line {n} of {path} is not JSON: {error}.") from error
    return values
