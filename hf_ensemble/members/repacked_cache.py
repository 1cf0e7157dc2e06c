"""One cache for all rows; every forward pass moves the rows to the right edge."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import MemberError
from .cached_rows import CachedRows, last_ids, most_new
from .member_model import MemberModel

_ROOM = 64
"""Room for this many more positions when a growing cache is copied."""
_MARGIN = 64
"""Minimum number of positions before its window that a window layer keeps when it drops some."""


def _join_rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """Join the rows of caches, each cut or padded on the left to this many positions."""
    return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[-2], 0)) for part in parts])


class RoomyLayer(DynamicLayer):
    """A layer's cache that has room after its end, so that it grows without being copied."""

    num_dropped = 0

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._with_room: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append, in place if there is room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._appended("keys", self.keys, key_states)
        self.values = self._appended("values", self.values, value_states)
        return self.keys, self.values

    def give_up_room(self) -> None:
        """Stop writing in place to tensors that other objects may hold."""
        self._with_room = {}

    def part(self, start: int, stop: int) -> "RoomyLayer":
        """Return a layer of some rows, which shares this one's tensors as long as all rows grow together."""
        twin = copy.copy(self)
        if self.keys is not None and self.values is not None:
            twin.keys, twin.values = self.keys[start:stop], self.values[start:stop]
        return twin

    def _appended(self, name: str, held: Any, new: Tensor) -> Tensor:
        start = held.shape[-2] if held.numel() else 0
        end = start + new.shape[-2]
        room = self._with_room.get(name)
        # After a move or a cut at the front, the states no longer start the tensor with room.
        if room is None or room.data_ptr() != held.data_ptr() or room.shape[0] != len(held) or room.shape[2] < end:
            room = new.new_empty(*new.shape[:2], end + _ROOM, new.shape[-1])
            if start:
                room[..., :start, :] = held
            self._with_room = {**self._with_room, name: room}  # a fork may hold the same dictionary
        room[..., start:end, :] = new
        return room[..., :end, :]


