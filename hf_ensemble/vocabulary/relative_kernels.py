"""Triton kernels for rows of relative representations: they are normalised in two passes, and read where they are kept.

Rows are scaled so that their largest entry is `_FULL`, which 16 bits hold; one over their sum is kept apart. Sums are
computed in float32, and columns beyond the anchors are zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

WIDTH_OF_BLOCKS = 512
"""The width of kept rows is a multiple of this."""

_FULL = 32768.0
"""The largest entry of a kept row."""

_ROWS, _BLOCK, _SPLITS = 4, 512, 8
"""How products are read: rows and columns at once, and parts of a row in parallel."""

_MOST_ROWS = 32
"""Maximum number of rows of a batch in one program."""


def keep_rows(
    products: Tensor,
    columns: Tensor,
    anchor_scales: Tensor,
    own_scales: Tensor | None,
    sharpness: float,
    kept: Tensor,
    scales: Tensor,
    slots: Tensor,
) -> None:
    """Turn products with the anchors into rows, and keep these.

    Args:
        products: Of shape `(num_ids, num_columns)`, in float32.
        columns: The column of each anchor, of shape `(num_anchors,)`.
        anchor_scales: One over the length of each anchor, of shape `(num_anchors,)`.
        own_scales: The same for each id, of shape `(num_ids,)`; None if similarities are scaled to length `sharpness`.
        sharpness: That length.
        kept: Gets the rows, each up to a factor, of shape `(capacity, width)`; changed in place.
        scales: Gets the factors, of shape `(capacity,)`; changed in place.
        slots: Where each row goes, of shape `(num_ids,)`.
    """
    num_ids, num_anchors = len(products), len(columns)
    split = triton.cdiv(triton.cdiv(num_anchors, _SPLITS), _BLOCK) * _BLOCK
    grid = triton.cdiv(num_ids, _ROWS), triton.cdiv(num_anchors, split)
    squares, highest, sums = (products.new_empty(grid[1], num_ids) for _ in range(3))
    _measure_rows[grid](
        products, columns, anchor_scales, squares, highest, num_ids, num_anchors, products.stride(0), split, _ROWS, _BLOCK,
        num_warps=4,
    )  # fmt: skip
    lengths = squares.sum(0).sqrt_().clamp_min_(1e-30)
    factors = sharpness / lengths if own_scales is None else own_scales
    _keep_rows[grid](
        products, columns, anchor_scales, highest.amax(0), factors, kept, slots, sums, num_ids, num_anchors,
        products.stride(0), kept.stride(0), split, _FULL, _ROWS, _BLOCK, num_warps=4,
    )  # fmt: skip
    scales.index_copy_(0, slots, sums.sum(0).reciprocal_())


@triton.jit(do_not_specialize=["num_ids", "num_anchors"])
def _measure_rows(
    products, columns, anchor_scales, squares, highest, num_ids, num_anchors, num_columns, split,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of a part of some rows, and find the largest number in it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * split
    is_row = row < num_ids
    squared = tl.zeros((ROWS, BLOCK), tl.float32)
    largest = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    for start in range(begin, tl.minimum(begin + split, num_anchors), BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = is_row[:, None] & (at < num_anchors)[None, :]
        x = _similarities(products, columns, anchor_scales, row, at, is_there, num_anchors, num_columns)
        squared += x * x
        largest = tl.maximum(largest, tl.where(is_there, x, float("-inf")))
    place = tl.program_id(1) * num_ids + row
    tl.store(squares + place, tl.sum(squared, 1), mask=is_row)
    tl.store(highest + place, tl.max(largest, 1), mask=is_row)


@triton.jit(do_not_specialize=["num_ids", "num_anchors"])
def _keep_rows(
    products, columns, anchor_scales, highest, factors, kept, slots, sums, num_ids, num_anchors, num_columns, width, split,
    FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep a part of some rows, and sum it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * split
    is_row = row < num_ids
    top = tl.load(highest + row, mask=is_row, other=0.0)
    factor = tl.load(factors + row, mask=is_row, other=0.0)
    place = tl.load(slots + row, mask=is_row, other=0).to(tl.int64) * width
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(begin, tl.minimum(begin + split, num_anchors), BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = is_row[:, None] & (at < num_anchors)[None, :]
        x = _similarities(products, columns, anchor_scales, row, at, is_there, num_anchors, num_columns)
        share = (tl.exp((x - top[:, None]) * factor[:, None]) * FULL).to(kept.dtype.element_ty)
        tl.store(kept + place[:, None] + at[None, :], share, mask=is_there)
        total += tl.where(is_there, share.to(tl.float32), 0.0)
    tl.store(sums + tl.program_id(1) * num_ids + row, tl.sum(total, 1), mask=is_row)


@triton.jit
def _similarities(products, columns, anchor_scales, row, at, is_there, num_anchors, num_columns):
    column = tl.load(columns + at, mask=at < num_anchors, other=0)
    scale = tl.load(anchor_scales + at, mask=at < num_anchors, other=0.0)
    place = row[:, None].to(tl.int64) * num_columns + column[None, :]
    return tl.load(products + place, mask=is_there, other=0.0) * scale[None, :]


def combine(kept: Tensor, slots: Tensor, weights: Tensor, num_anchors: int) -> Tensor:
    """Sum kept rows with weights.

    Args:
        kept: Of shape `(capacity, width)`.
        slots: The slots of the rows, of shape `(num_ids,)`.
        weights: Of shape `(batch_size, num_ids)`, in float32.
        num_anchors: Number of columns to return.

    Returns:
        Of shape `(batch_size, num_anchors)`, in float32.
    """
    weights = weights.contiguous()
    found = weights.new_empty(len(weights), num_anchors)
    rows = _rows_at_once(len(weights))
    anchors, ids = 128, 16 if rows == 1 else 32
    _combine[(triton.cdiv(num_anchors, anchors), triton.cdiv(len(weights), rows))](
        kept, slots, weights, found, len(slots), num_anchors, kept.stride(0), len(weights), rows, ids, anchors,
        num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["num_ids", "num_anchors", "num_rows"])
def _combine(
    kept, slots, weights, found, num_ids, num_anchors, width, num_rows,
    ROWS: tl.constexpr, IDS: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    sums = tl.zeros((IDS if ROWS == 1 else ROWS, ANCHORS), tl.float32)
    for start in range(0, num_ids, IDS):
        i = start + tl.arange(0, IDS)
        is_there = i < num_ids
        slot = tl.load(slots + i, mask=is_there, other=0).to(tl.int64)
        r = tl.load(kept + slot[:, None] * width + at[None, :], mask=is_there[:, None], other=0.0).to(tl.float32)
        if ROWS == 1:
            w = tl.load(weights + i, mask=is_there, other=0.0)
            sums += w[:, None] * r
        else:
            is_read = is_row[:, None] & is_there[None, :]
            w = tl.load(weights + row[:, None] * num_ids + i[None, :], mask=is_read, other=0.0)
            sums += tl.dot(w, r, input_precision="tf32x3")
    place = row[:, None].to(tl.int64) * num_anchors + at[None, :]
    total = tl.sum(sums, 0)[None, :] if ROWS == 1 else sums
    tl.store(found + place, total, mask=is_row[:, None] & (at < num_anchors)[None, :])


def compare(kept: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Multiply kept rows by weights of the anchors.

    Args:
        kept: Of shape `(capacity, width)`.
        slots: The slots of the rows, of shape `(num_ids,)`.
        weights: Of shape `(batch_size, num_anchors)`, in float32.

    Returns:
        Of shape `(batch_size, num_ids)`, in float32.
    """
    weights = weights.contiguous()
    (num_rows, num_anchors), num_ids, width = weights.shape, len(slots), kept.stride(0)
    rows = _rows_at_once(num_rows)
    ids, anchors, num_splits = (4, 512, 8) if rows == 1 else (32, 64, 32)
    split = triton.cdiv(triton.cdiv(width, num_splits), WIDTH_OF_BLOCKS) * WIDTH_OF_BLOCKS
    num_splits = triton.cdiv(width, split)
    parts = weights.new_empty(num_splits, num_rows, num_ids)
    _compare[(triton.cdiv(num_ids, ids), num_splits, triton.cdiv(num_rows, rows))](
        kept, slots, weights, parts, num_ids, num_anchors, width, num_rows, split, rows, ids, anchors, num_warps=4
    )
    return parts.sum(0)


