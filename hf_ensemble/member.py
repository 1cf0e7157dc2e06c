"""One model of an ensemble, and its cached state for the rows of one call."""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from .errors import ConfigurationError, MemberError
from .vocabulary.context import num_common
from .vocabulary.encoding import ByteEncoder
from .vocabulary.token_bytes import CONTROL, TokenBytes

logger = logging.getLogger(__name__)

_NUM_SNAPSHOTS = 8
_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


class Member:
    """A causal language model with its tokenizer, as an ensemble sees it.

    Neither the model nor the tokenizer, nor their configurations, are ever changed.

    Args:
        model: A causal language model.
        tokenizer: Its fast tokenizer.
        name: Name used in errors. Default: the last part of the model's `name_or_path`, else its class.
        extra_eos_token_ids: Ids that end a text besides those of its generation config.

    Attributes:
        eos_token_ids: Ids that end a text: those of the generation config, else of the model config, else of the
            tokenizer, plus `extra_eos_token_ids`.
        vocab_size: Width of the model's logits.

    Raises:
        ConfigurationError: If the model is no decoder-only causal language model.
        VocabularyError: If the tokenizer cannot be understood.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        extra_eos_token_ids: Iterable[int] = (),
    ):
        self.model = model
        self.tokenizer = tokenizer
        path = str(getattr(model, "name_or_path", "") or "").rstrip("/")
        self.name = name or path.rsplit("/", 1)[-1] or type(model).__name__
        text_config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise ConfigurationError(
                f"member {self.name!r} is an encoder-decoder model ({type(model).__name__}), which an ensemble cannot "
                "hold. Use decoder-only causal language models."
            )
        if model.get_output_embeddings() is None:
            raise ConfigurationError(
                f"member {self.name!r} ({type(model).__name__}) has no language-modelling head. Load it with "
                "AutoModelForCausalLM."
            )
        self.vocab_size: int = text_config.vocab_size
        self.eos_token_ids = sorted({*self._own_eos_token_ids(), *extra_eos_token_ids})
        self.encoder = ByteEncoder(
            tokenizer, TokenBytes(tokenizer, num_ids=self.vocab_size, end_ids=self.eos_token_ids, name=self.name)
        )
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_keyword = next((key for key in _CACHE_KEYWORDS if key in parameters), _CACHE_KEYWORDS[0])
        self._parameters = set(parameters)

    @property
    def device(self) -> torch.device:
        """The device that the member's input ids go to."""
        weight: Any = self.model.get_input_embeddings().weight
        device: torch.device = weight.device
        return device

    @cached_property
    def max_positions(self) -> int | None:
        """How many ids fit the member's learned position embeddings; None where nothing breaks beyond a length."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is None:
            return None
        token_embeddings = {id(self.model.get_input_embeddings()), id(self.model.get_output_embeddings())}
        tables = [
            module.num_embeddings
            for module in self.model.modules()
            if isinstance(module, torch.nn.Embedding) and id(module) not in token_embeddings
        ]
        # OPT and its relatives keep two rows more than they have positions.
        return limit if {limit, limit + 2} & set(tables) else None

    def accepts(self, keyword: str) -> bool:
        """Whether the model's forward has a parameter of this name."""
        return keyword in self._parameters

    def is_control(self, member_id: int) -> bool:
        """Whether an id is a control token of this member."""
        return member_id < self.vocab_size and self.encoder.token_bytes.kinds[member_id] == CONTROL

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        num_logits: int,
    ) -> Tensor:
        """Run the model.

        Args:
            input_ids: New ids of shape `(batch_size, num_new)`.
            position_ids: Their positions, of the same shape.
            attention_mask: Over cache and new ids, of shape `(batch_size, num_cached + num_new)`; None for all ones.
            cache: The cache, extended in place; None to use none.
            num_logits: Number of last positions whose logits are wanted.

        Returns:
            Logits of shape `(batch_size, num_logits, vocab_size)`, on the model's device.

        Raises:
            MemberError: If the model raises.
        """
        kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": cache is not None, "return_dict": True}
        if cache is not None:
            kwargs[self.cache_keyword] = cache
        optional = {"position_ids": position_ids, "attention_mask": attention_mask, "logits_to_keep": num_logits}
        # A mixture-of-experts model saved from training would compute an auxiliary loss, and fail on padding.
        optional["output_router_logits"] = False
        kwargs.update((key, value) for key, value in optional.items() if self.accepts(key) and value is not None)
        try:
            logits: Tensor = self.model(**kwargs).logits
        except Exception as error:
            raise MemberError(f"member {self.name!r} failed in its forward pass: {error}") from error
        return logits[:, -num_logits:]

    @cached_property
    def cache_mode(self) -> str:
        """How the member's cache can follow a text that changes at its end; found once by trying it on a few ids.

        `repack`: one cache for all rows, each row moved to the right edge. `row_chunks`, `row_tokens`: one cache a row
        with snapshots, fed in chunks or token by token (recurrent and hybrid models). `recompute`: no cache.
        """
        with torch.no_grad():
            expected = self._probe_logits("recompute")
            if not bool(expected.isfinite().all()):
                raise MemberError(
                    f"member {self.name!r} gave NaN or infinite logits before step 1, on ten ids that were tried (its "
                    f"dtype is {self.model.dtype}). Load it in bfloat16 or float32."
                )
            # Rounding moves the logits of half precision by some hundredths of their spread; a wrong cache by its whole.
            tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
            for mode in ("repack", "row_chunks", "row_tokens"):
                try:
                    found = self._probe_logits(mode)
                except Exception as error:
                    logger.info("member %r cannot use cache mode %s: %s", self.name, mode, error)
                    continue
                distance = (found - expected).std(-1) / expected.std(-1).clamp_min(1e-12)  # (num_steps, num_rows)
                logger.info("member %r in cache mode %s: distance %.2g", self.name, mode, distance.max())
                if bool((distance <= tolerance).all()):
                    return mode
        warnings.warn(
            f"no cache of member {self.name!r} ({type(self.model).__name__}) gives the logits that it gives without "
            "one, so its whole context is computed again at every step.",
            stacklevel=2,
        )
        return "recompute"

    def _probe_logits(self, mode: str) -> Tensor:
        """Logits along steps that grow, roll back and reorder two rows of unequal length."""
        text_ids = (self.encoder.token_bytes.kinds != CONTROL).nonzero()[0]
        ids = [int(text_ids[(n * 7919 + 13) % len(text_ids)]) for n in range(10)]
        rows = [PlainContext(ids[:4]), PlainContext(ids[2:5])]
        state = MemberState(self, rows, mode)
        seen = [state.logits()]
        rows[0].change(ids[:5])
        rows[1].change(ids[2:8])
        seen.append(state.logits())
        rows[0].change([*ids[:3], *ids[6:9]])
        rows[1].change(ids[2:7])
        seen.append(state.logits())
        for n in (9, 10):
            rows[0].change([*ids[:3], *ids[6:n]])
            rows[1].change(ids[2:n])
            seen.append(state.logits())
        return torch.stack(seen).float()

    def _own_eos_token_ids(self) -> list[int]:
        generation_config = getattr(self.model, "generation_config", None)
        sources = (generation_config, self.model.config, self.tokenizer)
        found: Any = next(
            (i for i in (getattr(source, "eos_token_id", None) for source in sources) if i is not None), []
        )
        ids = [int(i) for i in (found if isinstance(found, Iterable) else [found])]
        tokenizer_eos = self.tokenizer.eos_token_id
        if tokenizer_eos is not None and ids and tokenizer_eos not in ids:
            warnings.warn(
                f"member {self.name!r} ends texts with ids {ids} by its configuration, but its tokenizer's EOS token "
                f"is {tokenizer_eos}: the configuration holds. Name the tokenizer's too as an extra EOS id if the "
                "model uses it.",
                stacklevel=4,
            )
        return ids


