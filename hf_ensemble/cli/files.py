"""Files that are read or written whole, or not at all."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import ConfigurationError


@contextlib.contextmanager
def output(path: str | None) -> Iterator[TextIO]:
    """A stream to write to: stdout, or a file that takes its name only when everything is written."""
    if path is None:
        yield sys.stdout
        return
    # A link stays a link.
    target = Path(path).resolve()
    if not path or target.is_dir():
        raise ConfigurationError(f"{path!r} is no name of a file to write to.")
    if target.exists() and not target.is_file():
        # A device or a pipe cannot be replaced.
        with target.open("w", encoding="utf-8") as file:
            yield file
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def json_line(value: Any) -> str:
    """A value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False)


def read_json_lines(path: str) -> list[Any]:
    """The values of a file with one JSON value a line.

    Raises:
        ConfigurationError: Naming the line that is none.
    """
    values = []
    # JSON may hold the other characters at which `splitlines` splits.
    for number, line in enumerate(Path(path).read_text("utf-8").split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigurationError(f"line {number} of {path!r} is no JSON value: {error}.") from error
    return values
