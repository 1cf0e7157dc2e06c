"""An ensemble behind the server of `transformers serve`, which `openai` clients talk to.

The stock server makes its models by the name of their class in `transformers`. Here it gets a manager that holds the
one ensemble, loaded already; endpoints and formats are its own.
"""

import asyncio
import inspect
import itertools
import socket
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError

from .errors import ConfigurationError, MemberError
from .model import EnsembleForCausalLM

try:
    import fastapi
    import uvicorn
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager, TimedModel
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerateManager, GenerationState, _GenerationCancelled
except (ImportError, NameError) as error:
    raise ConfigurationError(
        f'serving needs packages that are not installed ({error}): `pip install "hf_ensemble[serve]"`.'
    ) from error

_start: ContextVar["Future[None] | None"] = ContextVar("start", default=None)
"""In the task of a request that streams: done when its first token is there, or why there is none."""


class _OneEnsemble(ModelManager):
    """The stock manager with one model, which was loaded by somebody else and is never let go."""

    def __init__(self, ensemble: EnsembleForCausalLM, name: str):
        super().__init__(device=str(ensemble.device), model_timeout=-1)
        self.force_model = name
        tokenizer: Any = ensemble.tokenizer
        self.loaded_models[name] = TimedModel(ensemble, -1, processor=tokenizer)

    def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
        """The name of the ensemble; others are refused."""
        if model_id != self.force_model:
            raise fastapi.HTTPException(400, f"This server has {self.force_model!r} only, not {model_id!r}.")
        return model_id

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The ensemble alone."""
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "hf_ensemble"}]

    get_gen_models = list_models
    """What transformers 5.17 calls it."""

    def shutdown(self) -> None:
        """Keep the model: it is the caller's."""


class _OneManager(GenerateManager):
    """The stock manager, whose streams tell errors before they begin from errors within."""

    def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Start generating in the thread that all requests share."""
        start: Future[None] = Future()
        start.set_running_or_notify_cancel()
        _start.set(start)

        def generate(streamer: Any, **options: Any) -> None:
            numbers = itertools.count()

            def put(value: Any) -> None:
                streamer.put(value)
                if next(numbers) == 1:  # 0 is the prompt
                    start.set_result(None)

            # `generate` ends a streamer whatever happens, and to the stock server an end is a success.
            passing_on = SimpleNamespace(put=put, end=lambda: None)
            try:
                model.generate(streamer=passing_on, **options)
            except _GenerationCancelled:
                raise
            except Exception as error:
                if not start.done():
                    start.set_exception(error)
                # The stock server writes it between double quotes as it is.
                raise RuntimeError(" ".join(str(error).replace("\\", "/").replace('"', "'").split())) from error
            streamer.end()
            if not start.done():
                start.set_result(None)

        stand_in: Any = SimpleNamespace(generate=generate)
        return super().generate_streaming(stand_in, *args, **kwargs)


class _Requests:
    """What a stock handler is given besides: a temperature samples, and a stream that cannot begin is an error."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(body.get("logit_bias"), dict):
            # Clients send whole numbers too, which `generate` refuses.
            body = {**body, "logit_bias": {key: float(value) for key, value in body["logit_bias"].items()}}
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        temperature = body.get("temperature")
        if temperature == 0:
            config.temperature = None
        elif temperature is not None or body.get("top_p") is not None:
            # The stock server leaves it to the model, most of which decode greedily.
            config.do_sample = True
        return config

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request."""
        response = await super().handle_request(body, request_id)  # type: ignore[misc]
        start = _start.get()
        if isinstance(response, StreamingResponse) and start is not None:
            await asyncio.wrap_future(start)
        return response


class _Chat(_Requests, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""


class _Completions(_Requests, CompletionHandler):
    """Answers `/v1/completions`."""


class _Responses(_Requests, ResponseHandler):
    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request; the stock server streams unless told not to, which no client expects."""
        return await super().handle_request({"stream": False, **body}, request_id)


def build_app(ensemble: EnsembleForCausalLM, name: str | None = None, *, enable_cors: bool = False) -> Any:
    """Make the FastAPI application of the stock server, with an ensemble as its only model.

    Requests are answered one after the other.

    Args:
        ensemble: The ensemble; it is not changed.
        name: What clients ask for. Default: the members' names, joined by `+`.
        enable_cors: Whether pages of other hosts may ask.
    """
    name = name or "+".join(member.name for member in ensemble.member_views)
    manager, state = _OneEnsemble(ensemble, name), GenerationState()
    state._generate_managers[name] = _OneManager()
    handlers: dict[str, Any] = {
        "chat_handler": _Chat(manager, state),
        "completion_handler": _Completions(manager, state),
        "response_handler": _Responses(manager, state),
        "transcription_handler": TranscriptionHandler(manager, state),
    }
    if "systemone_handler" in inspect.signature(build_server).parameters:
        from transformers.cli.serving.systemone import SystemOneHandler

        handlers["systemone_handler"] = SystemOneHandler(manager, state)
    app = build_server(manager, generation_state=state, enable_cors=enable_cors, **handlers)
    _answer_errors(app)
    return app


def _answer_errors(app: Any) -> None:
    """Let errors that a request causes be answered with their text, where clients look for it."""

    async def answer(request: Any, error: Any) -> Any:
        status, message = 400, str(error)
        if isinstance(error, HTTPException):
            status, message = error.status_code, str(error.detail)
        elif isinstance(error, KeyError):
            message = f"the request has no {error}."
        elif isinstance(error, MemberError) or not isinstance(error, refused):
            status, message = 500, f"{type(error).__name__}: {error}"
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)

    refused = (RequestValidationError, ValueError, TypeError, TemplateError)
    for kind in (HTTPException, KeyError, MemberError, *refused, Exception):
        app.add_exception_handler(kind, answer)


def serve(
    ensemble: EnsembleForCausalLM,
    host: str = "localhost",
    port: int = 8000,
    *,
    name: str | None = None,
    enable_cors: bool = False,
    log_level: str = "info",
) -> None:
    """Serve an ensemble until the process is interrupted.

    Args:
        ensemble: The ensemble.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        name: What clients ask for. Default: the members' names, joined by `+`.
        enable_cors: Whether pages of other hosts may ask.
        log_level: Of the server.

    Raises:
        ConfigurationError: If there is no such port.
        OSError: If the address cannot be listened on.
    """
    if not 0 <= port < 2**16:
        raise ConfigurationError(f"`port` has to be from 0 to {2**16 - 1}, but is {port}.")
    app = build_app(ensemble, name, enable_cors=enable_cors)
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=3)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another host or port."
        ) from error
    with listener:
        print(f"listening on http://{host}:{listener.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