class ContextIds(Protocol):
    """What a state reads of a row: its ids, and how many leading ones are unchanged since the last reading."""

    ids: list[int]
    num_kept: int


C = TypeVar("C", bound=ContextIds)


@dataclass
class PlainContext:
    """Ids that whoever holds them changes."""

    ids: list[int]
    num_kept: int = 0

    def change(self, ids: list[int]) -> None:
        """Put other ids in their place; of those that are cached, what both begin with stays."""
        self.num_kept = min(self.num_kept, num_common(self.ids, ids))
        self.ids = ids


class _WaitingContext(PlainContext):
    """What is cached of a row that is not wanted just now."""


class MemberState(Generic[C]):
    """A member's caches for the rows of one call: brings every row to its context and gives the logits after it.

    Args:
        member: The member.
        contexts: One context a row.
        mode: The cache mode; default: the member's.

    Attributes:
        num_forwards: Number of forward passes so far.
    """

    def __init__(self, member: Member, contexts: Sequence[C], mode: str | None = None):
        self.member = member
        self.contexts = list(contexts)
        self.num_forwards = 0
        self._mode = mode
        self._logits: Tensor | None = None
        self._lengths: list[int] = []

    @cached_property
    def _rows(self) -> Any:
        """The caches; made when they are first needed, since finding the mode runs the member."""
        mode = self._mode or self.member.cache_mode
        if mode == "repack":
            return _RepackedRows(self.member, len(self.contexts))
        return _SeparateRows(self.member, len(self.contexts), mode)

    def logits(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> Tensor:
        """Bring rows to their contexts and return the logits after their last ids.

        Only what differs from the cached contexts is computed: each row rolls back to the longest common prefix and
        takes what is new, all rows in one forward where the member's cache allows.

        Args:
            num_last: Number of last ids after each of which logits are wanted; or one such number a row.
            rows: Rows that are wanted; the others stay where they are and catch up when they are wanted. Default: all.
                All are run the first time.

        Returns:
            Logits of shape `(num_rows, vocab_size)`, or, if numbers above 1 are asked for, `(num_rows, num_last,
            vocab_size)` with the greatest of them, on the member's device: each row's stand at the right edge, and what
            is before them has no meaning. Nor have those of rows that were not wanted.
        """
        of_rows = [num_last] * len(self.contexts) if isinstance(num_last, int) else list(num_last)
        num_last = max(of_rows)
        if rows is None or not self._lengths:
            rows = range(len(self.contexts))
        stale = [
            row
            for row, context in enumerate(self.contexts)
            if not self._lengths or not len(context.ids) == self._lengths[row] == context.num_kept
        ]
        wanted = set(stale).intersection(rows)
        if self._logits is None or self._logits.shape[1] < num_last or wanted:
            contexts: list[ContextIds] = list(self.contexts)
            for row in set(stale).difference(rows):
                kept = self.contexts[row].num_kept
                if kept:
                    contexts[row] = _WaitingContext(self.contexts[row].ids[:kept], kept)
                else:
                    # Nothing of it stays, and a row of nothing but padding is no input for a model.
                    wanted.add(row)
            self._logits = self._rows.forward(contexts, of_rows)
            self.num_forwards += self._rows.forwards_of_last_call
            # A row that waits is not up to date, whatever its context becomes.
            self._lengths = [-1 if isinstance(c, _WaitingContext) else len(c.ids) for c in contexts]
            for row in wanted:
                self.contexts[row].num_kept = len(self.contexts[row].ids)
        logits = self._logits[:, -num_last:]
        return logits[:, -1] if num_last == 1 else logits

    def follow(self, contexts: Sequence[C]) -> None:
        """Follow other contexts from now on; of what is cached, what they have in common with the last ones stays."""
        for old, new in zip(self.contexts, contexts, strict=True):
            cached = old.ids[: old.num_kept]
            new.num_kept = len(cached) if new.ids[: len(cached)] == cached else num_common(cached, new.ids)
        self.contexts = list(contexts)

    def hold(self) -> None:
        """Remember the contexts as they are cached now, since rows will roll back to them."""
        self._rows.hold()

    def fork(self, rows: Sequence[int]) -> "MemberState[C]":
        """Return a state of its own that continues from row `rows[n]` in its row n; its contexts are yet to follow."""
        twin: MemberState[C] = copy.copy(self)
        twin._rows = self._rows.fork(rows)
        twin.contexts = [copy.copy(self.contexts[row]) for row in rows]
        twin.num_forwards = 0
        twin._logits, twin._lengths = None, []
        return twin

    def join(self, other: "MemberState[C]") -> None:
        """Take in the rows of a fork, after this state's own."""
        self._rows.join(other._rows)
        self.contexts += other.contexts
        if self._logits is not None and other._logits is not None:
            self._logits = torch.cat([self._logits[:, -1:], other._logits[:, -1:]])
        self._lengths = [*self._lengths, *other._lengths]

    def select(self, rows: Sequence[int], contexts: Sequence[C]) -> None:
        """Keep, repeat or drop rows: row n continues from what was row `rows[n]`, and now follows `contexts[n]`."""
        if "_rows" in vars(self):
            self._rows.select(rows)
        self.contexts = list(contexts)
        self._lengths = [self._lengths[row] for row in rows] if self._lengths else []
        if self._logits is not None:
            self._logits = self._logits[torch.tensor(list(rows), device=self._logits.device, dtype=torch.long)]


def _join_rows(a: Tensor, b: Tensor, missing: int) -> Tensor:
    """Put the rows of two caches together; `b` is `missing` positions shorter than `a` (or `-missing` longer)."""
    a = torch.nn.functional.pad(a, (0, 0, max(0, -missing), 0))
    return torch.cat([a, torch.nn.functional.pad(b, (0, 0, max(0, missing), 0))])


class _RepackedRows:
    """One cache for all rows, without a config so that it keeps every position.

    Every row's part is contiguous and ends at the right edge, because window masks count cache slots: holes may only be
    at the left. All rows take equally many ids a forward (a row with fewer new ones computes its last ones again), so
    the logits wanted always stand at the right edge too.
    """

    forwards_of_last_call = 1

    def __init__(self, member: Member, num_rows: int):
        self.member = member
        self.lengths = [0] * num_rows
        self.cache = DynamicCache()

    def forward(self, contexts: Sequence[ContextIds], num_last: Sequence[int]) -> Tensor:
        num_new = max(
            max(wanted, 1, len(context.ids) - min(context.num_kept, length))
            for context, length, wanted in zip(contexts, self.lengths, num_last, strict=True)
        )
        kept = [max(0, len(context.ids) - num_new) for context in contexts]
        self._keep(kept)
        width = max(kept)
        device = self.member.device
        ids = torch.tensor(
            [[0] * (num_new - len(tail)) + tail for tail in (context.ids[-num_new:] for context in contexts)]
        )
        starts = torch.tensor([len(context.ids) - num_new for context in contexts])
        positions = (starts[:, None] + torch.arange(num_new)).clamp_min(0)
        mask = None
        lengths = torch.tensor([len(context.ids) for context in contexts])
        if min(len(context.ids) for context in contexts) < width + num_new:
            mask = (torch.arange(width + num_new) >= width + num_new - lengths[:, None]).long().to(device)
        logits = self.member.forward(ids.to(device), positions.to(device), mask, self.cache, max(num_last))
        self.lengths = lengths.tolist()
        return logits

    def _keep(self, kept: list[int]) -> None:
        """Roll every row back to `kept` ids and move what stays to the right edge."""
        width = self.cache.get_seq_length()
        if width == 0:
            return
        new_width = max(kept)
        removed = [length - k for length, k in zip(self.lengths, kept, strict=True)]
        if len(set(removed)) == 1:
            start, end = width - removed[0] - new_width, width - removed[0]
            if (start, end) != (0, width):
                for layer in self._filled_layers():
                    layer.keys = layer.keys[..., start:end, :]
                    layer.values = layer.values[..., start:end, :]
            return
        # Column c of the new cache comes from old column c + (width - removed - new_width) of its row.
        shift = torch.tensor([width - r - new_width for r in removed])
        index = (torch.arange(new_width) + shift[:, None]).clamp_min(0)  # (B, new_width)
        by_device: dict[torch.device, Tensor] = {}
        for layer in self._filled_layers():
            device = layer.keys.device
            if device not in by_device:
                by_device[device] = index.to(device)[:, None, :, None]
            at = by_device[device]
            layer.keys = layer.keys.gather(2, at.expand(*layer.keys.shape[:2], -1, layer.keys.shape[-1]))
            layer.values = layer.values.gather(2, at.expand(*layer.values.shape[:2], -1, layer.values.shape[-1]))

    def _filled_layers(self) -> list[Any]:
        layers = [layer for layer in self.cache.layers if getattr(layer, "is_initialized", True)]
        if any(type(layer) is not DynamicLayer for layer in layers):
            kinds = sorted({type(layer).__name__ for layer in layers})
            raise MemberError(f"member {self.member.name!r} keeps a cache that cannot be repacked: {kinds}.")
        return layers

    def hold(self) -> None:
        """Nothing to do: every position stays."""

    def fork(self, rows: Sequence[int]) -> "_RepackedRows":
        twin = copy.copy(self)
        # Tensors are never changed in place, so both may hold the same ones.
        twin.cache = copy.copy(self.cache)
        twin.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        twin.select(rows)
        return twin

    def join(self, other: "_RepackedRows") -> None:
        missing = self.cache.get_seq_length() - other.cache.get_seq_length()
        for mine, theirs in zip(self._filled_layers(), other._filled_layers(), strict=True):
            mine.keys = _join_rows(mine.keys, theirs.keys, missing)
            mine.values = _join_rows(mine.values, theirs.values, missing)
        self.lengths = [*self.lengths, *other.lengths]

    def select(self, rows: Sequence[int]) -> None:
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(list(rows), dtype=torch.long)
        for layer in self._filled_layers():
            layer.keys = layer.keys[index.to(layer.keys.device)]
            layer.values = layer.values[index.to(layer.values.device)]


class _SeparateRows:
    """One cache a row, for members whose cache cannot be cut: snapshots, or nothing cached at all."""

    def __init__(self, member: Member, num_rows: int, mode: str):
        self.member = member
        self.mode = mode
        self.forwards_of_last_call = 0
        self._rows = [_SeparateRow() for _ in range(num_rows)]

    def forward(self, contexts: Sequence[ContextIds], num_last: Sequence[int]) -> Tensor:
        self.forwards_of_last_call = 0
        logits = [
            self._forward_row(row, context, wanted)
            for row, context, wanted in zip(self._rows, contexts, num_last, strict=True)
        ]
        width = max(num_last)
        return torch.cat([torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in logits])

    def _forward_row(self, row: "_SeparateRow", context: ContextIds, num_last: int) -> Tensor:
        num_ids = len(context.ids)
        if isinstance(context, _WaitingContext):
            like: Tensor = self.member.model.get_output_embeddings().weight
            return like.new_zeros(1, num_last, self.member.vocab_size, device=self.member.device)
        if context.num_kept == num_ids == row.length and row.logits is not None and row.logits.shape[1] >= num_last:
            return row.logits[:, -num_last:]
        if self.mode == "recompute":
            row.logits = self._run(context.ids, 0, None, num_last)
        else:
            row.roll_back(min(context.num_kept, num_ids - num_last))
            if row.cache is None:
                row.cache = DynamicCache(config=self.member.model.config)
            if self.mode == "row_chunks" or row.length == 0:
                ends = [num_ids] if num_last > 1 or row.length > 0 or num_ids == 1 else [num_ids - 1, num_ids]
            else:
                ends = list(range(row.length + 1, num_ids + 1))
            parts = []
            for end in ends:
                parts.append(
                    self._run(context.ids[row.length : end], row.length, row.cache, min(num_last, end - row.length))
                )
                row.length = end
                row.take_snapshot()
            row.logits = torch.cat(parts, dim=1)[:, -num_last:]
        row.length = num_ids
        return row.logits

    def _run(self, ids: list[int], start: int, cache: Cache | None, num_logits: int) -> Tensor:
        device = self.member.device
        positions = torch.arange(start, start + len(ids), device=device)[None]
        self.forwards_of_last_call += 1
        return self.member.forward(torch.tensor([ids], device=device), positions, None, cache, num_logits)

    def hold(self) -> None:
        for row in self._rows:
            row.hold()

    def fork(self, rows: Sequence[int]) -> "_SeparateRows":
        twin = copy.copy(self)
        twin._rows = [self._rows[row].fork() for row in rows]
        return twin

    def join(self, other: "_SeparateRows") -> None:
        self._rows += other._rows

    def select(self, rows: Sequence[int]) -> None:
        taken: set[int] = set()
        selected = []
        for row in rows:
            selected.append(copy.deepcopy(self._rows[row]) if row in taken else self._rows[row])
            taken.add(row)
        self._rows = selected


class _SeparateRow:
    """A cache, the number of ids in it, and snapshots to roll back to."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.length = 0
        self.logits: Tensor | None = None
        self._snapshots: list[tuple[int, Cache | None]] = []
        self._held: tuple[int, Cache | None] | None = None

    def take_snapshot(self) -> None:
        # States change in place, so a snapshot is a copy.
        held = [snapshot for snapshot in self._snapshots[: -_NUM_SNAPSHOTS + 1] if snapshot is self._held]
        self._snapshots = [
            *held,
            *self._snapshots[-_NUM_SNAPSHOTS + 1 :],
            (self.length, copy.deepcopy(self.cache)),
        ]

    def hold(self) -> None:
        self._held = self._snapshots[-1] if self._snapshots else None

    def fork(self) -> "_SeparateRow":
        # Snapshots never change, so both may hold the same ones; the state itself is restored from the last of them.
        twin = copy.copy(self)
        twin._snapshots = list(self._snapshots)
        twin.cache, twin.logits = None, None
        twin.length = self.length + 1
        return twin

    def roll_back(self, num_kept: int) -> None:
        """Return to the longest state of at most `num_kept` ids; the caller computes the rest again."""
        if self.length <= num_kept:
            return
        self._snapshots = [(n, cache) for n, cache in self._snapshots if n <= num_kept]
        if self._snapshots:
            self.length, snapshot = self._snapshots[-1]
            self.cache = copy.deepcopy(snapshot)
        else:
            self.length, self.cache = 0, None


def padded_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids padded on the left, and 1 for what is no padding, each of shape `(num_rows, longest)`."""
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    ids = torch.tensor([[pad] * n + list(row) for n, row in zip(missing, rows, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)])
    return ids, mask
