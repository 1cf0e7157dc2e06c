"""Run a fault in a separate process with limited time and memory, and watch what it opens and executes."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MEMORY = 16 << 30
"""Bytes of address space that a child may have."""

CODE_FILE = "own.py"
"""Name of the file with code that must not run."""

_IS_OPENED, _IS_CHANGED, _IS_FOLDER = 0x20, 0x40 | 0x80 | 0x100 | 0x200, 0x40000000
"""Of inotify: opened; moved, made or deleted; about a folder."""

_EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class")
"""Audit events of what executes something. A process that is forked is none."""


@dataclass
class Seen:
    """What came of a fault.

    Attributes:
        text: What the fault's function returned; empty if it raised.
        error: The error that it raised, with its type; empty for none.
        warnings: What was warned of.
        outside: What was opened, moved, made or deleted in the canary folder.
        executed: What was executed.
    """

    text: str = ""
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)

    @property
    def told(self) -> str:
        """The error, else the warnings, else the text."""
        return self.error or "; ".join(dict.fromkeys(self.warnings)) or self.text


def run(fault: Callable[..., Any], *arguments: Any, canary: Path, timeout: float = 60.0) -> Seen:
    """Run a function in a child process.

    Args:
        fault: The function.
        *arguments: Its arguments.
        canary: A folder that nothing may be opened in.
        timeout: Seconds after which it counts as hanging.
    """
    watch = _Watch(canary)
    child = _Child(fault, arguments)
    seen = child.result(timeout)
    seen.outside = watch.opened()
    return seen


def run_together(fault: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Seen]:
    """Run a function in two child processes at the same time; see `run`."""
    children = [_Child(fault, arguments) for _ in range(2)]
    return [child.result(timeout) for child in children]


class _Watch:
    """Hears from the system of all that is opened, moved, made or deleted in a folder, whatever code does it."""

    def __init__(self, folder: Path):
        self._folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        self._queue = self._libc.inotify_init1(os.O_NONBLOCK)
        if (
            self._queue < 0
            or self._libc.inotify_add_watch(self._queue, str(folder).encode(), _IS_OPENED | _IS_CHANGED) < 0
        ):
            raise OSError(ctypes.get_errno(), "the system does not tell which files are opened")

    def opened(self) -> list[str]:
        """Names of what that was, and an end of the watch."""
        names, data = [], b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._queue, 1 << 20)
        os.close(self._queue)
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            if not (mask & _IS_FOLDER and mask & _IS_OPENED):  # folders may be listed
                names.append(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return names


class _Child:
    """A process that runs a function."""

    def __init__(self, fault: Callable[..., Any], arguments: tuple[Any, ...]):
        context = multiprocessing.get_context("fork")
        self._reading, writing = context.Pipe(duplex=False)
        self._process = context.Process(target=_watched, args=(writing, fault, arguments))
        self._process.start()
        writing.close()

    def result(self, timeout: float) -> Seen:
        """What came of it; the process is ended."""
        try:
            is_there = self._reading.poll(timeout)
            seen = self._reading.recv() if is_there else Seen(error=f"hangs: nothing came in {timeout:g} s")
        except EOFError:
            self._process.join()
            seen = Seen(error=f"the process died (exit code {self._process.exitcode})")
        self._process.kill()
        self._process.join()
        self._reading.close()
        return seen


def _watched(writing: Any, fault: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
    seen = Seen()

    def watch(event: str, given: tuple[Any, ...]) -> None:
        # A hook stays for good, which is one reason why this is a process of its own.
        if event in _EXECUTES:
            seen.executed.append(f"{event} {given!r:.80}")
        elif event == "exec" and Path(getattr(given[0], "co_filename", "")).name == CODE_FILE:
            seen.executed.append(f"the code of {given[0].co_filename}")

    sys.addaudithook(watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen.text = str(fault(*arguments) or "")
        except BaseException as error:
            seen.error = f"{type(error).__name__}: {error}"
    seen.warnings = [str(warning.message) for warning in caught]
    writing.send(seen)
    writing.close()
