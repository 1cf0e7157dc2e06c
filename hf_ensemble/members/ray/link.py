"""The link to one actor: its life, the order of its messages, their size, and its failures."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from ... import messages
from ...errors import EnsembleError, MemberError
from ..entries import EntryIds
from . import cluster
from .actor import Answer, Description, HeldMember, Move
from .line import AskingLine, Failure, Number
from .wire import PackedIds, payload

_PATIENCE = 30.0
"""Seconds after which a warning says that an actor has not started, most likely for lack of resources."""

_LOOK = 1.0
"""Seconds without an answer after which Ray is asked whether the actor still lives: a lost host does not hang up."""

_FAREWELL = 30.0
"""Seconds for Ray to report the fate of an actor that has hung up."""

_MOST_REASON = 300
"""Number of characters of Ray's message that an error repeats."""

_NOWHERE = "not started yet"


@dataclass
class Traffic:
    """The traffic since the link was created: numbers and texts, without Ray's overhead.

    Attributes:
        sent: Bytes to the actor.
        received: Bytes from it.
        trips: Number of awaited calls.
    """

    sent: int = 0
    received: int = 0
    trips: int = 0


class ActorLink:
    """An actor that holds one member, from its start to its end.

    Changes of caches are held back and travel with the next request.

    Args:
        name: The member's name.
        load: Creates the member in the actor.
        options: Options of the actor, as for Ray's `.options(...)`.

    Attributes:
        traffic: The traffic so far.
        moves: Changes of caches that the actor does not know yet.
        numbers: Numbers for caches.
        address: The actor's place.

    Raises:
        ConfigurationError: If Ray is not available, or no node has what the actor asks for.
    """

    def __init__(self, name: str, load: Callable[[], Any], options: Mapping[str, Any]):
        self.name = name
        self.traffic = Traffic()
        self.address = _NOWHERE
        self.moves: deque[Move] = deque()
        self.numbers = itertools.count()
        self._lock = threading.Lock()
        self._kinds: weakref.WeakKeyDictionary[EntryIds, int] = weakref.WeakKeyDictionary()
        self._ray, is_ours = cluster.join(name)
        try:
            cluster.check_resources(self._ray, name, options)
            self._actor = self._ray.remote(HeldMember).options(**options).remote(load)
        except BaseException:
            if is_ours:
                cluster.leave(self._ray)
            raise
        self.close: Any = weakref.finalize(self, _end, self._ray, self._actor, is_ours)
        self._is_there = self._actor.is_there.remote()
        self._description = self._actor.load.remote()
        self._number = self._actor.listen.remote()
        # Runs as long as the actor does, so its end means the actor's.
        self._life = self._actor.answer.remote()

    @property
    def is_closed(self) -> bool:
        """Whether the actor was ended from this process."""
        return not self.close.alive

    def description(self) -> Description:
        """Wait until the member is loaded, and describe it.

        Raises:
            EnsembleError: As when loading it in this process; a `MemberError` where the actor itself fails.
        """
        ready, _ = self._ray.wait([self._is_there], timeout=_PATIENCE)
        if not ready:
            messages.warn(
                f"the actor of member {self.name!r} has not started after {_PATIENCE:.0f} s: it waits for resources, "
                f"or its host is slow. Free in the Ray cluster: {self._ray.available_resources()}."
            )
        found: Description = self._received(self._got(self._description))
        self.address = found.address
        number: Number = self._got(self._number)
        try:
            self._line = AskingLine(number)
        except OSError as error:
            raise MemberError(
                f"the actor of member {self.name!r} ({self.address}) cannot be reached at {number.address}: {error}. "
                "This host has to reach the ports of the nodes, as Ray itself requires."
            ) from error
        weakref.finalize(self, self._line.close)
        return found

    def kind_of(self, entry_ids: EntryIds) -> int:
        """Return a number for what the actor has to know about a method; it learns this with the next request."""
        with self._lock:
            kind = self._kinds.get(entry_ids)
            if kind is None:
                kind = next(self.numbers)
                self.moves.append(("learn", kind, PackedIds.of(entry_ids)))
                self._kinds[entry_ids] = kind
                weakref.finalize(entry_ids, self.moves.append, ("unlearn", kind)).atexit = False
        return kind

    def start(self, what: str, *arguments: Any) -> Any:
        """Send the actor a request, after all changes of caches that were held back.

        Args:
            what: Name of a method of `HeldMember` that takes changes first.
            *arguments: Its other arguments.

        Returns:
            The argument for `wait`.
        """
        # Requests of other threads may build on these changes.
        with self._lock:
            moves = [self.moves.popleft() for _ in range(len(self.moves))]
            try:
                return self.ask(what, moves, *arguments)
            except BaseException:
                self.moves.extendleft(reversed(moves))
                raise

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send the actor a request, independent of changes of caches."""
        if self.is_closed:
            raise self._ended()
        self.traffic.sent += payload(arguments)
        return self._line.ask(what, arguments)

    def wait(self, asked: "futures.Future[Any]") -> Any:
        """Wait for an answer.

        Raises:
            MemberError: If the actor has died or failed.
        """
        if self.is_closed:
            raise self._ended()
        while True:
            try:
                answer = asked.result(_LOOK)
            except futures.TimeoutError:
                ended, _ = self._ray.wait([self._life], timeout=0)
                if ended:
                    raise self._lost(None) from None
            except ConnectionError as error:
                raise self._lost(error) from error
            else:
                break
        if isinstance(answer, Failure):
            raise self._failure(answer)
        self.traffic.trips += 1
        return self._received(answer)

    def _received(self, answer: Any) -> Any:
        if isinstance(answer, Answer):
            for text in answer.warnings:
                messages.warn(text)
            answer = answer.value
        self.traffic.received += payload(answer)
        return answer

    def _got(self, asked: Any) -> Any:
        """The result of a call through Ray."""
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            raise self._failed(error) from error

    def _lost(self, error: Exception | None) -> EnsembleError:
        """The line is dead; ask Ray why."""
        if self.is_closed:
            return self._ended()
        try:
            self._ray.get(self._life, timeout=_FAREWELL)
        except self._ray.exceptions.GetTimeoutError:
            pass
        except self._ray.exceptions.RayError as reason:
            return self._failed(reason)
        return self._gone(f"the connection broke: {error}")

    @property
    def _remedy(self) -> str:
        if self.address == _NOWHERE:
            # There is no ensemble yet, or the member was being restarted.
            return (
                "It had not loaded the member yet. Ray's log of the actor says why; if memory ran out, let it ask for more: "
                "`MemberConfig(ray={'memory': <bytes>})`. Then load the ensemble again."
            )
        return f"To start it again, call `ensemble.restart_member({self.name!r})`."

    def _ended(self) -> MemberError:
        return MemberError(f"the actor of member {self.name!r} has ended. {self._remedy}")

    def _gone(self, reason: str) -> MemberError:
        return MemberError(f"the actor of member {self.name!r} ({self.address}) is gone ({reason}). {self._remedy}")

    def _failure(self, failure: Failure) -> EnsembleError:
        if failure.kind is None:
            return MemberError(f"member {self.name!r} failed in its actor ({self.address}): {failure.text}")
        error = failure.kind(*failure.arguments)
        return MemberError(f"{error} It runs in {self.address}.") if isinstance(error, MemberError) else error

    def _failed(self, error: Exception) -> EnsembleError:
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return self._failure(Failure.of(error.cause))
        # Indented lines are for Ray's own log.
        lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "\t"))]
        reason = " ".join(lines)
        if len(reason) > _MOST_REASON:  # the last line names the error
            reason = f"{reason[:_MOST_REASON]} … {lines[-1][:_MOST_REASON]}"
        return self._gone(f"{type(error).__name__}: {reason}")


def _end(ray: Any, actor: Any, is_ours: bool) -> None:
    if ray.is_initialized():
        ray.kill(actor)
    if is_ours:
        cluster.leave(ray)
