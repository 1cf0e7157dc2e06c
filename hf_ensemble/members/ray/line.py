"""A connection to an actor: the messages of a step use a socket, about ten times faster than a call through Ray.

Ray places, starts and ends the actor, and reports its fate. The line opens once the member is loaded.
"""

import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any

from ...errors import EnsembleError


@dataclass(frozen=True)
class Number:
    """The address of an actor's line.

    Attributes:
        address: Its host and port.
        key: The caller's key, which Ray brings to the ensemble.
    """

    address: tuple[str, int]
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Failure:
    """What went wrong in an actor.

    Attributes:
        kind: The class of the error if it is one of this package; None for others.
        arguments: Its arguments.
        text: The error in words.
    """

    kind: type[EnsembleError] | None
    arguments: tuple[Any, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an error."""
        text = f"{type(error).__name__}: {error}"
        return cls(type(error), error.args, text) if isinstance(error, EnsembleError) else cls(None, (), text)


class AnsweringLine:
    """The actor's end of the line.

    Args:
        host: The address of its node.
    """

    def __init__(self, host: str):
        self._key = secrets.token_bytes(32)
        self._listener = Listener((host, 0))
        self._callers: SimpleQueue[Connection] = SimpleQueue()
        self.number = Number((host, self._listener.address[1]), self._key)
        threading.Thread(target=self._listen, name="hf_ensemble-listen", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except OSError:
                continue  # hung up at once
            # A silent stranger does not block other callers.
            threading.Thread(target=self._admit, args=(caller,), daemon=True).start()

    def _admit(self, caller: Connection) -> None:
        try:
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
        except (EOFError, OSError, AuthenticationError):
            caller.close()
        else:
            self._callers.put(caller)

    def answer(self, handler: Callable[[str, Sequence[Any]], Any]) -> None:
        """Answer one caller after another, for as long as the actor lives.

        Args:
            handler: Takes a request and its arguments, and returns the answer.
        """
        while True:
            with self._callers.get() as caller:
                try:
                    _at_once(caller)
                    _answer(caller, handler)
                except (EOFError, OSError):
                    continue  # the caller has gone


def _answer(caller: Connection, handler: Callable[[str, Sequence[Any]], Any]) -> None:
    while True:
        place, what, arguments = caller.recv()
        try:
            answer = handler(what, arguments)
        except Exception as error:
            answer = Failure.of(error)
        caller.send((place, answer))


class AskingLine:
    """The ensemble's end of the line. Any thread may ask; the actor answers in turn.

    Args:
        number: The address of the actor's line.

    Raises:
        OSError: If it cannot be reached.
    """

    def __init__(self, number: Number):
        self._connection: Any = Client(number.address, authkey=number.key)
        _at_once(self._connection)
        self._places = itertools.count()
        self._sends = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        # It does not refer to this object, which may be freed. An interrupt never stops it within a message.
        reader = threading.Thread(
            target=_read, args=(self._connection, self._asked), name="hf_ensemble-line", daemon=True
        )
        reader.start()

    def ask(self, what: str, arguments: Sequence[Any]) -> "Future[Any]":
        """Ask something.

        Returns:
            A future for the answer or a `Failure`; a `ConnectionError` if the line is dead.
        """
        answer: Future[Any] = Future()
        place = next(self._places)
        self._asked[place] = answer
        try:
            with self._sends:
                self._connection.send((place, what, arguments))
        except OSError as error:
            # Waiting callers learn of it; what was written until then stays.
            if self._asked.pop(place, None) is not None:
                answer.set_exception(ConnectionError(str(error)))
        except BaseException:
            # It is unknown how much of it was sent.
            self.close()
            raise
        return answer

    def close(self) -> None:
        """Hang up."""
        try:
            # Wakes the reader, which a plain close would leave waiting.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already


def _read(connection: Connection, asked: dict[int, "Future[Any]"]) -> None:
    reason: BaseException
    try:
        while True:
            place, answer = connection.recv()
            asked.pop(place).set_result(answer)
    except BaseException as error:
        reason = error
    connection.close()
    while asked:
        _, waiting = asked.popitem()
        waiting.set_exception(ConnectionError(f"{type(reason).__name__}: {reason}"))


def _at_once(connection: Any) -> None:
    """Send short messages at once, without waiting for more."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
