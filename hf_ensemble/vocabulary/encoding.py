"""Finds the ids of a tokenizer that write given bytes, as the start or the continuation of a text."""

import codecs
import re
from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from .token_bytes import TEXT, TokenBytes, text_or_none
from .tokenizer_views import SEPARATOR, TokenizerView, TokenizerViews

_REPLACEMENT = "�"
_NO_TEXT, _END = b"\xff", b"\xfe\xff" * 8
"""Bytes that never occur in text."""


class ByteEncoder:
    """Encodes bytes with one tokenizer, never as control tokens, whatever the text spells.

    It works on views of the tokenizer that share its vocabulary but none of its settings: padding, truncation and
    added control tokens of the user's object have no effect here and do not change.

    Args:
        tokenizer: A fast tokenizer. It is read, never changed.
        token_bytes: The bytes of its ids.

    Attributes:
        merges: Whether ids result from merging neighbours, independent of their place in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, token_bytes: TokenBytes):
        self.token_bytes = token_bytes
        self._backend = token_bytes.backend
        self._control = token_bytes.control
        self._views = TokenizerViews(token_bytes)
        self.merges = type(self._backend.model).__name__ == "BPE"
        self._unknown = tokenizer.unk_token_id
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._start_tokens = [i for i in starts if i is not None and i < token_bytes.num_ids]

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The canonical id of every entry: the tokenizer's own for these bytes, or else the lowest."""
        entries = self.token_bytes.entries
        text_ids = (self.token_bytes.kinds == TEXT).nonzero()[0][::-1].tolist()
        found = {entries[i]: i for i in text_ids}
        for data in {entries[i] for i in text_ids if found[entries[i]] != i}:
            text = text_or_none(data)
            ids = [] if text is None else self._encode_view(self._views.continuation, text)
            if len(ids) == 1 and self.token_bytes.entries[ids[0]] == data:
                found[data] = ids[0]
        return found

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The control tokens that the tokenizer puts in front of a text (its BOS rule), if the model has them."""
        return [i for i in self._views.prefix_ids if i < self.token_bytes.num_ids]

    @cached_property
    def suffix_ids(self) -> list[int]:
        """The control tokens that the tokenizer puts after a text, if the model has them."""
        return [i for i in self._views.suffix_ids if i < self.token_bytes.num_ids]

    @property
    def inserts_space(self) -> bool:
        """Whether the tokenizer puts a space before the first word of a text."""
        return self._views.inserts_space

    @property
    def start_ids(self) -> list[int]:
        """The ids that start an empty text: by the BOS rule, else the BOS or EOS token; empty if there is neither."""
        return self.prefix_ids or self._start_tokens[:1]

    def encode(self, data: bytes) -> list[int] | None:
        """Encode bytes as the continuation of a text.

        The result is one id if the bytes are an entry, or else the tokenizer's own encoding. If that would change the
        bytes, the tokenizer encodes without its normalizer, then with byte tokens. Invalid UTF-8 is encoded as one
        byte token per byte.

        Returns:
            Ids that write exactly `data`, or None if this tokenizer cannot write it.
        """
        if data in self.id_of:
            return [self.id_of[data]]
        parts = [self._encode_text(text) if text else self.byte_tokens(invalid) for text, invalid in _segments(data)]
        return None if None in parts else [i for part in parts for i in part or ()]

    def encode_batch(self, batch: Sequence[bytes]) -> list[list[int] | None]:
        """Encode many byte strings as `encode` does; the common case runs in the tokenizer's threads."""
        texts = [None if data in self.id_of else text_or_none(data) for data in batch]
        plain = [n for n, text in enumerate(texts) if text is not None and SEPARATOR not in text]
        encoded = self._views.separating.encode_separated([texts[n] or "" for n in plain])
        entries, num_ids = self._entries_and_end, self.token_bytes.num_ids
        # All at once; -1 gives the end of each. Results that do not write their text are encoded again, alone.
        written = b"".join([entries[min(i, num_ids)] for ids in encoded for i in (*ids, -1)]).split(_END)
        found = {n: ids for n, ids, data in zip(plain, encoded, written, strict=False) if data == batch[n]}
        return [found[n] if n in found else self.encode(data) for n, data in enumerate(batch)]

    def encode_context(self, text: str, start: bool = False) -> list[int]:
        """Encode text as this tokenizer sees it, which may lose something (case, compatibility characters, `▁`).

        A byte that it cannot write becomes its encoding of U+FFFD.

        Args:
            text: The text.
            start: Whether the text starts here, so that the tokenizer's own leading space (if any) is added.
        """
        if start:
            text = self._views.with_start_space(text)
        unwritable = self._unwritable_chars(text)
        if not unwritable:
            return self._encode_view(self._views.continuation, text)
        ids: list[int] = []
        # Every second run is one of them.
        for n, run in enumerate(re.split(f"([{re.escape(''.join(sorted(unwritable)))}])", text)):
            if n % 2:
                ids += self._replace_missing(run.encode("utf-8"))
            elif run:
                ids += self._encode_view(self._views.continuation, run)
        return ids

    def encode_context_bytes(self, data: bytes) -> list[int]:
        """Encode bytes for a context: exactly if possible, else as `encode_context` with U+FFFD for missing bytes."""
        exact = self.encode(data)
        if exact is not None:
            return exact
        parts = [self.encode_context(text) if text else self._replace_missing(lost) for text, lost in _segments(data)]
        return [i for part in parts for i in part]

    def replace_unwritable(self, text: str) -> str:
        """Replace every character that this tokenizer would lose by U+FFFD."""
        return text.translate({ord(char): _REPLACEMENT for char in self._unwritable_chars(text)})

    def byte_tokens(self, data: bytes) -> list[int] | None:
        """Encode bytes as one token per byte, or None if this tokenizer lacks one of them."""
        ids = [self._byte_ids.get(b) for b in data]
        return None if None in ids else ids  # type: ignore[return-value]

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        return {b: self.id_of[bytes([b])] for b in range(256) if bytes([b]) in self.id_of}

    def is_hard_boundary(self, text: str, position: int) -> bool:
        """Whether text before and after `position` is encoded independently: between a word and a space.

        This holds if no entry of the vocabulary contains this character followed by a space, so no merge, piece or
        pre-token can cross it.
        """
        before = text[position - 1]
        return (
            text[position] == " "
            and not before.isspace()
            and before.encode("utf-8", "replace")[-1] not in self._bytes_joined_to_space
        )

    @cached_property
    def _bytes_joined_to_space(self) -> set[int]:
        """Bytes that may be encoded together with a space after them."""
        if not self._views.space_cuts or b" " not in self.id_of:
            return set(range(256))
        joined = b"\n".join(self.token_bytes.entries)
        swallowing = {
            token.content.encode("utf-8", "replace")[-1] for token in self._views.added.values() if token.rstrip
        }
        return swallowing | {pair[0] for pair in set(re.findall(rb"[^\s] ", joined))}

    @cached_property
    def _missing_bytes(self) -> bytes:
        """Bytes that this tokenizer loses, so that contexts need a stand-in; empty if it has an unknown token."""
        if self.token_bytes.writer.family != "byte-level":
            return b""
        return self.token_bytes.missing_bytes

    def _unwritable_chars(self, text: str) -> set[str]:
        missing = self._missing_bytes
        if not missing or len(data := text.encode("utf-8", "replace")) == len(data.translate(None, missing)):
            return set()
        return {char for char in set(text) if not set(missing).isdisjoint(char.encode("utf-8", "replace"))}

    def _replace_missing(self, data: bytes) -> list[int]:
        """Encode bytes that are not text for this tokenizer: as byte tokens, or as U+FFFD if there are none."""
        byte_ids = self._byte_ids
        if not any(b in byte_ids for b in range(0x80, 0x100)):
            # Without byte tokens, as Python decodes it.
            return self._stand_in(len(data.decode("utf-8", "replace")))
        return [i for b in data for i in ([byte_ids[b]] if b in byte_ids else self._stand_in(1))]

    def _stand_in(self, count: int) -> list[int]:
        ids = self._views.continuation.encode(_REPLACEMENT * count)
        return [i for i in ids if i < self.token_bytes.num_ids]

    def _encode_text(self, text: str) -> list[int] | None:
        data = text.encode("utf-8")
        for view in (self._views.continuation, self._views.bare):
            ids = self._encode_view(view, text)
            if self.token_bytes.write(ids) == data and self._control.isdisjoint(ids):
                return ids
        return self.byte_tokens(data)

    def _encode_view(self, view: TokenizerView, text: str) -> list[int]:
        ids = view.encode(text)
        return ids if self._suspicious_ids.isdisjoint(ids) else self._respell(view, text)

    @cached_property
    def _entries_and_end(self) -> list[bytes]:
        """The text of each id; empty for one that needs a closer look or has no row. The last one is an end."""
        entries = [*self.token_bytes.entries, _NO_TEXT, _END]
        for i in self._suspicious_ids:
            entries[min(i, self.token_bytes.num_ids)] = _NO_TEXT
        return entries

    @cached_property
    def _suspicious_ids(self) -> set[int]:
        """Ids that need a closer look: without a row, or possibly read from text that spells them."""
        rowless = set(range(self.token_bytes.num_ids, self._backend.get_vocab_size(with_added_tokens=True)))
        return self._control | rowless | set(self._spelled_byte_ids)

    @cached_property
    def _spelled_byte_ids(self) -> frozenset[int]:
        """Byte tokens of a tokenizer that would read one from the text `<0x0A>`; not if only merges make tokens."""
        model = self._backend.model
        if self.merges and not model.ignore_merges:
            return frozenset()
        ids = (model.token_to_id(f"<0x{b:02X}>") for b in range(256))
        return frozenset(i for i in ids if i is not None)

    def _respell(self, view: TokenizerView, text: str) -> list[int]:
        """Encode text so that nothing it spells becomes a control or byte token, and every id has a row.

        If a token must not be used, the text is cut inside it and both parts are encoded again.
        """
        places = view.encode_with_places(text)
        for i, a, b in places:
            if i == self._unknown:
                # If it stands for unknown characters, it is the tokenizer's view of the text, and stays.
                must_go = self._backend.id_to_token(i) in view.normalized(text[a:b])
            else:
                is_spelled_byte = i in self._spelled_byte_ids and b - a > 1
                must_go = is_spelled_byte or i in self._control or i >= self.token_bytes.num_ids
            if must_go:
                if b - a > 1:
                    return self._respell(view, text[: a + 1]) + self._respell(view, text[a + 1 :])
                before = self._respell(view, text[:a]) if a else []
                after = self._respell(view, text[b:]) if b < len(text) else []
                return [*before, *self._replace_missing(text[a:b].encode("utf-8", "replace")), *after]
        return [i for i, _, _ in places]


def split_begun_character(data: bytes) -> tuple[str, bytes]:
    """Split bytes into the text they hold and the begun character at their end.

    Bytes that can never become a character are U+FFFD, as in Python's incremental decoder.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


def _segments(data: bytes) -> list[tuple[str, bytes]]:
    """Cut bytes into runs of valid text and runs of invalid bytes: pairs, one of them empty."""
    # surrogateescape gives every invalid byte its own character, U+DC80 to U+DCFF.
    runs = re.finditer("([\udc80-\udcff]+)|[^\udc80-\udcff]+", data.decode("utf-8", "surrogateescape"))
    return [("", run[1].encode("utf-8", "surrogateescape")) if run[1] else (run[0], b"") for run in runs]
