"""A member's tokenizer: what its ids write, and how it reads texts and conversations."""

import copy
from collections.abc import Iterable
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from ..chat.rendering import ChatRenderer
from ..vocabulary.backend import without_dropout
from ..vocabulary.encoding import ByteEncoder
from ..vocabulary.rendered import RenderedEncoder
from ..vocabulary.token_bytes import TokenBytes


class TokenizedMember:
    """The part of a member that concerns its tokenizer; see `Member`."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        chat_template: str | None = None,
        system_prompt: str | None = None,
    ):
        self.name, self.tokenizer, self.vocab_size = name, tokenizer, vocab_size
        self.eos_token_ids = self.ids_with_row(sorted(set(eos_token_ids)))
        self.encoder = ByteEncoder(
            tokenizer, TokenBytes(tokenizer, num_ids=vocab_size, end_ids=self.eos_token_ids, name=name)
        )
        token_bytes = self.encoder.token_bytes
        self.renderer = ChatRenderer(
            tokenizer,
            RenderedEncoder(token_bytes.backend, token_bytes.control, token_bytes.num_ids),
            name,
            chat_template,
            system_prompt,
            self.encoder.replace_unwritable,
        )

    def is_control(self, member_id: int) -> bool:
        """Whether an id is a control token of this member."""
        return self.encoder.token_bytes.is_control(member_id)

    def ids_with_row(self, ids: Iterable[int]) -> list[int]:
        """Leave out ids without a row in the model, which cannot be written or used as an index."""
        return [i for i in ids if 0 <= i < self.vocab_size]

    def encode(self, text: str, starts: bool = True) -> list[int]:
        """Encode a text as a user of the tokenizer would, without dropout, reading control tokens that it spells.

        Args:
            text: The text.
            starts: Whether to add what the tokenizer puts in front of a text (BOS).
        """
        ids: list[int] = self._tokenizer_without_dropout(text, add_special_tokens=starts)["input_ids"]
        return ids

    @cached_property
    def _tokenizer_without_dropout(self) -> PreTrainedTokenizerBase:
        backend = without_dropout(self.tokenizer.backend_tokenizer)
        if backend is self.tokenizer.backend_tokenizer:
            return self.tokenizer
        twin = copy.copy(self.tokenizer)
        twin._tokenizer = backend
        return twin
