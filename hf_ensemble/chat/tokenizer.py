"""The tokenizer of an ensemble: the primary's, which remembers the conversations that it renders."""

import copy
import functools
from collections.abc import Collection
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..config import EnsembleConfig
from ..errors import ConfigurationError
from ..vocabulary.backend import without_dropout
from ..vocabulary.rendered import RenderedEncoder
from .conversation import read_conversations
from .memory import forget, remember
from .rendering import ChatRenderer

_SETTINGS = "ensemble_chat"
"""Key in `tokenizer_config.json` under which an ensemble's settings of its primary are saved."""

_encoders: WeakKeyDictionary[Any, tuple[Any, RenderedEncoder]] = WeakKeyDictionary()
"""For each tokenizer its number of tokens, its control tokens, and the encoder made for these.

Kept apart from the tokenizers, because attributes of a tokenizer are copied and saved with it.
"""


class _RemembersConversations:
    """What an ensemble's tokenizer does in addition to the primary's own."""

    def apply_chat_template(
        self: Any,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        *,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: Any = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """Render a conversation, or a batch of them, in the primary's template, and keep it for the other members.

        Its ids are this conversation until the tokenizer encodes a plain text to the same ids. A text returned with
        `tokenize=False` stays the conversation, however often it is encoded.

        Arguments and result are those of `transformers`. Content that spells control tokens is always encoded as text.

        Raises:
            ConfigurationError: If the template refuses the conversation, or it contains anything but text.
        """
        # Content is always text here.
        template_kwargs.pop("sanitize_control_tokens", None)
        options = template_kwargs | {"tools": tools, "documents": documents}
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        shape = {"padding": padding, "max_length": max_length, "return_tensors": return_tensors}
        if return_assistant_tokens_mask:
            # For training: nothing to remember, and unlike this class, the stock one forgets nothing.
            own = {"chat_template": chat_template, "tokenize": tokenize, "truncation": truncation}
            own |= {"return_dict": return_dict, "return_assistant_tokens_mask": True}
            own |= {"tokenizer_kwargs": tokenizer_kwargs} | shape | options
            stock = copy.copy(self)
            stock.__class__ = _base_of(type(self))
            return stock.apply_chat_template(conversation, **own)
        conversations, is_batch = read_conversations(conversation, **options)
        renderer = self._renderer(chat_template)
        texts = [] if tokenize else [renderer.text(item) for item in conversations]
        rows = []
        for item in conversations:
            # Tokenizing the rendered text gives these ids too, if its content spells no control token.
            ids = renderer.ids(item)
            rows.append(self._truncated(ids, truncation, max_length) if tokenize else ids)
            if len(rows[-1]) == len(ids):
                remember(self._chat_id, ids, item, is_text=not tokenize)
        if not tokenize:
            return texts if is_batch else texts[0]
        encoded = self._encoding(rows, shape, tokenizer_kwargs or {})
        if not is_batch and return_tensors is None:
            encoded = BatchEncoding({key: values[0] for key, values in encoded.items()})
        return encoded if return_dict else encoded["input_ids"]

    def _encode_plus(self: Any, *args: Any, **kwargs: Any) -> BatchEncoding:
        # All ways to tokenize plain text come here.
        encoded: BatchEncoding = super()._encode_plus(*args, **kwargs)  # type: ignore[misc]
        forget(self._chat_id, (list(compress(row.ids, row.attention_mask)) for row in encoded.encodings or []))
        return encoded

    @property
    def _settings(self: Any) -> dict[str, Any]:
        return self.init_kwargs.get(_SETTINGS) or {}

    @property
    def _chat_id(self: Any) -> str:
        # Ensembles saved by older versions have none.
        return str(self._settings.get("chat_id") or "")

    def _renderer(self: Any, chat_template: str | None) -> ChatRenderer:
        settings = self._settings
        version = (len(self), tuple(self.all_special_ids))
        known = _encoders.get(self)
        if known is None or known[0] != version:
            added = self.backend_tokenizer.get_added_tokens_decoder()
            control = {i for i, token in added.items() if token.special} | set(self.all_special_ids)
            control |= set(settings.get("control_ids", []))
            known = _encoders[self] = version, RenderedEncoder(self.backend_tokenizer, control)
        name = settings.get("name") or "primary"
        return ChatRenderer(self, known[1], name, chat_template, settings.get("system_prompt"))

    def _truncated(self: Any, ids: list[int], truncation: Any, max_length: int | None) -> list[int]:
        limit = self.model_max_length if max_length is None else max_length
        if truncation in (False, None, "do_not_truncate") or len(ids) <= limit:
            return ids
        return ids[-limit:] if self.truncation_side == "left" else ids[:limit]

    def _encoding(self: Any, rows: list[list[int]], shape: dict[str, Any], options: dict[str, Any]) -> Any:
        known = {"pad_to_multiple_of", "padding_side", "return_attention_mask"}
        if unknown := sorted(set(options) - known):
            raise ConfigurationError(
                f"`tokenizer_kwargs` has no option {unknown[0]!r} for the conversations of an ensemble. Options: "
                f"{sorted(known)}."
            )
        values: dict[str, Any] = {"input_ids": rows}
        if "token_type_ids" in self.model_input_names:
            values["token_type_ids"] = [[0] * len(row) for row in rows]
        # The warning would advise to tokenize text instead.
        self.deprecation_warnings = {**self.deprecation_warnings, "Asking-to-pad-a-fast-tokenizer": True}
        return self.pad(values, verbose=False, **shape, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class may have been created for the primary's class, so it is created again on loading.
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, (_base_of(type(self)),), *reduced[2:])


class EnsembleTokenizer(_RemembersConversations, PreTrainedTokenizerFast):  # type: ignore[misc]
    """The tokenizer of a saved ensemble: the primary's, which remembers the conversations that it renders."""


def _base_of(kind: type) -> type:
    return next(c for c in kind.__mro__ if not issubclass(c, _RemembersConversations))


@functools.cache
def _class_for(base: type) -> Any:
    if base is PreTrainedTokenizerFast:
        return EnsembleTokenizer
    return type(EnsembleTokenizer.__name__, (_RemembersConversations, base), {"__module__": __name__})


def _new(base: type) -> Any:
    return object.__new__(_class_for(base))


def ensemble_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    control: Collection[int],
    name: str,
    chat_template: str | None = None,
    system_prompt: str | None = None,
    chat_id: str = "",
) -> PreTrainedTokenizerBase:
    """Return a copy of the primary's tokenizer that pads on the left and remembers the conversations it renders.

    It encodes without dropout.

    Args:
        tokenizer: The primary's tokenizer; not changed.
        control: Ids of its control tokens.
        name: The primary's name, for errors.
        chat_template: A template to use instead of the tokenizer's own.
        system_prompt: A system turn to use instead of every conversation's; empty for none.
        chat_id: The `chat_id` of the ensemble that reads the conversations.
    """
    twin: Any = copy.copy(tokenizer)
    if not isinstance(twin, _RemembersConversations):
        base: Any = type(tokenizer)
        twin.__class__ = _class_for(base)
    twin.padding_side = "left"
    twin._tokenizer = without_dropout(twin.backend_tokenizer)
    added = twin.backend_tokenizer.get_added_tokens_decoder()
    unflagged = sorted(i for i in control if i in added and not added[i].special)
    settings = {"name": name, "control_ids": unflagged, "system_prompt": system_prompt, "chat_id": chat_id}
    twin.init_kwargs = {**twin.init_kwargs, _SETTINGS: settings}
    if chat_template is not None:
        twin.chat_template = chat_template
    return twin  # type: ignore[no-any-return]


AutoTokenizer.register(EnsembleConfig, fast_tokenizer_class=EnsembleTokenizer)
