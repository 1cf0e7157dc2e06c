"""Relative representations: a token as its similarities to the anchors, formed on request."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_CACHE_BYTES = 512 * 2**20
"""Largest memory of one member's kept rows."""

_COPY_BYTES = 256 * 2**20
"""Largest memory of a copy of the anchors' embeddings; if they are larger, rows are formed against all embeddings."""

_SCRATCH_BYTES = 320 * 2**20
"""Largest memory of the products from which rows are formed."""

_BLOCK_BYTES = 24 * 2**20
"""Size of the pieces in which rows are normalised on a CPU."""

_CUDA_BLOCK_BYTES = 224 * 2**20
"""The same on a GPU, where small pieces leave it idle."""

_CONVERTED_ROWS = 16384
_ALIGNMENT = 8
_TINY = 1e-30
_HAS_OUT_DTYPE = torch.__version__ >= "2.8"


class RelativeRows:
    """One member's relative representation `R̂`; only requested rows exist, in bounded number.

    A row is the softmax over the anchors of the cosine similarities between a token's embedding and the anchors'. Rows
    are formed and kept, in float32, on the embeddings' device. When no more fit, rows that are not requested at the
    moment are dropped. Rows of tokens without an embedding (all zeros) are uniform. Not safe for several threads or
    CUDA streams at once.

    Args:
        embeddings: Of shape `(vocab_size, hidden_size)`; not copied.
        anchor_ids: Ids of the anchors, of shape `(num_anchors,)`, on the embeddings' device.
        sharpness: If given, similarities are scaled to length `sharpness` before the softmax.

    Attributes:
        capacity: Largest number of kept rows.
        device: Their device.
    """

    def __init__(self, embeddings: Tensor, anchor_ids: Tensor, sharpness: float | None):
        vocab_size, hidden_size = embeddings.shape
        self.capacity = max(1, min(vocab_size, _CACHE_BYTES // (4 * len(anchor_ids))))
        self.device = embeddings.device
        self._embeddings = embeddings
        self._sharpness = sharpness
        self._inverse_norms = inverse_norms(embeddings)
        self._anchor_inverse_norms = self._inverse_norms[anchor_ids]
        self._num_anchors = len(anchor_ids)
        is_small = len(anchor_ids) * hidden_size * embeddings.element_size() <= _COPY_BYTES
        self._axes = embeddings[anchor_ids] if is_small else embeddings
        self._columns = None if is_small else anchor_ids
        self._slot_of = anchor_ids.new_full((vocab_size,), -1)
        self._num_kept = 0
        self._kept: Tensor | None = None

    def is_missing(self, ids: Tensor) -> Tensor:
        """Whether there is no kept row for some ids.

        Args:
            ids: Of any shape, on the embeddings' device.

        Returns:
            Of the same shape.
        """
        return self._slot_of[ids] < 0

    def reserve(self) -> None:
        """Allocate the memory for kept rows, which stays the same until it is freed."""
        if self._kept is None:
            self._kept = self._anchor_inverse_norms.new_empty(self.capacity, self._num_anchors)

    def keep(self, ids: Tensor, num_missing: int) -> None:
        """Form the rows of some ids that are not kept yet, and keep the rows of all of them.

        Args:
            ids: At most `capacity`, each once, of shape `(num_ids,)`, on the embeddings' device.
            num_missing: Number of ids that are not kept yet.
        """
        assert self._kept is not None, "no memory reserved"
        # Ids without a slot first. Masks would make the host wait for the device.
        missing, others = ids[self._slot_of[ids].argsort()].tensor_split([num_missing])
        if self._num_kept + num_missing > self.capacity:
            # Rows that are not requested now are dropped.
            kept = self._kept[self._slot_of[others]]
            self._slot_of.fill_(-1)
            self._num_kept = len(others)
            self._kept[: self._num_kept] = kept
            self._slot_of[others] = torch.arange(self._num_kept, device=ids.device)
        if num_missing:
            start, self._num_kept = self._num_kept, self._num_kept + num_missing
            self.form(missing, self._kept[start : self._num_kept])
            self._slot_of[missing] = torch.arange(start, self._num_kept, device=ids.device)

    def take(self, ids: Tensor) -> "TakenRows":
        """Return rows of some ids, without reading on the host.

        Args:
            ids: Of shape `(num_ids,)` or, for each row of a batch its own, `(batch_size, num_ids)`. Their rows must be
                kept (see `keep`); other rows are undefined. More than `capacity`, of the first shape, are formed in
                pieces at every use.
        """
        ids = (ids[0] if ids.ndim == 2 and len(ids) == 1 else ids).to(self.device)
        if ids.numel() > self.capacity:
            return TakenRows(self, ids, None)
        assert self._kept is not None
        held = self._kept.index_select(0, self._slot_of[ids].clamp_min(0).flatten())
        return TakenRows(self, ids, held.view(*ids.shape, -1))

    def form(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Form rows of some ids.

        Args:
            ids: Of shape `(num_ids,)`, on the embeddings' device.
            out: Receives the rows, if given.

        Returns:
            Rows in float32, of shape `(num_ids, num_anchors)`; `out` if given.
        """
        if out is None:
            out = self._anchor_inverse_norms.new_empty(len(ids), self._num_anchors)
        num_scratch = max(1, _SCRATCH_BYTES // (4 * len(self._axes)))
        num_block = max(1, (_CUDA_BLOCK_BYTES if ids.is_cuda else _BLOCK_BYTES) // (4 * self._num_anchors))
        for part, rows in zip(ids.split(num_scratch), out.split(num_scratch), strict=True):
            products = _products(self._embeddings[part], self._axes)
            blocks = zip(part.split(num_block), products.split(num_block), rows.split(num_block), strict=True)
            for few_ids, few, into in blocks:
                if self._columns is not None:
                    few = few.index_select(1, self._columns)
                few.mul_(self._anchor_inverse_norms)
                if self._sharpness is None:
                    few.mul_(self._inverse_norms[few_ids, None])
                else:
                    lengths = torch.linalg.vector_norm(few, dim=-1, keepdim=True)
                    few.mul_(self._sharpness / lengths.clamp_min_(_TINY))
                torch.softmax(few, -1, out=into)
        return out

    def forget(self) -> None:
        """Free the memory of the kept rows."""
        self._slot_of.fill_(-1)
        self._num_kept, self._kept = 0, None


class TakenRows:
    """Products with the rows of some ids, without their matrix if it would be too large (see `RelativeRows.take`).

    Args:
        rows: Forms rows that are not held.
        ids: Of shape `(num_ids,)` or `(batch_size, num_ids)`.
        held: Their rows, of shape `(num_ids, num_anchors)` or `(batch_size, num_ids, num_anchors)`; None if they are to be
            formed in pieces at every use.
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
        weights = probs.to(self._ids.device)[:, None]
        products = ((weights[..., part] @ rows)[:, 0] for part, rows in self._blocks())
        return functools.reduce(torch.add, products).to(probs.device)

    def compare(self, weights: Tensor) -> Tensor:
        """Multiply every row by weights of the anchors.

        Args:
            weights: Of shape `(batch_size, num_anchors)`, on any device.

        Returns:
            Of shape `(batch_size, num_ids)`, on the device of `weights`.
        """
        moved = weights.to(self._ids.device)
        if self._held is not None and self._ids.ndim == 2:
            return (self._held @ moved[..., None])[..., 0].to(weights.device)
        return torch.cat([moved @ rows.T for _, rows in self._blocks()], dim=-1).to(weights.device)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        if self._held is not None:
            yield slice(None), self._held
            return
        size = max(1, self._rows.capacity // 4)
        for start in range(0, len(self._ids), size):
            yield slice(start, start + size), self._rows.form(self._ids[start : start + size])


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
