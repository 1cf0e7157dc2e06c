"""Results as tables: aligned rows, `pandas` tables, and methods as the command line takes them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .optional_packages import not_installed


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, the header first, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def data_frame(asked: str, lines: Iterable[Sequence[Any]], columns: Sequence[str], types: Mapping[str, str]) -> Any:
    """Return a `pandas.DataFrame`.

    Args:
        asked: Name of the method that the user called.
        lines: Its rows, each with a value for every column.
        columns: Names of the columns.
        types: The types of columns that could be mistaken if values are missing.

    Raises:
        ConfigurationError: If pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise not_installed(f"`{asked}` makes a data frame", "pandas") from error
    return pandas.DataFrame(list(lines), columns=list(columns)).astype(dict(types))


def shown_size(num_bytes: int | None) -> str:
    """Return a size in memory, with its unit; None means unknown."""
    if num_bytes is None:
        return "not known"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def spelled(method: Any) -> str:
    """Return a method in the form of the command line: its name, and the options that differ from the defaults.

    Args:
        method: Its configuration.
    """
    told = []
    for option in dataclasses.fields(method):
        value = getattr(method, option.name)
        make = option.default_factory
        default = option.default if make is dataclasses.MISSING else make()
        if value != default:
            told.append(f"{option.name}={spelled_value(value)}")
    return f"{method.name}:{','.join(told)}" if told else method.name


def spelled_value(value: Any) -> str:
    """Return an option's value in the form of the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(spelled_value, value))
    if isinstance(value, Mapping):
        return "+".join(f"{name}={spelled_value(own)}" for name, own in value.items())
    if dataclasses.is_dataclass(value):
        kind, path = getattr(value, "kind", None), getattr(value, "path", None)
        return f"{kind}:{path}" if kind else spelled(value)
    return str(getattr(value, "__qualname__", getattr(value, "pattern", value)))
