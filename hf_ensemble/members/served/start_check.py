"""Checks a server before an ensemble relies on it: its model, its limits, and whether a tokenizer fits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import ConfigurationError
from ...vocabulary.token_bytes import TEXT, TokenBytes
from .completions import Completions
from .http_client import RefusalError

_WHEN = "when the ensemble was created"
_MOST_LISTED = 1024
"""Number of best ids up to which the limit is searched."""

_NUM_COMPARED = 32
_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a server.

    Attributes:
        max_positions: Largest number of ids of a prompt that leaves room for one more; None if it does not say.
        max_listed: Number of best ids it lists; `_MOST_LISTED` means at least that many.
    """

    max_positions: int | None
    max_listed: int


def check_server(server: Completions, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes) -> ServerLimits:
    """Ask a server for its model and its limits, and compare its ids with those of a tokenizer.

    Args:
        server: The model behind its server.
        tokenizer: The tokenizer that is to fit.
        token_bytes: What its ids write.

    Raises:
        ConfigurationError: If the server has no such model, the tokenizer does not fit, or the server returns numbers
            that are not log-probabilities.
        MemberError: If it does not answer, or gives a wrong answer.
    """
    described = _described(server)
    text_ids = (token_bytes.kinds == TEXT).nonzero()[0].tolist()
    # From all over the vocabulary, including the last id, which a smaller model lacks.
    sample = [text_ids[n * (len(text_ids) - 1) // (_NUM_COMPARED - 1)] for n in range(_NUM_COMPARED)]
    length = described.get("max_model_len")
    _compare_ids(server, tokenizer, sample[-length + 1 :] if isinstance(length, int) else sample)
    return ServerLimits(length - 1 if isinstance(length, int) else None, _num_listed(server, sample[:1]))


def _described(server: Completions) -> dict[str, Any]:
    """The server's description of its model."""
    try:
        answer = server.client.get("/models", _WHEN)
    except RefusalError as error:
        if error.status != 404:
            raise
        raise ConfigurationError(f"{error} `url` has to end where the paths begin, usually in '/v1'.") from None
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise server.client.error(_WHEN, "its answer to `/models` is not a list. Does `url` end in '/v1'?")
    by_name = {str(model.get("id")): model for model in models}
    if server.model not in by_name:
        raise ConfigurationError(
            f"the server of member {server.client.name!r} at {server.client.url} has no model {server.model!r}. It has: "
            f"{', '.join(map(repr, by_name)) or 'none'}."
        )
    described: dict[str, Any] = by_name[server.model]
    return described


def _compare_ids(server: Completions, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Check that ids write the same for the server as for the tokenizer, and have log-probabilities."""
    name, url = server.client.name, server.client.url
    remedy = "Set `MemberConfig.tokenizer` to the tokenizer of the served model"
    try:
        entries = server.read(ids, 1, (), _WHEN).ids
    except RefusalError as error:
        if error.status != 400:
            raise
        raise ConfigurationError(f"the tokenizer of member {name!r} does not fit: {error} {remedy}.") from None
    for i, entry in zip(ids[1:], entries, strict=True):
        if entry.log_prob > 0:
            raise ConfigurationError(
                f"the server of member {name!r} at {url} returns {entry.log_prob:g} in place of a log-probability. "
                "Start it with `--logprobs-mode raw_logprobs`."
            )
        own, text = str(tokenizer.decode([i], clean_up_tokenization_spaces=False)), entry.text
        # Some decoders remove the space before a text's first word, others add one.
        if text is not None and _UNKNOWN not in text + own and text.strip() != own.strip():
            raise ConfigurationError(
                f"the tokenizer of member {name!r} does not fit: its id {i} writes {own!r:.40}, but {text!r:.40} at "
                f"the server {url}. {remedy}."
            )


def _num_listed(server: Completions, ids: Sequence[int]) -> int:
    """The largest number of best ids that the server lists, which it reveals only by refusing more."""
    most = _MOST_LISTED if server.vocab_size is None else min(_MOST_LISTED, server.vocab_size)
    low, high = 1, most
    server.best(ids, low, _WHEN)
    while low < high:
        # vLLM's default and typical choices are near the lower end.
        count = min(high, math.isqrt(low * high) + 1)
        if server.lists(ids, count, _WHEN):
            low = count
        else:
            high = count - 1
    return low
