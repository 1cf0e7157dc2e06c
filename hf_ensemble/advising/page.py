"""The page that shows the advice: the answer, the tables behind it, and two plots."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..evaluation.measures import measure_of
from ..pages import escaped, page, table

if TYPE_CHECKING:
    from .advice import Advice, TriedEnsemble, TriedMember

_WIDTH, _LEFT, _LINE = 760, 300, 24
"""Width of a plot and of its labels, and the height of a line, in pixels."""


class _Mark(NamedTuple):
    """One system in a plot: value, interval, seconds per example, and whether it is a single member."""

    label: str
    value: float
    low: float
    high: float
    seconds: float
    is_member: bool


def advice_page(advice: "Advice") -> str:
    """Return a page that needs no network and runs no script.

    Args:
        advice: The advice.
    """
    measure = measure_of(advice.measure)
    marks = [_mark(one.name, one, measure.factor, True) for one in advice.members]
    marks += [_mark(one.title, one, measure.factor, False) for one in advice.ensembles]
    unit = f"{measure.name}{measure.unit}"
    parts = {
        "answer": escaped(advice.reason),
        "set": escaped(f"{advice.set_name}, {advice.num_examples} examples"),
        "members": table(advice.member_rows()),
        "ensembles": table(advice.ensemble_rows()) if advice.ensembles else "<p>None was tried.</p>",
        "values": _intervals(marks, unit),
        "costs": _costs(marks, unit),
        "remarks": "".join(f"<li>{escaped(remark)}</li>" for remark in advice.remarks()),
    }
    return page(__package__, "page", "Does an ensemble pay?", parts)


def _mark(label: str, one: "TriedMember | TriedEnsemble", factor: float, is_member: bool) -> _Mark:
    value, low, high = (factor * number for number in one.estimate)
    return _Mark(label, value, low, high, one.seconds, is_member)


def _scale(values: Sequence[float], start: float, stop: float) -> "_Scale":
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    return _Scale(low - margin, high + margin, start, stop)


class _Scale(NamedTuple):
    """Values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> Iterator[float]:
        step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (k * step) <= 6)
        for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            yield n * step


def _across(scale: _Scale, bottom: float, unit: str) -> str:
    """Grid lines with their values below, and the unit."""
    lines = [
        f'<line class="grid" x1="{scale(x):.1f}" x2="{scale(x):.1f}" y1="8" y2="{bottom}"/>'
        f'<text x="{scale(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x:.4g}</text>'
        for x in scale.ticks()
    ]
    middle = (scale.start + scale.stop) / 2
    return "".join(lines) + f'<text x="{middle:.1f}" y="{bottom + 34}" text-anchor="middle">{escaped(unit)}</text>'


def _svg(height: float, title: str, inner: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="{escaped(title)}">{inner}</svg>'
    )


def _intervals(marks: Sequence[_Mark], unit: str) -> str:
    """A line for each system, with its value and interval."""
    shown = [mark for mark in marks if math.isfinite(mark.value)]
    ends = [x for mark in shown for x in mark[1:4] if math.isfinite(x)]
    scale = _scale(ends, _LEFT + 10, _WIDTH - 20)
    bottom = 12 + _LINE * len(shown)
    lines = []
    for n, mark in enumerate(shown):
        y = 12 + _LINE * (n + 0.5)
        kind = "member" if mark.is_member else "ensemble"
        label = mark.label if len(mark.label) < 46 else f"{mark.label[:44]}…"
        lines.append(f'<text x="{_LEFT}" y="{y + 4}" text-anchor="end">{escaped(label)}</text>')
        if math.isfinite(mark.low):
            lines.append(
                f'<line class="{kind}" x1="{scale(mark.low):.1f}" x2="{scale(mark.high):.1f}" y1="{y}" y2="{y}"/>'
            )
        lines.append(f'<circle class="{kind}" cx="{scale(mark.value):.1f}" cy="{y}" r="4.5"/>')
    return _svg(bottom + 40, "values with their 95 % intervals", _across(scale, bottom, unit) + "".join(lines))


def _costs(marks: Sequence[_Mark], unit: str) -> str:
    """Each system's value by its seconds per example."""
    shown = [mark for mark in marks if math.isfinite(mark.value)]
    across = _scale([mark.seconds for mark in shown], 70, _WIDTH - 220)
    up = _scale([mark.value for mark in shown], 250, 12)
    inner = [_across(across, 260, "seconds an example")]
    for y in up.ticks():
        inner.append(
            f'<line class="grid" x1="60" x2="{_WIDTH - 200}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
            f'<text x="54" y="{up(y) + 4:.1f}" text-anchor="end">{y:.4g}</text>'
        )
    inner.append(f'<text x="{_WIDTH - 195}" y="20">{escaped(unit)}</text>')
    for mark in shown:
        kind = "member" if mark.is_member else "ensemble"
        inner.append(
            f'<circle class="{kind}" cx="{across(mark.seconds):.1f}" cy="{up(mark.value):.1f}" r="5">'
            f"<title>{escaped(mark.label)}: {mark.value:.4g}, {mark.seconds:.3g} s</title></circle>"
        )
    return _svg(300, "value by seconds per example", "".join(inner))
