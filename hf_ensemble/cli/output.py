"""Where results go."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ..files import whole_file


@contextlib.contextmanager
def output(path: str | None) -> Iterator[TextIO]:
    """A stream to write to: stdout, or a file that takes its name only when everything is written."""
    if path is None:
        yield sys.stdout
        return
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        yield file


def json_line(value: Any) -> str:
    """A value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False)
