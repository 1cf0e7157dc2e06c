"""Relative representations: a token as its similarities to the anchors, formed on request."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CACHE_BYTES = 320 * 2**20
"""Largest memory of one member's kept rows."""

_COPY_BYTES = 256 * 2**20
"""Largest memory of a copy of the anchors' embeddings; if they are larger, rows are formed against all embeddings."""

_SCRATCH_BYTES = 320 * 2**20
"""Largest memory of the products from which rows are formed."""

_BLOCK_BYTES = 24 * 2**20
"""Size of the pieces in which rows are normalised on a CPU."""

_CUDA_BLOCK_BYTES = 224 * 2**20
"""The same on a GPU, where small pieces leave it idle."""

_LEAST_HALVED = 16384
"""Least number of anchors for rows in float16. With few anchors, the entries of a row differ by more than it can hold.
"""

_CONVERTED_ROWS = 16384
_ALIGNMENT = 8
_TINY = 1e-30
_HAS_OUT_DTYPE = torch.__version__ >= "2.8"


class RelativeRows:
    """One member's relative representation `R̂`; only requested rows exist, in bounded number.

    A row is the softmax over the anchors of the cosine similarities between a token's embedding and the anchors'. Rows
    are formed and kept on the embeddings' device. When no more fit, those unused for longest are dropped. Rows of
    tokens without an embedding (all zeros) are uniform. Not safe for several threads or CUDA streams at once.

    Rows are kept in float32; on a GPU with Triton, long ones of 16-bit embeddings in float16 if `sharpness` is given,
    with a float32 factor for each row. Sums over rows are in float32.

    Args:
        embeddings: Of shape `(vocab_size, hidden_size)`; not copied.
        anchor_ids: Ids of the anchors, of shape `(num_anchors,)`, on the embeddings' device.
        sharpness: If given, similarities are scaled to length `sharpness` before the softmax.

    Attributes:
        capacity: Largest number of kept rows.
        device: Their device.
        are_shared: Whether kept rows are read where they are, once for all rows of a batch.
    """

    def __init__(self, embeddings: Tensor, anchor_ids: Tensor, sharpness: float | None):
        vocab_size, hidden_size = embeddings.shape
        self.device = embeddings.device
        self._embeddings = embeddings
        self._sharpness = sharpness
        self._inverse_norms = inverse_norms(embeddings)
        self._anchor_inverse_norms = self._inverse_norms[anchor_ids]
        self._num_anchors = self._width = len(anchor_ids)
        is_small = len(anchor_ids) * hidden_size * embeddings.element_size() <= _COPY_BYTES
        self._axes = embeddings[anchor_ids] if is_small else embeddings
        self._columns = None if is_small else anchor_ids
        self._kernels = _kernels(self.device)
        self._dtype = torch.float32
        if self._kernels is not None:
            block = self._kernels.WIDTH_OF_BLOCKS
            self._width = -(-self._num_anchors // block) * block
            if embeddings.dtype != torch.float32 and sharpness is not None and self._num_anchors >= _LEAST_HALVED:
                self._dtype = torch.float16
            # Kept in the order of ids, so that neighbours in a row of products are read together.
            order = anchor_ids.argsort()
            self._column_of = (order if self._columns is None else self._columns[order]).int()
            self._scale_of = self._anchor_inverse_norms[order]
            self._order: Tensor | None = None
            self._places: Tensor | None = None
            if bool((anchor_ids.diff() < 0).any()):
                self._order, self._places = order, order.argsort()
        self.are_shared = self._kernels is not None
        self.capacity = max(1, min(vocab_size, _CACHE_BYTES // (self._dtype.itemsize * self._width)))
        # The last entry of each stands for none. `forget` fills them in place, because graphs read them.
        self._slot_of = anchor_ids.new_empty(vocab_size + 1)
        self._id_at, self._used_at = (anchor_ids.new_empty(self.capacity + 1) for _ in range(2))
        self._time = 0
        self._kept: Tensor | None
        self._factors = self._inverse_norms.new_zeros(self.capacity)
        self.forget()

    def is_missing(self, ids: Tensor) -> Tensor:
        """Whether there is no kept row for some ids.

        Args:
            ids: Of any shape, on the embeddings' device.

        Returns:
            Of the same shape.
        """
        return self._slot_of[ids] < 0

    def keep(self, ids: Tensor, num_missing: int) -> None:
        """Form the rows of some ids that are not kept yet, and keep the rows of all of them.

        The memory of kept rows stays where it is until `forget`.

        Args:
            ids: At most `capacity`, each once, of shape `(num_ids,)`, on the embeddings' device.
            num_missing: Number of ids that are not kept yet.
        """
        if self._kept is None:
            # Kernels read columns beyond the anchors; without them, memory is used only as rows come.
            new = torch.empty if self._kernels is None else torch.zeros
            self._kept = new(self.capacity, self._width, dtype=self._dtype, device=self.device)
        self._time += 1
        slots = self._slot_of[ids]
        self._used_at.index_fill_(0, torch.where(slots < 0, self.capacity, slots), self._time)
        if not num_missing:
            return
        # Ids without a slot come first. Masks would make the host wait for the device.
        missing = ids[slots.argsort()[:num_missing]]
        slots = self._used_at[:-1].argsort()[:num_missing]
        self._slot_of.index_fill_(0, self._id_at[slots], -1)
        self._slot_of.index_copy_(0, missing, slots)
        self._id_at.index_copy_(0, slots, missing)
        self._used_at.index_fill_(0, slots, self._time)
        self._form_in(missing, slots)

    def _form_in(self, ids: Tensor, slots: Tensor) -> None:
        """Form rows in their slots."""
        assert self._kept is not None
        if self._kernels is None:
            begin = 0
            for block in self._formed(ids):
                self._kept.index_copy_(0, slots[begin : begin + len(block)], block)
                begin += len(block)
            return
        for part, products in self._products_of(ids):
            own = self._inverse_norms[part] if self._sharpness is None else None
            slots_of_part, slots = slots[: len(part)], slots[len(part) :]
            with _on(self.device):
                self._kernels.keep_rows(
                    products, self._column_of, self._scale_of, own, self._sharpness or 0.0,
                    self._kept, self._factors, slots_of_part,
                )  # fmt: skip

    def take(self, ids: Tensor, places: Tensor | None = None) -> "TakenRows | KeptRows":
        """Return rows of some ids, without reading on the host.

        Args:
            ids: Of shape `(num_ids,)`, for all rows of a batch. Their rows must be kept (see `keep`); other rows are
                undefined. More than `capacity` are formed in pieces at every use.
            places: Where in `ids` the ids of each row of the batch are, of shape `(batch_size, num_own)`. Only if
                `are_shared`. Default: every row takes all.
        """
        ids = ids.to(self.device)
        if len(ids) > self.capacity:
            return TakenRows(self, ids, None)
        assert self._kept is not None
        slots = self._slot_of[ids].clamp_min(0)
        if self._kernels is None:
            assert places is None
            return TakenRows(self, ids, self._kept.index_select(0, slots))
        return KeptRows(self, slots, None if places is None else places.to(self.device))

    def form(self, ids: Tensor) -> Tensor:
        """Form rows of some ids.

        Args:
            ids: Of shape `(num_ids,)`, on the embeddings' device.

        Returns:
            Rows in float32, of shape `(num_ids, num_anchors)`.
        """
        return torch.cat(list(self._formed(ids)))

    def _products_of(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids, as many as fit, and the products of their embeddings with `_axes`."""
        for part in ids.split(max(1, _SCRATCH_BYTES // (4 * len(self._axes)))):
            yield part, _products(self._embeddings[part], self._axes)

    def _formed(self, ids: Tensor) -> Iterator[Tensor]:
        """Form the rows of some ids, a few at a time."""
        num_block = max(1, (_CUDA_BLOCK_BYTES if ids.is_cuda else _BLOCK_BYTES) // (4 * self._num_anchors))
        for part, products in self._products_of(ids):
            for few_ids, few in zip(part.split(num_block), products.split(num_block), strict=True):
                if self._columns is not None:
                    few = few.index_select(1, self._columns)
                few.mul_(self._anchor_inverse_norms)
                if self._sharpness is None:
                    few.mul_(self._inverse_norms[few_ids, None])
                else:
                    lengths = torch.linalg.vector_norm(few, dim=-1, keepdim=True)
                    few.mul_(self._sharpness / lengths.clamp_min_(_TINY))
                yield torch.softmax(few, -1)

    def forget(self) -> None:
        """Free the memory of the kept rows."""
        self._slot_of.fill_(-1)
        self._id_at.fill_(len(self._slot_of) - 1)
        self._used_at.fill_(0)
        self._kept = None


class KeptRows:
    """Products with kept rows, which are read where they are.

    Args:
        rows: Keeps them.
        slots: Their slots, of shape `(num_ids,)`.
        places: Which of them each row of a batch takes, of shape `(batch_size, num_own)`; None for all.
    """

    def __init__(self, rows: RelativeRows, slots: Tensor, places: Tensor | None):
        self._rows = rows
        self._slots = slots
        self._factors = rows._factors[slots]
        self._places = places

    def combine(self, probs: Tensor) -> Tensor:
        """Sum the rows weighted by probabilities; see `TakenRows.combine`."""
        weights, rows = probs.to(self._slots.device), self._rows
        if self._places is not None:
            weights = weights.new_zeros(len(weights), len(self._slots)).scatter_(1, self._places, weights)
        with _on(rows.device):
            found: Tensor = rows._kernels.combine(rows._kept, self._slots, weights * self._factors, rows._num_anchors)
        return (found if rows._places is None else found[:, rows._places]).to(probs.device)

    def compare(self, weights: Tensor) -> Tensor:
        """Multiply every row by weights of the anchors; see `TakenRows.compare`."""
        rows = self._rows
        moved = weights.to(self._slots.device)
        moved = moved if rows._order is None else moved[:, rows._order]
        with _on(rows.device):
            found: Tensor = rows._kernels.compare(rows._kept, self._slots, moved) * self._factors
        return (found if self._places is None else found.gather(1, self._places)).to(weights.device)


class TakenRows:
    """Products with the rows of some ids, without their matrix if it would be too large (see `RelativeRows.take`).

    Args:
        rows: Forms rows that are not held.
        ids: Of shape `(num_ids,)`.
        held: Their rows, of shape `(num_ids, num_anchors)`; None if they are to be formed in pieces at every use.
    """

    def __init__(self, rows: RelativeRows, ids: Tensor, held: Tensor | None):
        self._rows = rows
        self._ids = ids
        self._held = held

    def combine(self, probs: Tensor) -> Tensor:
        """Sum the rows weighted by probabilities.

        Args:
            probs: Of shape `(batch_size, num_ids)`, on any device.

        Returns:
            Of shape `(batch_size, num_anchors)`, on the device of `probs`.
        """
        weights = probs.to(self._ids.device)
        products = (weights[:, part] @ rows for part, rows in self._blocks())
        return functools.reduce(torch.add, products).to(probs.device)

    def compare(self, weights: Tensor) -> Tensor:
        """Multiply every row by weights of the anchors.

        Args:
            weights: Of shape `(batch_size, num_anchors)`, on any device.

        Returns:
            Of shape `(batch_size, num_ids)`, on the device of `weights`.
        """
        moved = weights.to(self._ids.device)
        return torch.cat([moved @ rows.T for _, rows in self._blocks()], dim=-1).to(weights.device)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        if self._held is not None:
            yield slice(None), self._held
            return
        size = max(1, self._rows.capacity // 4)
        for start in range(0, len(self._ids), size):
            yield slice(start, start + size), self._rows.form(self._ids[start : start + size])


def distinct_ids(ids: Tensor, is_asked: Tensor, vocab_size: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the distinct ids of a batch, without reading on the host.

    Args:
        ids: Of shape `(batch_size, num_own)`.
        is_asked: Whose ids count, of shape `(batch_size,)`.
        vocab_size: Number of ids there are.
        capacity: Largest number to return.

    Returns:
        The distinct ids, of shape `(num_ids,)`, filled up with 0; where the ids of each row are among them, of the shape
        of `ids`; and how many distinct ids the batch has, which may be more than `capacity`.
    """
    most = min(capacity, ids.numel())
    is_wanted = torch.zeros(vocab_size + 1, dtype=torch.bool, device=ids.device)
    is_wanted.index_fill_(0, torch.where(is_asked[:, None], ids, vocab_size).flatten(), True)
    is_wanted = is_wanted[:vocab_size]
    place = is_wanted.cumsum(0) - 1
    distinct = ids.new_zeros(most + 1)
    every = torch.arange(vocab_size, device=ids.device)
    distinct.scatter_(0, torch.where(is_wanted, place.clamp_max(most), most), every)
    return distinct[:most], place.clamp(0, most - 1)[ids], is_wanted.sum()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch kernels on a device, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kernels(device: torch.device) -> Any:
    """Our kernels for rows on a device; None where Triton does not run."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module(".relative_kernels", __package__)
    except ImportError:  # PyTorch's kernels, one row of a batch after the other
        return None


def inverse_norms(embeddings: Tensor) -> Tensor:
    """One over the length of every row, 0 for rows of zeros, in float32, of shape `(num_rows,)`."""
    # In pieces, because each is converted as a whole.
    norms = torch.cat([torch.linalg.vector_norm(block.float(), dim=-1) for block in embeddings.split(_CONVERTED_ROWS)])
    return torch.where(norms > 0, 1 / norms, 0.0)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """`queries @ keys.T` with sums and result in float32, whatever the dtype of both."""
    if queries.dtype == torch.float32:
        return queries @ keys.T
    if queries.is_cuda and _HAS_OUT_DTYPE:
        cut = len(keys) - len(keys) % _ALIGNMENT
        if cut in (0, len(keys)):
            return torch.mm(queries, keys.T, out_dtype=torch.float32)
        # An odd number of keys, or rows at odd offsets, would make it several times slower.
        padded = queries.new_empty(len(queries), cut + _ALIGNMENT, dtype=torch.float32)
        for some in (slice(cut), slice(cut, len(keys))):
            torch.mm(queries, keys[some].T, out_dtype=torch.float32, out=padded[:, some])
        return padded[:, : len(keys)]
    # There is no kernel for that here; the keys are converted in pieces, to save memory.
    queries = queries.float()
    return torch.cat([queries @ block.float().T for block in keys.split(_CONVERTED_ROWS)], dim=-1)