class _WindowLayer(RoomyLayer):
    """A layer's cache that drops positions before its window.

    It keeps a margin before the window, and what the last forward added, so that rows can roll back that far. It drops
    only when a second margin is full, so few steps copy it. Attention reads it as if it began with the `num_dropped`
    missing positions, which no window reaches.
    """

    is_sliding = True

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append; drop positions, but only after this forward has read them."""
        keys, values = super().update(key_states, value_states)
        surplus = keys.shape[-2] - key_states.shape[-2] - self.window - _MARGIN
        if surplus >= _MARGIN:
            self.num_dropped += surplus
            self.keys, self.values = keys[..., surplus:, :], values[..., surplus:, :]
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of positions, including dropped ones."""
        return self.num_dropped + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions a forward reads, and how many are dropped before them."""
        return super().get_seq_length() + query_length, self.num_dropped


class RepackedRows(CachedRows):
    """One cache for all rows, which drops only positions far before the windows of window layers.

    Every row's part is contiguous and ends at the right edge: window masks count cache slots, so holes are allowed
    only on the left. All rows take the same number of ids per forward (a row with fewer new ids computes its last ones
    again), so the requested logits are at the right edge too.
    """

    mode = "repack"

    def __init__(self, member: MemberModel, num_rows: int):
        self.member = member
        self._begin(num_rows)

    def _begin(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.cache = DynamicCache(config=self.member.model.config)
        windows = [
            layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0 for layer in self.cache.layers
        ]
        # All window layers share one mask, so they drop the same positions.
        self._window = max(windows, default=0)
        self.cache.layers = [_WindowLayer(self._window) if window else RoomyLayer() for window in windows]
        self.cache.layer_class_to_replicate = RoomyLayer

    def forward(self, texts: Sequence[Sequence[int]], num_last: Sequence[int]) -> Tensor:
        """Bring rows to their texts; return their last logits, of shape `(num_rows, num_logits, vocab_size)`."""
        num_cached = self._num_cached_of(texts)
        num_new = most_new(texts, num_cached, num_last)
        kept = [max(0, len(text) - num_new) for text in texts]
        if not self._keep(kept):
            self._bring_nearer(texts)
            return self.forward(texts, num_last)
        inputs = _inputs(texts, max(kept), num_new, self.member.device)
        logits = self.member.forward(*inputs, self.cache, max(num_last))
        self._follow(texts, num_cached)
        return logits

    def _bring_nearer(self, texts: Sequence[Sequence[int]]) -> None:
        """Bring rows part of the way to their texts, if they cannot roll back far enough to do it at once.

        Rows with many new ids, for which the other rows would have to roll back, take the first of these ids. If there
        is no such row, all rows start over.
        """
        nearer = [text[: self.num_cached(row, text) + _MARGIN] for row, text in enumerate(texts)]
        if list(map(len, nearer)) == list(map(len, texts)):
            self._begin(len(texts))
        else:
            self.forward(nearer, [1] * len(nearer))

    def _keep(self, kept: list[int], new_width: int | None = None) -> bool:
        """Roll every row back to `kept` ids and move the rest to the right edge.

        Args:
            kept: Number of ids that each row keeps.
            new_width: The new number of positions, at least that of the longest row. Default: exactly that.

        Returns:
            False, with nothing changed, if a window layer has dropped positions that the next forward reads.
        """
        width, new_width = self.cache.get_seq_length(), max(kept) if new_width is None else new_width
        lengths = list(map(len, self.cached))
        if width == 0 or (kept == lengths and width == new_width):
            return True
        # Column c of the new cache comes from old column c + shift of its row.
        shifts = [width - new_width - (length - k) for length, k in zip(lengths, kept, strict=True)]
        layers = self._filled_layers()
        lost = [max(layer.num_dropped for layer in layers) - shift for shift in shifts]
        # Only positions inside a row count, not those before its start.
        dropped = max((n for n, k in zip(lost, kept, strict=True) if new_width - k < min(n, new_width)), default=0)
        if dropped > max(0, new_width - self._window + 1):
            return False
        indices: dict[tuple[bool, torch.device], Tensor] = {}
        for layer in layers:
            now_dropped = dropped if layer.is_sliding else 0
            starts = [shift - layer.num_dropped + now_dropped for shift in shifts]
            count = new_width - now_dropped
            layer.num_dropped = now_dropped
            if len(set(starts)) == 1 and starts[0] >= 0:
                layer.keys = layer.keys[..., starts[0] : starts[0] + count, :]
                layer.values = layer.values[..., starts[0] : starts[0] + count, :]
                continue
            key = layer.is_sliding, layer.keys.device
            if key not in indices:
                index = (torch.arange(count) + torch.tensor(starts)[:, None]).clamp_min(0)  # (B, count)
                indices[key] = index.to(layer.keys.device)[:, None, :, None]
            at = indices[key]
            layer.keys = layer.keys.gather(2, at.expand(*layer.keys.shape[:2], -1, layer.keys.shape[-1]))
            layer.values = layer.values.gather(2, at.expand(*layer.values.shape[:2], -1, layer.values.shape[-1]))
        return True

    def _filled_layers(self) -> list[Any]:
        layers = [layer for layer in self.cache.layers if getattr(layer, "is_initialized", True)]
        if any(not isinstance(layer, RoomyLayer) for layer in layers):
            kinds = sorted({type(layer).__name__ for layer in layers})
            raise MemberError(f"member {self.member.name!r} keeps a cache that cannot be repacked: {kinds}.")
        return layers

    def fork(self, rows: Sequence[int]) -> "RepackedRows":
        """Return independent rows that continue from these."""
        twin = copy.copy(self)
        twin.cached = list(map(list, self.cached))
        # Both can hold the same tensors as long as neither writes to them.
        for layer in self._filled_layers():
            layer.give_up_room()
        twin.cache = copy.copy(self.cache)
        twin.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        twin.select(rows)
        return twin

    def adopt(self, fork: "RepackedRows", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork; None leaves it unchanged."""
        num_rows = len(self.cached)
        self.join(fork)
        self.select([place if row is None else num_rows + row for place, row in enumerate(rows)])

    def join(self, other: "RepackedRows") -> None:
        """Append the rows of other caches of the member."""
        width = max(self.cache.get_seq_length(), other.cache.get_seq_length())
        for mine, theirs in zip(self._filled_layers(), other._filled_layers(), strict=True):
            dropped = max((width - layer.keys.shape[-2] for layer in (mine, theirs) if layer.num_dropped), default=0)
            mine.keys = _join_rows([mine.keys, theirs.keys], width - dropped)
            mine.values = _join_rows([mine.values, theirs.values], width - dropped)
            mine.num_dropped = dropped
        self.cached = [*self.cached, *other.cached]

    def select(self, rows: Sequence[int]) -> None:
        """Keep, repeat or drop rows."""
        if list(rows) == list(range(len(self.cached))):
            return
        self.cached = [list(self.cached[row]) for row in rows]
        index = torch.tensor(list(rows), dtype=torch.long)
        for layer in self._filled_layers():
            layer.keys = layer.keys[index.to(layer.keys.device)]
            layer.values = layer.values[index.to(layer.values.device)]


