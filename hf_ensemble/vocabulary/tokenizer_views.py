"""Views of a tokenizer, which share its vocabulary but none of its settings, to encode pieces of a text."""

import itertools
import json
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from .backend import component_state, flatten_component, prefix_ids, suffix_ids
from .token_bytes import NO_TOKEN, TokenBytes

SEPARATOR = "\U000fffff"
_CHUNK = 256
_TEXT_KEEPING_NORMALIZERS = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "Prepend", "Nmt"}
"""Normalizers that look only at a character and its combining marks, so that a space cuts their input."""
_WHITE_SPACE_AS_BETWEEN_WORDS = [
    {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
    for pattern, content in ((r"\s+", " "), (r"\s$", ""))
]
"""Normalizers that keep white space, in tokenizers that drop it and add their own space."""


class TokenizerView:
    """A separate tokenizer over a vocabulary, whose ids are translated to those of the vocabulary.

    Args:
        tokenizer: The tokenizer, which has no added tokens yet.
        added: Its added tokens, by their ids in the vocabulary.
        num_holes: Number of ids that the vocabulary leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, AddedToken], num_holes: int):
        self.tokenizer = tokenizer
        # New tokens are numbered from the count of the others, so holes are filled first, with tokens that no text
        # spells.
        tokenizer.add_tokens([f"\U0010fffe{secrets.token_hex(8)}\U0010ffff" for _ in range(num_holes)])
        tokenizer.add_tokens(list(added.values()))
        real_ids = {tokenizer.token_to_id(token.content): i for i, token in added.items()}
        self._real_ids = {new: old for new, old in real_ids.items() if new != old}

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._real(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_with_places(self, text: str) -> list[tuple[int, int, int]]:
        """Return the ids of a text, each with its first character and the one after its last."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return [(i, a, b) for i, (a, b) in zip(self._real(encoding.ids), encoding.offsets, strict=True)]

    def encode_separated(self, texts: list[str]) -> list[list[int]]:
        """Encode many texts without separators in one call, which takes half the time of single calls.

        The separator must be a token in this view.
        """
        chunks = [SEPARATOR.join([*texts[n : n + _CHUNK], ""]) for n in range(0, len(texts), _CHUNK)]
        encoded = self.tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        ids = [i for encoding in encoded for i in encoding.ids]
        ends = np.flatnonzero(np.array(ids, dtype=np.int64) == self.tokenizer.token_to_id(SEPARATOR)).tolist()
        real = self._real(ids)
        return [real[a + 1 : b] for a, b in itertools.pairwise([-1, *ends])]

    def normalized(self, text: str) -> str:
        """Return a text as the tokenizer normalizes it."""
        normalizer = self.tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _real(self, ids: list[int]) -> list[int]:
        return [self._real_ids.get(i, i) for i in ids] if self._real_ids else ids


class TokenizerViews:
    """The views of one tokenizer, created on first use; control tokens are not tokens in them.

    Args:
        token_bytes: The bytes of the tokenizer's ids.
    """

    def __init__(self, token_bytes: TokenBytes):
        self._backend = token_bytes.backend
        self._kinds = token_bytes.kinds
        added = sorted(token_bytes.added.items())
        self.added = {i: t for i, t in added if i not in token_bytes.control and i < token_bytes.num_ids}
        self._added_surfaces = tuple(token.content for token in self.added.values())
        self._normalizers = flatten_component(component_state(self._backend.normalizer), "normalizers")
        self._pre_tokenizers = flatten_component(component_state(self._backend.pre_tokenizer), "pretokenizers")

    @cached_property
    def continuation(self) -> TokenizerView:
        """Encodes the continuation of a text."""
        return self._view(normalize=True)

    @cached_property
    def bare(self) -> TokenizerView:
        """The same without the tokenizer's normalizer, which may change the text."""
        return self._view(normalize=False)

    @cached_property
    def separating(self) -> TokenizerView:
        """The same as `continuation` in which the separator is a token."""
        view = self._view(normalize=True)
        # Added tokens that are not normalized are cut out first, so that nothing acts across one.
        view.tokenizer.add_tokens([AddedToken(SEPARATOR, normalized=False)])
        return view

    @property
    def prefix_ids(self) -> list[int]:
        """The ids that the tokenizer puts in front of a text."""
        return prefix_ids(self._view(normalize=True).tokenizer, self._backend)

    @property
    def suffix_ids(self) -> list[int]:
        """The ids that the tokenizer puts after a text."""
        return suffix_ids(self._view(normalize=True).tokenizer, self._backend)

    @property
    def inserts_space(self) -> bool:
        """Whether the tokenizer inserts a space at the start of a text."""
        return bool(self._start_space)

    @property
    def space_cuts(self) -> bool:
        """Whether nothing but an entry of the vocabulary can reach across a space."""
        keeps = (part["type"] in _TEXT_KEEPING_NORMALIZERS or _is_space_sign(part) for part in self._normalizers)
        return type(self._backend.model).__name__ in {"BPE", "Unigram"} and all(keeps)

    def with_start_space(self, text: str) -> str:
        """Add the space that the tokenizer itself inserts at the start of a text."""
        if not text or not self._start_space or text.startswith(self._added_surfaces):
            return text
        return text if self._start_space == "unless there" and text.startswith((" ", "▁")) else " " + text

    @cached_property
    def _start_space(self) -> Literal["", "always", "unless there"]:
        if any(part["type"] == "Prepend" for part in self._normalizers):
            return "always"
        return "unless there" if any(_without_prefix_space(part) != part for part in self._pre_tokenizers) else ""

    def _view(self, normalize: bool) -> TokenizerView:
        view = Tokenizer(self._backend.model)
        kept = [
            part for part in self._normalizers if _is_space_sign(part) or (part["type"] != "Prepend" and normalize)
        ]
        parts = [_without_prefix_space(part) for part in self._pre_tokenizers]
        kinds = [part["type"] for part in parts]
        if "WhitespaceSplit" in kinds and "Metaspace" in kinds:
            # It cuts out white space and puts one space before each word, so an existing space is that space.
            parts.pop(kinds.index("WhitespaceSplit"))
            kept += _WHITE_SPACE_AS_BETWEEN_WORDS if normalize else []
        view.normalizer = _from_state(normalizers.Sequence([]), {"type": "Sequence", "normalizers": kept})
        view.pre_tokenizer = _from_state(pre_tokenizers.Sequence([]), {"type": "Sequence", "pretokenizers": parts})
        num_ids = int((self._kinds != NO_TOKEN).nonzero()[0].max(initial=-1)) + 1
        num_holes = max(0, num_ids - self._backend.get_vocab_size(with_added_tokens=True))
        return TokenizerView(view, self.added, num_holes)


def _is_space_sign(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "Replace" and part["pattern"].get("String") == " ")


def _without_prefix_space(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def _from_state(component: Any, state: dict[str, Any]) -> Any:
    component.__setstate__(json.dumps(state).encode())
    return component
