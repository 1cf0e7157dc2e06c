"""Clocks and memory, on a CPU (Linux) or on GPUs."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def synchronize() -> None:
    """Wait for every GPU."""
    for n in range(torch.cuda.device_count()):
        torch.cuda.synchronize(n)


def seconds_of(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes, with what it starts on the GPUs.

    Args:
        function: The call.
        clock: What gives the seconds.
    """
    synchronize()
    start = clock()
    function()
    synchronize()
    return clock() - start


def gpu_events(function: Callable[[], object]) -> list[dict]:
    """What GPUs do during a call, as the events of a trace: kernels have the category `kernel`, `dur` is in microseconds."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, acc_events=True) as recorded:
        function()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


class Peak:
    """The highest use of memory since this object was made: of the GPUs, or of the process if there is none among the devices.

    Attributes:
        start: Bytes in use when it was made.
    """

    def __init__(self, devices: Sequence[torch.device | str]):
        self._gpus = [device for device in map(torch.device, devices) if device.type == "cuda"]
        if self._gpus:
            synchronize()
            for gpu in self._gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            self.start = sum(map(torch.cuda.memory_allocated, self._gpus))
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.start = _status_bytes("VmRSS")

    def bytes(self) -> int:
        """The highest use so far, in bytes."""
        if self._gpus:
            return sum(map(torch.cuda.max_memory_allocated, self._gpus))
        return _status_bytes("VmHWM")

    def mib_above_start(self) -> float:
        """By how many MiB the highest use is above that at the start."""
        return (self.bytes() - self.start) / 2**20


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
