"""The bytes that every id of a tokenizer writes."""

import copy
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..errors import VocabularyError
from .backend import component_state, fast_backend, flatten_component
from .store import load_or_build, store_key, tokenizer_fingerprint

NO_TOKEN, TEXT, CONTROL = 0, 1, 2
"""Kinds of id: without a token (it never takes part), writing text, writing nothing."""

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE_TEXTS = (
    "The capital of France is Paris, isn't it? 3.14 (x != y).",
    "def f(x):\n\treturn x  +  1\n\n    # done\r\n",
    "Zürich, naïve café — ½ “quoted” … 你好世界 ภาษาไทย עברית 👩‍💻",
)
_NUM_PROBE_IDS = 256
_MOST_HOLES = 1 << 20
"""Limit on ids without a token, each of which costs time and memory."""


def check_holes(name: str, num_tokens: int, highest_id: int) -> None:
    """Refuse a tokenizer with so many ids without a token that every list over ids takes all memory.

    Args:
        name: Name used in errors.
        num_tokens: Number of its tokens.
        highest_id: The highest id that has a token.

    Raises:
        VocabularyError: If there are more than the limit.
    """
    if highest_id >= num_tokens + _MOST_HOLES:
        raise VocabularyError(
            f"the tokenizer of {name!r} has {num_tokens} tokens, but ids up to {highest_id}. The limit is {_MOST_HOLES} ids "
            "without a token. Its tokenizer.json is damaged: get it again from a source that you trust."
        )


