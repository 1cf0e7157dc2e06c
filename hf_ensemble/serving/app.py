"""The application: the stock server's endpoints, with the engine behind them."""

import contextlib
import inspect
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import uvicorn
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers.cli.serving.model_manager import ModelManager, TimedModel
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from .. import messages
from ..errors import ConfigurationError, MemberError
from ..model import EnsembleForCausalLM
from .engine import Closing, Engine, Expired, QueueFull
from .grammar import Grammars
from .guard import Guard, error_body
from .handlers import Chat, Completions, EngineManager, Responses
from .limits import Limits

_GRACE = 2.0
"""Seconds for running requests after a signal."""

_PATIENCE = 20
"""Seconds after which remaining connections are cut."""


class _OneEnsemble(ModelManager):
    """The stock manager with one model, which the caller loaded and which is never unloaded."""

    def __init__(self, ensemble: EnsembleForCausalLM, name: str):
        super().__init__(device=str(ensemble.device), model_timeout=-1)
        self.force_model = name
        tokenizer: Any = ensemble.tokenizer
        self.loaded_models[name] = TimedModel(ensemble, -1, processor=tokenizer)

    def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
        """The name of the ensemble; others are refused."""
        if model_id != self.force_model:
            raise fastapi.HTTPException(
                404, f"the model {model_id!r} does not exist here. This server has {self.force_model!r} only."
            )
        return model_id

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The ensemble alone."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "hf_ensemble"}]

    get_gen_models = list_models
    """Its name in transformers 5.17."""

    def shutdown(self) -> None:
        """Keep the model, which belongs to the caller."""


def build_app(
    ensemble: EnsembleForCausalLM,
    name: str | None = None,
    *,
    enable_cors: bool = False,
    limits: Limits | None = None,
    api_key: str | None = None,
) -> Any:
    """Return the FastAPI application of the stock server, with an ensemble as its only model.

    Concurrent requests are answered together, if the method decides token by token.

    Args:
        ensemble: The ensemble; it is not changed.
        name: Model name for clients. Default: the members' names, joined by `+`.
        enable_cors: Whether web pages of other hosts may send requests.
        limits: The limits. Default: `Limits()`.
        api_key: The key that clients have to send. Default: none.

    Raises:
        ConfigurationError: If the key is empty.
    """
    if api_key == "":
        raise ConfigurationError("`api_key` has to be a key, or None for no key, but is empty.")
    name = name or "+".join(member.name for member in ensemble.member_views)
    limits = limits or Limits()
    engine, grammars = Engine(ensemble, limits), Grammars(ensemble)
    manager, state = _OneEnsemble(ensemble, name), GenerationState()
    state._generate_managers[name] = EngineManager(engine)  # type: ignore[assignment]
    handlers: dict[str, Any] = {
        "chat_handler": Chat(manager, state),
        "completion_handler": Completions(manager, state),
        "response_handler": Responses(manager, state),
    }
    for handler in handlers.values():
        handler.engine, handler.grammars = engine, grammars
    handlers["transcription_handler"] = TranscriptionHandler(manager, state)
    if "systemone_handler" in inspect.signature(build_server).parameters:
        from transformers.cli.serving.systemone import SystemOneHandler

        handlers["systemone_handler"] = SystemOneHandler(manager, state)
    app = build_server(manager, generation_state=state, enable_cors=enable_cors, **handlers)
    _answer_errors(app)
    _end_with(app, engine)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(engine.report(), media_type="text/plain; version=0.0.4")

    known = {getattr(route, "path", None) for route in app.routes}

    def count(path: str, status: int) -> None:
        engine.metrics.add("requests_total", endpoint=path if path in known else "other", status=str(status))

    app.add_middleware(Guard, key=api_key, max_body_bytes=limits.max_body_bytes, count=count)
    app.state.engine = engine
    return app


def _end_with(app: Any, engine: Engine) -> None:
    """End the engine when the application ends."""
    stock = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with stock(app) as state:
            try:
                yield state
            finally:
                engine.close()

    app.router.lifespan_context = lifespan


def _answer_errors(app: Any) -> None:
    """Answer errors that a request causes with their text, in the form that clients expect."""

    async def answer(request: Any, error: Any) -> Any:
        status, message, headers = 400, str(error), {}
        if isinstance(error, HTTPException):
            status, message = error.status_code, str(error.detail)
        elif isinstance(error, (QueueFull, Closing)):
            status, headers = 503, {"Retry-After": str(getattr(error, "seconds", 1))}
        elif isinstance(error, Expired):
            status = 504
        elif isinstance(error, KeyError):
            message = f"the request has no {error}."
        elif isinstance(error, MemberError) or not isinstance(error, refused):
            status, message = 500, f"{type(error).__name__}: {error}"
        code = "model_not_found" if status == 404 and "model" in message else None
        return JSONResponse(error_body(status, message, code), status, headers)

    refused = (RequestValidationError, ValueError, TypeError, TemplateError)
    for kind in (HTTPException, KeyError, MemberError, QueueFull, Closing, Expired, *refused, Exception):
        app.add_exception_handler(kind, answer)


class _Server(uvicorn.Server):
    """Ends within seconds of a signal, which running requests have to finish."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handle a signal, which may come at any point."""
        self._engine.end_within(_GRACE)
        super().handle_exit(sig, frame)


def serve(
    ensemble: EnsembleForCausalLM,
    host: str = "localhost",
    port: int = 8000,
    *,
    name: str | None = None,
    enable_cors: bool = False,
    log_level: str = "info",
    limits: Limits | None = None,
    api_key: str | None = None,
) -> None:
    """Serve an ensemble until the process is interrupted.

    Args:
        ensemble: The ensemble.
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        name: Model name for clients. Default: the members' names, joined by `+`.
        enable_cors: Whether web pages of other hosts may send requests.
        log_level: Of the server.
        limits: The limits. Default: `Limits()`.
        api_key: The key that clients have to send. Default: none, with a warning if other machines can reach the
            server.

    Raises:
        ConfigurationError: If there is no such port, or the key is empty.
        OSError: If the address cannot be listened on.
    """
    if not 0 <= port < 2**16:
        raise ConfigurationError(f"`port` has to be from 0 to {2**16 - 1}, but is {port}.")
    app = build_app(ensemble, name, enable_cors=enable_cors, limits=limits, api_key=api_key)
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=_PATIENCE)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another host or port."
        ) from error
    if api_key is None and not ipaddress.ip_address(listener.getsockname()[0].split("%")[0]).is_loopback:
        messages.warn(
            f"other machines can reach this server at {host!r}, and it needs no key. Set one (`--api-key-env NAME`), "
            "or listen on localhost."
        )
    with listener:
        print(f"listening on http://{host}:{listener.getsockname()[1]}/v1", flush=True)
        _Server(config, app.state.engine).run(sockets=[listener])
