"""Metrics of a server, in Prometheus' text format."""

import threading
from collections import defaultdict
from collections.abc import Iterable

_HELP = {
    "requests_total": ("counter", "Requests, by endpoint and status."),
    "prompt_tokens_total": ("counter", "The primary's tokens in accepted prompts."),
    "generated_tokens_total": ("counter", "The primary's tokens written."),
    "texts_waiting": ("gauge", "Texts that wait."),
    "texts_running": ("gauge", "Texts being written."),
    "texts_given_up_total": ("counter", "Texts given up because the client left or time ran out."),
    "steps_total": ("counter", "Steps of running batches; each writes one token in every text."),
    "step_seconds_total": ("counter", "Seconds spent in these steps."),
    "milliseconds_per_token": ("gauge", "Milliseconds of the last step, divided by the number of texts in it."),
    "member_forward_passes_total": ("counter", "Forward passes, by member."),
    "member_seconds_total": ("counter", "Seconds spent starting a member or waiting for it, by member."),
}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and gauges, which any thread may change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, Labels], float] = defaultdict(float)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] = value

    def value(self, name: str, **labels: str) -> float:
        """Return the current value."""
        with self._lock:
            return self._values[name, tuple(sorted(labels.items()))]

    def text(self) -> str:
        """Return all metrics in Prometheus' format."""
        with self._lock:
            values = dict(self._values)
        lines: list[str] = []
        for name, (kind, words) in _HELP.items():
            found = sorted((labels, value) for (own, labels), value in values.items() if own == name)
            if not found and not name.startswith(("requests", "member")):
                found = [((), 0)]
            full = f"hf_ensemble_{name}"
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
            lines += [f"{full}{_written(labels)} {value:.12g}" for labels, value in found]
        return "\n".join(lines) + "\n"


def _written(labels: Iterable[tuple[str, str]]) -> str:
    escaped = ((key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels)
    inside = ",".join(f'{key}="{value}"' for key, value in escaped)
    return f"{{{inside}}}" if inside else ""
