"""OpenAI's formats: whole or streamed answers, with log-probabilities and counts."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from ..decoding.running_batch import Written
from .texts import RowText

_LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot express."""

_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}
"""Characters at which some clients split lines, though no event ends there."""


@dataclass(frozen=True)
class Token:
    """A written token, with the likeliest alternatives."""

    data: bytes
    log_prob: float
    best: Sequence[tuple[bytes, float]]
    start: int  # in the text, in bytes


@dataclass
class Piece:
    """A new piece of an answer.

    Attributes:
        text: Its text.
        reasoning: Text that the model's template marks as reasoning.
        tool_calls: Calls of functions that are complete.
        tokens: The tokens of the text, if log-probabilities were requested.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[Any] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.tokens)


class Choice:
    """One answer, built from its ids as they arrive.

    Args:
        member: The primary.
        stops: Stop strings.
        end_ids: Ids that end a text.
        max_new_tokens: Number of ids after which it is cut.
        has_log_probs: Whether log-probabilities were requested.
        parser: Separates text, reasoning and calls of functions; None for text alone.

    Attributes:
        num_ids: Number of ids so far.
        finish_reason: Why it ended; None while it continues.
    """

    def __init__(
        self,
        member: Any,
        stops: Sequence[str],
        end_ids: Sequence[int],
        max_new_tokens: int,
        has_log_probs: bool,
        parser: Any = None,
    ):
        self._member, self._end_ids, self._most = member, end_ids, max_new_tokens
        self._row = RowText(member.tokenizer, stops, keeps_control=parser is not None)
        self._has_stops = bool(stops)
        self._has_log_probs, self._parser = has_log_probs, parser
        self._tokens: list[Token] = []
        self._num_bytes = 0
        self._calls: list[Any] = []
        self.finish_reason: str | None = None

    @property
    def num_ids(self) -> int:
        """Number of ids so far."""
        return len(self._row.ids)

    def begin(self) -> Piece:
        """Return the piece before the first id."""
        return self._parsed("" if self._parser is None else self._parser.initial_events, [])

    def take(self, written: Written) -> Piece:
        """Take in a step; returns the new piece."""
        text = ""
        if written.id is not None:
            if self._has_log_probs and not self._member.is_control(written.id):
                self._take_token(written)
            text = self._row.take(written.id)
        if written.ends:
            text += self._row.end()
        piece = self._parsed(text if self._parser is None else self._parser.feed(text) if text else [], [])
        if written.ends:
            self._end(piece)
        sent = len(self._row.text.encode())
        count = sum(1 for token in self._tokens if token.start < sent)
        piece.tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return piece

    def _end(self, piece: Piece) -> None:
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except (ValueError, RuntimeError):
                events = []  # it was cut within a part
            more = self._parsed(events, [])
            piece.text, piece.reasoning = piece.text + more.text, piece.reasoning + more.reasoning
            piece.tool_calls += more.tool_calls
        ids = self._row.ids
        is_ended = self._row.is_stopped or (bool(ids) and ids[-1] in self._end_ids)
        # If a stop string began in the prompt, none of it is in the text.
        is_ended |= self._has_stops and len(ids) < self._most
        self.finish_reason = "tool_calls" if self._calls else "stop" if is_ended else "length"

    def _parsed(self, found: Any, calls: list[Any]) -> Piece:
        if self._parser is None:
            return Piece(text=found)
        piece = Piece(tool_calls=calls)
        for item in response_events_to_chunks(found):
            if isinstance(item, ToolCall):
                piece.tool_calls.append(item)
                self._calls.append(item)
            elif isinstance(item, ReasoningText):
                piece.reasoning += item
            else:
                piece.text += item
        return piece

    def _take_token(self, written: Written) -> None:
        write = self._member.encoder.token_bytes.write
        assert written.id is not None
        assert written.log_prob is not None
        data = write([written.id])
        best = [(self._data_of(i), max(value, _LEAST)) for i, value in written.best]
        self._tokens.append(Token(data, max(written.log_prob, _LEAST), best, self._num_bytes))
        self._num_bytes += len(data)

    def _data_of(self, i: int) -> bytes:
        if self._member.is_control(i):
            return str(self._member.tokenizer.convert_ids_to_tokens(i)).encode()
        return self._member.encoder.token_bytes.write([i])  # type: ignore[no-any-return]


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces as one."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.reasoning += piece.reasoning
        whole.tool_calls += piece.tool_calls
        whole.tokens += piece.tokens
    return whole


class Format:
    """The format of an endpoint's answers.

    Args:
        request_id: Id of the request.
        model: Name of the ensemble.
    """

    kind: str
    kind_of_chunk: str

    def __init__(self, request_id: str, model: str):
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._num_calls = 0

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """A whole answer."""
        return {**self._frame(self.kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        """A part of a stream, as an event."""
        chunk: dict[str, Any] = {**self._frame(self.kind_of_chunk), "choices": list(choices)}
        if usage is not None:
            chunk["usage"] = usage
        return event(chunk)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def choice(self, index: int, piece: Piece, finish_reason: str | None, has_log_probs: bool) -> dict[str, Any]:
        """One answer of a whole one."""
        raise NotImplementedError

    def part(self, index: int, piece: Piece, finish_reason: str | None, is_first: bool) -> dict[str, Any]:
        """The new part of one answer in a stream."""
        raise NotImplementedError


class ChatFormat(Format):
    """The format of `/v1/chat/completions`."""

    kind, kind_of_chunk = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, piece: Piece, finish_reason: str | None, has_log_probs: bool) -> dict[str, Any]:
        """See `Format`."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if piece.tool_calls:
            message["tool_calls"] = [self._call(call) for call in piece.tool_calls]
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        log_probs = _of_chat(piece.tokens) if has_log_probs else None
        return {"index": index, "message": message, "finish_reason": finish_reason, "logprobs": log_probs}

    def part(self, index: int, piece: Piece, finish_reason: str | None, is_first: bool) -> dict[str, Any]:
        """See `Format`."""
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if piece.text or is_first:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = [{"index": self._num_calls, **self._call(call)} for call in piece.tool_calls]
        log_probs = _of_chat(piece.tokens) if piece.tokens else None
        return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": log_probs}

    def _call(self, call: Any) -> dict[str, Any]:
        self._num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"{self._id}_tool_call_{self._num_calls - 1}", "type": "function", "function": function}


