"""Requests to a server's completions, and reading and checking its answers."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import MemberError
from .http_client import MAX_TRIES, HttpClient, RefusalError

MAX_ASKED = 128
"""Number of ids whose log-probabilities vLLM gives in one request."""

_PLAIN = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
}
"""Set in every request: a server's own defaults, from the model's generation config, would change texts."""

_NOTHING = -9999.0
"""What vLLM writes for minus infinity."""

_PREFIX = "token_id:"

_MIXED_UP_PAUSE = 0.02


@dataclass(frozen=True)
class WrittenId:
    """An id that a server has written.

    Attributes:
        id: The id.
        log_prob: Its log-probability.
        others: Log-probabilities of the requested ids at this position.
    """

    id: int
    log_prob: float
    others: Mapping[int, float]


@dataclass(frozen=True)
class ReadId:
    """An id of a prompt, as the server reads it.

    Attributes:
        log_prob: Its log-probability.
        is_best: Whether it is the model's best there.
        text: Its text; None if the server does not say.
    """

    log_prob: float
    is_best: bool
    text: str | None


@dataclass(frozen=True)
class Reading:
    """A server's result for a text that it has read.

    Attributes:
        ids: Each of its ids.
        next_id: The id it would write next, greedily.
        others: Log-probabilities of the requested ids after the text.
    """

    ids: list[ReadId]
    next_id: int
    others: Mapping[int, float]


class Completions:
    """One model behind a server. Prompts go as ids, and ids come back.

    Every answer is checked: it has to come from this model, contain what was requested, and have no NaN and no ids
    that the model lacks.

    Args:
        client: Reaches the server.
        model: The name under which it serves the model.
        vocab_size: Number of ids of the model, if known; higher ids are refused.
    """

    def __init__(self, client: HttpClient, model: str, vocab_size: int | None = None):
        self.client, self.model, self.vocab_size = client, model, vocab_size

    # Requests

    def best(self, ids: Sequence[int], count: int, where: str) -> dict[int, float]:
        """Return the ids that are most likely to follow a text.

        Args:
            ids: The text.
            count: How many.
            where: What this is for: "in row 0 at step 1".

        Returns:
            Their log-probabilities, the best first.

        Raises:
            MemberError: If the server does not answer, or gives a wrong answer.
        """
        found: Mapping[int, float] = {}
        for number in range(MAX_TRIES):
            if number:
                time.sleep(_MIXED_UP_PAUSE * 2**number)
            found = self._listed(ids, count, where)
            # vLLM loses the best ids of a request that shares a batch with a request for given ids.
            if len(found) >= count:
                return dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))[:count])
        raise self._error(where, f"it returned {len(found)} of the {count} best ids that were requested.")

    def lists(self, ids: Sequence[int], count: int, where: str) -> bool:
        """Whether the server returns this many best ids; see `best`."""
        try:
            return len(self._listed(ids, count, where)) >= count
        except RefusalError as error:
            if error.status != 400:
                raise
            return False

    def _listed(self, ids: Sequence[int], count: int, where: str) -> Mapping[int, float]:
        choice = self._choice({"prompt": list(ids), "max_tokens": 1, "logprobs": count}, where)
        return {i: value for i, value in self._written(choice, where)[0].others.items() if value > -math.inf}

    def log_probs_of(self, ids: Sequence[int], asked: Sequence[int], where: str) -> dict[int, float]:
        """Return the log-probabilities that given ids follow a text.

        Args:
            ids: The text.
            asked: At most `MAX_ASKED` ids.
            where: What this is for.

        Raises:
            MemberError: If the server does not answer, or gives a wrong answer.
        """
        body = {"prompt": list(ids), "max_tokens": 1, **_asking(asked)}
        return dict(self._of_asked(self._written(self._choice(body, where), where)[0], asked, where))

    def read(self, ids: Sequence[int], start: int, asked: Sequence[int], where: str) -> Reading:
        """Return how likely the ids of a text are. The server computes the whole text, whatever it has cached.

        Args:
            ids: The text.
            start: Number of leading ids to skip; at least 1, because the first has nothing before it.
            asked: At most `MAX_ASKED` ids whose log-probabilities after the text to request.
            where: What this is for.

        Raises:
            MemberError: If the server does not answer, or gives a wrong answer.
        """
        choice = self._choice({"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0, **_asking(asked)}, where)
        found = choice.get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(ids):
            raise self._error(where, "it returned no log-probabilities of the prompt.")
        of_ids = [self._read_id(i, entries, where) for i, entries in zip(ids[start:], found[start:], strict=True)]
        written = self._written(choice, where)[0]
        return Reading(of_ids, written.id, self._of_asked(written, asked, where))

    def write(self, ids: Sequence[int], options: Mapping[str, Any], where: str) -> tuple[list[WrittenId], str]:
        """Let the server continue a text.

        Args:
            ids: The text.
            options: Of the request: `max_tokens` and the like.
            where: What this is for.

        Returns:
            What it wrote, and why it ended: "stop" or "length".

        Raises:
            MemberError: If the server does not answer, or gives a wrong answer.
        """
        choice = self._choice({"prompt": list(ids), "logprobs": 0, **options}, where)
        return self._written(choice, where), str(choice.get("finish_reason"))

    @contextmanager
    def stream(
        self, ids: Sequence[int], options: Mapping[str, Any], asked: Sequence[int], where: str
    ) -> Iterator[Iterator[WrittenId]]:
        """Let the server continue a text, and read its ids one by one; leaving early ends the request.

        Args:
            ids: The text.
            options: Of the request: `max_tokens` and the like.
            asked: Ids whose log-probabilities to request at every position.
            where: What this is for.

        Raises:
            MemberError: If the server does not answer, or gives a wrong answer.
        """
        body = self._body({"prompt": list(ids), "stream": True, **_asking(asked), **options})
        with self.client.stream("/completions", body, where) as parts:
            yield self._ids_of(parts, asked, where)

    def _ids_of(self, parts: Iterator[Any], asked: Sequence[int], where: str) -> Iterator[WrittenId]:
        for part in parts:
            if isinstance(part, dict) and part.get("choices") == []:
                continue  # such as one with only the usage
            for written in self._written(self._checked(part, where), where, may_be_empty=True):
                self._of_asked(written, asked, where)
                yield written

    # Reading answers

    def _body(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **_PLAIN, **options}

    def _choice(self, options: Mapping[str, Any], where: str) -> dict[str, Any]:
        return self._checked(self.client.post("/completions", self._body(options), where), where)

    def _checked(self, answer: Any, where: str) -> dict[str, Any]:
        """The one choice of an answer."""
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._error(where, "its answer lacks the one entry in `choices` that was requested.")
        if answer.get("model") != self.model:
            raise self._error(where, f"it answered for the model {answer.get('model')!r:.100}, not {self.model!r}.")
        return choices[0]

    def _written(self, choice: Mapping[str, Any], where: str, may_be_empty: bool = False) -> list[WrittenId]:
        logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
        if may_be_empty and not ids:
            return []
        own = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        top = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
        for name, values in (("token_ids", ids), ("token_logprobs", own), ("top_logprobs", top)):
            if not isinstance(values, list) or not values or len(values) != len(ids or ()):
                raise self._error(where, f"its answer lacks `{name}`. The server has to be vLLM 0.32 or later.")
        assert isinstance(ids, list)
        assert isinstance(own, list)
        assert isinstance(top, list)
        return [
            WrittenId(self._id(i, where), self._log_prob(value, where), self._entries(others, where))
            for i, value, others in zip(ids, own, top, strict=True)
        ]

    def _entries(self, found: Any, where: str) -> dict[int, float]:
        if not isinstance(found, dict):
            raise self._error(where, "its answer lacks the entries of `top_logprobs`.")
        return {
            self._id(key.removeprefix(_PREFIX), where): self._log_prob(value, where) for key, value in found.items()
        }

    def _of_asked(self, written: WrittenId, asked: Sequence[int], where: str) -> Mapping[int, float]:
        missing = [i for i in asked if i not in written.others]
        if missing:
            raise self._error(
                where,
                f"it returned no log-probability of the requested id {missing[0]}. The server has to be vLLM 0.32 or "
                "later, which supports `logprob_token_ids`.",
            )
        return written.others

    def _read_id(self, i: int, entries: Any, where: str) -> ReadId:
        entry = entries.get(str(i)) if isinstance(entries, dict) else None
        if not isinstance(entry, dict):
            raise self._error(where, f"it returned no log-probability of id {i} of the prompt.")
        text = entry.get("decoded_token")
        log_prob = self._log_prob(entry.get("logprob"), where)
        return ReadId(log_prob, entry.get("rank") == 1, text if isinstance(text, str) else None)

    def _id(self, given: Any, where: str) -> int:
        try:
            found = int(given)
        except (TypeError, ValueError):
            raise self._error(
                where, f"its answer contains {given!r:.40} in place of an id. The server has to be vLLM 0.32 or later."
            ) from None
        if found < 0 or (self.vocab_size is not None and found >= self.vocab_size):
            raise self._error(
                where,
                f"its answer contains id {found}, but the ids of its model go from 0 to {(self.vocab_size or 0) - 1}. "
                "Check that this tokenizer belongs to the model.",
            )
        return found

    def _log_prob(self, given: Any, where: str) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or math.isnan(given) or given == math.inf:
            raise self._error(where, f"its answer contains {given!r:.40} in place of a log-probability.")
        return float(given) if given > _NOTHING else -math.inf

    def _error(self, where: str, reason: str) -> MemberError:
        return self.client.error(where, reason)


def _asking(asked: Sequence[int]) -> dict[str, Any]:
    """The options to request log-probabilities of given ids."""
    if not asked:
        return {"logprobs": 0}
    ids = list(asked)
    # In a batch, vLLM pads shorter lists with id 0, whose value is only right in a list of full length.
    return {"logprobs": 0, "logprob_token_ids": ids + [0] * (MAX_ASKED - len(ids)) if 0 in ids else ids}
