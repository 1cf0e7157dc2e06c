"""Triton kernels for the operations that short steps spend their time on, besides reading weights.

In plain PyTorch, a step of one token launches about fifty kernels per layer, and each takes longer to start than to
run. Sums are computed in float32. Shapes that change between calls are not constants, so few variants of each kernel
are compiled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_VECTORS = 32
"""Maximum number of vectors in a product with a matrix in int8."""

_MOST_SPLITS = 64
"""Maximum number of parts in which the slots of a row are read in parallel."""

_LEAST_SPLIT = 64
"""Minimum number of slots in each part."""

_MANY = 2048
"""This many parts, over all rows and heads, keep a GPU busy."""


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, adds_one: bool) -> Tensor:
    """Divide by the root of the mean square, and scale.

    Args:
        states: Of shape `(..., width)`.
        weight: The scale, of shape `(width,)`.
        epsilon: Added to the mean square.
        adds_one: Whether the scale is one more than `weight`, applied before rounding, as in Gemma.
    """
    states = states.contiguous()
    found, width = torch.empty_like(states), states.shape[-1]
    block = triton.next_power_of_2(width)
    grid = (states.numel() // width,)
    _rms_norm[grid](states, weight, found, width, epsilon, adds_one, block, num_warps=min(16, max(1, block // 512)))
    return found


@triton.jit
def _rms_norm(states, weight, found, width, epsilon, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    is_there = at < width
    start = tl.program_id(0).to(tl.int64) * width
    x = tl.load(states + start + at, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    kind = found.dtype.element_ty
    x = x * (1.0 + scale) if ADDS_ONE else x.to(kind).to(tl.float32) * scale
    tl.store(found + start + at, x.to(kind), mask=is_there)


def product(states: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Multiply a matrix with a single vector or, if it is in int8, with up to `MOST_VECTORS`.

    Args:
        states: Of shape `(..., width)`.
        weight: Of shape `(num_out, width)`, contiguous.
        bias: Of shape `(num_out,)`.
        scale: Factors for the rows of a matrix in int8, in float32, of shape `(num_out,)`.

    Returns:
        Of shape `(..., num_out)`.
    """
    num_out, width = weight.shape
    num_vectors = states.numel() // width
    states, found = states.contiguous(), states.new_empty(*states.shape[:-1], num_out)
    # A missing scale or bias is not read, so the matrix stands in for it.
    inputs = states, weight, weight if scale is None else scale, weight if bias is None else bias, found
    if num_vectors > 1:
        # Products of matrices need 16 vectors or more.
        num_padded = max(16, triton.next_power_of_2(num_vectors))
        _products[(triton.cdiv(num_out, 32),)](
            *inputs, width, num_out, num_vectors, bias is not None, 32, 128, num_padded, _precision(states),
            num_warps=4, num_stages=5,
        )  # fmt: skip
        return found
    block = 1024 if width % 1024 == 0 else 512
    _product[(num_out,)](
        *inputs, width, scale is not None, bias is not None, width % block == 0, block, num_warps=block // 256
    )
    return found


