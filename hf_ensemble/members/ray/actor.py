"""The actor's side: a member, its caches by number, and its answers."""

import functools
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigurationError
from ...mixing import log_normalizer, merge_duplicates, top_entries
from ..cached_rows import CachedRows
from ..cuda_graphs import Captured
from ..entries import EntryIds, padded_ids
from .line import AnsweringLine, Number
from .wire import Delta, Ids, Packed, PackedIds

Move = tuple[Any, ...]
"""A change of caches without an answer: the name of a method of `Caches`, and its arguments."""


@dataclass(frozen=True)
class Description:
    """What an ensemble needs to know about a member whose model is elsewhere; read once.

    Attributes:
        config: The model's configuration.
        generation_config: Its generation config; None if it has none.
        eos_token_ids: Ids that end a text.
        vocab_size: Width of its logits.
        max_positions: Number of ids that fit; None for no limit.
        dtype: Its dtype.
        num_parameters: Number of its parameters.
        address: The actor's process, host and node.
    """

    config: Any
    generation_config: Any
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    num_parameters: int
    address: str


@dataclass(frozen=True)
class Answer:
    """An actor's answer, and the warnings given meanwhile.

    Attributes:
        value: The answer.
        warnings: Texts of warnings.
    """

    value: Any
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EntriesFound:
    """`Entries` as they travel.

    Attributes:
        ids: Of shape `(num_rows, num_ids)`; -1 for none.
        logits: Of the same shape.
        normalizers: Of shape `(num_rows,)`.
    """

    ids: Ids
    logits: NDArray[np.float32]
    normalizers: NDArray[np.float32]


class Caches:
    """The caches of a member for all calls that use it, by number.

    Args:
        member: The member.
    """

    def __init__(self, member: Any):
        self._member = member
        self._rows: dict[int, CachedRows] = {}
        self._last: dict[int, list[Tensor]] = {}
        self._asked: dict[int, Tensor] = {}
        self._entry_ids: dict[int, BestEntries] = {}

    def new(self, number: int, num_rows: int, num_expected: int, mode: str | None) -> None:
        """Make caches."""
        self._rows[number] = self._member.new_rows(num_rows, num_expected, mode)

    def drop(self, number: int) -> None:
        """Forget caches."""
        self._rows.pop(number, None)
        self._last.pop(number, None)
        self._asked.pop(number, None)

    def select(self, number: int, rows: Ids) -> None:
        """Keep, repeat or drop rows."""
        chosen = rows.tolist()
        self._rows[number].select(chosen)
        if number in self._last:
            self._last[number] = [self._last[number][row] for row in chosen]

    def fork(self, number: int, twin: int, rows: Ids) -> None:
        """Create independent caches that continue from rows of others."""
        self._rows[twin] = self._rows[number].fork(rows.tolist())

    def adopt(self, number: int, fork: int, rows: Ids) -> None:
        """Let rows continue from those of a fork; -1 leaves a row unchanged."""
        self._rows[number].adopt(self._rows[fork], [None if row < 0 else row for row in rows.tolist()])
        self._last.pop(number, None)

    def hold(self, number: int) -> None:
        """Remember the current rows."""
        self._rows[number].hold()

    def learn(self, kind: int, entry_ids: PackedIds) -> None:
        """Learn which ids take part in a method, under a number."""
        self._entry_ids[kind] = BestEntries(entry_ids.unpacked(self._member.device))

    def unlearn(self, kind: int) -> None:
        """Forget a method."""
        self._entry_ids.pop(kind, None)

    def forward(self, number: int, delta: Delta) -> tuple[list[Tensor], int]:
        """Bring rows to their texts.

        Returns:
            For each row its logits, of shape `(num_last, vocab_size)`, and the number of forward passes it took.
        """
        rows, num_last = self._rows[number], delta.num_last.tolist()
        last = self._last.get(number)
        has_grown = bool(delta.counts.any()) or delta.kept.tolist() != list(map(len, rows.cached))
        if last is not None and not has_grown and all(len(row) >= n for row, n in zip(last, num_last, strict=True)):
            return [row[len(row) - n :] for row, n in zip(last, num_last, strict=True)], 0
        logits = rows.collect(rows.forward(delta.texts(rows.cached), num_last))
        found = [logits[row, logits.shape[1] - count :] for row, count in enumerate(num_last)]
        self._last[number] = found
        return found, rows.num_forwards

    def best(self, number: int, delta: Delta, rows: Ids, kind: int, count: int) -> tuple[EntriesFound, int]:
        """Bring rows to their texts, and find the best entries of some of them."""
        found, num_forwards = self.forward(number, delta)
        self._asked[number] = wanted = torch.stack([found[row][-1] for row in rows.tolist()])
        return self._entry_ids[kind].of(wanted, count), num_forwards

    def logits_of(self, number: int, counts: Ids, ids: Ids) -> NDArray[np.float32]:
        """The logits of ids in the rows of the last `best`, row after row."""
        wanted = self._asked[number]
        first = np.arange(len(counts)).repeat(counts) * wanted.shape[-1]
        found: NDArray[np.float32] = wanted.take(torch.from_numpy(first + ids).to(wanted.device)).float().cpu().numpy()
        return found


