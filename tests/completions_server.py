"""A small server of completions on the loopback interface, as vLLM answers them: by plain transformers code on a tiny model.

It can be told to be slow, to die, to refuse, and to give answers that are wrong in many ways. What it was asked is kept.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from torch import Tensor

from tests.loopback import listening

MAX_ASKED = 128


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, message


class Gone(Exception):
    """The connection is dropped."""


@dataclass
class Asked:
    path: str
    body: dict[str, Any]
    authorization: str | None


@dataclass
class CompletionsServer:
    """The state of a server.

    Attributes:
        faults: What goes wrong with the next requests for completions, one each: takes the handler, and an answer that it
            may change (None before it is computed); None where nothing does.
        asked: What it was asked, in order.
    """

    model: Any
    tokenizer: Any
    name: str = "tiny"
    max_logprobs: int = 64
    max_model_len: int = 256
    key: str | None = None
    url: str = ""
    faults: list[Callable[[Any, Any], Any] | None] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def completions(self) -> list[dict[str, Any]]:
        return [one.body for one in self.asked if one.path.endswith("/completions")]

    def logits(self, ids: list[int]) -> Tensor:
        """After every id, of shape `(length, vocab_size)`."""
        with torch.no_grad(), self.lock:
            return self.model(torch.tensor([ids])).logits[0].float()


@contextmanager
def serving(model: Any, tokenizer: Any, **options: Any) -> Iterator[CompletionsServer]:
    """A running server."""
    server = CompletionsServer(model, tokenizer, **options)
    with listening(functools.partial(_Handler, server)) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server


# --- What can go wrong ----------------------------------------------------------------------------------------------


def refuses(status: int, message: str = "not now", **headers: str) -> Callable[[Any, Any], Any]:
    def fault(handler: Any, answer: Any) -> Any:
        handler.send(status, {"error": {"message": message, "code": status}}, headers)
        return None

    fault.is_early = True  # type: ignore[attr-defined]
    return fault


def drops(handler: Any, answer: Any) -> Any:
    raise Gone


def is_slow(seconds: float) -> Callable[[Any, Any], Any]:
    def fault(handler: Any, answer: Any) -> Any:
        time.sleep(seconds)
        return answer

    return fault


def changes(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any], Any]:
    """Change the one choice of an answer, or the answer by way of `choice["answer"]`."""

    def fault(handler: Any, answer: Any) -> Any:
        choice = answer["choices"][0]
        change(choice)
        return answer

    return fault


# --- Answers --------------------------------------------------------------------------------------------------------


def entry(i: int) -> str:
    return f"token_id:{i}"


def number(value: float) -> float:
    return max(value, -9999.0)


class Writer:
    """Writes on after a prompt, id by id."""

    def __init__(self, server: CompletionsServer, body: dict[str, Any]):
        self.server, self.body = server, body
        self.ids = list(body["prompt"])
        self.num_prompt = len(self.ids)
        self.rows = server.logits(self.ids)
        self.generator = torch.Generator().manual_seed(body.get("seed") or 0)
        self.reason: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.reason is None:
            logits = self.server.logits(self.ids)[-1] if len(self.ids) > self.num_prompt else self.rows[-1]
            i, row = self.choose(logits), logits.log_softmax(-1)
            self.ids.append(i)
            self.reason = self.end()
            yield {"id": i, "log_prob": number(row[i].item()), "top": self.top(row, i)}

    @property
    def new(self) -> list[int]:
        return self.ids[self.num_prompt :]

    def choose(self, row: Tensor) -> int:
        body = self.body
        scores = row.clone()
        if body["repetition_penalty"] != 1:
            seen = torch.tensor(sorted(set(self.ids)))
            penalized = scores[seen]
            scores[seen] = torch.where(
                penalized < 0, penalized * body["repetition_penalty"], penalized / body["repetition_penalty"]
            )
        for i, bias in (body.get("logit_bias") or {}).items():
            scores[int(i)] += bias
        if len(self.new) < (body.get("min_tokens") or 0):
            scores[body.get("stop_token_ids") or []] = -torch.inf
        if not body["temperature"]:
            return int(scores.argmax())
        scores = scores / body["temperature"]
        if body["top_k"] > 0:
            scores[scores < scores.topk(body["top_k"]).values[-1]] = -torch.inf
        probs = scores.softmax(-1)
        if body["top_p"] < 1:
            order = probs.argsort(descending=True)
            left = probs[order].cumsum(-1) - probs[order] < body["top_p"]
            probs[order[~left]] = 0.0
        probs[probs < body["min_p"] * probs.max()] = 0.0
        return int(torch.multinomial(probs / probs.sum(), 1, generator=self.generator))

    def top(self, row: Tensor, chosen: int) -> dict[str, float]:
        asked = self.body.get("logprob_token_ids")
        listed = asked if asked else row.topk(self.body["logprobs"]).indices.tolist() if self.body["logprobs"] else []
        return {entry(i): number(row[i].item()) for i in dict.fromkeys([chosen, *listed])}

    def end(self) -> str | None:
        body = self.body
        is_free = len(self.new) >= (body.get("min_tokens") or 0)
        text = self.server.tokenizer.decode(self.new)
        if is_free and (
            self.new[-1] in (body.get("stop_token_ids") or []) or any(s in text for s in body.get("stop") or [])
        ):
            return "stop"
        is_full = len(self.new) >= body["max_tokens"] or len(self.ids) >= self.server.max_model_len
        return "length" if is_full else None

    def prompt_logprobs(self) -> list[Any]:
        found: list[Any] = [None]
        for row, i in zip(self.rows.log_softmax(-1), self.ids[1 : self.num_prompt], strict=False):
            rank = int((row > row[i]).sum()) + 1
            decoded = self.server.tokenizer.decode([i])
            found.append({str(i): {"logprob": number(row[i].item()), "rank": rank, "decoded_token": decoded}})
        return found


def choice_of(items: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    logprobs = {
        "tokens": [entry(item["id"]) for item in items],
        "token_logprobs": [item["log_prob"] for item in items],
        "top_logprobs": [item["top"] for item in items],
        "text_offset": [0] * len(items),
    }
    return {"index": 0, "logprobs": logprobs, "token_ids": [item["id"] for item in items], **others}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, server: CompletionsServer, *args: Any):
        self.state = server
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_GET

    def _answer(self) -> None:
        state = self.state
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        authorization = self.headers.get("Authorization")
        with state.lock:
            state.asked.append(Asked(self.path, body, authorization))
            is_completion = self.path == "/v1/completions"
            fault = state.faults.pop(0) if is_completion and state.faults else None
        try:
            if state.key is not None and authorization != f"Bearer {state.key}":
                raise Refused(401, f"Unauthorized: {authorization}")
            if self.path == "/v1/models":
                self.send(200, {"object": "list", "data": [{"id": state.name, "max_model_len": state.max_model_len}]})
            elif is_completion:
                self._complete(body, fault)
            else:
                raise Refused(404, "Not Found")
        except Refused as error:
            self.send(error.status, {"error": {"message": error.message, "code": error.status}})
        except (Gone, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _complete(self, body: dict[str, Any], fault: Callable[[Any, Any], Any] | None) -> None:
        state = self.state
        check(state, body)
        if getattr(fault, "is_early", False):
            assert fault is not None
            fault(self, None)
            return
        writer = Writer(state, body)
        if body.get("stream"):
            self._stream(writer, fault)
            return
        items = list(writer)
        prompt = writer.prompt_logprobs() if body.get("prompt_logprobs") is not None else None
        choice = choice_of(items, finish_reason=writer.reason, prompt_logprobs=prompt)
        answer: Any = {"id": "cmpl-1", "model": state.name, "choices": [choice]}
        if fault is not None:
            answer = fault(self, answer)
        if answer is not None:
            self.send(200, answer)

    def _stream(self, writer: Writer, fault: Callable[[Any, Any], Any] | None) -> None:
        """In parts; a fault happens in the third."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for count, item in enumerate(writer):
            answer = {"model": self.state.name, "choices": [choice_of([item], finish_reason=writer.reason)]}
            if fault is not None and count == 2:
                answer = fault(self, answer)
            self._chunk(f"data: {json.dumps(answer)}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def check(state: CompletionsServer, body: dict[str, Any]) -> None:
    """Refuse what vLLM refuses."""
    width = state.model.config.vocab_size
    asked = body.get("logprob_token_ids") or []
    if body["model"] != state.name:
        raise Refused(404, f"The model `{body['model']}` does not exist.")
    for i in body["prompt"]:
        if i >= width:
            raise Refused(400, f"Token id {i} is out of vocabulary")
    if len(asked) > MAX_ASKED or any(i >= width for i in asked):
        raise Refused(
            400, f"Requested logprob_token_ids of length {len(asked)}, which is greater than max allowed: 128"
        )
    if body["logprobs"] > state.max_logprobs:
        raise Refused(
            400,
            f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: {state.max_logprobs}",
        )
    if len(body["prompt"]) >= state.max_model_len:
        raise Refused(400, f"This model's maximum context length is {state.max_model_len} tokens.")
