"""A server in a separate process, and what the system reports about it. Needs Linux's `/proc`."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from hf_ensemble import EnsembleForCausalLM
from hf_ensemble.serving import serve

IDLE = 6.0
"""Seconds after which the server's writing thread has ended if there was nothing to do."""


class ServerProcess:
    """A server of an ensemble, on this machine only.

    Args:
        ensemble: What is served. No thread may run in this process yet.
        name: What clients ask for.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, ensemble: EnsembleForCausalLM, name: str):
        reading, writing = os.pipe()
        context = multiprocessing.get_context("fork")
        self._process: Any = context.Process(target=_serve, args=(ensemble, name, writing), daemon=True)
        self._process.start()
        os.close(writing)
        with os.fdopen(reading) as lines:
            self.port = int(lines.readline().rsplit(":", 1)[1].split("/")[0])
        self._folder = Path(f"/proc/{self._process.pid}")

    def memory(self) -> float:
        """Resident memory in MiB."""
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def num_threads(self) -> int:
        """Number of threads."""
        return len(os.listdir(self._folder / "task"))

    def num_sockets(self) -> int:
        """Number of open sockets, the one that listens among them."""
        count = 0
        for name in os.listdir(self._folder / "fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(self._folder / "fd" / name).startswith("socket:")
        return count

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says, by name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("hf_ensemble_"): float(value) for name, value in pairs}

    def wait(self, seconds: float) -> None:
        """Wait until nothing is written any more.

        Args:
            seconds: How long at most.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            metrics = self.metrics()
            if not metrics["texts_running"] + metrics["texts_waiting"]:
                break
            time.sleep(0.1)

    def end(self) -> tuple[float, int | None]:
        """Send SIGTERM; seconds until the process had ended, and its exit code."""
        began = time.monotonic()
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.join(60)
        seconds, code = time.monotonic() - began, self._process.exitcode
        self._process.kill()
        self._process.join()
        return seconds, code


def _serve(ensemble: EnsembleForCausalLM, name: str, writing: int) -> None:
    sys.stdout = os.fdopen(writing, "w")  # where the address is printed
    serve(ensemble, "127.0.0.1", 0, name=name, log_level="critical")
