"""Messages between an ensemble and an actor: compact arrays of numbers, and their size."""

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...mixing import Duplicates
from ..entries import EntryIds

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Packed:
    """A tensor as bytes of its own dtype, even if numpy lacks this dtype.

    Attributes:
        values: Its elements, flat.
        dtype: Its dtype.
        shape: Its shape.
    """

    values: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Packed":
        """Pack a tensor of any device."""
        flat = tensor.detach().to("cpu").contiguous().flatten()
        return cls(flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """Return the tensor, on the CPU, with its own memory."""
        # Arrays from the object store are read-only, and stay there as long as they are referenced.
        flat = torch.from_numpy(np.array(self.values))
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Delta:
    """How rows change: the number of leading ids that stay, and the ids that follow. No id travels twice.

    Attributes:
        kept: For each row, how many leading ids stay, of shape `(num_rows,)`.
        counts: For each row, how many ids follow, of the same shape.
        new: These ids, row after row.
        num_last: For each row, the number of last ids with logits, of shape `(num_rows,)`; 0 if it waits.
    """

    kept: Ids
    counts: Ids
    new: Ids
    num_last: Ids

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], kept: Sequence[int], num_last: Sequence[int]) -> "Delta":
        """Return the difference between the texts and the kept ids of each row."""
        new = [text[start:] for text, start in zip(texts, kept, strict=True)]
        return cls(
            ids_of(kept), ids_of(list(map(len, new))), ids_of([i for row in new for i in row]), ids_of(num_last)
        )

    def texts(self, held: Sequence[Sequence[int]]) -> list[list[int]]:
        """The texts, given what each row holds."""
        ends = np.cumsum(self.counts)
        starts = ends - self.counts
        return [
            [*row[:kept], *self.new[start:end].tolist()]
            for row, kept, start, end in zip(held, self.kept.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class PackedIds:
    """`EntryIds`, which travel once.

    Attributes:
        takes_part: A bit for each id.
        num_ids: Number of ids.
        duplicates: As in `EntryIds`: ids, canonical ids and positions.
        eos_ids: As in `EntryIds`.
    """

    takes_part: NDArray[np.uint8]
    num_ids: int
    duplicates: tuple[Ids, Ids, Ids]
    eos_ids: Ids

    @classmethod
    def of(cls, given: EntryIds) -> "PackedIds":
        """Pack."""
        takes_part = (given.mask == 0).cpu().numpy()
        ids, canonical_ids, position = (part.cpu().numpy().astype(np.int32) for part in given.duplicates)
        eos_ids = given.eos_ids.cpu().numpy().astype(np.int32)
        return cls(np.packbits(takes_part), len(takes_part), (ids, canonical_ids, position), eos_ids)

    def unpacked(self, device: torch.device) -> EntryIds:
        """Unpack, onto a device."""
        takes_part = torch.from_numpy(np.unpackbits(self.takes_part, count=self.num_ids)).to(device, torch.bool)
        duplicates = Duplicates(*(torch.from_numpy(part.astype(np.int64)).to(device) for part in self.duplicates))
        eos_ids = torch.from_numpy(self.eos_ids.astype(np.int64)).to(device)
        return EntryIds(torch.where(takes_part, 0.0, -torch.inf), duplicates, eos_ids)


def ids_of(values: Sequence[int]) -> Ids:
    """Integers in their compact form."""
    return np.array(values, dtype=np.int32)


def payload(message: Any) -> int:
    """The number of bytes of numbers and texts in a message, without overhead."""
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, (str, bytes)):
        return len(message)
    if isinstance(message, (list, tuple)):
        return sum(map(payload, message))
    if is_dataclass(message):
        return sum(map(payload, vars(message).values()))
    return 0 if message is None else 8