@triton.jit(do_not_specialize=["num_ids", "num_anchors", "num_rows"])
def _compare(
    kept, slots, weights, parts, num_ids, num_anchors, width, num_rows, split,
    ROWS: tl.constexpr, IDS: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * IDS + tl.arange(0, IDS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_there, is_row = i < num_ids, row < num_rows
    slot = tl.load(slots + i, mask=is_there, other=0).to(tl.int64)
    begin = tl.program_id(1) * split
    end = tl.minimum(begin + split, width)
    sums = tl.zeros((IDS, ANCHORS) if ROWS == 1 else (ROWS, IDS), tl.float32)
    for start in range(begin, end, ANCHORS):
        at = start + tl.arange(0, ANCHORS)
        r = tl.load(kept + slot[:, None] * width + at[None, :], mask=is_there[:, None], other=0.0).to(tl.float32)
        if ROWS == 1:
            w = tl.load(weights + at, mask=at < num_anchors, other=0.0)
            sums += r * w[None, :]
        else:
            is_read = is_row[:, None] & (at < num_anchors)[None, :]
            w = tl.load(weights + row[:, None].to(tl.int64) * num_anchors + at[None, :], mask=is_read, other=0.0)
            sums += tl.dot(w, tl.trans(r), input_precision="tf32x3")
    place = (tl.program_id(1) * num_rows + row[:, None]) * num_ids + i[None, :]
    total = tl.sum(sums, 1)[None, :] if ROWS == 1 else sums
    tl.store(parts + place, total, mask=is_row[:, None] & is_there[None, :])


def _rows_at_once(num_rows: int) -> int:
    """Products of matrices need 16 rows or more."""
    return 1 if num_rows == 1 else min(_MOST_ROWS, max(16, triton.next_power_of_2(num_rows)))
