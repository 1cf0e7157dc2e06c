"""The caches of an encoder-decoder model: every row begins at position 0."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from .cached_rows import CachedRows
from .encoder_decoder_model import EncoderDecoderModel
from .repacked_cache import RoomyLayer
from .source import SourceStart

_States = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, of shape `(num_rows, num_heads, length, width)`."""


@dataclass(frozen=True)
class _Batch:
    """The cached data of rows that ran together. It never changes.

    Attributes:
        encoded: The encoder's states of their sources, of shape `(num_rows, longest, width)`.
        source_mask: 1 where a source has an id, of shape `(num_rows, longest)`.
        own: The decoder layers' cache of the rows' ids; empty before the first forward pass.
        cross: Their cache of the sources; empty before the first forward pass.
    """

    encoded: Tensor
    source_mask: Tensor
    own: _States = field(default_factory=list)
    cross: _States = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """A row of a batch, and its source."""

    start: SourceStart
    batch: _Batch
    place: int


class AlignedRows(CachedRows):
    """Rows of an encoder-decoder model, each of which begins with a `SourceStart`.

    The encoder runs once for every distinct source, when its first row runs; its output follows the rows.

    These decoders use an id's place in the cache as its position. So all rows begin at place 0, and ids that some rows
    lack are computed again for the others, which costs little when texts grow together.

    Args:
        model: The model.
        num_rows: Number of rows.
        mode: `aligned`, or `recompute` for a decoder without a cache.
    """

    def __init__(self, model: EncoderDecoderModel, num_rows: int, mode: str = "aligned"):
        super().__init__(num_rows)
        self.mode = mode
        self._model = model
        self._rows: list[_Row | None] = [None] * num_rows
        self._batch: _Batch | None = None  # the batch of the cache; only it writes into the spare room
        self._cache: EncoderDecoderCache | None = None

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Bring rows to their texts; return their last logits, of shape `(num_rows, num_logits, vocab_size)`."""
        running = [row for row, wanted in enumerate(num_last) if wanted]
        self._read_sources({row: texts[row][0] for row in running})
        new_texts = [texts[row] for row in running]
        num_cached = [self.num_cached(row, texts[row]) for row in running]
        kept = [
            min(count, len(text) - num_last[row])
            for row, text, count in zip(running, new_texts, num_cached, strict=True)
        ]
        start = 0 if self.mode == "recompute" else max(0, min(kept))
        batch = self._batch_of(running, start)
        cache = None if self.mode == "recompute" else self._cache_of(batch, start)
        ends = [len(text) - start for text in new_texts]
        # Nothing reads beyond the end of a row.
        ids = torch.tensor(
            [[*text[start:], *[0] * (max(ends) - end)] for text, end in zip(new_texts, ends, strict=True)]
        )
        found = self._model.run_decoder(ids.to(self._model.device), batch.encoded, batch.source_mask, cache)
        if cache is not None:
            batch = _Batch(
                batch.encoded,
                batch.source_mask,
                _states(cache.self_attention_cache),
                _states(cache.cross_attention_cache),
            )
            self._batch, self._cache = batch, cache
        for place, (row, text) in enumerate(zip(running, new_texts, strict=True)):
            self._rows[row] = _Row(_start_of(text), batch, place)
            self.cached[row] = list(text)
        width = max(num_last)
        at = torch.tensor(ends)[:, None] + torch.arange(-width, 0)  # (num_running, width)
        logits = found.gather(1, at.clamp_min(0).to(found.device)[..., None].expand(-1, -1, found.shape[-1]))
        if len(running) == len(texts):
            return logits
        there = torch.tensor(running, device=logits.device)
        return logits.new_zeros(len(texts), *logits.shape[1:]).index_copy_(0, there, logits)

    def _read_sources(self, starts: dict[int, int]) -> None:
        """Let the encoder read new sources; a row whose source has changed starts over."""
        known = {row.start: row for row in self._rows if row is not None}
        wanted = {row: _start_of([start]) for row, start in starts.items()}
        new = [start for start in dict.fromkeys(wanted.values()) if start not in known]
        if new:
            batch = _Batch(*self._model.run_encoder([start.source for start in new]))
            known.update((start, _Row(start, batch, place)) for place, start in enumerate(new))
        for row, start in wanted.items():
            held = self._rows[row]
            if held is None or held.start != start:
                # Only the encoder's states come from another row.
                self._rows[row] = known[start]
                self.cached[row] = []

    def _batch_of(self, running: Sequence[int], start: int) -> _Batch:
        """Return the rows that run together, with the first `start` ids of each."""
        rows = [row for row in (self._rows[number] for number in running) if row is not None]
        if all(row.batch is self._batch and row.place == place for place, row in enumerate(rows)):
            assert self._batch is not None
            if len(self._batch.encoded) == len(rows):
                return self._batch
        places = [row.place for row in rows]
        encoded = _gathered([(row.batch.encoded, row.place) for row in rows], 0)
        mask = _gathered([(row.batch.source_mask, row.place) for row in rows], 0)
        if not all(row.batch.own for row in rows):
            return _Batch(encoded, mask)

        def gathered(states: Sequence[_States], length: int | None) -> _States:
            found = []
            for layers in zip(*states, strict=True):
                parts = zip(*layers, strict=True)  # keys, values
                keys, values = (_gathered(list(zip(part, places, strict=True)), 1, length) for part in parts)
                found.append((keys, values))
            return found

        own = gathered([row.batch.own for row in rows], start)
        return _Batch(encoded, mask, own, gathered([row.batch.cross for row in rows], None))

    def _cache_of(self, batch: _Batch, start: int) -> EncoderDecoderCache:
        """Return a cache that holds the first `start` ids of a batch and can continue from there."""
        if batch is self._batch and self._cache is not None:
            held: Any = self._cache.self_attention_cache
            for layer in held.layers:
                layer.keys, layer.values = layer.keys[..., :start, :], layer.values[..., :start, :]
            return self._cache
        own, cross = DynamicCache(), DynamicCache()
        own.layer_class_to_replicate = RoomyLayer
        own.layers = [_layer(RoomyLayer(), keys[..., :start, :], values[..., :start, :]) for keys, values in batch.own]
        cross.layers = [_layer(DynamicLayer(), *pair) for pair in batch.cross]
        return EncoderDecoderCache(own, cross)

    def fork(self, rows: Sequence[int]) -> "AlignedRows":
        """Return independent rows that continue from these."""
        self._give_up_room()
        twin = copy.copy(self)
        twin.cached = list(map(list, self.cached))
        twin.select(rows)
        return twin

    def adopt(self, fork: "AlignedRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        fork._give_up_room()
        for place, row in enumerate(rows):
            if row is not None:
                self._rows[place], self.cached[place] = fork._rows[row], list(fork.cached[row])

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        self._rows = [self._rows[row] for row in rows]
        self.cached = [list(self.cached[row]) for row in rows]

    def _give_up_room(self) -> None:
        """Stop writing to tensors that other objects may hold."""
        self._batch = self._cache = None


def _start_of(text: Sequence[int]) -> SourceStart:
    start = text[0]
    assert isinstance(start, SourceStart)
    return start


def _states(cache: Any) -> _States:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _layer(layer: DynamicLayer, keys: Tensor, values: Tensor) -> DynamicLayer:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _gathered(places: Sequence[tuple[Tensor, int]], dim: int, length: int | None = None) -> Tensor:
    """Gather rows of tensors in one tensor; shorter rows are padded with zeros at the end of one dimension.

    Args:
        places: Tensors of shape `(num_rows, ...)`, and the row of each.
        dim: The padded dimension of a row.
        length: Its length in the result. Default: that of the longest row.
    """
    first = places[0][0]
    if all(tensor is first for tensor, _ in places):
        length = first.shape[dim + 1] if length is None else length
        return first.narrow(dim + 1, 0, length)[torch.tensor([place for _, place in places], device=first.device)]
    rows = [tensor[place] for tensor, place in places]
    length = max(row.shape[dim] for row in rows) if length is None else length
    cut = [row.narrow(dim, 0, min(length, row.shape[dim])) for row in rows]
    sides = [0, 0] * (first.ndim - 2 - dim)
    return torch.stack([torch.nn.functional.pad(row, [*sides, 0, length - row.shape[dim]]) for row in cut])
