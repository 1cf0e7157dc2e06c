"""Files that are read or written completely, or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigurationError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, which gets the file's name once it is complete; if interrupted, the old file stays.

    Raises:
        ConfigurationError: If the name is empty or names a folder.
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
        endings: The allowed endings.

    Raises:
        ConfigurationError: If it is not one of these, or the folder does not exist.
    """
    if path.suffix not in endings:
        raise ConfigurationError(f"the file name has to end in {', '.join(endings)}, but is {path.name!r}.")
    check_place(path)
    return path.suffix


def check_place(path: Path) -> None:
    """Check that a file can be written, before the work for it starts.

    Raises:
        ConfigurationError: If it is a folder, or its folder does not exist.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} cannot be written: it is a folder.")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: the folder does not exist.")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error


def read_json_lines(path: str | os.PathLike[str]) -> list[Any]:
    """Return the values of a file with one JSON value per line; empty lines are ignored.

    Raises:
        ConfigurationError: If it cannot be read; names the line that is not JSON.
    """
    values = []
    # Not `splitlines`, which also splits at characters that may occur inside JSON texts.
    for n, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ConfigurationError(f"line {n} of {path} is not JSON: {error}.") from error
    return values
