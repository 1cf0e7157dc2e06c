"""Requests to a server: keeps connections, retries temporary failures, and never shows keys."""

import contextlib
import email.utils
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2 as httpx

from ...address import checked_url, shown
from ...errors import ConfigurationError, MemberError
from .threads import Threads, collected

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

MAX_TRIES = 5
"""Number of tries before a request has failed."""

MAX_AT_ONCE = 32
"""Number of concurrent requests to one server."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
"""Seconds between tries: doubled each time, or what the server asks for, if that is not too long."""

_TIMEOUT, _CONNECT_TIMEOUT = 120.0, 10.0
_PASSING = (429, 500, 502, 503, 504)
"""Statuses of temporary failures. Retrying a completion is safe, because it changes nothing at the server."""

_DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
_LONGEST_REASON = 300


class RefusalError(MemberError):
    """A server refused a request, and would refuse it again.

    Attributes:
        status: The HTTP status of its answer.
    """

    status: int


class HttpClient:
    """Sends requests to one server, from any thread, and many at a time.

    Connections and threads are created on first use, and not copied or pickled. No redirect is followed. A key is read
    from the environment for every request, and kept nowhere.

    Args:
        name: Of the member, for errors.
        url: Where the server's paths begin: "http://host:8000/v1".
        api_key_env: Name of the environment variable that holds a key. Default: no key is sent.
        timeout: Seconds to wait for an answer, or for the next part of one that comes in parts. Default: 120.

    Raises:
        ConfigurationError: If `url` is not a URL.
    """

    def __init__(self, name: str, url: str, api_key_env: str | None = None, timeout: float | None = None):
        self.name = name
        self.url = checked_url(url, name)
        self.api_key_env = api_key_env
        self.timeout = timeout or _TIMEOUT
        self._forget_connections()

    def __repr__(self) -> str:
        return f"HttpClient({self.name!r}, {self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "url", "api_key_env", "timeout")
        return {key: value for key, value in vars(self).items() if key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[httpx.Client, Threads] | None = None
        self._process = os.getpid()

    def close(self) -> None:
        """Close all connections; later requests open new ones."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            _close(*opened)

    # Asking

    def get(self, path: str, where: str) -> Any:
        """Request a path.

        Args:
            path: After the URL: "/models".
            where: The occasion, for errors: "when the ensemble was created", "in row 0 at step 1".

        Returns:
            The answer, a JSON value.

        Raises:
            MemberError: If there is no good answer.
            ConfigurationError: If the key cannot be sent.
        """
        return self._decoded(self._with_tries("GET", path, None, where), where)

    def post(self, path: str, body: Any, where: str) -> Any:
        """Send a JSON value to a path; see `get`."""
        return self._decoded(self._with_tries("POST", path, body, where), where)

    @contextlib.contextmanager
    def stream(self, path: str, body: Any, where: str) -> Iterator[Iterator[Any]]:
        """Send a JSON value to a path, and read the answer in parts; leaving early ends the request.

        A connection lost after the first part is not retried.
        """
        response = self._with_tries("POST", path, body, where, is_stream=True)
        with contextlib.closing(response):
            yield self._parts(response, where)

    def submit(self, function: Callable[..., _Made], *arguments: Any) -> "Future[_Made]":
        """Run a function with requests in a thread."""
        while (future := self._opened()[1].submit(function, *arguments)) is None:
            pass  # another thread has closed them meanwhile
        return future

    def side_by_side(self, function: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
        """Run a function with requests for all items at the same time; a single item stays in this thread."""
        if len(items) < 2:
            return [function(item) for item in items]
        futures = [self.submit(function, item) for item in items]
        return collected(futures)

    def error(self, where: str, reason: str, status: int | None = None) -> MemberError:
        """Return the error for a request that failed, or an answer that cannot be used.

        Args:
            where: The occasion: "in row 0 at step 1".
            reason: What is wrong, and what to do.
            status: The HTTP status with which the server refused, if it did.
        """
        message = f"member {self.name!r} at {self.url} failed {where}: {self._without_key(reason)}"
        if status is None:
            return MemberError(message)
        refusal = RefusalError(message)
        refusal.status = status
        return refusal

    # Sending

    def _opened(self) -> tuple[httpx.Client, Threads]:
        with self._lock:
            # The connections of a process that forked are not shared.
            if self._open is None or self._process != os.getpid():
                # uvicorn closes connections that were idle for five seconds.
                limits = httpx.Limits(
                    max_connections=MAX_AT_ONCE, max_keepalive_connections=MAX_AT_ONCE, keepalive_expiry=4.0
                )
                client = httpx.Client(
                    timeout=httpx.Timeout(self.timeout, connect=min(_CONNECT_TIMEOUT, self.timeout), pool=None),
                    limits=limits,
                    follow_redirects=False,
                )
                threads = Threads(MAX_AT_ONCE)
                self._open, self._process = (client, threads), os.getpid()
                weakref.finalize(self, _close, client, threads)
            return self._open

    def _with_tries(self, method: str, path: str, body: Any, where: str, is_stream: bool = False) -> httpx.Response:
        reason = ""
        for number in range(1, MAX_TRIES + 1):
            outcome = self._tried(method, path, body, is_stream)
            if isinstance(outcome, httpx.Response):
                return outcome
            reason = outcome.reason
            # Raised here, without the HTTP library's error as its cause, which knows the request's headers.
            if outcome.pause is None:
                raise self.error(where, f"{reason}.", outcome.status)
            if number < MAX_TRIES:
                time.sleep(max(outcome.pause, _FIRST_PAUSE * 2 ** (number - 1)))
        raise self.error(where, f"{reason}, {MAX_TRIES} times. Check that the server runs.")

    def _tried(self, method: str, path: str, body: Any, is_stream: bool) -> "httpx.Response | _Failure":
        try:
            response = self._sent(method, path, body, is_stream)
        except _DROPPED as error:
            return _Failure(f"the connection failed ({type(error).__name__}: {error})", 0.0)
        except httpx.TimeoutException:
            return _Failure(f"{self._no_answer}. Check whether the server is busy, or raise `MemberConfig.timeout`")
        except httpx.HTTPError as error:
            return _Failure(f"{type(error).__name__}: {error}")
        if response.is_success:
            return response
        asked = _retry_after(response)
        may_pass = response.status_code in _PASSING and asked <= _LONGEST_PAUSE
        return _Failure(self._refusal(response), asked if may_pass else None, response.status_code)

    @property
    def _no_answer(self) -> str:
        return f"no answer came within {self.timeout:g} seconds"

    def _sent(self, method: str, path: str, body: Any, is_stream: bool) -> httpx.Response:
        client = self._opened()[0]
        auth = None if self.api_key_env is None else _KeyFromEnvironment(self.name, self.api_key_env)
        request = client.build_request(method, self.url + path, json=body)
        response = client.send(request, auth=auth, stream=True)
        try:
            if not (is_stream and response.is_success):
                response.read()
        except BaseException:
            response.close()
            raise
        return response

    def _refusal(self, response: httpx.Response) -> str:
        """The message of a server that refused."""
        status = response.status_code
        if response.has_redirect_location:
            return (
                f"it redirects to {shown(response.headers['location'])} ({status}), which is not followed. If that "
                "address is right, pass it as `url`"
            )
        said = response.text
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            found = response.json()
            error = found.get("error", found)
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        said = "".join(one if one.isprintable() else " " for one in self._without_key(said))
        said = " ".join(said.split())[:_LONGEST_REASON]
        if status in (401, 403):
            has_key = (
                "no key was sent: name its environment variable with `MemberConfig(api_key_env=...)`"
                if self.api_key_env is None
                else f"the key in ${self.api_key_env} was sent"
            )
            said += f" ({has_key})"
        return f"it answers {status}: {said or response.reason_phrase}"

    def _without_key(self, text: str) -> str:
        """A server's message, which may repeat the key, without it."""
        return text if self.api_key_env is None else text.replace(os.environ.get(self.api_key_env) or "\0", "[key]")

    # Reading

    def _decoded(self, response: httpx.Response, where: str) -> Any:
        return self._value(response.text, where)

    def _value(self, text: str, where: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise self.error(where, f"its answer is not JSON: {text[:80]!r}.") from None

    def _parts(self, response: httpx.Response, where: str) -> Iterator[Any]:
        """The parts of an answer that comes as server-sent events."""
        reason = "its answer broke off"
        try:
            for line in response.iter_lines():
                kind, _, data = line.partition(":")
                if kind == "data" and data.strip() == "[DONE]":
                    return
                if kind == "data":
                    yield self._value(data, where)
        except httpx.TimeoutException:
            reason = f"{self._no_answer}. Raise `MemberConfig.timeout`"
        except httpx.HTTPError as error:
            reason += f" ({type(error).__name__}: {error})"
        raise self.error(where, f"{reason}.")


@dataclass(frozen=True)
class _Failure:
    """Why a try has failed.

    Attributes:
        reason: What errors say.
        pause: Seconds until the next try; None for no further try.
        status: The HTTP status of the answer, if there was one.
    """

    reason: str
    pause: float | None = None
    status: int | None = None


class _KeyFromEnvironment(httpx.Auth):
    """Reads the key for every request."""

    def __init__(self, name: str, variable: str):
        self._name, self._variable = name, variable

    def auth_flow(self, request: httpx.Request) -> Any:
        """Put the key into the request."""
        request.headers["Authorization"] = "Bearer " + _key(self._name, self._variable)
        yield request


def _key(name: str, variable: str) -> str:
    problem = _problem_of_key(os.environ.get(variable, ""))
    if problem is not None:
        raise ConfigurationError(
            f"the key of member {name!r} in the environment variable {variable!r} {problem}. Set it, or name another "
            "variable as `api_key_env`."
        )
    return os.environ[variable]


def _problem_of_key(key: str) -> str | None:
    if not key:
        return "is missing"
    # Errors of the HTTP library would show it.
    return (
        None
        if key.isascii() and key.isprintable() and " " not in key
        else "contains characters that a header cannot carry"
    )


def _retry_after(response: httpx.Response) -> float:
    """The number of seconds that a server asks to wait."""
    given = response.headers.get("retry-after", "0")
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def _close(client: httpx.Client, threads: Threads) -> None:
    threads.close()
    client.close()