class CompletionFormat(Format):
    """Of `/v1/completions`.

    Args:
        request_id: Id of the request.
        model: Name of the ensemble.
        suffix: Text appended to every answer.
    """

    kind = kind_of_chunk = "text_completion"

    def __init__(self, request_id: str, model: str, suffix: str = ""):
        super().__init__(request_id, model)
        self._suffix = suffix
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, piece: Piece, finish_reason: str | None, has_log_probs: bool) -> dict[str, Any]:
        """See `Format`."""
        return self._choice(index, piece, finish_reason, has_log_probs)

    def part(self, index: int, piece: Piece, finish_reason: str | None, is_first: bool) -> dict[str, Any]:
        """See `Format`."""
        return self._choice(index, piece, finish_reason, bool(piece.tokens))

    def _choice(self, index: int, piece: Piece, finish_reason: str | None, has_log_probs: bool) -> dict[str, Any]:
        text = piece.text + (self._suffix if finish_reason is not None else "")
        log_probs = self._log_probs(index, piece.tokens) if has_log_probs else None
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": log_probs}

    def _log_probs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(_name(token.data))
        return {
            "tokens": [_name(token.data) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [{_name(data): value for data, value in token.best} for token in tokens],
            "text_offset": offsets,
        }


def _of_chat(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_one(token.data, token.log_prob),
                "top_logprobs": [_one(data, value) for data, value in token.best],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _one(data: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": _name(data), "logprob": log_prob, "bytes": list(data)}


def _name(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def usage_of(num_prompt: int, num_written: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


def event(data: Any) -> str:
    """A server-sent event."""
    text = json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)
    return f"data: {text}\n\n"
