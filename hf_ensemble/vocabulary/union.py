"""The union vocabulary: every entry that any member can write, matched by bytes."""

import copy
import itertools
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import VocabularyError
from .encoding import ByteEncoder
from .store import load_or_build, store_key
from .token_bytes import CONTROL, TEXT, TokenBytes

_BATCH = 4096


class UnionVocabulary:
    """The union of all members' vocabularies, compared by the bytes that tokens write.

    Union ids are the primary's ids under their own numbers, then each assistant's entries that no earlier member has,
    in member order and id order. For every member three maps say how it writes a union entry: as an entry of its own,
    as the first id of the continuation that writes it, or as all ids of that continuation. Memory grows with the sum
    of the vocabularies.

    Args:
        encoders: One encoder per member; the first is the primary's.
        cache: Whether to read and write the store on disk.

    Attributes:
        num_shared: Number of entries that all members have.
        member_to_union: For each member the union id of each of its ids, -1 if it takes no part, of shape
            `(member_vocab_size,)`.
        union_to_member: For each member its id for each union entry, -1 if it has none, of shape `(union_size,)`.
        union_to_first: For each member the first id with which it writes each union entry, -1 if it cannot.

    Reference:
        Yu et al., "Breaking the Ceiling of the LLM Community by Treating Token Generation as a Classification for
        Ensembling" (https://arxiv.org/abs/2406.12585), section 3.2; entries are compared by bytes here.
    """

    def __init__(self, encoders: Sequence[ByteEncoder], cache: bool = True):
        if not encoders:
            raise VocabularyError("a union vocabulary needs at least one tokenizer: got 0.")
        self.encoders = list(encoders)
        self._entries_of = [encoder.token_bytes for encoder in encoders]
        self.primary_size = encoders[0].token_bytes.num_ids
        fingerprints = [encoder.token_bytes.fingerprint for encoder in encoders]
        arrays = load_or_build(store_key("union", fingerprints) if cache and all(fingerprints) else None, self._build)
        count = range(len(encoders))
        self.member_to_union = [arrays[f"member_to_union_{m}"] for m in count]
        self.union_to_member = [arrays[f"union_to_member_{m}"] for m in count]
        self.union_to_first = [arrays[f"union_to_first_{m}"] for m in count]
        self._continuation_bounds = [arrays[f"continuation_bounds_{m}"] for m in count]
        self._continuation_ids = [arrays[f"continuation_ids_{m}"] for m in count]
        self._source = arrays["source"]
        self.num_shared = int(np.logical_and.reduce([ids >= 0 for ids in self.union_to_member]).sum())

    @classmethod
    def from_tokenizers(cls, tokenizers: Sequence[PreTrainedTokenizerBase], cache: bool = True) -> "UnionVocabulary":
        """Build, or read from disk, the union vocabulary of fast tokenizers; the first is the primary's.

        Args:
            tokenizers: Fast tokenizers. They are read, never changed.
            cache: Whether to read and write the store on disk.

        Raises:
            VocabularyError: If a tokenizer cannot be understood, or there is none.
        """
        return cls([ByteEncoder(t, TokenBytes(t, cache=cache)) for t in tokenizers], cache=cache)

    def of_members(self, indices: Sequence[int]) -> "UnionVocabulary":
        """Return the same entries with the same numbers, for some of the members.

        Args:
            indices: Their indices; the first is the primary's.
        """
        twin = copy.copy(self)
        for name in ("encoders", "member_to_union", "union_to_member", "union_to_first"):
            setattr(twin, name, [getattr(self, name)[index] for index in indices])
        twin._continuation_bounds = [self._continuation_bounds[index] for index in indices]
        twin._continuation_ids = [self._continuation_ids[index] for index in indices]
        twin.num_shared = int(np.logical_and.reduce([ids >= 0 for ids in twin.union_to_member]).sum())
        return twin

    def __len__(self) -> int:
        """Number of union ids, including the primary's ids without a token."""
        return len(self.union_to_member[0])

    def entry(self, union_id: int) -> bytes:
        """Return the bytes of a union entry; empty for control tokens and ids without a token."""
        member, member_id = self._source[:, union_id].tolist()
        entry: bytes = self._entries_of[member].entry(member_id)
        return entry

    def continuation(self, union_id: int, member: int) -> list[int] | None:
        """Return all ids with which a member writes a union entry after a text.

        Args:
            union_id: The entry.
            member: Index of the member.

        Returns:
            The ids; None if it cannot write the entry.
        """
        own = int(self.union_to_member[member][union_id])
        if own >= 0:
            return [own]
        a, b = self._continuation_bounds[member][union_id : union_id + 2].tolist()
        return self._continuation_ids[member][a:b].tolist() or None

    def _build(self) -> dict[str, np.ndarray]:
        union_of = dict(self.encoders[0].id_of)
        entries = list(self.encoders[0].token_bytes.entries)
        sources = [np.stack([np.zeros(self.primary_size, dtype=np.int32), np.arange(self.primary_size)])]
        for m, encoder in enumerate(self.encoders[1:], start=1):
            canonical = sorted(encoder.id_of.values())
            new = [i for i in canonical if encoder.token_bytes.entries[i] not in union_of]
            new_entries = [encoder.token_bytes.entries[i] for i in new]
            union_of.update(zip(new_entries, range(len(entries), len(entries) + len(new)), strict=True))
            entries += new_entries
            sources.append(np.stack([np.full(len(new), m), new]))
        arrays = {"source": np.concatenate(sources, axis=1).astype(np.int32)}
        in_use = np.sort(np.array(list(union_of.values()), dtype=np.int64))
        for m, encoder in enumerate(self.encoders):
            token_bytes = encoder.token_bytes
            to_union = np.full(token_bytes.num_ids, -1, dtype=np.int32)
            text_ids = np.flatnonzero(token_bytes.kinds == TEXT)
            to_union[text_ids] = [union_of[token_bytes.entries[i]] for i in text_ids.tolist()]
            own = np.full(len(entries), -1, dtype=np.int32)
            canonical_ids = np.array(list(encoder.id_of.values()), dtype=np.int32)
            own[to_union[canonical_ids]] = canonical_ids
            if m == 0:
                control = np.flatnonzero(token_bytes.kinds == CONTROL)
                to_union[control] = control
                own[control] = control
            missing = in_use[own[in_use] < 0]
            lengths = np.zeros(len(entries), dtype=np.int64)
            flat: list[int] = []
            # In pieces of a few thousand lists at once, because more keep the garbage collector busy.
            for start in range(0, len(missing), _BATCH):
                batch = missing[start : start + _BATCH]
                encoded = [ids or [] for ids in encoder.encode_batch([entries[u] for u in batch.tolist()])]
                lengths[batch] = list(map(len, encoded))
                flat += itertools.chain.from_iterable(encoded)
            bounds = np.concatenate([[0], np.cumsum(lengths)])
            ids = np.array(flat, dtype=np.int32)
            first = own.copy()
            written = np.flatnonzero(lengths)
            first[written] = ids[bounds[written]]
            arrays[f"member_to_union_{m}"] = to_union
            arrays[f"union_to_member_{m}"] = own
            arrays[f"union_to_first_{m}"] = first
            arrays[f"continuation_bounds_{m}"] = bounds
            arrays[f"continuation_ids_{m}"] = ids
        return arrays
