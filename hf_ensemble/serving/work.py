"""A request's texts, on the event loop's side."""

import asyncio
from collections.abc import Callable, Sequence

from ..decoding.running_batch import Written
from .engine import Engine, Job


class ClientGone(Exception):
    """The client has disconnected."""


class Work:
    """The jobs of one request, and their results.

    Args:
        engine: The engine.
        make_job: Creates each job, given its index and the function to tell.
        count: Number of jobs.
        gone: Set once the client has disconnected.

    Raises:
        QueueFull: If too many texts wait already.
    """

    def __init__(
        self,
        engine: Engine,
        make_job: Callable[[int, Callable[[Written], None]], Job],
        count: int,
        gone: asyncio.Event,
    ):
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[int, Written] | None] = asyncio.Queue()
        self.jobs: Sequence[Job] = [make_job(number, self._teller(number)) for number in range(count)]
        engine.submit(self.jobs)
        self._num_open = count
        self._watch = asyncio.ensure_future(self._wait_for(gone))

    def _teller(self, number: int) -> Callable[[Written], None]:
        def tell(written: Written) -> None:
            try:
                self._loop.call_soon_threadsafe(self._told.put_nowait, (number, written))
            except RuntimeError:  # the loop has been closed
                self.jobs[number].give_up()

        return tell

    async def _wait_for(self, gone: asyncio.Event) -> None:
        await gone.wait()
        self.give_up()
        self._told.put_nowait(None)

    def give_up(self) -> None:
        """Let all jobs leave at the next step."""
        for job in self.jobs:
            job.give_up()

    async def next(self) -> tuple[int, Written] | None:
        """Return the index of a job and what it has written; None when all have ended.

        Raises:
            ClientGone: If the client has disconnected.
            Exception: The error of a failed job; the others are given up.
        """
        if not self._num_open:
            self._watch.cancel()
            return None
        told = await self._told.get()
        if told is None:
            raise ClientGone
        if told[1].error is not None:
            self.give_up()
            raise told[1].error
        self._num_open -= told[1].ends
        return told
