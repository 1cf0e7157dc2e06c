"""One answer in a conversation."""

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigurationError
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
        ConfigurationError: If the chat template is missing or refuses the conversation.
    """
    from jinja2 import TemplateError

    tokenizer: Any = ensemble.tokenizer
    try:
        inputs = tokenizer.apply_chat_template(
            list(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except (ValueError, TemplateError) as error:
        raise ConfigurationError(
            f"the conversation cannot be rendered: {error} Make a model with a chat template the primary (the first of "
            "the members), or use `hf-ensemble generate`, which needs none."
        ) from error
    inputs = inputs.to(ensemble.get_input_embeddings().weight.device)
    ids = ensemble.generate(**inputs, **options, streamer=streamer)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
