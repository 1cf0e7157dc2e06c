"""The slots of a cache of fixed size, and the CUDA graphs of steps over them."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..errors import MemberError
from .cuda_graphs import capture, lock_of
from .fused_model import fused_model
from .member_model import MemberModel, is_out_of_memory, window_of
from .transfer import sent

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of new ids per row for which steps are captured; other numbers are rounded up."""

_MOST_CAPTURED = 1024
"""Maximum number of ids over all rows in a captured step, unless each row has only one."""

_EVERYDAY = 16
"""Steps of up to this many ids per row are captured at once, longer ones after several uses."""

_USES_OF_OTHERS = 3

GROWTH = 1.5
"""The factor by which a full capacity grows, and by which a reused one may exceed the request."""

_MOST_SPARE = 4
"""Buffers for up to this many times the requested rows are reused, with the graphs of their batches.

So a last, small batch neither frees what the next batches need, nor captures graphs again.
"""

_MOST_OTHERS = 2
"""Maximum number of unused buffers of other sizes: calls of these sizes find their graphs again."""

_MOST_OTHER_BYTES = 512 * 2**20
"""Maximum memory of their slots."""

Masks = Callable[[Tensor, int], Any]


def masks_of(member: MemberModel) -> Masks:
    """Return what a member's layers see: a function of positions of shape `(num_rows, num_new)` and the capacity.

    Raises:
        MemberError: If the model's layers or attention are of a kind that does not take such masks, or its weights are
            on several devices.
    """
    devices = {member.device, *(parameter.device for parameter in member.model.parameters())}
    if len(devices) > 1:
        raise MemberError(f"its weights are spread over {sorted(map(str, devices))}")
    config: Any = member.model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise MemberError(f"its attention is {implementation!r}, which takes no mask. Load it with 'sdpa' or 'eager'")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise MemberError(f"it has layers of kinds {sorted(unknown)}")
    dtype = member.model.dtype
    # Attention would convert a boolean mask to numbers in every layer. The numbers must have the dtype it computes in.
    dtypes = {parameter.dtype for parameter in member.model.parameters() if parameter.is_floating_point()}
    is_additive = implementation == "eager" or dtypes == {dtype}

    def mask(positions: Tensor, capacity: int, window: int | None) -> Tensor:
        slots = torch.arange(capacity, device=positions.device)
        seen = slots <= positions[..., None]  # (num_rows, num_new, capacity)
        if window is not None:
            seen &= slots > positions[..., None] - window
        if is_additive:
            seen = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return seen[:, None]

    def masks(positions: Tensor, capacity: int) -> Any:
        if kinds:
            return {kind: mask(positions, capacity, window_of(config, kind)) for kind in sorted(kinds)}
        return mask(positions, capacity, window_of(config, None))

    return masks


