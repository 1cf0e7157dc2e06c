"""Make the study's tables and plots from its result files.

    python examples/study/report.py                  # tables.md and the plots, in the study's `report`
    python examples/study/report.py --no-plots       # without matplotlib

Seeds are pooled: an example's values are averaged over them. Intervals (95 %) come from a bootstrap over documents of
paired differences to the best member: the one with the highest exact match on these examples, averaged over seeds. A
star marks intervals without 0. The oracle picks the best of the members' answers to each example, and the fewest of
their bits. Development sets, on which values and weights are chosen, come last.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cells import read_cells
from groups import (
    Group,
    groups_of,
    in_words,
    place_of,
    set_title,
)
from marks import Estimate

Points = dict[str, list[tuple[Any, Estimate]]]
"""Positions and gains, by the entry in the legend."""


def by_option(groups: Sequence[Group], prefix: str) -> Points:
    """Gains by the value of an option, one line per ensemble."""
    points: Points = {}
    for group in groups:
        values = sorted(int(s.removeprefix(prefix)) for s in group.systems if s.removeprefix(prefix).isdigit())
        for value in values:
            points.setdefault(" + ".join(group.names), []).append((value, group.gain(f"{prefix}{value}")))
    return points


def by_ensemble(groups: Sequence[Group], where: Callable[[Group], Any]) -> Points:
    """Gains by a property of the ensemble, one line per system."""
    points: Points = {}
    for group in sorted(groups, key=where):
        for system in group.systems:
            if group.runs(system):
                points.setdefault(in_words(system), []).append((where(group), group.gain(system)))
    return points


def plots_of(groups: Sequence[Group]) -> dict[str, tuple[str, Points]]:
    """The plots for the ensembles on one task: the label of the axis and the points, by file name."""
    pairs = [group for group in groups if len(group.names) == 2]
    # Plots of an option's values show only the pair with the most runs.
    main = max(groups, key=lambda group: (len(group.systems), len(group.ensembles)))
    turned = [group for group in pairs if group.names in (main.names, main.names[::-1])]
    larger = [group for group in groups if group.names[: len(main.names)] == main.names]
    # A pair in which one member knows nothing would leave no room for the others.
    near = [group for group in pairs if group.gap < 50]
    gains = [(in_words(system), main.gain(system)) for system in main.systems if main.runs(system)]
    return {
        "systems": ("", {" + ".join(main.titles): gains}),
        "gap": ("points between the members", by_ensemble(near, lambda group: group.gap)),
        "disagreement": ("% on which they disagree", by_ensemble(near, lambda group: group.disagreement)),
        "top_k": ("k of UniTE", by_option(groups, "unite:top_k=")),
        "span_length": ("words of a span", by_option(groups, "sweetspan:span_length=")),
        "order": ("place of the better member", by_ensemble(turned, lambda group: ("first", "second")[group.better])),
        "members": ("members", by_ensemble(larger, lambda group: str(len(group.names)))),
    }


def draw(file: Path, panels: dict[str, tuple[str, Points]]) -> bool:
    """Draw a panel for each task; return whether any has more than one position."""
    lines = {
        task: {name: p for name, p in points.items() if len({x for x, _ in p}) > 1}
        for task, (_, points) in panels.items()
    }
    tasks = [task for task in lines if lines[task]]
    if not tasks:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    kind = file.stem
    names = list(dict.fromkeys(name for task in tasks for name in lines[task]))
    is_tall, is_scattered = kind == "systems", kind in ("gap", "disagreement")
    most = max(len(points) for task in tasks for points in lines[task].values())
    size = (3 * len(tasks) + 1, 0.9 + 0.3 * most) if is_tall else (4.2 * len(tasks), 3.4)
    with matplotlib.rc_context({"svg.hashsalt": "study", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        for axes, task in zip(
            figure.subplots(1, len(tasks), squeeze=False, sharex=is_tall, sharey=is_tall)[0], tasks, strict=True
        ):
            axes.set_title(set_title(task))
            for name, points in lines[task].items():
                n = names.index(name)
                values = [gain.value for _, gain in points]
                errors = [[g.value - g.low for _, g in points], [g.high - g.value for _, g in points]]
                if is_tall:
                    axes.errorbar(values, [place for place, _ in points], xerr=errors, fmt="o", capsize=2)
                    continue
                # Several systems of one ensemble stand side by side.
                places = [place + 0.4 * n if is_scattered else place for place, _ in points]
                style = {"color": f"C{n}", "marker": "osD^v<>pP*"[n % 10], "capsize": 2, "label": name}
                axes.errorbar(places, values, errors, linestyle="none" if is_scattered else "-", **style)
            if is_tall:
                axes.axvline(0, color="gray", linestyle=":")
                axes.set_xlabel("points above the best member")
                continue
            axes.axhline(0, color="gray", linestyle=":")
            axes.set(xlabel=panels[task][0], ylabel="points above the best member")
            if kind in ("top_k", "span_length"):
                ticks = sorted({place for points in lines[task].values() for place, _ in points})
                axes.set_xscale("log")
                axes.set_xticks(ticks, map(str, ticks))
                axes.minorticks_off()
            axes.legend(fontsize="x-small")
        if is_tall:
            figure.axes[0].invert_yaxis()
        figure.savefig(file, metadata={"Date": None})
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("study"), help="of the study")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--systems", nargs="+", help="only these, beside the members alone; default: all")
    args = parser.parse_args()
    cells = read_cells(args.folder)
    if args.systems:
        cells = {key: cell for key, cell in cells.items() if key.system in ("alone", *args.systems)}
    groups = groups_of(cells, args.folder)
    if not groups:
        sys.exit(f"report.py: {args.folder / 'results'} holds no ensemble whose members ran alone too")
    folder = args.folder / "report"
    folder.mkdir(exist_ok=True)
    text = "\n".join(group.table() for group in groups)
    (folder / "tables.md").write_text(text, "utf-8")
    print(text)
    if not args.no_plots:
        tasks = sorted({group.task for group in groups if "_test_" in group.task}, key=place_of)
        plots = {task: plots_of([group for group in groups if group.task == task]) for task in tasks}
        for name in next(iter(plots.values()), {}):
            if draw(folder / f"{name}.svg", {task: plots[task][name] for task in tasks}):
                print(f"drawn: {folder / name}.svg")


if __name__ == "__main__":
    main()