class TokenBytes:
    """The bytes that each id of one tokenizer writes in the middle of a text.

    Byte-level BPE undoes the GPT-2 byte alphabet; SentencePiece-style tokenizers write `▁` as a space and `<0xNN>` as
    a byte; WordPiece writes a space before every piece that starts a word. Added tokens write their literal text.
    Control tokens (flagged special, in `all_special_ids`, or in the EOS set) write nothing; ids without a token take
    no part.

    Args:
        tokenizer: A fast tokenizer (one with a `tokenizers` backend). It is read, never changed.
        num_ids: Number of ids that the model has rows for; higher ids have no token. Default: all the tokenizer has.
        end_ids: Ids that end a text. Those that are added tokens are control tokens, unless they are white space.
        name: Name in errors. Default: the tokenizer's `name_or_path` or class.
        cache: Whether to read and write the store on disk.

    Raises:
        VocabularyError: If the tokenizer has no fast backend, or its decoder writes other text than these rules.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_ids: int | None = None,
        end_ids: Iterable[int] = (),
        name: str | None = None,
        cache: bool = True,
    ):
        self.name = name or tokenizer.name_or_path or type(tokenizer).__name__
        self.backend = fast_backend(tokenizer, self.name)
        self.writer = TokenWriter(self.backend, self.name)
        self.strips_start = self.writer.strips_start
        """Whether the tokenizer's decoder drops one space at the start of a text."""
        self.added = self.backend.get_added_tokens_decoder()
        self.control = _control_ids(tokenizer, end_ids, self.added)
        self.fingerprint = ""
        if cache:
            self.fingerprint = store_key(
                "token_bytes", tokenizer_fingerprint(tokenizer), num_ids, sorted(self.control)
            )
        self._take(load_or_build(self.fingerprint or None, lambda: self._build(num_ids)))

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        self.kinds: np.ndarray = arrays["kinds"]
        self.num_ids = len(self.kinds)
        self.num_rowless = int(arrays["num_rowless"][0])
        self._bounds = arrays["bounds"]
        self._blob: bytes = arrays["blob"].tobytes()

    def _build(self, num_ids: int | None) -> dict[str, np.ndarray]:
        size = self.backend.get_vocab_size(with_added_tokens=True)
        tokens: list[str | None] = list(map(self.backend.id_to_token, range(size)))
        if None in tokens:
            # Ids with holes go beyond the count of tokens.
            ids = self.backend.get_vocab(with_added_tokens=True).values()
            end = max(ids) + 1
            check_holes(self.name, size, end - 1)
            tokens += map(self.backend.id_to_token, range(size, end))
        num_ids = len(tokens) if num_ids is None else num_ids
        num_rowless = sum(1 for token in tokens[num_ids:] if token is not None)
        tokens += [None] * (num_ids - len(tokens))
        entries = self.writer.pieces([token or "" for token in tokens[:num_ids]])
        # A vocabulary with holes can have a piece under the id of an added token; the decoder writes the added token.
        added = {i: token.content for i, token in self.added.items() if i < num_ids}
        for i, entry in zip(added, self.writer.added(list(added.values())), strict=True):
            entries[i] = entry
        control = [i for i in self.control if i < num_ids]
        for i in control:
            entries[i] = b""
        lengths = np.fromiter(map(len, entries), dtype=np.int64, count=num_ids)
        kinds = np.where(lengths > 0, TEXT, NO_TOKEN).astype(np.uint8)
        kinds[control] = CONTROL
        arrays = {
            "kinds": kinds,
            "bounds": np.concatenate([[0], np.cumsum(lengths)]),
            "blob": np.frombuffer(b"".join(entries), dtype=np.uint8),
            "num_rowless": np.array([num_rowless]),
        }
        self._take(arrays)
        self._check_against_decoder()
        return arrays

    def with_entries(self, entries: Sequence[bytes], kind: str) -> "TokenBytes":
        """Return the same ids with other entries.

        Args:
            entries: The bytes of each id; empty or not, as before.
            kind: The reason, for the store.
        """
        twin = copy.copy(self)
        twin.__dict__.pop("entries", None)
        twin.fingerprint = self.fingerprint and store_key(kind, self.fingerprint)
        lengths = np.fromiter(map(len, entries), dtype=np.int64, count=len(entries))
        twin._bounds = np.concatenate([[0], np.cumsum(lengths)])
        twin._blob = b"".join(entries)
        return twin

    @cached_property
    def entries(self) -> list[bytes]:
        """The bytes of each id; empty for control tokens and ids without a token."""
        return [self._blob[a:b] for a, b in itertools.pairwise(self._bounds.tolist())]

    @property
    def lengths(self) -> np.ndarray:
        """Number of bytes that each id writes, of shape `(num_ids,)`."""
        return np.diff(self._bounds)

    def entry(self, token_id: int) -> bytes:
        """Return the bytes of one id, without expanding the whole vocabulary."""
        return self._blob[self._bounds[token_id] : self._bounds[token_id + 1]]

    @property
    def missing_bytes(self) -> bytes:
        """The byte values that no single token writes, which the tokenizer may be unable to write."""
        alone = {entry[0] for entry in self.entries if len(entry) == 1}
        return bytes(b for b in range(256) if b not in alone)

    def is_control(self, i: int) -> bool:
        """Whether an id, which may be out of range, is a control token."""
        return 0 <= i < self.num_ids and bool(self.kinds[i] == CONTROL)

    def write(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids in the middle of a text; ids without a token and control tokens write nothing."""
        return b"".join(self.entry(i) for i in ids if i < self.num_ids)

    def write_from_start(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids as a whole text, as the tokenizer's decoder writes them."""
        data = self.write(ids)
        return data[1:] if self.strips_start and data.startswith(b" ") else data

    def _check_against_decoder(self) -> None:
        """Compare with the tokenizer's own decoder where that gives valid text."""
        text_ids = [i for i in np.flatnonzero(self.kinds == TEXT).tolist() if i not in self.added]
        if not text_ids:
            return
        # After another token, because decoders treat the first token of a text differently.
        anchor = next(
            (i for i in text_ids if self.entries[i].strip().isalpha() and self.entries[i].isascii()), text_ids[0]
        )
        step = max(1, len(text_ids) // _NUM_PROBE_IDS)
        probes = [[i] for i in text_ids[::step]]
        for text in _PROBE_TEXTS:
            ids = self.backend.encode(text, add_special_tokens=False).ids
            probes.append([i for i in ids if i < self.num_ids and self.kinds[i] == TEXT and i not in self.added])
        for ids in probes:
            decoded = self.writer.decode([self.backend.id_to_token(i) for i in [anchor, *ids]])
            written = text_or_none(self.write_from_start([anchor, *ids]))
            if written not in (None, decoded):
                raise VocabularyError(
                    f"the tokenizer of {self.name!r} is not supported: by its vocabulary, ids {ids[:8]} write "
                    f"{written!r}, but its decoder writes {decoded!r}. Use a tokenizer whose `decoder` matches its "
                    "vocabulary (byte-level, SentencePiece-style or WordPiece)."
                )


class TokenWriter:
    """How one tokenizer's decoder writes a token, by the decoder's own description."""

    def __init__(self, backend: Any, name: str):
        parts = flatten_component(component_state(backend.decoder), "decoders")
        kinds = [part["type"] for part in parts]
        self._decoder = backend.decoder
        self.strips_start = False
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = "ByteFallback" in kinds
        self._word_prefix: str | None = None
        if "ByteLevel" in kinds:
            self.family = "byte-level"
        elif "WordPiece" in kinds:
            self.family = "wordpiece"
            self._word_prefix = parts[kinds.index("WordPiece")]["prefix"]
            self._decoder = decoders.WordPiece(prefix=self._word_prefix, cleanup=False)
            self.strips_start = True
        elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            self.family = "sentencepiece"
            for part in parts:
                if part["type"] == "Replace" and "String" in part["pattern"]:
                    self._replacements.append((part["pattern"]["String"], part["content"]))
                elif part["type"] == "Metaspace":
                    self._replacements.append((part["replacement"], " "))
                    self.strips_start |= part.get("prepend_scheme", "always") != "never"
                elif part["type"] == "Strip":
                    if part["content"] != " " or part["start"] > 1 or part["stop"]:
                        raise VocabularyError(f"the tokenizer of {name!r} is not supported: decoder {part}.")
                    self.strips_start |= part["start"] == 1
        else:
            raise VocabularyError(
                f"the tokenizer of {name!r} is not supported: its decoder is {kinds or None}. Supported are "
                "byte-level, SentencePiece-style (Replace, ByteFallback, Metaspace) and WordPiece decoders."
            )

    def decode(self, tokens: list[str]) -> str:
        """Decode tokens with the tokenizer's own decoder, without WordPiece's clean-up of spaces."""
        text: str = self._decoder.decode(tokens)
        return text

    def pieces(self, tokens: Sequence[str]) -> list[bytes]:
        """Return the bytes of ordinary vocabulary tokens; empty for empty tokens."""
        if self.family == "byte-level":
            return _undo_byte_alphabet(tokens)
        if self._word_prefix is not None:
            prefix = self._word_prefix
            words = [token[len(prefix) :] if token.startswith(prefix) else token and " " + token for token in tokens]
            return [word.encode("utf-8", "surrogatepass") for word in words]
        # All at once, around a character that no token contains.
        text = "".join(tokens)
        separator = next(char for char in map(chr, range(sys.maxunicode, 0, -1)) if char not in text)
        text = separator.join([*tokens, ""])
        for old, new in self._replacements:
            text = text.replace(old, new)
        entries = text.encode("utf-8", "surrogatepass").split(separator.encode())[:-1]
        if self._byte_fallback:
            for i, token in enumerate(tokens):
                if token.startswith("<0x") and (match := _BYTE_FALLBACK.fullmatch(token)):
                    entries[i] = bytes([int(match[1], 16)])
        return entries

    def added(self, tokens: Sequence[str]) -> list[bytes]:
        """Return the bytes of added tokens: their literal text; SentencePiece-style, as the decoder writes it."""
        if self.family == "sentencepiece":
            return self.pieces(tokens)
        return [token.encode("utf-8", "surrogatepass") for token in tokens]


def _control_ids(
    tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int], added: Mapping[int, AddedToken]
) -> set[int]:
    """Ids that write nothing: flagged special, in `all_special_ids`, or ending a text as an added token.

    An end id that is an ordinary entry, or an added token of white space (a newline, say), writes text.
    """
    control = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    return control | {i for i in end_ids if i in added and added[i].content.strip()}


_ALPHABET = {ord(char): byte for byte, char in bytes_to_unicode().items()}
_BYTE_OF_CHAR = np.array([_ALPHABET.get(code, -1) for code in range(max(_ALPHABET) + 2)])
"""Code point in a byte-level token -> byte, or -1, as the last is."""


def _undo_byte_alphabet(tokens: Sequence[str]) -> list[bytes]:
    """The bytes that tokens spell in GPT-2's alphabet; UTF-8 for a token with a character outside of it."""
    chars = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    values = _BYTE_OF_CHAR[np.minimum(chars, len(_BYTE_OF_CHAR) - 1)]
    ends = np.cumsum(np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens)))
    data = values.astype(np.uint8).tobytes()
    entries = [data[a:b] for a, b in itertools.pairwise([0, *ends.tolist()])]
    for i in np.unique(np.searchsorted(ends, np.flatnonzero(values < 0), side="right")).tolist():
        entries[i] = tokens[i].encode("utf-8", "surrogatepass")
    return entries


def text_or_none(data: bytes) -> str | None:
    """Return the text of UTF-8 bytes; None if they are invalid."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
