"""The plain, slow reference for encoder-decoder members (section 13), as assistants of `Reference` and its relatives.

Encoder and decoder run anew for every row and step, without a cache. Where the semantics leave something open:

- An entry that is nothing but one space keeps it where the others lose theirs: without it, it would write nothing.
- Of the ids of one entry there, the one with the space is what the tokenizer itself gives.
- DeePEn's anchors are then those of the entries as they are there.
- The space that is put before the first word is there even if the tokenizer would put none before that word, as before
  a second space.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tests.reference import AssistantState, ReferenceMember, split_begun

SPACE = b" "


class Start(NamedTuple):
    """What the decoder begins with, and what the encoder reads."""

    id: int
    source: tuple[int, ...]


@dataclass(frozen=True)
class SpecialistState(AssistantState):
    """`text` is only what was generated."""

    start: tuple = ()
    is_open: bool = False
    """Whether the prompt ended so that a first word takes no space."""


class ReferenceEncoderDecoder(ReferenceMember):
    """An encoder-decoder model, its tokenizer and the language that it writes.

    Args:
        model: A sequence-to-sequence model in float32.
        tokenizer: A tokenizer with a `tokenizers` backend, which puts a space before the first word.
        language: A token that names the language that is written.
        source: What the encoder reads; the prompt by default. May be changed from row to row.
        **options: Of `ReferenceMember`.
    """

    def __init__(self, model, tokenizer, language: str | None = None, source: str | None = None, **options):
        super().__init__(model, tokenizer, **options)
        forced = model.generation_config.forced_bos_token_id
        if language is not None:
            forced = tokenizer.convert_tokens_to_ids(language)
        self.forced = [] if forced is None else [forced]
        self.source = source

    def source_ids(self, text: str) -> tuple[int, ...]:
        """A text in the tokenizer's frame; control tokens that it spells are text."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("a")["input_ids"]
        behind = full[len(self.prompt_prefix) + len(bare) :]
        return (*self.prompt_prefix, *self.prompt_ids(text), *behind)

    def read_prompt(self, data: bytes, is_open: bool) -> SpecialistState:
        text = self.source if self.source is not None else data.decode(errors="replace")
        start = (Start(self.model.config.decoder_start_token_id, self.source_ids(text)), *self.forced)
        return SpecialistState(b"", list(start), start=start, is_open=is_open)

    def context(self, state: SpecialistState, resync: str) -> list | None:
        if resync == "append":
            return None if state.held else state.appended
        text, begun = split_begun(state.text)
        begun_ids = self.byte_ids(begun)
        ids = self._seen(" " + text.removeprefix(" "), self._continue) if text else []
        return None if begun_ids is None else [*state.start, *ids, *begun_ids]

    def written_after(self, state: SpecialistState, data: bytes) -> bytes:
        return state.held + data if state.text or not data else SPACE + data.removeprefix(SPACE)

    def loses_space(self, state: SpecialistState) -> bool:
        return state.is_open and not state.text

    @functools.cached_property
    def without_space(self) -> "_WithoutSpace":
        """The same with entries that have lost their leading space."""
        return _WithoutSpace(self)

    def input_embeddings(self) -> torch.Tensor:
        return self.model.get_decoder().embed_tokens.weight

    @torch.no_grad()
    def last_logits(self, context: Sequence, count: int) -> torch.Tensor:
        start, *ids = context
        read = torch.tensor([start.source])
        written = torch.tensor([[start.id, *ids]])
        output = self.model(
            input_ids=read, attention_mask=torch.ones_like(read), decoder_input_ids=written, use_cache=False
        )
        return output.logits[0, -count:]


class _WithoutSpace(ReferenceEncoderDecoder):
    def __init__(self, plain: ReferenceEncoderDecoder):
        self.__dict__.update(vars(plain))
        self.plain = plain
        self.token_bytes = {i: data.removeprefix(SPACE) or data for i, data in plain.token_bytes.items()}
        self.entries, self._encoded = {}, {}
        for i in sorted(self.token_bytes):
            self.entries.setdefault(self.token_bytes[i], []).append(i)

    def canonical_id(self, data: bytes) -> int:
        is_word = data != SPACE and SPACE + data in self.plain.entries
        return self.plain.canonical_id(SPACE + data if is_word else data)

    def _encode(self, data: bytes) -> list[int] | None:
        return [self.canonical_id(data)] if data in self.entries else self.plain.encode(SPACE + data)
