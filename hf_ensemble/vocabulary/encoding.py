"""Which ids of a tokenizer write given bytes, as the start or the continuation of a text."""

import codecs
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from .store import component_state
from .token_bytes import NO_TOKEN, TEXT, TokenBytes, flatten_component

_REPLACEMENT = "�"
_SEPARATOR = "\U000fffff"
_CHUNK = 256
_MORE_THAN_ANY = 1 << 40
_TEXT_KEEPING_NORMALIZERS = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "Prepend", "Nmt"}
"""Normalizers that look at no more than a character and its combining marks, so that a space cuts their input."""


class ByteEncoder:
    """Encodes bytes with one tokenizer: never a control token, whatever the text spells.

    Works on views of the tokenizer that share its vocabulary but none of its settings: padding, truncation and added
    control tokens of the user's object neither act here nor change.

    Args:
        tokenizer: A fast tokenizer. It is read, never changed.
        token_bytes: What its ids write.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes):
        self.token_bytes = token_bytes
        self._backend = token_bytes.backend
        self._control = token_bytes.control
        added = sorted(token_bytes.added.items())
        self._added = [(i, token) for i, token in added if i not in self._control and i < token_bytes.num_ids]
        self._normalizers = flatten_component(component_state(self._backend.normalizer), "normalizers")
        self._pre_tokenizers = flatten_component(component_state(self._backend.pre_tokenizer), "pretokenizers")
        self._model_type = type(self._backend.model).__name__
        self._unknown = tokenizer.unk_token_id
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._start_tokens = [i for i in starts if i is not None and i < token_bytes.num_ids]

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The canonical id of every entry: the one that the tokenizer itself gives for these bytes, else the lowest."""
        entries = self.token_bytes.entries
        text_ids = (self.token_bytes.kinds == TEXT).nonzero()[0][::-1].tolist()
        found = {entries[i]: i for i in text_ids}
        for data in {entries[i] for i in text_ids if found[entries[i]] != i}:
            text = _text_or_none(data)
            ids = [] if text is None else self._encode_view(self._continuation, text)
            if len(ids) == 1 and self.token_bytes.entries[ids[0]] == data:
                found[data] = ids[0]
        return found

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The control tokens that the tokenizer puts in front of a text (its BOS rule), if the model has them."""
        view = self._view(normalize=True)[0]
        view.post_processor = self._backend.post_processor
        encoded = view.encode("a", add_special_tokens=True)
        first_text = encoded.special_tokens_mask.index(0) if 0 in encoded.special_tokens_mask else 0
        return [i for i in encoded.ids[:first_text] if i < self.token_bytes.num_ids]

    @property
    def start_ids(self) -> list[int]:
        """What a text without any token starts from: the BOS rule, else the BOS or EOS token; empty if neither."""
        return self.prefix_ids or self._start_tokens[:1]

    def encode(self, data: bytes) -> list[int] | None:
        """Encode bytes as the continuation of a text.

        One id where they are an entry; else what the tokenizer gives; where that would change the bytes, the same
        without its normalizer, then byte tokens; one byte token a byte for what is no valid UTF-8.

        Returns:
            Ids that write exactly `data`, or None if this tokenizer cannot write it.
        """
        if data in self.id_of:
            return [self.id_of[data]]
        ids: list[int] = []
        for text, invalid in _utf8_segments(data):
            part = self._encode_text(text) if text else self.byte_tokens(invalid)
            if part is None:
                return None
            ids += part
        return ids

    def encode_batch(self, batch: Sequence[bytes]) -> list[list[int] | None]:
        """Encode many byte strings as `encode` does; the common case runs in the tokenizer's threads."""
        texts = [None if data in self.id_of else _text_or_none(data) for data in batch]
        plain = [n for n, text in enumerate(texts) if text is not None and _SEPARATOR not in text]
        ids, bounds = self._encode_separated([texts[n] or "" for n in plain])
        exact = self._is_exact(ids, bounds, [batch[n] for n in plain]).tolist()
        flat, edges = ids.tolist(), itertools.pairwise(bounds.tolist())
        found = {n: flat[a:b] for n, (a, b), is_exact in zip(plain, edges, exact, strict=True) if is_exact}
        return [found[n] if n in found else self.encode(data) for n, data in enumerate(batch)]

    def encode_context(self, text: str, start: bool = False) -> list[int]:
        """Encode text as this tokenizer sees it, which may lose something (case, compatibility characters, `▁`).

        A byte that it cannot write becomes its encoding of U+FFFD.

        Args:
            text: The text.
            start: Whether the text starts here, so that the tokenizer's own leading space (if any) is put in.
        """
        if start:
            text = self._with_start_space(text)
        missing = self._missing_bytes
        if not missing or len(data := text.encode("utf-8", "replace")) == len(data.translate(None, missing)):
            return self._encode_view(self._continuation, text)
        ids: list[int] = []
        for run in re.split(f"([{re.escape(''.join(sorted(self._unwritable_chars(text))))}])", text):
            if run and len(run.encode("utf-8").translate(None, missing)) == len(run.encode("utf-8")):
                ids += self._encode_view(self._continuation, run)
            elif run:
                ids += self._replace_missing(run.encode("utf-8"))
        return ids

    def encode_context_bytes(self, data: bytes) -> list[int]:
        """Encode bytes for a context: exactly if possible, else as `encode_context` and U+FFFD for what is missing."""
        exact = self.encode(data)
        if exact is not None:
            return exact
        ids: list[int] = []
        for text, invalid in _utf8_segments(data):
            ids += self.encode_context(text) if text else self._replace_missing(invalid)
        return ids

    def replace_unwritable(self, text: str) -> str:
        """Put U+FFFD in place of every character that this tokenizer would lose."""
        missing = self._unwritable_chars(text) if self._missing_bytes else ()
        return text.translate({ord(char): _REPLACEMENT for char in missing})

    def byte_tokens(self, data: bytes) -> list[int] | None:
        """Encode bytes as one token a byte, or None if this tokenizer lacks one of them."""
        ids = [self._byte_ids.get(b) for b in data]
        return None if None in ids else ids  # type: ignore[return-value]

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        return {b: self.id_of[bytes([b])] for b in range(256) if bytes([b]) in self.id_of}

    def is_hard_boundary(self, text: str, position: int) -> bool:
        """Whether text before and after `position` is encoded independently: between a word and a space.

        Holds where no entry of the vocabulary contains this character followed by a space, so no merge, piece or
        pre-token can cross it.
        """
        before = text[position - 1]
        return (
            text[position] == " "
            and not before.isspace()
            and self._space_cuts
            and before.encode("utf-8", "replace")[-1] not in self._bytes_joined_to_space
        )

    @cached_property
    def merges(self) -> bool:
        """Whether ids are what merging neighbours gives, wherever in a text they stand."""
        return self._model_type == "BPE"

    @cached_property
    def _space_cuts(self) -> bool:
        return (
            all(part["type"] in _TEXT_KEEPING_NORMALIZERS or _is_space_sign(part) for part in self._normalizers)
            and self._model_type in {"BPE", "Unigram"}
            and b" " in self.id_of
        )

    @cached_property
    def _bytes_joined_to_space(self) -> set[int]:
        joined = b"\n".join(self.token_bytes.entries)
        swallowing = {token.content.encode("utf-8", "replace")[-1] for _, token in self._added if token.rstrip}
        return swallowing | {pair[0] for pair in set(re.findall(rb"[^\s] ", joined))}

    @cached_property
    def _missing_bytes(self) -> bytes:
        """Bytes that are lost by this tokenizer, so that contexts need a stand-in; empty if it has an unknown token."""
        if self.token_bytes.writer.family != "byte-level":
            return b""
        return self.token_bytes.missing_bytes

    def _unwritable_chars(self, text: str) -> set[str]:
        missing = set(self._missing_bytes)
        return {char for char in set(text) if not missing.isdisjoint(char.encode("utf-8", "replace"))}

    def _replace_missing(self, data: bytes) -> list[int]:
        """Write bytes that are no text here: byte tokens, and what stands for U+FFFD where there is none."""
        byte_ids = self._byte_ids
        if not any(b in byte_ids for b in range(0x80, 0x100)):
            # No byte tokens at all: as Python decodes it.
            return self._stand_in(len(data.decode("utf-8", "replace")))
        return [i for b in data for i in ([byte_ids[b]] if b in byte_ids else self._stand_in(1))]

    def _stand_in(self, count: int) -> list[int]:
        tokenizer, real_ids = self._continuation
        ids = tokenizer.encode(_REPLACEMENT * count, add_special_tokens=False).ids
        return [real_ids.get(i, i) for i in ids if real_ids.get(i, i) < self.token_bytes.num_ids]

    def _encode_text(self, text: str) -> list[int] | None:
        data = text.encode("utf-8")
        for view in (self._continuation, self._bare):
            ids = self._encode_view(view, text)
            if self.token_bytes.write(ids) == data and self._control.isdisjoint(ids):
                return ids
        return self.byte_tokens(data)

    # Views of the tokenizer. Each is (tokenizer, {its id: the real id}) and shares the vocabulary with the original.

    @cached_property
    def _continuation(self) -> tuple[Tokenizer, dict[int, int]]:
        return self._view(normalize=True)

    @cached_property
    def _bare(self) -> tuple[Tokenizer, dict[int, int]]:
        return self._view(normalize=False)

    @cached_property
    def _separating_continuation(self) -> tuple[Tokenizer, dict[int, int]]:
        view, real_ids = self._view(normalize=True)
        # Added tokens that are not normalized are cut out first, so that nothing acts across one.
        view.add_tokens([AddedToken(_SEPARATOR, normalized=False)])
        return view, real_ids

    def _view(self, normalize: bool) -> tuple[Tokenizer, dict[int, int]]:
        view = Tokenizer(self._backend.model)
        kept = [
            part for part in self._normalizers if _is_space_sign(part) or (part["type"] != "Prepend" and normalize)
        ]
        if kept:
            view.normalizer = _from_state(normalizers.Sequence([]), {"type": "Sequence", "normalizers": kept})
        if self._pre_tokenizers:
            parts = [_without_prefix_space(part) for part in self._pre_tokenizers]
            view.pre_tokenizer = _from_state(pre_tokenizers.Sequence([]), {"type": "Sequence", "pretokenizers": parts})
        # New tokens are numbered from the count of the others, so holes are filled first, with what no text spells.
        num_ids = int((self.token_bytes.kinds != NO_TOKEN).nonzero()[0].max(initial=-1)) + 1
        num_holes = max(0, num_ids - self._backend.get_vocab_size(with_added_tokens=True))
        view.add_tokens([f"\U0010fffe{n}\U0010ffff" for n in range(num_holes)])
        view.add_tokens([token for _, token in self._added])
        real_ids: dict[Any, int] = {view.token_to_id(token.content): i for i, token in self._added}
        return view, {new: old for new, old in real_ids.items() if new != old}

    def _with_start_space(self, text: str) -> str:
        """Put in the space that the tokenizer itself inserts at the start of a text."""
        if not text or not self._start_space or text.startswith(self._added_surfaces):
            return text
        return text if self._start_space == "unless there" and text.startswith((" ", "▁")) else " " + text

    @cached_property
    def _added_surfaces(self) -> tuple[str, ...]:
        return tuple(token.content for _, token in self._added)

    @cached_property
    def _start_space(self) -> Literal["", "always", "unless there"]:
        if any(part["type"] == "Prepend" for part in self._normalizers):
            return "always"
        for part in self._pre_tokenizers:
            if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
                return "unless there"
            if part["type"] == "ByteLevel" and part["add_prefix_space"]:
                return "unless there"
        return ""

    def _encode_view(self, view: tuple[Tokenizer, dict[int, int]], text: str) -> list[int]:
        tokenizer, real_ids = view
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if real_ids:
            ids = [real_ids.get(i, i) for i in ids]
        return ids if self._suspicious_ids.isdisjoint(ids) else self._respell(view, text)

    def _encode_separated(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts that hold no separator, many in one call, which costs half of a call each.

        Returns:
            All ids in a row, and the bounds of each text's, of shape `(num_texts + 1,)`.
        """
        tokenizer, real_ids = self._separating_continuation
        chunks = [_SEPARATOR.join([*texts[n : n + _CHUNK], ""]) for n in range(0, len(texts), _CHUNK)]
        encoded = tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        ids = [i for encoding in encoded for i in encoding.ids]
        is_end = np.array(ids, dtype=np.int64) == tokenizer.token_to_id(_SEPARATOR)
        if real_ids:
            ids = [real_ids.get(i, i) for i in ids]
        bounds = np.concatenate([[0], np.flatnonzero(is_end) - np.arange(len(texts))])
        return np.array(ids, dtype=np.int64)[~is_end], bounds

    def _is_exact(self, ids: np.ndarray, bounds: np.ndarray, batch: list[bytes]) -> np.ndarray:
        """Whether each run of ids writes exactly its bytes, with no suspicious id, of shape `(len(batch),)`."""
        written = np.concatenate([[0], np.cumsum(self._lengths[np.minimum(ids, self.token_bytes.num_ids)])])[bounds]
        wanted = np.array(list(map(len, batch)), dtype=np.int64)
        exact: np.ndarray = np.diff(written) == wanted
        entries = self.token_bytes.entries
        found = b"".join([entries[i] for i in ids[np.repeat(exact, np.diff(bounds))].tolist()])
        data = b"".join(itertools.compress(batch, exact.tolist()))
        wrong = np.flatnonzero(np.frombuffer(found, dtype=np.uint8) != np.frombuffer(data, dtype=np.uint8))
        which = np.searchsorted(np.cumsum(wanted[exact]), wrong, side="right")
        exact[np.flatnonzero(exact)[which]] = False
        return exact

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Bytes that an id writes, of shape `(num_ids + 1,)`; more than any text has for suspicious and rowless ids."""
        lengths = np.append(self.token_bytes.lengths, _MORE_THAN_ANY)
        lengths[[i for i in self._suspicious_ids if i < len(lengths)]] = _MORE_THAN_ANY
        return lengths

    @cached_property
    def _suspicious_ids(self) -> set[int]:
        """Ids whose presence asks for a closer look: without a row, or perhaps read from text that spells them."""
        rowless = set(range(self.token_bytes.num_ids, self._backend.get_vocab_size(with_added_tokens=True)))
        return self._control | rowless | set(self._spelled_byte_ids)

    @cached_property
    def _spelled_byte_ids(self) -> frozenset[int]:
        """Byte tokens of a tokenizer that would read one from the text `<0x0A>`: not so where only merges make tokens."""
        model = self._backend.model
        if self._model_type == "BPE" and not model.ignore_merges:
            return frozenset()
        ids = (model.token_to_id(f"<0x{b:02X}>") for b in range(256))
        return frozenset(i for i in ids if i is not None)

    def _respell(self, view: tuple[Tokenizer, dict[int, int]], text: str) -> list[int]:
        """Encode text such that nothing it spells becomes a control or byte token, and every id has a row.

        Where a token must not be used, the text is cut inside it and both parts are encoded again.
        """
        tokenizer, real_ids = view
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids = [real_ids.get(i, i) for i in encoding.ids]
        for i, (a, b) in zip(ids, encoding.offsets, strict=True):
            if i == self._unknown:
                # Where it stands for characters that are unknown it is the tokenizer's view of the text, and stays.
                normalizer = tokenizer.normalizer
                seen = text[a:b] if normalizer is None else normalizer.normalize_str(text[a:b])
                must_go = self._backend.id_to_token(i) in seen
            else:
                is_spelled_byte = i in self._spelled_byte_ids and b - a > 1
                must_go = is_spelled_byte or i in self._control or i >= self.token_bytes.num_ids
            if must_go:
                if b - a > 1:
                    return self._respell(view, text[: a + 1]) + self._respell(view, text[a + 1 :])
                before = self._respell(view, text[:a]) if a else []
                after = self._respell(view, text[b:]) if b < len(text) else []
                return [*before, *self._replace_missing(text[a:b].encode("utf-8", "replace")), *after]
        return ids


def split_begun_character(data: bytes) -> tuple[str, bytes]:
    """Split bytes into the text they hold and the begun character at their end.

    Bytes that can never become a character are U+FFFD, as in Python's incremental decoder.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


def _utf8_segments(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Cut bytes into runs of valid text and runs of bytes that are none: pairs of which one is empty."""
    text = _text_or_none(data)
    if text is not None:
        yield text, b""
        return
    # surrogateescape gives every byte that is no valid UTF-8 a character of its own, U+DC80 to U+DCFF.
    for run in re.findall("[\udc80-\udcff]+|[^\udc80-\udcff]+", data.decode("utf-8", "surrogateescape")):
        if "\udc80" <= run[0] <= "\udcff":
            yield "", run.encode("utf-8", "surrogateescape")
        else:
            yield run, b""


def _text_or_none(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _is_space_sign(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "Replace" and part["pattern"].get("String") == " ")


def _without_prefix_space(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def _from_state(component: Any, state: dict[str, Any]) -> Any:
    component.__setstate__(json.dumps(state).encode())
    return component