@triton.jit
def _product(
    states, weight, scale, bias, found, width,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    weight += row.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        if IS_EVEN:
            x = tl.load(states + start + at)
            w = tl.load(weight + start + at)
        else:
            is_there = start + at < width
            x = tl.load(states + start + at, mask=is_there, other=0.0)
            w = tl.load(weight + start + at, mask=is_there, other=0)
        total += x.to(tl.float32) * w.to(tl.float32)
    y = tl.sum(total, 0)
    if HAS_SCALE:
        y *= tl.load(scale + row)
    if HAS_BIAS:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(found + row, y.to(found.dtype.element_ty))


@triton.jit(do_not_specialize=["num_vectors"])
def _products(
    states, weight, scale, bias, found, width, num_out, num_vectors,
    HAS_BIAS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, vector = tl.program_id(0) * OUT + tl.arange(0, OUT), tl.arange(0, VECTORS)
    along = tl.arange(0, BLOCK)
    is_row, is_vector = row < num_out, vector < num_vectors
    total = tl.zeros((OUT, VECTORS), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + along
        is_there = at < width
        w_at = row[:, None].to(tl.int64) * width + at[None, :]
        w = tl.load(weight + w_at, mask=is_row[:, None] & is_there[None, :], other=0)
        x_at = vector[None, :] * width + at[:, None]
        x = tl.load(states + x_at, mask=is_vector[None, :] & is_there[:, None], other=0.0)
        # Every dtype holds these whole numbers exactly.
        total = tl.dot(w.to(x.dtype), x, total, input_precision=PRECISION)
    total *= tl.load(scale + row, mask=is_row, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    place = vector[None, :].to(tl.int64) * num_out + row[:, None]
    tl.store(found + place, total.to(found.dtype.element_ty), mask=is_row[:, None] & is_vector[None, :])


def _precision(states: Tensor) -> str:
    return "ieee" if states.dtype == torch.float32 else "tf32"


def rotate_and_keep(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate queries and keys by their positions, and put keys and values into their slots.

    Args:
        query: Of shape `(num_rows, num_new, num_heads, width)`.
        key: Of shape `(num_rows, num_new, num_key_heads, width)`.
        value: As `key`.
        cos: Cosines of the positions' angles, of shape `(num_rows or 1, num_new, width)`; the two halves are equal.
        sin: As `cos`.
        keys: The cached keys, of shape `(num_rows, num_key_heads, capacity, width)`; changed in place.
        values: As `keys`.
        slots: The slots of the new keys and values, of shape `(num_rows, num_new)`.

    Returns:
        The rotated queries, of shape `(num_rows, num_new, num_heads, width)`.
    """
    num_rows, num_new, num_heads, width = query.shape
    num_kept = key.shape[2]
    cos, sin = (part.expand(num_rows, num_new, width).contiguous() for part in (cos, sin))
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotate_and_keep[(num_rows * num_new, num_heads + 2 * num_kept)](
        query.contiguous(), key.contiguous(), value.contiguous(), cos, sin, rotated, keys, values, slots.contiguous(),
        num_new, num_heads, num_kept, keys.stride(0), keys.stride(1), width // 2, num_warps=1,
    )  # fmt: skip
    return rotated


@triton.jit(do_not_specialize=["num_new", "num_heads", "num_kept"])
def _rotate_and_keep(
    query, key, value, cos, sin, rotated, keys, values, slots,
    num_new, num_heads, num_kept, of_row, of_head, HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    left = tl.arange(0, HALF)
    right = HALF + left
    kind = rotated.dtype.element_ty
    if head < num_heads:
        source = query + (token * num_heads + head) * 2 * HALF
        target = rotated + (token * num_heads + head) * 2 * HALF
    else:
        head -= num_heads
        slot = tl.load(slots + token)
        place = (token // num_new) * of_row + (head % num_kept) * of_head + slot * 2 * HALF
        if head < num_kept:
            source = key + (token * num_kept + head) * 2 * HALF
            target = keys + place
        else:
            source = value + (token * num_kept + head - num_kept) * 2 * HALF
            target = values + place
    a, b = tl.load(source + left).to(tl.float32), tl.load(source + right).to(tl.float32)
    if tl.program_id(1) < num_heads + num_kept:
        cos_of, sin_of = cos + token * 2 * HALF, sin + token * 2 * HALF
        c, s = tl.load(cos_of + left).to(tl.float32), tl.load(sin_of + left).to(tl.float32)
        a, b = a * c - b * s, b * c + a * s
    tl.store(target + left, a.to(kind))
    tl.store(target + right, b.to(kind))


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend only to the slots up to each query's position.

    Every key head is read once for all query heads that share it, in parallel parts.

    Args:
        query: Of shape `(num_rows, num_new, num_heads, width)`, contiguous.
        keys: Of shape `(num_rows, num_key_heads, capacity, width)`.
        values: As `keys`.
        positions: The queries' positions, of shape `(num_rows, num_new)`.
        scale: Factor for the scores.
        window: How many slots, up to and including its own, a query sees; None for all.

    Returns:
        Of the shape of `query`.
    """
    num_rows, num_new, num_heads, width = query.shape
    num_kept, capacity = keys.shape[1:3]
    group = num_heads // num_kept
    count = group * num_new
    block = min(64, max(16, triton.next_power_of_2(count)))
    num_blocks = triton.cdiv(count, block)
    wanted = min(_MOST_SPLITS, max(1, _MANY // (num_rows * num_kept * num_blocks)))
    split = max(_LEAST_SPLIT, triton.next_power_of_2(triton.cdiv(capacity, wanted)))
    num_splits = triton.cdiv(capacity, split)
    parts = torch.empty(num_rows * num_kept * num_splits * count, width, dtype=torch.float32, device=query.device)
    logsums = torch.empty(len(parts), dtype=torch.float32, device=query.device)
    found, positions = torch.empty_like(query), positions.contiguous()
    _attend[(num_rows * num_kept, num_splits, num_blocks)](
        query, keys, values, positions, parts, logsums, scale, keys.stride(0), keys.stride(1),
        num_new, num_kept, num_splits, split, group, window or 0, width, block,
        _precision(query), num_warps=4,
    )  # fmt: skip
    _join[(num_rows * num_kept, count)](
        parts, logsums, found, num_new, num_kept, num_splits, group, width, _MOST_SPLITS, num_warps=4
    )
    return found


@triton.jit(do_not_specialize=["num_new", "num_kept", "num_splits", "group", "window"])
def _attend(
    query, keys, values, positions, parts, logsums, scale, of_row, of_head,
    num_new, num_kept, num_splits, split, group, window,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // num_kept).to(tl.int64), tl.program_id(0) % num_kept
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    along = tl.arange(0, WIDTH)
    count = group * num_new
    is_there = at < count
    token = at % num_new
    position = tl.load(positions + row * num_new + token, mask=is_there, other=-1).to(tl.int32)
    last = tl.max(position, 0)
    begin = tl.program_id(1) * split
    end = tl.minimum(begin + split, last + 1)
    first = 0
    if window > 0:
        first = tl.min(tl.where(is_there, position, 2147483647), 0) - window + 1
    out = (tl.program_id(0).to(tl.int64) * num_splits + tl.program_id(1)) * count + at
    if (begin > last) | (begin + split <= first):
        tl.store(logsums + out, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_there)
    else:
        q_at = ((row * num_new + token) * num_kept + head) * group + at // num_new
        q = tl.load(query + q_at[:, None] * WIDTH + along[None, :], mask=is_there[:, None], other=0.0)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK, WIDTH), tl.float32)
        keys += row * of_row + head * of_head
        values += row * of_row + head * of_head
        STEP: tl.constexpr = 32 if WIDTH > 128 else 64
        for start in range(begin, end, STEP):
            slot = start + tl.arange(0, STEP)
            is_read = slot < end
            k = tl.load(keys + slot[:, None] * WIDTH + along[None, :], mask=is_read[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            is_seen = (slot[None, :] <= position[:, None]) & is_read[None, :]
            if window > 0:
                is_seen &= slot[None, :] > position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            # If nothing has been seen yet, there is nothing to subtract.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shares = tl.exp(scores - base[:, None])
            kept = tl.exp(highest - base)
            v = tl.load(values + slot[:, None] * WIDTH + along[None, :], mask=is_read[:, None], other=0.0)
            sums = sums * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
            total = total * kept + tl.sum(shares, 1)
            highest = higher
        # NaN is neither, and is passed on.
        is_empty = total == 0.0
        total = tl.where(is_empty, 1.0, total)
        sums = sums / total[:, None]
        logsum = tl.where(is_empty, float("-inf"), tl.log(total) + highest)
        tl.store(parts + out[:, None] * WIDTH + along[None, :], sums, mask=is_there[:, None])
        tl.store(logsums + out, logsum, mask=is_there)


@triton.jit(do_not_specialize=["num_new", "num_kept", "num_splits", "group"])
def _join(parts, logsums, found, num_new, num_kept, num_splits, group, WIDTH: tl.constexpr, MOST_SPLITS: tl.constexpr):
    row, head = (tl.program_id(0) // num_kept).to(tl.int64), tl.program_id(0) % num_kept
    at = tl.program_id(1)
    split, along = tl.arange(0, MOST_SPLITS), tl.arange(0, WIDTH)
    place = (tl.program_id(0).to(tl.int64) * num_splits + split) * group * num_new + at
    logsum = tl.load(logsums + place, mask=split < num_splits, other=float("-inf"))
    shares = tl.exp(logsum - tl.max(logsum, 0))
    shares = shares / tl.sum(shares, 0)
    part = tl.load(parts + place[:, None] * WIDTH + along[None, :], mask=(shares > 0.0)[:, None], other=0.0)
    total = tl.sum(part * shares[:, None], 0)
    place_found = ((row * num_new + at % num_new) * num_kept + head) * group + at // num_new
    tl.store(found + place_found * WIDTH + along, total.to(found.dtype.element_ty))