def widths_of(num_rows: int) -> list[int]:
    """Return the numbers of new ids per row for which steps of so many rows are captured, in ascending order."""
    return [width for width in WIDTHS if width <= max(1, _MOST_CAPTURED // num_rows)]


class _SlotCache(Cache):
    """Keys and values of every layer in slots; new ones, at `positions`, go to the slots `slots`.

    Layers of the same shape are views of one tensor, so rows are copied in one operation.
    """

    def __init__(self, num_rows: int, capacity: int, num_alike: int = 1):
        super().__init__(layers=[])
        self.num_rows, self.capacity, self._num_alike = num_rows, capacity, num_alike
        self.slots: Tensor | None = None
        self.positions: Tensor | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.blocks: list[Tensor] = []  # (num_layers, num_rows, num_heads, capacity, width) of keys, then of values

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.layer(layer_idx, key_states, value_states)
        return self._put(keys, key_states), self._put(values, value_states)

    def layer(self, index: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of a layer's keys and values, for states of shape `(num_rows, num_heads, …, width)`."""
        if index == len(self.keys):
            self.add(self.slots_for(key_states), self.slots_for(value_states))
        return self.keys[index][: len(key_states)], self.values[index][: len(key_states)]

    def slots_for(self, states: Tensor) -> Tensor:
        """Create empty slots for layers with such states."""
        return states.new_zeros(self._num_alike, self.num_rows, states.shape[1], self.capacity, states.shape[-1])

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add the slots of layers."""
        self.blocks += [keys, values]
        self.keys += keys.unbind()
        self.values += values.unbind()

    def take(self, other: "_SlotCache", rows: Tensor, into: Tensor, length: int) -> None:
        """Copy the first `length` slots of rows of another cache into rows of this one."""
        for n in range(len(self.blocks), len(other.blocks), 2):
            keys, values = other.blocks[n : n + 2]
            self.add(*(self.slots_for(held[0]) for held in (keys, values)))
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            mine[..., :length, :].index_copy_(1, into, theirs[..., :length, :].index_select(1, rows))

    def _put(self, held: Tensor, new: Tensor) -> Tensor:
        assert self.slots is not None
        return held.scatter_(2, self.slots[:, None, :, None].expand_as(new), new)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.capacity, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity


@dataclass
class _Step:
    """A captured step with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    logits: Tensor


class StaticBuffers:
    """The tensors and graphs of one member for up to `num_rows` rows of fewer than `capacity` ids; one user at a time.

    Graphs run on a separate stream, so members run in parallel.

    Args:
        member: The member.
        num_rows: Maximum number of rows.
        capacity: Number of slots per row; the last one is for ids that are not text.
        made_for: The fingerprint of the model whose weights the graphs read.
        is_fused: Whether short steps run through the kernels of `fused_model`.

    Attributes:
        holds_logits: Whether the logits of the last step are in a buffer that the next step overwrites.
        is_spent: Whether capturing a step ran out of memory, or something else failed halfway. Such buffers are not
            used again.

    Raises:
        MemberError: If the kind of model does not take such masks, or cannot be fused.
    """

    def __init__(self, member: MemberModel, num_rows: int, capacity: int, made_for: Any, is_fused: bool = False):
        self.member = member
        self.made_for, self.is_fused = made_for, is_fused
        self.num_rows, self.capacity = num_rows, capacity
        self.device = member.device
        self._masks = masks_of(member)
        self._fused = fused_model(member) if is_fused else None
        config: Any = member.model.config.get_text_config(decoder=True)
        self.cache = _SlotCache(num_rows, capacity, config.num_hidden_layers if is_fused else 1)
        self._is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._is_cuda else None
        self._can_capture = self._is_cuda
        self._uses: Counter[tuple[int, int, int]] = Counter()
        self._steps: dict[tuple[int, int, int], _Step] = {}
        self._pool: Any = None
        self._is_running = False
        self.holds_logits = False
        self.is_spent = False

    def run(self, packed: Tensor, num_logits: int, last_ids: Tensor | None = None) -> Tensor:
        """Start a step.

        Args:
            packed: For each row, its new ids and the position of the first one; ids at negative positions are not
                text. Of shape `(num_rows, num_new + 1)`, on the CPU.
            num_logits: Number of last ids to return logits for.
            last_ids: The single new id of each of the first rows, on the device, if it is not in `packed`.

        Returns:
            Logits of shape `(num_rows, num_logits, vocab_size)`. Read them after `wait`, before the next step.
        """
        with self._context():
            self.wait()
            key = (len(packed), packed.shape[1] - 1, num_logits)
            step = self._steps.get(key)
            is_due = self._uses[key] >= (1 if key[1] <= _EVERYDAY else _USES_OF_OTHERS)
            if step is None and self._can_capture and is_due and key[1] in widths_of(key[0]):
                step = self._capture(key)
            self.holds_logits = step is not None
            if step is None:
                self._uses[key] += 1
                there = packed.to(self.device)
            else:
                there = step.packed.copy_(packed.pin_memory(), non_blocking=True)
            if last_ids is not None:
                there[: len(last_ids), 0] = last_ids
            if step is None:
                return self._step(there, num_logits)
            with self.beside():
                step.graph.replay()
            return step.logits

    def wait(self) -> None:
        """Let later launches wait for the last step."""
        if self._is_running:
            assert self._stream is not None
            current = torch.cuda.current_stream(self.device)
            if current != self._stream:
                with lock_of(self._stream):
                    current.wait_stream(self._stream)
                self._is_running = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the steps' stream, after everything launched so far, so that other launches do not wait."""
        if self._stream is None:
            yield
            return
        with lock_of(self._stream):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._is_running = True
            with torch.cuda.stream(self._stream):
                yield

    def take(self, other: "StaticBuffers", rows: Sequence[int], into: Sequence[int], length: int) -> None:
        """Copy the first `length` slots of rows of `other`, possibly this object, into rows `into` of this one."""
        with self._context():
            self.wait()
            other.wait()
            there, here = (sent(list(some), self.device) for some in (rows, into))
            self.cache.take(other.cache, there, here, length)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(held.nbytes for held in self.cache.blocks)

    def clear(self) -> None:
        """Clear the slots: even unseen slots must hold numbers."""
        with self._context():
            self.wait()
            for held in self.cache.blocks:
                held.zero_()

    @contextmanager
    def _context(self) -> Iterator[None]:
        # Buffers live longer than a call, so they must not be tied to its inference mode.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self.device if self._is_cuda else -1):
            try:
                yield
            except BaseException:
                # Some layers may have slots, others not yet.
                self.is_spent = True
                raise

    def _step(self, packed: Tensor, num_logits: int) -> Tensor:
        ids, starts = packed[:, :-1], packed[:, -1:]
        positions = starts + torch.arange(ids.shape[1], device=packed.device)
        self.cache.slots = torch.where(positions < 0, self.capacity - 1, positions)
        self.cache.positions = positions = positions.clamp_min(0)
        fused = self._fused if ids.shape[1] in widths_of(len(ids)) else None
        # A model that ignores the mask still needs one, or it would create one.
        masks = self._masks(positions, 1 if fused is not None else self.capacity)
        return self.member.forward(ids, positions, masks, self.cache, num_logits, fused)

    def _capture(self, key: tuple[int, int, int]) -> _Step | None:
        num_rows, num_new, num_logits = key
        packed = torch.zeros(num_rows, num_new + 1, dtype=torch.long, device=self.device)
        packed[:, -1] = -num_new
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        # Only one step runs at a time, so all can use the same scratch memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with capture(graph, self._pool, self._stream):
                logits = self._step(packed, num_logits)
        except (RuntimeError, MemberError) as error:
            self._can_capture = False
            self.is_spent = is_out_of_memory(error)
            self.member.warn_uncaptured(str(error))
            return None
        self._steps[key] = _Step(graph, packed, logits)
        return self._steps[key]


class BufferPool:
    """A member's unused buffers, kept for the next call.

    Args:
        member: The member.
    """

    def __init__(self, member: MemberModel):
        self._member = weakref.proxy(member)
        self._free: list[StaticBuffers] = []
        self._has_failed = False
        self._lock = threading.Lock()

    def acquire(self, num_rows: int, capacity: int, made_for: Any = None, is_fused: bool = False) -> StaticBuffers:
        """Return buffers for one user, which must be given back with `release`.

        Args:
            num_rows: Minimum number of rows.
            capacity: Minimum number of slots per row.
            made_for: The model's fingerprint, if the caller has already taken it in this call.
            is_fused: Whether short steps run through the kernels of `fused_model`.
        """
        made = made_for or self._member.fingerprint(), is_fused
        with self._lock:
            for buffers in list(self._free):
                # Graphs read weights at their old addresses, even if buffers come back after the weights were
                # replaced.
                fits = (
                    num_rows <= buffers.num_rows <= _MOST_SPARE * num_rows
                    and capacity <= buffers.capacity <= GROWTH * capacity
                    and (buffers.made_for, buffers.is_fused) == made
                )
                if fits:
                    self._free.remove(buffers)
                    buffers.clear()
                    return buffers
            # After a failure, which may be for want of memory, everything goes.
            num_places, num_bytes = 0 if self._has_failed else _MOST_OTHERS, _MOST_OTHER_BYTES
            self._has_failed = False
            for buffers in reversed(list(self._free)):
                if num_places and buffers.num_bytes <= num_bytes and (buffers.made_for, buffers.is_fused) == made:
                    num_places, num_bytes = num_places - 1, num_bytes - buffers.num_bytes
                else:
                    self._free.remove(buffers)
                    buffers.wait()  # for a step that ran ahead, because its memory is about to be reused
        return StaticBuffers(self._member, num_rows, capacity, *made)

    def release(self, buffers: StaticBuffers) -> None:
        """Take buffers back."""
        # Without the lock, because a finalizer may run in a thread that holds it.
        if buffers.is_spent:
            self._has_failed = True
        else:
            self._free.append(buffers)
