"""The endpoints: turn a request into jobs, and what they write into an answer."""

import asyncio
import inspect
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import fastapi
import torch
from fastapi.responses import JSONResponse, Response, StreamingResponse
from torch import Tensor
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    DirectStreamer,
    Modality,
    _GenerationCancelled,
    _StreamError,
    build_response_parser,
)

from ..decoding.call import end_ids
from ..decoding.running_batch import Written
from ..errors import ConfigurationError
from .engine import Engine, Job
from .fields import Asked, read_fields, read_prompts, refuse_of_responses
from .formats import ChatFormat, Choice, CompletionFormat, Format, event, joined, usage_of
from .grammar import Grammars
from .guard import client_is_gone, error_body
from .values import read_logit_bias
from .work import ClientGone, Work

_DEFAULT_NEW_TOKENS = 1024

_start: ContextVar["Future[None] | None"] = ContextVar("start", default=None)
"""In the task of a streaming request: done when its first token is there, or with the error if there is none."""

_seed: ContextVar[int | None] = ContextVar("seed", default=None)
"""The seed of the current request, passed through stock code."""


class Requests:
    """What is added to a stock handler.

    A temperature samples, each request has its own seed, and only the ensemble is a known model.
    """

    engine: Engine
    grammars: Grammars
    model_manager: Any

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        biases = read_logit_bias(body, self.engine.ensemble.primary_member.vocab_size)
        # The stock server seeds the process.
        body = {name: value for name, value in body.items() if name not in ("seed", "logit_bias")}
        if body.get("max_completion_tokens") is not None:
            body["max_tokens"] = body["max_completion_tokens"]
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        if biases:
            config.sequence_bias = biases
        if config.num_return_sequences not in (None, 1):
            raise ConfigurationError("`num_return_sequences` is not supported by this server. Pass `n`.")
        temperature = body.get("temperature")
        if temperature == 0:
            config.temperature = None
        elif temperature is not None or body.get("top_p") is not None:
            # The stock server leaves this to the model, and most models decode greedily.
            config.do_sample = True
        most = self.engine.limits.max_new_tokens
        if body.get("generation_config") is None:
            config.max_new_tokens = min(config.max_new_tokens, most)
        elif config.max_new_tokens is None:
            config.max_new_tokens = min(_DEFAULT_NEW_TOKENS, most)
        elif config.max_new_tokens > most:
            raise ConfigurationError(f"`max_new_tokens` can be at most {most}, but is {config.max_new_tokens}.")
        return config

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        name = self.model_manager.process_model_name(body.get("model") or self.model_manager.force_model)
        model, processor = self.model_manager.load_model_and_processor(name)
        return name, model, processor


