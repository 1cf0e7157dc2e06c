"""Results as a plot."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import check_ending, whole_file
from .marking import Result

PLOT_ENDINGS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Check that a plot can be written.

    Raises:
        ConfigurationError: If it cannot.
    """
    check_ending(path, PLOT_ENDINGS)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            'a plot needs `matplotlib`, which is not installed: `pip install "hf_ensemble[plot]"`.'
        ) from error


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw a panel for each measure of each set, with a line and an interval for each system.

    Args:
        results: What is drawn.
        path: File to write.

    Raises:
        ConfigurationError: If `matplotlib` is not installed, or the file has another ending than `PLOT_ENDINGS`.
    """
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((result.set_name, result.measure) for result in results))
    systems = list(dict.fromkeys(result.system for result in results))
    width = min(3, len(columns)) or 1
    height = -(-len(columns) // width) or 1
    with matplotlib.rc_context({"svg.hashsalt": "hf_ensemble", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(1.5 + 2.6 * width, height * (0.9 + 0.25 * len(systems))), layout="constrained")
        panels = figure.subplots(height, width, sharey=True, squeeze=False).flat
        if not columns:
            figure.suptitle("nothing to measure")
        for axes, (set_name, measure) in zip(panels, columns, strict=False):
            _draw_panel(axes, [r for r in results if (r.set_name, r.measure) == (set_name, measure)], systems)
        for axes in list(figure.axes)[len(columns) :]:
            axes.set_visible(False)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
        with whole_file(path) as unfinished:
            figure.savefig(unfinished, format=path.suffix[1:], metadata=metadata)


def _draw_panel(axes: Any, results: Sequence[Result], systems: Sequence[str]) -> None:
    measure = results[0].measure
    factor = 1 if measure == "bits per byte" else 100
    for result in results:
        value, low, high = (factor * number for number in result.estimate)
        if math.isfinite(value):
            errors = [[value - low], [high - value]] if math.isfinite(low) else None
            color = "tab:gray" if result.is_member else "tab:blue"
            axes.errorbar(value, systems.index(result.system), xerr=errors, fmt="o", color=color, capsize=3)
    members = [r.estimate.value for r in results if r.is_member and math.isfinite(r.estimate.value)]
    if members:
        best = min(members) if measure == "bits per byte" else max(members)
        axes.axvline(factor * best, color="tab:gray", linestyle=":", linewidth=1)
    axes.set_title(f"{results[0].set_name} ({results[0].num_examples})")
    axes.set_xlabel(measure if factor == 1 else f"{measure}, %")
    axes.set_yticks(range(len(systems)), systems)
    axes.set_ylim(len(systems) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
