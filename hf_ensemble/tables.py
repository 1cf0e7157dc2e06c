"""Results as text: aligned rows, and methods as the command line takes them."""

import dataclasses
from collections.abc import Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of cells, the header first, as lines whose columns stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def spelled(method: Any) -> str:
    """A method as the command line takes it: its name, and the options that are not the defaults.

    Args:
        method: Its configuration.
    """
    plain, told = type(method)(), []
    for option in dataclasses.fields(method):
        value = getattr(method, option.name)
        if value != getattr(plain, option.name):
            told.append(f"{option.name}={str(value).lower() if value is None or isinstance(value, bool) else value}")
    return f"{method.name}:{','.join(told)}" if told else method.name
