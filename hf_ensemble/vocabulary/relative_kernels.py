"""Triton kernels for rows of relative representations: they are normalised in two passes, and read where they are kept.

Rows are kept as their largest entry times a power of two, so that 16 bits hold them, with one over their sum apart. Sums
are computed in float32, and columns beyond the anchors are zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

WIDTH_OF_BLOCKS = 512
"""Rows are a multiple of this wide."""

_FULL = 32768.0
"""What the largest entry of a row is kept as."""

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
    is_scaled = own_scales is None
    _keep_rows[(len(products),)](
        products, columns, anchor_scales, scales if own_scales is None else own_scales, kept, scales, slots, sharpness,
        len(columns), products.stride(0), kept.stride(0), is_scaled, _FULL, 2048, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_anchors"])
def _keep_rows(
    products, columns, anchor_scales, own_scales, kept, scales, slots, sharpness,
    num_anchors, num_columns, width, IS_SCALED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    products += row * num_columns
    squares = tl.zeros((BLOCK,), tl.float32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_anchors, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = at < num_anchors
        column = tl.load(columns + at, mask=is_there, other=0)
        x = tl.load(products + column, mask=is_there, other=0.0)
        x *= tl.load(anchor_scales + at, mask=is_there, other=0.0)
        squares += x * x
        highest = tl.maximum(highest, tl.where(is_there, x, float("-inf")))
    top = tl.max(highest, 0)
    factor = sharpness / tl.maximum(tl.sqrt(tl.sum(squares, 0)), 1e-30) if IS_SCALED else tl.load(own_scales + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_anchors, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = at < num_anchors
        column = tl.load(columns + at, mask=is_there, other=0)
        x = tl.load(products + column, mask=is_there, other=0.0)
        x *= tl.load(anchor_scales + at, mask=is_there, other=0.0)
        share = (tl.exp((x - top) * factor) * FULL).to(kept.dtype.element_ty)
        tl.store(kept + slot * width + at, share, mask=is_there)
        total += tl.where(is_there, share.to(tl.float32), 0.0)
    tl.store(scales + slot, 1.0 / tl.sum(total, 0))


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
    rows, anchors, ids = _rows_at_once(len(weights)), 128, 32
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
    total = tl.zeros((ROWS, ANCHORS), tl.float32)
    for start in range(0, num_ids, IDS):
        i = start + tl.arange(0, IDS)
        is_there = i < num_ids
        slot = tl.load(slots + i, mask=is_there, other=0).to(tl.int64)
        r = tl.load(kept + slot[:, None] * width + at[None, :], mask=is_there[:, None], other=0.0).to(tl.float32)
        if ROWS == 1:
            w = tl.load(weights + i, mask=is_there, other=0.0)
            total += tl.sum(w[:, None] * r, 0)[None, :]
        else:
            is_read = is_row[:, None] & is_there[None, :]
            w = tl.load(weights + row[:, None] * num_ids + i[None, :], mask=is_read, other=0.0)
            total += tl.dot(w, r, input_precision="tf32x3")
    place = row[:, None].to(tl.int64) * num_anchors + at[None, :]
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