def _inputs(
    texts: Sequence[Sequence[int]], width: int, num_new: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the last `num_new` ids and their positions, and a mask over them and `width` cached positions."""
    ids = torch.tensor([last_ids(text, num_new) for text in texts])
    lengths = torch.tensor(list(map(len, texts)))
    positions = (lengths[:, None] - num_new + torch.arange(num_new)).clamp_min(0)
    mask = None
    if min(map(len, texts)) < width + num_new:
        mask = (torch.arange(width + num_new) >= width + num_new - lengths[:, None]).long().to(device)
    return ids.to(device), positions.to(device), mask


# Several members' caches in one forward pass

Asked = tuple[RepackedRows, Sequence[Sequence[int]], Sequence[int]]
"""A member's rows, the texts to bring them to, and the number of last ids to return logits for."""


def num_new_ids(asked: Asked) -> int:
    """Return how many ids every row takes when these rows are brought to their texts."""
    rows, texts, num_last = asked
    return most_new(texts, rows._num_cached_of(texts), num_last)


def forward_together(
    forward: Callable[[Tensor, Tensor, Tensor | None, DynamicCache, int], Tensor], asked: Sequence[Asked]
) -> list[Tensor] | None:
    """Bring the rows of several members to their texts, in one forward pass of a model that can act as all of them.

    Every member's rows keep their own cache. While the members advance together, the caches are parts of one tensor
    that grows in place; if one diverges, all are joined again.

    Args:
        forward: Runs the shared model, given ids, positions, mask, cache and the number of logits.
        asked: The request to each member. The members' caches have layers of the same kinds.

    Returns:
        The results of each member's own `forward`; None if one cannot roll back far enough, so that each has to run
        alone.
    """
    num_new = max(map(num_new_ids, asked))
    num_kept = []
    for rows, texts, _ in asked:
        kept = [max(0, len(text) - num_new) for text in texts]
        # Columns before the longest row stay, so that the joint tensor need not be copied.
        width = rows.cache.get_seq_length() - min(len(held) - k for held, k in zip(rows.cached, kept, strict=True))
        if not rows._keep(kept, width):
            return None
        rows.cached = [held[:k] for held, k in zip(rows.cached, kept, strict=True)]
        num_kept.append(kept)
    cache, width = _joined_cache([rows for rows, _, _ in asked])
    all_texts = [text for _, texts, _ in asked for text in texts]
    inputs = _inputs(all_texts, width, num_new, asked[0][0].member.device)
    logits = forward(*inputs, cache, max(max(num_last) for _, _, num_last in asked))
    found, start = [], 0
    layers: Any = cache.layers
    for (rows, texts, num_last), kept in zip(asked, num_kept, strict=True):
        stop = start + len(texts)
        rows.cache.layers = [layer.part(start, stop) for layer in layers]
        rows._follow(texts, kept)
        found.append(logits[start:stop, -max(num_last) :])
        start = stop
    return found


def _joined_cache(parts: Sequence[RepackedRows]) -> tuple[DynamicCache, int]:
    """Return one cache with the rows of all members, each at the right edge, and its number of positions."""
    width = max(rows.cache.get_seq_length() for rows in parts)
    cache = copy.copy(parts[0].cache)
    of_layers = zip(*(rows.cache.layers for rows in parts), strict=True)
    counts = [len(rows.cached) for rows in parts]
    cache.layers = [_joined_layer(layers, counts, width) for layers in of_layers]
    return cache, width


def _joined_layer(layers: Sequence[RoomyLayer], counts: Sequence[int], width: int) -> RoomyLayer:
    filled = next((layer for layer in layers if layer.is_initialized and layer.get_seq_length()), layers[0])
    joined = copy.copy(filled)
    if not (filled.is_initialized and width):
        return joined
    dropped = max(
        (layer.num_dropped + width - layer.get_seq_length() for layer in layers if layer.num_dropped), default=0
    )
    joined.num_dropped = dropped
    joined.give_up_room()
    for name in ("keys", "values"):
        room = _common_room(layers, name, counts, width - dropped)
        if room is None:
            like = getattr(filled, name)
            held = [_held(layer, name, count, like) for layer, count in zip(layers, counts, strict=True)]
            setattr(joined, name, _join_rows(held, width - dropped))
        else:
            joined._with_room[name] = room
            setattr(joined, name, room[:, :, : width - dropped])
    return joined


def _held(layer: RoomyLayer, name: str, count: int, like: Tensor) -> Tensor:
    """Return a layer's states; zero positions of `count` rows if the layer has not run yet."""
    if layer.is_initialized and layer.get_seq_length():
        held: Tensor = getattr(layer, name)
        return held
    return like.new_zeros(count, like.shape[1], 0, like.shape[-1])


def _common_room(layers: Sequence[RoomyLayer], name: str, counts: Sequence[int], width: int) -> Tensor | None:
    """Return the tensor of which all layers hold rows, from its first position on; None if they do not share one."""
    room = layers[0]._with_room.get(name)
    if room is None or room.shape[0] != sum(counts):
        return None
    starts = itertools.accumulate(counts, initial=0)
    for layer, start in zip(layers, starts, strict=False):
        held = getattr(layer, name)
        if layer._with_room.get(name) is not room or held.shape[-2] != width:
            return None
        if held.data_ptr() != room[start].data_ptr() or held.stride() != room.stride():
            return None
    return room
