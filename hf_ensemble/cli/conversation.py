"""One answer in a conversation."""

from collections.abc import Sequence
from typing import Any

from ..members.member_model import input_device
from ..model import EnsembleForCausalLM


def answer(
    ensemble: EnsembleForCausalLM,
    conversation: Sequence[dict[str, str]],
    options: dict[str, Any],
    streamer: Any = None,
) -> str:
    """Let an ensemble answer the last message of a conversation.

    Args:
        ensemble: Its tokenizer renders the conversation.
        conversation: Messages, each with `role` and `content`.
        options: Options of `generate`.
        streamer: As in `transformers`.

    Raises:
        ConfigurationError: If a chat template refuses the conversation.
    """
    tokenizer: Any = ensemble.tokenizer
    inputs = tokenizer.apply_chat_template(
        list(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = inputs.to(input_device(ensemble))
    ids = ensemble.generate(**inputs, **options, streamer=streamer)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
