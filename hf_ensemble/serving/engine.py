"""Writes for all requests: texts that can share a batch do; the others are separate calls, one after the other."""

import copy
import gc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ..decoding.running_batch import Row, RunningBatch, Written
from ..errors import ConfigurationError, MemberError
from ..members.member_model import is_out_of_memory
from ..model import EnsembleForCausalLM
from ..modes.shared import NotShared, new_row
from .limits import Limits
from .metrics import Metrics

_PATIENCE = 5.0
"""Seconds that the thread waits for work before it ends."""


class QueueFull(Exception):
    """Too many texts wait, so no more are accepted.

    Args:
        seconds: Seconds after which to try again.
    """

    def __init__(self, seconds: int):
        super().__init__(f"too many texts are waiting already. Try again in {seconds} s.")
        self.seconds = seconds


class Expired(Exception):
    """A text took longer than the server's limit."""


class Closing(Exception):
    """The server is shutting down."""


class _GivenUp(Exception):
    """Ends a separate call that was given up."""


@dataclass(eq=False)
class Job:
    """One text to write.

    Attributes:
        inputs: The prompt: the primary's `input_ids` of shape `(1, length)`, and the mask if there is one.
        config: The generation config.
        seed: From which its draws follow.
        num_best: How many of the most likely ids are wanted at every step; None for no log-probabilities.
        processors: Creates its own processors.
        tell: Receives what is written, in the engine's thread; the last time with `ends`.
        is_given_up: Whether it was given up.
    """

    inputs: dict[str, Tensor]
    config: Any
    seed: int
    tell: Callable[[Written], None]
    num_best: int | None = None
    processors: Callable[[], Sequence[Any]] = tuple
    is_given_up: bool = False
    deadline: float = math.inf
    num_written: int = 0

    def give_up(self) -> None:
        """Let it leave at the next step."""
        self.is_given_up = True

    @property
    def is_due(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline


@dataclass
class _Batch:
    """A running batch, and the jobs of its rows."""

    running: RunningBatch
    jobs: dict[Row, Job] = field(default_factory=dict)


class Engine:
    """Writes in its own thread, which ends when there is nothing to do.

    Args:
        ensemble: The ensemble; it is not changed.
        limits: The limits.

    Attributes:
        metrics: Counters of its work.
    """

    def __init__(self, ensemble: EnsembleForCausalLM, limits: Limits):
        self.ensemble, self.limits, self.metrics = ensemble, limits, Metrics()
        self._wakes = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._batches: dict[Hashable, _Batch] = {}
        self._thread: threading.Thread | None = None
        self._ends_at = math.inf
        self._seconds_of_texts = 1.0
        self._names = [member.name for member in ensemble.member_views]

    # Of any thread

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none.

        Raises:
            QueueFull: If too many texts wait.
            Closing: If the engine has been closed.
        """
        deadline = time.monotonic() + self.limits.max_seconds
        with self._wakes:
            if self._ends_at < math.inf:
                raise Closing("the server is shutting down.")
            free = self.limits.max_batch - self.num_running
            if len(self._waiting) + len(jobs) > self.limits.max_waiting + max(0, free):
                rounds = (len(self._waiting) + len(jobs)) / self.limits.max_batch
                raise QueueFull(max(1, min(600, round(rounds * self._seconds_of_texts))))
            for job in jobs:
                job.deadline = deadline
            self._waiting += jobs
            if self._thread is None:
                # Not a daemon: a daemon that computes while the interpreter ends crashes it.
                self._thread = threading.Thread(target=self._run, name="hf_ensemble")
                self._thread.start()
            self._wakes.notify()
        self.metrics.add("prompt_tokens_total", sum(job.inputs["input_ids"].shape[1] for job in jobs))

    def end_within(self, seconds: float) -> None:
        """Accept nothing more, and drop what is not written by then. Never waits, not even for a lock."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    @property
    def _is_closing(self) -> bool:
        return time.monotonic() >= self._ends_at

    def close(self) -> None:
        """End running and waiting jobs, and wait for the thread. Nothing is accepted afterwards."""
        self.end_within(0)
        with self._wakes:
            thread = self._thread
            self._wakes.notify()
        if thread is not None:
            thread.join()

    def report(self) -> str:
        """Return the current metrics, in Prometheus' format."""
        self.metrics.set("texts_running", self.num_running)
        self.metrics.set("texts_waiting", self.num_waiting)
        return self.metrics.text()

    @property
    def num_waiting(self) -> int:
        """Number of waiting texts."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of texts being written together."""
        return sum(len(batch.jobs) for batch in list(self._batches.values()))

    # Of the engine's own thread

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not (self._waiting or self._batches or self._is_closing):
                    if not self._wakes.wait(_PATIENCE) and not (self._waiting or self._is_closing):
                        self._thread = None
                        return
            if self._is_closing:
                self._end_all()
                return
            arrivals: list[Job] = []
            try:
                # So that those who wait get the places of those who have gone.
                self._let_go()
                with self._wakes:
                    arrivals = self._arrivals()
                self._admit(arrivals)
                for key, batch in list(self._batches.items()):
                    self._step(key, batch)
            except BaseException as error:  # who waits is told, and the thread lives on
                for key in list(self._batches):
                    self._drop(key, error)
                self._fail(arrivals, error)

    def _arrivals(self) -> list[Job]:
        free = self.limits.max_batch - self.num_running
        arrivals: list[Job] = []
        while self._waiting and len(arrivals) < free:
            arrivals.append(self._waiting.popleft())
        return arrivals

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Let jobs join their batches; run jobs that cannot share one now."""
        joining: dict[Hashable, dict[Row, Job]] = {}
        for job in jobs:
            if self._is_over(job):
                continue
            try:
                row = self._row_of(job)
            except NotShared:
                self._run_alone(job)
            except Exception as error:
                self._fail([job], error)
            else:
                joining.setdefault(row.kind, {})[row] = job
        for key, newcomers in joining.items():
            self._join(key, newcomers)

    def _row_of(self, job: Job) -> Row:
        def take(written: Written) -> None:
            self._tell(job, written)

        return new_row(
            self.ensemble,
            {name: part.to(self.ensemble.device) for name, part in job.inputs.items()},
            job.config,
            job.seed,
            logits_processor=job.processors(),
            num_best=job.num_best,
            take=take,
        )

    def _join(self, key: Hashable, newcomers: dict[Row, Job]) -> None:
        batch = self._batches.get(key)
        try:
            decoder = RunningBatch.begun(list(newcomers), batch is not None)
        except Exception as error:
            # The batch is unchanged.
            self._fail(list(newcomers.values()), error)
            return
        if batch is None:
            self._batches[key] = _Batch(RunningBatch(list(newcomers), decoder), newcomers)
            return
        batch.jobs |= newcomers
        try:
            batch.running.join(list(newcomers), decoder)
        except Exception as error:
            self._drop(key, error)

    def _let_go(self) -> None:
        """Drop jobs that were given up, and jobs whose time is over."""
        for key, batch in list(self._batches.items()):
            gone = [row for row, job in batch.jobs.items() if self._is_over(job)]
            if gone:
                batch.running.leave(gone)
                self._forget(key, batch)

    def _step(self, key: Hashable, batch: _Batch) -> None:
        began = time.perf_counter()
        count = len(batch.running.rows)
        states = batch.running.decoder.rows.states
        before = {index: (state.num_forwards, self._seconds(batch, index)) for index, state in states.items()}
        try:
            batch.running.step()
        except Exception as error:
            self._drop(key, error)
            return
        seconds = time.perf_counter() - began
        self.metrics.add("steps_total")
        self.metrics.add("step_seconds_total", seconds)
        self.metrics.set("milliseconds_per_token", 1000 * seconds / count)
        for index, (forwards, spent) in before.items():
            name = self._names[index]
            self.metrics.add("member_forward_passes_total", states[index].num_forwards - forwards, member=name)
            self.metrics.add("member_seconds_total", self._seconds(batch, index) - spent, member=name)
        self._forget(key, batch)

    def _seconds(self, batch: _Batch, index: int) -> float:
        return batch.running.decoder.rows.seconds.total[index]

    def _forget(self, key: Hashable, batch: _Batch) -> None:
        batch.jobs = {row: batch.jobs[row] for row in batch.running.rows}
        if not batch.jobs:
            self._batches.pop(key, None)

    def _drop(self, key: Hashable, error: BaseException) -> None:
        """End a batch whose step has failed."""
        batch = self._batches.pop(key)
        self._fail(list(batch.jobs.values()), error)
        if is_out_of_memory(error):
            del batch
            error.__traceback__ = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _is_over(self, job: Job) -> bool:
        if self._is_closing:
            job.tell(Written(None, ends=True, error=Closing("the server is shutting down.")))
        elif job.is_due:
            why = f"the request took longer than this server's limit of {self.limits.max_seconds:g} s."
            job.tell(Written(None, ends=True, error=Expired(why)))
        elif not job.is_given_up:
            return False
        self.metrics.add("texts_given_up_total")
        return True

    def _fail(self, jobs: Sequence[Job], error: BaseException) -> None:
        # Code in Rust that panics, as a regular expression of a tokenizer may, raises what nothing else catches.
        if not isinstance(error, Exception) or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            error = MemberError(f"a step failed: {type(error).__name__}: {error}")
        for job in jobs:
            job.tell(Written(None, ends=True, error=error))

    def _tell(self, job: Job, written: Written) -> None:
        if written.id is not None:
            job.num_written += 1
            self.metrics.add("generated_tokens_total")
        if written.ends:
            # Roughly how long a text takes, for clients that have to retry.
            seconds = self.limits.max_seconds - (job.deadline - time.monotonic())
            self._seconds_of_texts += 0.2 * (seconds - self._seconds_of_texts)
        job.tell(written)

    def _end_all(self) -> None:
        waiting = list(self._waiting)
        self._waiting.clear()
        for job in [*waiting, *(job for batch in self._batches.values() for job in batch.jobs.values())]:
            self._is_over(job)
        self._batches.clear()
        self._thread = None

    # Calls of their own

    def _run_alone(self, job: Job) -> None:
        """Write with a separate call of `generate`; the others wait."""
        engine, length = self, job.inputs["input_ids"].shape[1]

        class Listens(StoppingCriteria):
            """Ends a call that was given up."""

            def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> Any:
                if engine._is_closing or job.is_due or job.is_given_up:
                    raise _GivenUp
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        class Tells:
            """Passes on what is written; the prompt comes first."""

            is_prompt = True

            def put(self, ids: Tensor) -> None:
                for i in [] if self.is_prompt else ids.flatten().tolist():
                    engine._tell(job, Written(i))
                self.is_prompt = False

            def end(self) -> None:
                """The caller says so."""

        beams = job.config.num_beams not in (None, 1)
        try:
            if job.num_best is not None:
                raise ConfigurationError(
                    f"`logprobs` are not available with method {self.ensemble.config.method.name!r} or these options, "
                    "because no fused distribution decides each token."
                )
            config = copy.copy(job.config)
            config.max_time = max(0.001, min(config.max_time or math.inf, job.deadline - time.monotonic()))
            # Whole answers of several writers take no criteria, so the call runs to its end.
            is_heard = self.ensemble.config.method.decides != "answers"
            options: dict[str, Any] = {
                **{name: part.to(self.ensemble.device) for name, part in job.inputs.items()},
                "generation_config": config,
                "logits_processor": list(job.processors()),
                "stopping_criteria": StoppingCriteriaList([Listens()] if is_heard else []),
                "streamer": None if beams else Tells(),
                "seed": job.seed if self.ensemble.config.method.takes_seed else None,
            }
            with _seeded(job.seed):
                ids = self.ensemble.generate(**options)
        except _GivenUp:
            self._is_over(job)
        except Exception as error:
            self._fail([job], error)
        else:
            for i in ids[0, length:].tolist() if beams else ():
                self._tell(job, Written(i))
            self._tell(job, Written(None, ends=True))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators, and restore them afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
