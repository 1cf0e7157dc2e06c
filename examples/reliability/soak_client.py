"""A client of the soak: sends requests over HTTP on this machine, reads answers, and disconnects when told to."""

import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from requests_at_random import CHAT, RESPONSES, Request

KEPT = 3.0
"""Seconds for which a connection is kept; the server hangs up on idle ones after five."""


@dataclass
class Outcome:
    """What came of a request.

    Attributes:
        status: Of the answer; None where there was none, or the client hung up.
        texts: Texts of a good answer, in order.
        finish: Why each of them ended.
        num_tokens: Tokens that the answer says were written.
        reason: What the server says of an error.
        problem: What was wrong with the answer: it did not come, or cannot be understood.
        is_late: Whether it did not come in time.
        seconds: Until the answer was whole.
    """

    status: int | None = None
    texts: list[str] = field(default_factory=list)
    finish: list[Any] = field(default_factory=list)
    num_tokens: int = 0
    reason: str = ""
    problem: str | None = None
    is_late: bool = False
    seconds: float = 0.0


class Client:
    """A client with one connection, which it keeps as long as the server does.

    Args:
        port: Of the server on this machine.
        timeout: Seconds without a byte after which a request counts as hanging.
    """

    def __init__(self, port: int, timeout: float):
        self._port, self._timeout, self._last = port, timeout, 0.0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def close(self) -> None:
        self._connection.close()

    def send(self, request: Request) -> Outcome:
        """Send a request and read its answer, or hang up."""
        began = time.monotonic()
        if began - self._last > KEPT:
            self.close()
        try:
            outcome = self._sent(request)
        except TimeoutError:
            outcome = Outcome(problem="no answer in time", is_late=True)
            self.close()
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            outcome = Outcome(problem=f"{type(error).__name__}: {error}")
            self.close()
        self._last = time.monotonic()
        outcome.seconds = self._last - began
        return outcome

    def _sent(self, request: Request) -> Outcome:
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request(request.method, request.path, request.body, headers)
            if request.kind == "hangs up":
                time.sleep(request.patience)
                return self._hang_up()
            response = self._connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            if request.kind != "bad":
                raise
            # The server may have refused a body before all of it was sent.
            self.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)
            self._connection.request(request.method, request.path, request.body, headers)
            response = self._connection.getresponse()
        if request.kind == "hangs up, streamed":
            for _ in range(int(request.patience)):
                response.readline()
            return self._hang_up()
        return read_answer(request, response.status, response.read())

    def _hang_up(self) -> Outcome:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.close()
        return Outcome()


def read_answer(request: Request, status: int, data: bytes) -> Outcome:
    """Read an answer, whole or streamed."""
    outcome = Outcome(status)
    if status != 200:
        outcome.reason = json.loads(data)["error"]["message"]
        if not outcome.reason:
            outcome.problem = "no reason given"
        return outcome
    if request.path == RESPONSES:
        _read_response(outcome, request, data)
    elif request.fields.get("stream"):
        _read_stream(outcome, request, data)
    else:
        answer = json.loads(data)
        for choice in answer["choices"]:
            outcome.texts.append(choice["message"]["content"] if request.path == CHAT else choice["text"])
            outcome.finish.append(choice["finish_reason"])
        outcome.num_tokens = answer["usage"]["completion_tokens"]
    return outcome


def _events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _read_stream(outcome: Outcome, request: Request, data: bytes) -> None:
    texts: dict[int, str] = {}
    finish: dict[int, Any] = {}
    for chunk in _events(data):
        if "error" in chunk:
            outcome.problem = f"an error in the stream: {chunk['error']['message']}"
            return
        outcome.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", outcome.num_tokens)
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if request.path == CHAT else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
            finish[choice["index"]] = choice["finish_reason"] or finish.get(choice["index"])
    outcome.texts = [texts[index] for index in sorted(texts)]
    outcome.finish = [finish[index] for index in sorted(finish)]
    if not data.rstrip().endswith(b"data: [DONE]") or None in outcome.finish:
        outcome.problem = "the stream has no end"


def _read_response(outcome: Outcome, request: Request, data: bytes) -> None:
    if request.fields.get("stream"):
        events = _events(data)
        ends = [event["response"] for event in events if event["type"] == "response.completed"]
        if not ends:
            outcome.problem = f"the stream has no end: {events[-1] if events else None}"
            return
        answer = ends[0]
    else:
        answer = json.loads(data)
    outcome.texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
    outcome.finish = [answer["status"]]
    outcome.num_tokens = answer["usage"]["output_tokens"]
