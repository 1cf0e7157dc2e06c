"""Checks before the server's endpoints: the key, the size of bodies, and disconnected clients."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_gone: ContextVar[asyncio.Event | None] = ContextVar("gone", default=None)

_OPEN = ("/health",)
"""Paths that need no key, for health checks."""

_MOST_UNREAD = 1 << 26
"""Bytes of a body that is too large after which the connection is cut."""


def client_is_gone() -> asyncio.Event:
    """Set once the client of the current request has disconnected."""
    return _gone.get() or asyncio.Event()


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in the form that OpenAI's clients expect."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Guard:
    """An ASGI application in front of another.

    Args:
        app: The other application.
        key: The key that clients have to send as `Authorization: Bearer`; None for no key.
        max_body_bytes: Largest size of a body.
        count: Receives the path and the status of every answer.
    """

    def __init__(self, app: Any, key: str | None, max_body_bytes: int, count: Callable[[str, int], None]):
        self._app, self._key, self._most, self._count = app, key, max_body_bytes, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
            await send(message)

        # A browser's preflight request has no key.
        if scope["method"] != "OPTIONS" and scope["path"] not in _OPEN and not self._is_let_in(scope):
            await _answer(counted, 401, "this server needs a key: `Authorization: Bearer …`.", "invalid_api_key")
            return
        body = await self._body(scope, receive)
        if body is None:
            message = f"the body is larger than this server's limit of {self._most} bytes."
            await _answer(counted, 413, message, "request_too_large")
            return
        gone = asyncio.Event()
        watch = asyncio.ensure_future(_watch(receive, gone))
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        token = _gone.set(gone)
        try:
            await self._app(scope, replay, counted)
        finally:
            _gone.reset(token)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    def _is_let_in(self, scope: Any) -> bool:
        if self._key is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._key}".encode())

    async def _body(self, scope: Any, receive: Any) -> bytes | None:
        """The whole body; None if it is too large."""
        length = dict(scope["headers"]).get(b"content-length", b"")
        is_too_large = length.isdigit() and int(length) > self._most
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= max(self._most, _MOST_UNREAD):
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            size += len(message.get("body", b""))
            is_too_large |= size > self._most
            if is_too_large:
                # It is still taken in: a client that is cut off while it sends reads no answer.
                parts.clear()
            else:
                parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        return None if is_too_large else b"".join(parts)


async def _watch(receive: Any, gone: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _answer(send: Any, status: int, message: str, code: str) -> None:
    body = json.dumps(error_body(status, message, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