class _Writes(Requests):
    """An endpoint whose answers this library formats."""

    is_chat: bool
    _unused_fields: set[str] = set()

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request."""
        self._validate_request(body)  # type: ignore[attr-defined]
        name, model, tokenizer = self._resolve_model(body)
        asked = read_fields(body, self.is_chat, self.engine.limits)
        prompts = self._prompts(body, asked, tokenizer)
        config = self._build_generation_config(body, model.generation_config)
        processors = self.grammars.processors(body.get("response_format"))

        def make_job(number: int, tell: Callable[[Written], None]) -> Job:
            inputs, seed = prompts[number // asked.count], asked.seeds[number % asked.count]
            return Job(inputs, config, seed, tell, asked.num_best, processors)

        count = len(prompts) * asked.count
        if count > self.engine.limits.max_waiting:
            raise ConfigurationError(
                f"the request asks for {count} texts, but at most {self.engine.limits.max_waiting} may wait."
            )
        choices = [self._choice(config, asked, model, prompts[n // asked.count]) for n in range(count)]
        work = Work(self.engine, make_job, count, client_is_gone())
        answer = _Answer(work, choices, self._format(body, request_id, name), asked)
        num_prompt = sum(inputs["input_ids"].shape[1] for inputs in prompts)
        return await (answer.stream(num_prompt) if asked.is_streamed else answer.whole(num_prompt))

    def _choice(self, config: Any, asked: Asked, model: Any, inputs: dict[str, Tensor]) -> Choice:
        has_log_probs = asked.num_best is not None
        member = model.primary_member
        return Choice(
            member,
            asked.stops,
            end_ids(config),
            config.max_new_tokens,
            has_log_probs,
            self._parser(model, inputs, asked),
        )

    def _parser(self, model: Any, inputs: dict[str, Tensor], asked: Asked) -> Any:
        return None

    def _prompts(self, body: dict[str, Any], asked: Asked, tokenizer: Any) -> list[dict[str, Tensor]]:
        raise NotImplementedError

    def _format(self, body: dict[str, Any], request_id: str, model: str) -> Format:
        raise NotImplementedError


class Chat(_Writes, ChatCompletionHandler):
    """Answers `/v1/chat/completions`."""

    is_chat = True

    def _prompts(self, body: dict[str, Any], asked: Asked, tokenizer: Any) -> list[dict[str, Tensor]]:
        inputs = tokenizer.apply_chat_template(
            self.get_processor_inputs_from_messages(body["messages"], Modality.LLM),
            add_generation_prompt=True,
            tools=asked.tools,
            return_tensors="pt",
            return_dict=True,
            tokenize=True,
            **(body.get("chat_template_kwargs") or {}),
        )
        return [dict(inputs)]

    def _parser(self, model: Any, inputs: dict[str, Tensor], asked: Asked) -> Any:
        takes = inspect.signature(build_response_parser).parameters
        tools = {"tools": asked.tools} if "tools" in takes else {}
        return build_response_parser(model.tokenizer, model, inputs["input_ids"], **tools)

    def _format(self, body: dict[str, Any], request_id: str, model: str) -> Format:
        return ChatFormat(request_id, model)


class Completions(_Writes, CompletionHandler):
    """Answers `/v1/completions`."""

    is_chat = False

    def _prompts(self, body: dict[str, Any], asked: Asked, tokenizer: Any) -> list[dict[str, Tensor]]:
        rows = read_prompts(body.get("prompt", ""), lambda text: list(tokenizer(text)["input_ids"]))
        return [
            {"input_ids": torch.tensor([ids], dtype=torch.long), "attention_mask": torch.ones(1, len(ids)).long()}
            for ids in rows
        ]

    def _format(self, body: dict[str, Any], request_id: str, model: str) -> Format:
        return CompletionFormat(request_id, model, body.get("suffix") or "")


class _Answer:
    """Turns the jobs' results into an answer."""

    def __init__(self, work: Work, choices: Sequence[Choice], form: Format, asked: Asked):
        self._work, self._choices, self._form, self._asked = work, choices, form, asked
        self._has_log_probs = asked.num_best is not None

    async def whole(self, num_prompt: int) -> Any:
        """The whole answer, when all texts have ended."""
        pieces = [[choice.begin()] for choice in self._choices]
        try:
            while told := await self._work.next():
                number, written = told
                pieces[number].append(self._choices[number].take(written))
        except ClientGone:
            return Response(status_code=499)
        except asyncio.CancelledError:
            self._work.give_up()
            raise
        choices = [
            self._form.choice(number, joined(of_choice), self._choices[number].finish_reason, self._has_log_probs)
            for number, of_choice in enumerate(pieces)
        ]
        return JSONResponse(self._form.whole(choices, self._usage(num_prompt)))

    async def stream(self, num_prompt: int) -> Any:
        """A stream, which begins with its first token; before that, an error is a separate answer."""
        try:
            first = await self._work.next()
        except ClientGone:
            return Response(status_code=499)
        return StreamingResponse(self._events(first, num_prompt), media_type="text/event-stream")

    async def _events(self, told: tuple[int, Written] | None, num_prompt: int) -> AsyncIterator[str]:
        begun: set[int] = set()
        try:
            while told is not None:
                number, written = told
                choice = self._choices[number]
                is_first = number not in begun
                piece = joined([choice.begin(), choice.take(written)]) if is_first else choice.take(written)
                if piece or is_first or written.ends:
                    begun.add(number)
                    yield self._form.chunk([self._form.part(number, piece, choice.finish_reason, is_first)])
                told = await self._work.next()
            if self._asked.wants_usage:
                yield self._form.chunk([], self._usage(num_prompt))
            yield "data: [DONE]\n\n"
        except ClientGone:
            return
        except Exception as error:
            yield event(error_body(500, str(error)))
        finally:
            self._work.give_up()

    def _usage(self, num_prompt: int) -> dict[str, int]:
        return usage_of(num_prompt, sum(choice.num_ids for choice in self._choices))


class Responses(Requests, ResponseHandler):
    """Answers `/v1/responses`, in the stock server's formats."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. The stock server streams unless told not to, which no client expects."""
        refuse_of_responses(body, self.engine.limits)
        _seed.set(body.get("seed"))
        response = await super().handle_request({"stream": False, **body}, request_id)
        start = _start.get()
        if isinstance(response, StreamingResponse) and start is not None:
            await asyncio.wrap_future(start)
        return response


class EngineManager(BaseGenerateManager):
    """Lets stock handlers use the engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def _job(self, inputs: Any, config: Any, tell: Callable[[Written], None]) -> Job:
        seed = _seed.get()
        own = random.SystemRandom().randrange(2**63) if seed is None else seed % 2**63
        prompt = {name: inputs[name].cpu() for name in ("input_ids", "attention_mask") if name in inputs}
        return Job(prompt, config, own, tell)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> Any:
        """See the stock manager."""
        start: Future[None] = Future()
        start.set_running_or_notify_cancel()
        _start.set(start)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        streamer = DirectStreamer(processor._tokenizer, loop, queue, response_parser=response_parser)
        streamer.put(inputs["input_ids"])

        def tell(written: Written) -> None:
            try:
                if written.error is not None:
                    if not start.done():
                        start.set_exception(written.error)
                    # The stock server writes it between double quotes without escaping.
                    message = " ".join(str(written.error).replace("\\", "/").replace('"', "'").split())
                    loop.call_soon_threadsafe(queue.put_nowait, _StreamError(message))
                    return
                if written.id is not None:
                    streamer.put(torch.tensor([written.id]))
                if not start.done():
                    start.set_result(None)
                if written.ends:
                    streamer.end()
            except (_GenerationCancelled, RuntimeError):  # or the loop has been closed
                job.give_up()

        job = self._job(inputs, gen_config, tell)
        self._engine.submit([job])
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """See the stock manager."""
        work = Work(self._engine, lambda _, tell: self._job(inputs, gen_config, tell), 1, client_is_gone())
        ids: list[int] = []
        try:
            while told := await work.next():
                if told[1].id is not None:
                    ids.append(told[1].id)
        except ClientGone:
            raise fastapi.HTTPException(499, "the client has disconnected.") from None
        return processor.decode(ids, skip_special_tokens=True), inputs["input_ids"].shape[-1], torch.tensor(ids)

    def stop(self) -> None:
        """Do nothing, because the engine belongs to the application."""
