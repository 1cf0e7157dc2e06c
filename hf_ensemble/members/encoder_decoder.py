"""An encoder-decoder model of this process, such as a translation model, as a member."""

import copy
import difflib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import messages
from ..errors import ConfigurationError
from ..offers import Offer
from ..vocabulary.context import Resync
from ..vocabulary.target_context import TargetContext
from ..vocabulary.text_start import TextStartEncoder
from ..vocabulary.token_bytes import TEXT
from .aligned_cache import AlignedRows
from .encoder_decoder_model import EncoderDecoderModel
from .local import LocalMember
from .member import Member, RowPrompt
from .source import SourceStart


def languages_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the languages that a tokenizer is set to, by their options; empty if it has none."""
    found = {key: getattr(tokenizer, key, None) for key in ("src_lang", "tgt_lang")}
    return {key: language for key, language in found.items() if isinstance(language, str)}


class EncoderDecoderMember(EncoderDecoderModel, LocalMember):
    """An encoder-decoder model of this process with its tokenizer: an assistant beside causal language models.

    Its encoder reads a source, once per row: the row's own plain text (`member_prompts`), else the last user turn,
    else the prompt. Its decoder reads only what has been written.

    Args:
        model: A sequence-to-sequence language model.
        tokenizer: Its fast tokenizer, with its languages set if it has any.
        name: Name in errors. Default: the last part of the model's `name_or_path`, else its class.
        extra_eos_token_ids: More ids that end a text, in addition to its generation config's.
        chat_template: Refused, because it reads only the last user turn of a conversation.
        system_prompt: Refused for the same reason.

    Raises:
        ConfigurationError: If the model cannot run as a member, or the tokenizer's target language is not set.
        VocabularyError: If the tokenizer is not supported.
    """

    offers = frozenset({Offer.ROWS, Offer.ENTRIES, Offer.EMBEDDINGS, Offer.SPANS, Offer.ANSWERS, Offer.LIKELIHOODS})
    kind = "an encoder-decoder model of this process"
    runs_in_loop = False
    shares_beginnings = False  # what is before the answer goes through the encoder as a whole
    cache_modes = ("aligned", "recompute")

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        system_prompt: str | None = None,
    ):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            EncoderDecoderModel.__init__(self, model, name)
            raise messages.python_tokenizer(self.name, type(tokenizer).__name__)
        super().__init__(model, tokenizer, name, extra_eos_token_ids)
        for option, value in (("chat_template", chat_template), ("system_prompt", system_prompt)):
            if value is not None:
                raise ConfigurationError(
                    f"member {self.name!r} is {self.kind}, which reads the last user turn of a conversation and "
                    f"ignores `{option}`. Leave it out."
                )
        self._start_ids = self._first_ids()

    def _decoder_start(self) -> int:
        found: list[Any] = [
            getattr(one, "decoder_start_token_id", None) for one in (self.generation_config, self.model.config)
        ]
        found += [getattr(one, "bos_token_id", None) for one in (self.generation_config, self.model.config)]
        first: Any = next((i for i in found if i is not None), None)
        if first is None:
            raise ConfigurationError(
                f"member {self.name!r} does not say which id its decoder starts from. Set `decoder_start_token_id` in its "
                "generation config."
            )
        return int(first[0] if isinstance(first, (list, tuple)) else first)

    def _first_ids(self) -> list[int]:
        """The first ids of every text: the decoder's start, then the language or another forced id."""
        start, language = self._decoder_start(), self._language_id()
        if language is None:
            forced = getattr(self.generation_config, "forced_bos_token_id", None)
            return [start] if forced is None else [start, int(forced)]
        # Some models (mBART) start from the language itself.
        return [language] if start in self._language_ids() else [start, language]

    def _language_ids(self) -> set[int]:
        """Control tokens that only name a language or the like."""
        tokenizer = self.tokenizer
        roles = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id")
        return set(tokenizer.all_special_ids) - {getattr(tokenizer, role, None) for role in roles}

    def _language_id(self) -> int | None:
        """The token of the target language; None for a tokenizer without languages."""
        if not hasattr(self.tokenizer, "tgt_lang"):
            return None
        language = self.tokenizer.tgt_lang
        if language is None:
            raise ConfigurationError(
                f"member {self.name!r} writes several languages, but its language is not set: load it with "
                '`MemberConfig(tokenizer_kwargs={"src_lang": ..., "tgt_lang": ...})`, or set `tgt_lang` of its '
                "tokenizer."
            )
        # A source in a language that the tokenizer does not know would begin with an unknown token.
        if getattr(self.tokenizer, "src_lang", None) is not None:
            self._known_language("src_lang")
        return self._known_language("tgt_lang")

    def _known_language(self, option: str) -> int:
        """The token of the tokenizer's source or target language."""
        language = getattr(self.tokenizer, option)
        found: Any = self.tokenizer.convert_tokens_to_ids(language)
        if found is None or found == self.tokenizer.unk_token_id:
            known = sorted(map(str, self.tokenizer.convert_ids_to_tokens(sorted(self._language_ids()))))
            near = difflib.get_close_matches(str(language), known, n=3, cutoff=0.3) or known[:3]
            raise ConfigurationError(
                f"member {self.name!r} does not know the language {language!r} (`{option}`). Some of the {len(known)} "
                f"that it knows: {', '.join(near)}."
            )
        return int(found)

    def input_embeddings(self) -> Any:
        """The module whose `weight` holds the decoder's input embeddings."""
        return self.model.get_decoder().get_input_embeddings()

    def read(self, prompt: RowPrompt, resync: Resync) -> TargetContext:
        """Take the source from a prompt, and start a text with it; see `Member.read`.

        Raises:
            ConfigurationError: If the source is longer than the encoder has learned positions for.
        """
        text = self._source_text(prompt)
        source = [*self.encoder.prefix_ids, *self.encoder.encode_context(text, start=True), *self.encoder.suffix_ids]
        if self.max_source_positions is not None and len(source) > self.max_source_positions:
            raise messages.too_long(
                self.name,
                self.max_source_positions,
                "the source takes",
                len(source),
                "Shorten its `member_prompts`",
            )
        start, *forced = self._start_ids
        return TargetContext(self.encoder, resync, [SourceStart(start, source), *forced], prompt.is_open)

    def _source_text(self, prompt: RowPrompt) -> str:
        said = prompt.own
        if said is None and prompt.conversation is not None:
            turns = prompt.conversation.with_joined_parts().messages
            said = next((turn.get("content") for turn in reversed(turns) if turn["role"] == "user"), None)
        data = prompt.text if said is None else said.encode("utf-8", "replace")
        return data.decode("utf-8", "replace")

    @cached_property
    def at_text_start(self) -> Member | None:
        """The member whose entries have lost a leading space; None if its tokenizer puts none before a first word."""
        if not self.encoder.inserts_space:
            return None
        twin = copy.copy(self)
        twin.encoder = TextStartEncoder(self.encoder)
        return twin

    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> AlignedRows:
        """Make caches for the rows of a call; see `Member.new_rows`."""
        return AlignedRows(self, num_rows, mode or self.cache_mode)

    def _trial_start(self) -> Sequence[int]:
        ids = (self.encoder.token_bytes.kinds == TEXT).nonzero()[0][:5].tolist()
        return [SourceStart(self._start_ids[0], ids), *self._start_ids[1:]]
