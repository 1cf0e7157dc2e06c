"""How one member reads a conversation: its template, its system prompt, its control tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigurationError
from ..vocabulary.rendered import RenderedEncoder
from .conversation import Conversation

PLAIN_TEMPLATE = (
    "{{ text_start }}{% for message in messages %}{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{% if message['role'] != 'system' %}{{ message['role'] | capitalize }}{{ ':\\n' }}{% endif %}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:\\n' }}{% endif %}"
)
"""The template for members without one: BOS, the system turn unchanged, then turns headed by their roles."""


@dataclass(frozen=True, eq=False)
class ChatRenderer:
    """Renders conversations for one member.

    Attributes:
        tokenizer: The member's tokenizer; only read.
        encoder: Encodes what the template rendered.
        name: The member's name, for errors.
        chat_template: A template to use instead of the tokenizer's own.
        system_prompt: A system turn to use instead of the conversation's; empty for none.
        writable: Replaces text that the member cannot write.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder: RenderedEncoder
    name: str
    chat_template: str | None = None
    system_prompt: str | None = None
    writable: Callable[[str], str] | None = None

    def text(self, conversation: Conversation) -> str:
        """Render to text, which does not distinguish control tokens from content that spells them.

        Raises:
            ConfigurationError: If the template refuses the conversation.
        """
        return self._render(conversation.with_system_prompt(self.system_prompt))

    def ids(self, conversation: Conversation) -> list[int]:
        """Render to ids: the template's control tokens are real, and content stays text.

        Raises:
            ConfigurationError: If the template refuses the conversation.
        """
        conversation = conversation.with_system_prompt(self.system_prompt)
        if self.writable is not None:
            conversation = conversation.with_strings(self.writable)
        sign = _unused_sign(conversation)
        marked = conversation.with_strings(lambda text: self.encoder.mark(text, sign))
        text = self._render(marked)
        all_marked = conversation.with_strings(lambda text: self.encoder.mark_all(text, sign))
        if all_marked != marked:
            # If these differ, the template joined several pieces of content into a control token.
            cautious = self._render(all_marked)
            if self.encoder.controls(cautious, sign) != self.encoder.controls(text, sign):
                text = cautious
        return self.encoder.encode(text, sign)

    def _render(self, conversation: Conversation) -> str:
        """Render unchanged, with parts joined, or with system turns folded: the first that the template accepts."""
        template, more = self.chat_template, {}
        if template is None and self.tokenizer.chat_template is None:
            template, more = PLAIN_TEMPLATE, {"text_start": self.encoder.start}
        errors = []
        for way in (conversation, conversation.with_joined_parts(), conversation.with_folded_system()):
            options = {**way.options, **more, "chat_template": template, "tokenize": False}
            try:
                text = str(PreTrainedTokenizerBase.apply_chat_template(self.tokenizer, way.messages, **options))
            except (TemplateError, TypeError, ValueError) as error:
                errors.append(error)
                continue
            if all(_shows_parts(text, message.get("content")) for message in way.messages):
                return text
        raise ConfigurationError(
            f"the chat template of member {self.name!r} refuses the conversation: {errors[0]} Change the conversation, "
            "or give the member another template with `MemberConfig(chat_template=...)`."
        ) from errors[0]


def _shows_parts(text: str, content: Any) -> bool:
    """Whether a rendering shows the texts of a turn's parts, rather than the Python list."""
    if not isinstance(content, list):
        return True
    return str(content) not in text and all(part["text"].strip() in text for part in content)


def _unused_sign(conversation: Conversation) -> str:
    texts: dict[str, str] = {}
    conversation.with_strings(lambda text: texts.setdefault(text, text))
    # Noncharacters, reserved for internal use: no text contains them.
    sign = next((sign for sign in map(chr, range(0xFDD0, 0xFDF0)) if not any(sign in text for text in texts)), None)
    if sign is None:
        raise ConfigurationError("a conversation must not contain every noncharacter from U+FDD0 to U+FDEF.")
    return sign
