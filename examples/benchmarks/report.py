"""Output of the benchmarks: the machine and versions, and Markdown tables, line by line."""

import platform
import statistics
from collections.abc import Sequence

import torch
import transformers

import hf_ensemble


def setting(device: torch.device | str, *details: object) -> str:
    """Say on what machine and with which versions a benchmark runs.

    Args:
        device: Where the members are.
        details: What else has to be known of the run.
    """
    is_cuda = torch.device(device).type == "cuda"
    where = torch.cuda.get_device_name() if is_cuda else f"{torch.get_num_threads()} threads, {platform.machine()}"
    versions = (
        f"hf_ensemble {hf_ensemble.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    return ", ".join([where, versions, *map(str, details)])


def print_heads(*heads: str) -> None:
    """Begin a table, after an empty line."""
    print()
    print_row(*heads)
    print("|" + "---|" * len(heads), flush=True)


def print_row(*cells: object) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def quartiles(values: Sequence[float], digits: int) -> str:
    """The median, and the quartiles in brackets; a single value as it is.

    Args:
        values: At least one number.
        digits: Digits after the point.
    """
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def milliseconds(seconds: Sequence[float], digits: int = 1) -> str:
    """Seconds as milliseconds: the median and the quartiles.

    Args:
        seconds: At least one number.
        digits: Digits after the point.
    """
    return quartiles([1e3 * value for value in seconds], digits)


def medians(rows: Sequence[Sequence[float]], digits: int = 1) -> str:
    """The median of each column, in milliseconds, joined by plus signs.

    Args:
        rows: Seconds, of shape `(num_steps, num_members)`.
        digits: Digits after the point.
    """
    return " + ".join(f"{1e3 * statistics.median(values):.{digits}f}" for values in zip(*rows, strict=True))