class BestEntries:
    """Finds the best entries of rows of logits for one method.

    Args:
        entry_ids: Which ids take part, and which of them stand for the same entry.
    """

    def __init__(self, entry_ids: EntryIds):
        self._entry_ids = entry_ids
        self._others = entry_ids.duplicates.by_canonical_id()
        self._eos_ids = entry_ids.eos_ids.tolist()
        self._finds: dict[int, Captured] = {}

    def of(self, logits: Tensor, count: int) -> EntriesFound:
        """Find the best entries.

        Args:
            logits: In the member's dtype, of shape `(num_rows, vocab_size)`.
            count: Number of entries of each row; those of which EOS is one, or which have several ids, give more ids.
        """
        if count not in self._finds:
            self._finds[count] = Captured(functools.partial(_best_of, entry_ids=self._entry_ids, count=count), True)
        (found,) = self._finds[count](logits)
        numbers = found.cpu().numpy()  # all at once, because every read from a GPU waits for it
        of_rows = [
            sorted({*self._eos_ids, *row, *(i for one in row for i in self._others.get(one, ()))})
            for row in numbers[:, 1:].astype(np.int64).tolist()
        ]
        ids = padded_ids(of_rows)
        found_logits = logits.gather(1, ids.clamp_min(0).to(logits.device)).float().cpu().numpy()
        return EntriesFound(ids.numpy().astype(np.int32), found_logits, numbers[:, 0].astype(np.float32))


def _best_of(logits: Tensor, *, entry_ids: EntryIds, count: int) -> tuple[Tensor]:
    """The normalizer of every row and then its best ids, in float64, which holds both; of shape `(num_rows, 1 + count)`."""
    masked = logits.float() + entry_ids.mask
    merged = merge_duplicates(masked, entry_ids.duplicates)
    _, best = top_entries(merged, min(count, merged.shape[-1]))
    return (torch.cat([log_normalizer(masked)[:, None].double(), best.double()], dim=-1),)


class HeldMember:
    """A member in an actor.

    Args:
        load: Creates the member, with the same code as in the ensemble's own process.
    """

    def __init__(self, load: Callable[[], Any]):
        self._load = load

    def is_there(self) -> None:
        """Report that the actor has started, before anything slow happens in it."""

    def load(self) -> Answer:
        """Load the member and describe it."""
        with _warned() as said:
            self._member = member = self._load()
            self._caches = Caches(member)
            description = Description(
                config=member.config,
                generation_config=member.generation_config,
                eos_token_ids=tuple(member.eos_token_ids),
                vocab_size=member.vocab_size,
                max_positions=member.max_positions,
                dtype=member.dtype,
                num_parameters=member.num_parameters,
                address=f"process {os.getpid()} on {socket.gethostname()}",
            )
        return Answer(description, tuple(said))

    def listen(self) -> Number:
        """Open a line to the ensemble."""
        import ray

        self._line = AnsweringLine(ray.util.get_node_ip_address())
        return self._line.number

    def answer(self) -> None:
        """Answer requests over the line for as long as the actor lives."""
        self._line.answer(lambda what, arguments: getattr(self, what)(*arguments))

    @torch.no_grad()
    def cache_mode(self) -> Answer:
        """How the member's cache follows a text."""
        with _warned() as said:
            mode = self._member.cache_mode
        return Answer(mode, tuple(said))

    def describe(self) -> Answer:
        """A value that identifies the member."""
        return Answer(self._member.description())

    def embeddings(self, name: str) -> Packed | None:
        """A matrix of the model: `get_input_embeddings` or `get_output_embeddings`, None if it has none."""
        layer = getattr(self._member.model, name)()
        if layer is not None and layer.weight.is_meta:
            raise ConfigurationError(
                f"the embeddings of member {self._member.name!r} are offloaded from its actor's memory. Give the "
                "actor more memory, or use a method that does not compare embeddings, such as 'unite'."
            )
        return None if layer is None else Packed.of(layer.weight)

    @torch.no_grad()
    def forward(self, moves: Sequence[Move], number: int, delta: Delta) -> Answer:
        """Move rows, bring them to their texts, and return whole rows of logits in the member's own dtype.

        Returns:
            The requested logits, row after row, of shape `(num_asked, vocab_size)`, and the number of forward passes.
        """
        with _warned() as said:
            self._move(moves)
            found, num_forwards = self._caches.forward(number, delta)
        return Answer((Packed.of(torch.cat(found)), num_forwards), tuple(said))

    @torch.no_grad()
    def best(self, moves: Sequence[Move], number: int, delta: Delta, rows: Ids, kind: int, count: int) -> Answer:
        """Move rows, bring them to their texts, and return the best entries of some.

        Returns:
            `EntriesFound` of `rows`, and the number of forward passes.
        """
        with _warned() as said:
            self._move(moves)
            found = self._caches.best(number, delta, rows, kind, count)
        return Answer(found, tuple(said))

    @torch.no_grad()
    def logits_of(self, moves: Sequence[Move], number: int, counts: Ids, ids: Ids) -> Answer:
        """Return the logits of these ids in the rows of the last `best`, row after row."""
        self._move(moves)
        return Answer(self._caches.logits_of(number, counts, ids))

    def _move(self, moves: Sequence[Move]) -> None:
        for name, *arguments in moves:
            getattr(self._caches, name)(*arguments)


@contextmanager
def _warned() -> Iterator[list[str]]:
    """Collect the warnings of a block for the ensemble's process."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield said
    said += dict.fromkeys(str(one.message) for one in caught)
