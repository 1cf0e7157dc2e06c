"""The generation options of one call: the user's, and those that the method sets."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ..decoding.call import Call, take_prompt
from .base import Mode

_OF_THE_PROMPT = ("input_ids", "attention_mask", "token_type_ids", "tokenizer")
"""Keyword arguments of `generate` that describe the prompt, or are not for the primary."""


def take_options(model: Any, call: Call, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Give a call its generation options, and the primary's inputs besides its prompt.

    Args:
        model: The ensemble.
        call: The call.
        generation_config: The argument of `generate`.
        kwargs: Its other arguments.
    """
    given = {key: value for key, value in kwargs.items() if value is not None}
    own, num_returned = call.config.generate_options_beside(generation_config), None
    if call.config.decides == "answers":
        # Several returned answers may each have been written greedily by another writer.
        asked = [given.pop("num_return_sequences", None), getattr(generation_config, "num_return_sequences", None)]
        asked += [own.get("num_return_sequences"), model.generation_config.num_return_sequences]
        num_returned = next((count for count in asked if count is not None), 1)
        own["num_return_sequences"] = 1
        if generation_config is None and model.generation_config.num_return_sequences not in (None, 1):
            # Otherwise the ensemble's own would be checked first.
            generation_config = GenerationConfig()
    if generation_config is None:
        given = own | given
    elif own:
        # `transformers` refuses options beside a configuration.
        generation_config = copy.deepcopy(generation_config)
        unknown = generation_config.update(**own)
        # They are refused like any other.
        given = unknown | given
    call.settings, others = model._prepare_generation_config(generation_config, **given)
    if num_returned is not None:
        call.settings.num_return_sequences = num_returned
    call.primary_inputs = frozenset(others).difference(_OF_THE_PROMPT)


def run_call(
    model: Any,
    call: Call,
    mode_for: Callable[[Call], Mode],
    inputs: Tensor | None,
    kwargs: dict[str, Any],
    member_prompts: Sequence[Any] | None = None,
) -> Any:
    """Run a call in a mode that is chosen once its options are known.

    Args:
        model: The ensemble.
        call: The call.
        mode_for: Returns the mode, or refuses.
        inputs: As in `generate`.
        kwargs: Generation options and the primary's inputs, as in `generate`.
        member_prompts: As in `generate`.
    """
    take_options(model, call, call.arguments.get("generation_config"), kwargs)
    mode = mode_for(call)
    inputs = take_prompt(call, inputs, kwargs, member_prompts)
    if call.settings.stop_strings is not None and kwargs.get("tokenizer") is None:
        kwargs["tokenizer"] = model.tokenizer
    return mode.run(model, inputs, {**call.arguments, **kwargs})
