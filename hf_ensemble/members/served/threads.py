"""Threads for waiting requests, which do not keep the process alive."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

_Made = TypeVar("_Made")


class Threads:
    """Runs functions in threads, several at the same time.

    Unlike those of `concurrent.futures`, its threads end with the process, so an interrupted program does not wait for
    a server that does not answer.

    Args:
        most: Largest number of threads; they are created when needed.
    """

    def __init__(self, most: int):
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False

    def submit(self, function: Callable[..., _Made], *arguments: Any) -> "Future[_Made] | None":
        """Run a function as soon as a thread is free; None if the threads were closed."""
        future: Future[_Made] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._is_closed:
                return None
            self._work.put(run)
            if not self._idle.acquire(blocking=False) and self._count < self._most:
                self._count += 1
                name = f"hf_ensemble-served-{self._count}"
                threading.Thread(target=_work_off, args=(self._work, self._idle), name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let the threads end once all submitted work is done."""
        with self._lock:
            self._is_closed = True
            self._work.put(None)


def _work_off(work: "queue.SimpleQueue[Callable[[], None] | None]", idle: threading.Semaphore) -> None:
    while (run := work.get()) is not None:
        run()
        del run  # which refers to the request and its answer
        idle.release()
    work.put(None)  # for the next thread


def collected(futures: "Sequence[Future[_Made]]") -> list[_Made]:
    """Wait for all results, and return them in order; the first error cancels what has not begun."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
