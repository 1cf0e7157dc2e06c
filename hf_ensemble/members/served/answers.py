"""Whole answers of a server: turns options into a request, and the result into an answer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig

from ...errors import ConfigurationError
from ..member import OwnAnswer, ids_in
from .completions import WrittenId

_WITHOUT = {
    "num_beams": 1,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "max_time": None,
}
"""Options that a server does not support, with the values at which they have no effect."""


def refuse_options(name: str, settings: GenerationConfig) -> None:
    """Refuse options that a server does not support.

    Args:
        name: Of the member, for the error.
        settings: The options.

    Raises:
        ConfigurationError: If one of them has an effect.
    """
    for option, nothing in _WITHOUT.items():
        value = getattr(settings, option, None)
        if value is not None and value != nothing:
            raise ConfigurationError(
                f"member {name!r} writes at its server, which does not support `{option}={value!r:.80}`. Leave it "
                "out, or load the member into this process."
            )


def sampling_of(settings: GenerationConfig, seed: int | None) -> dict[str, Any]:
    """Return the sampling options of a request.

    Args:
        settings: The options.
        seed: Determines its samples; None without sampling.
    """
    options: dict[str, Any] = {"repetition_penalty": _or(settings.repetition_penalty, 1.0)}
    if settings.do_sample:
        options |= {
            "temperature": _or(settings.temperature, 1.0),
            "top_k": _or(settings.top_k, 0),
            "top_p": _or(settings.top_p, 1.0),
            "min_p": _or(settings.min_p, 0.0),
            "seed": seed,
        }
    return options


def request_of(settings: GenerationConfig, seed: int | None, num_free: float) -> dict[str, Any]:
    """Return the options of a request for a whole answer.

    Args:
        settings: The options of the call.
        seed: Determines its samples; None without sampling.
        num_free: Number of free positions.
    """
    stop = settings.stop_strings
    max_tokens = int(min(settings.max_new_tokens or math.inf, num_free))
    options = {
        **sampling_of(settings, seed),
        "max_tokens": max_tokens,
        "min_tokens": min(settings.min_new_tokens or 0, max_tokens),
        "stop_token_ids": ids_in(settings.eos_token_id),
    }
    if stop:
        options |= {"stop": [stop] if isinstance(stop, str) else list(stop), "include_stop_str_in_output": True}
    return options


def written_answer(
    written: Sequence[WrittenId], reason: str, settings: GenerationConfig, is_control: Callable[[int], bool]
) -> OwnAnswer:
    """Return the server's text as an answer.

    Args:
        written: The ids.
        reason: Why it stopped: "stop" or "length".
        settings: The options of the call.
        is_control: Whether an id is a control token.
    """
    ids = tuple(one.id for one in written)
    log_prob = math.fsum(one.log_prob for one in written)
    if ids[-1] in ids_in(settings.eos_token_id):
        return OwnAnswer(ids, "eos" if is_control(ids[-1]) else "text", log_prob)
    return OwnAnswer(ids, "text" if reason == "stop" else None, log_prob)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
