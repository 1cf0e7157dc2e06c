"""One model of an ensemble, with its tokenizer."""

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import messages
from ..chat.rendering import ChatRenderer
from ..errors import ConfigurationError
from ..vocabulary.backend import without_dropout
from ..vocabulary.encoding import ByteEncoder
from ..vocabulary.rendered import RenderedEncoder
from ..vocabulary.token_bytes import TEXT, TokenBytes
from .cache_probe import NUM_TRIAL_IDS, find_cache_mode
from .cached_rows import CACHE_MODES, CachedRows
from .member_model import MemberModel
from .per_row_cache import SeparateRows
from .repacked_cache import RepackedRows
from .static_buffers import BufferPool
from .static_cache import StaticRows

_MAX_MODES = 8
"""States of a model, such as with one adapter or another, for which it is kept how its cache can be used."""


class Member(MemberModel):
    """A causal language model with its tokenizer, as an ensemble sees it.

    Neither the model nor the tokenizer, nor their configurations, are ever changed.

    Args:
        model: A causal language model.
        tokenizer: Its fast tokenizer.
        name: Name used in errors. Default: the last part of the model's `name_or_path`, else its class.
        extra_eos_token_ids: Ids that end a text besides those of its generation config.
        chat_template: A template in place of the tokenizer's own.
        system_prompt: A system turn in place of every conversation's; empty for none.

    Attributes:
        eos_token_ids: Ids that end a text: those of the generation config, else of the model config, else of the
            tokenizer, plus `extra_eos_token_ids`; without any that the model has no row for.
        encoder: Which of its ids write given bytes.
        renderer: How it reads a conversation.

    Raises:
        ConfigurationError: If the model is no decoder-only causal language model.
        VocabularyError: If the tokenizer cannot be understood.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        system_prompt: str | None = None,
    ):
        super().__init__(model, name)
        self._given_mode: str | None = None
        self._found_modes: dict[Any, str] = {}
        self.tokenizer = tokenizer
        self.eos_token_ids = self.ids_with_row(sorted({*self._own_eos_token_ids(), *extra_eos_token_ids}))
        self.encoder = ByteEncoder(
            tokenizer, TokenBytes(tokenizer, num_ids=self.vocab_size, end_ids=self.eos_token_ids, name=self.name)
        )
        token_bytes = self.encoder.token_bytes
        self.renderer = ChatRenderer(
            tokenizer,
            RenderedEncoder(token_bytes.backend, token_bytes.control, token_bytes.num_ids),
            self.name,
            chat_template,
            system_prompt,
            self.encoder.replace_unwritable,
        )

    def is_control(self, member_id: int) -> bool:
        """Whether an id is a control token of this member."""
        return self.encoder.token_bytes.is_control(member_id)

    def ids_with_row(self, ids: Iterable[int]) -> list[int]:
        """Leave out ids that the model has no row for: nothing can write them, and as an index they would be wrong."""
        return [i for i in ids if 0 <= i < self.vocab_size]

    def encode(self, text: str, starts: bool = True) -> list[int]:
        """Encode a text as a user of the tokenizer would, without dropout; control tokens that it spells are such.

        Args:
            text: The text.
            starts: Whether what the tokenizer puts in front of a text (BOS) stands there.
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

    @property
    def cache_mode(self) -> str:
        """How the member's cache can follow a text that changes at its end.

        `static`: a cache of fixed size, with steps captured as CUDA graphs (on a GPU). `repack`: one cache for all rows,
        each row moved to the right edge. `row_chunks`, `row_tokens`: one cache a row with snapshots, fed in chunks or
        token by token (recurrent and hybrid models). `recompute`: no cache.

        Found by trying it on a few ids, and again when the model has changed since, which takes a look at the whole
        model: ask once a call. What is set here stays.
        """
        if self._given_mode is not None:
            return self._given_mode
        made_for = self.fingerprint()
        mode = self._found_modes.get(made_for)
        if mode is None:
            text_ids = (self.encoder.token_bytes.kinds == TEXT).nonzero()[0]
            ids = [int(text_ids[(n * 7919 + 13) % len(text_ids)]) for n in range(NUM_TRIAL_IDS)]
            mode, is_final = find_cache_mode(self, ids, lambda num_rows, mode: self.new_rows(num_rows, mode=mode))
            if is_final:
                if len(self._found_modes) >= _MAX_MODES:
                    self._found_modes.clear()
                self._found_modes[made_for] = mode
        return mode

    @cache_mode.setter
    def cache_mode(self, mode: str) -> None:
        if mode not in CACHE_MODES:
            raise ConfigurationError(
                f"member {self.name!r} has no cache mode {mode!r}. Modes: {', '.join(CACHE_MODES)}."
            )
        self._given_mode = mode

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs."""
        # Elsewhere no other mode is asked about, so that finding it, by a trial, can wait.
        is_possible = self._given_mode is not None or self.device.type == "cuda"
        return is_possible and self.cache_mode == "static"

    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> CachedRows:
        """Make caches for the rows of a call.

        Args:
            num_rows: Number of rows.
            num_expected: Number of ids by which each row is expected to grow.
            mode: The cache mode; default: the member's.
        """
        mode = mode or self.cache_mode
        if mode == "static":
            return StaticRows(self.buffer_pool, num_rows, num_expected)
        if mode == "repack":
            return RepackedRows(self, num_rows)
        return SeparateRows(self, num_rows, mode)

    @cached_property
    def buffer_pool(self) -> BufferPool:
        """The member's static buffers."""
        return BufferPool(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its buffers anew: they hold graphs of a device.
        return {key: value for key, value in vars(self).items() if key != "buffer_pool"}

    def _own_eos_token_ids(self) -> list[int]:
        generation_config = getattr(self.model, "generation_config", None)
        sources = (generation_config, self.model.config, self.tokenizer)
        found: Any = next(
            (i for i in (getattr(source, "eos_token_id", None) for source in sources) if i is not None), []
        )
        ids = [int(i) for i in (found if isinstance(found, Iterable) else [found])]
        tokenizer_eos = self.tokenizer.eos_token_id
        if tokenizer_eos is not None and ids and tokenizer_eos not in ids:
            messages.warn(
                f"member {self.name!r} ends texts with ids {ids} by its configuration, but its tokenizer's EOS token "
                f"is {tokenizer_eos}: the configuration holds. Name the tokenizer's too as an extra EOS id if the "
                "model uses it."
            )
        return ids
