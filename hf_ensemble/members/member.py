"""One model of an ensemble, and its cached state for the rows of one call."""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from .. import messages
from ..errors import ConfigurationError, MemberError
from ..vocabulary.context import num_common
from ..vocabulary.encoding import ByteEncoder
from ..vocabulary.token_bytes import CONTROL, TokenBytes
from .cached_rows import ContextIds, PlainContext, RepackedRows, SeparateRows, WaitingContext
from .static_cache import BufferPool, StaticRows

logger = logging.getLogger(__name__)

_CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")

_PROBE_STEPS = (
    ((0, 4), (2, 3)),
    ((0, 5), (2, 6)),
    ((1, 6), (2, 5)),
    ((1, 6), (2, 7)),
    ((1, 7), (2, 8)),
)
"""Of which text two rows hold how many ids, at steps that grow, roll back and branch off."""


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
            tokenizer, plus `extra_eos_token_ids`; without any that the model has no row for.
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
        self.eos_token_ids = self.ids_with_row(sorted({*self._own_eos_token_ids(), *extra_eos_token_ids}))
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
        return self.encoder.token_bytes.is_control(member_id)

    def ids_with_row(self, ids: Iterable[int]) -> list[int]:
        """Leave out ids that the model has no row for: nothing can write them, and as an index they would be wrong."""
        return [i for i in ids if 0 <= i < self.vocab_size]

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
            Logits of shape `(batch_size, num_logits, vocab_size)`, on the member's device.

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
        return logits[:, -num_logits:].to(self.device)

    @cached_property
    def cache_mode(self) -> str:
        """How the member's cache can follow a text that changes at its end; found once by trying it on a few ids.

        `static`: a cache of fixed size, with steps captured as CUDA graphs (on a GPU). `repack`: one cache for all rows,
        each row moved to the right edge. `row_chunks`, `row_tokens`: one cache a row with snapshots, fed in chunks or
        token by token (recurrent and hybrid models). `recompute`: no cache.
        """
        with torch.no_grad():
            expected = self._expected_probe_logits()
            if not bool(expected.isfinite().all()):
                raise self.not_finite("before step 1, on ten ids that were tried")
            # Rounding moves the logits of half precision by some hundredths of their spread; a wrong cache by its whole.
            tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
            modes = ["static", "repack", "row_chunks", "row_tokens"]
            for mode in modes if self.device.type == "cuda" else modes[1:]:
                try:
                    if mode == "static":
                        self._check_capturable()
                    found = self._probe_logits(mode)
                except Exception as error:
                    logger.info("member %r cannot use cache mode %s: %s", self.name, mode, error)
                    reason = str(error)
                else:
                    distance = (found - expected).std(-1) / expected.std(-1).clamp_min(1e-12)  # (num_steps, num_rows)
                    logger.info("member %r in cache mode %s: distance %.2g", self.name, mode, distance.max())
                    if bool((distance <= tolerance).all()):
                        return mode
                    reason = "with a cache of fixed size it gives other logits"
                if mode == "static":
                    self.warn_uncaptured(reason)
        warnings.warn(
            f"no cache of member {self.name!r} ({type(self.model).__name__}) gives the logits that it gives without "
            "one, so its whole context is computed again at every step.",
            stacklevel=2,
        )
        return "recompute"

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs."""
        return self.cache_mode == "static"

    @cached_property
    def buffer_pool(self) -> BufferPool:
        """The member's static buffers."""
        return BufferPool(self)

    def not_finite(self, where: str) -> MemberError:
        """Make the error for NaN or infinite logits; `where` goes on "in row 0 at step 1"."""
        return messages.not_finite(self.name, self.model.dtype, where)

    def warn_uncaptured(self, reason: str) -> None:
        """Say that the member's steps do not run as CUDA graphs, and why."""
        warnings.warn(
            f"steps of member {self.name!r} ({type(self.model).__name__}) are not captured as CUDA graphs, so they take "
            f"longer: {reason}.",
            stacklevel=2,
        )

    def _check_capturable(self) -> None:
        devices = {parameter.device for parameter in self.model.parameters()}
        if len(devices) > 1:
            raise MemberError(f"its weights are spread over {sorted(map(str, devices))}")

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its buffers anew: they hold graphs of a device.
        return {key: value for key, value in vars(self).items() if key != "buffer_pool"}

    def _probe_texts(self) -> list[list[int]]:
        text_ids = (self.encoder.token_bytes.kinds != CONTROL).nonzero()[0]
        ids = [int(text_ids[(n * 7919 + 13) % len(text_ids)]) for n in range(10)]
        return [ids[:5], [*ids[:3], *ids[6:]], ids[2:]]

    def _expected_probe_logits(self) -> Tensor:
        """What `_probe_logits` has to give, from one forward for each text."""
        texts = self._probe_texts()
        state = MemberState(self, [PlainContext(ids) for ids in texts], "recompute")
        logits = state.logits([len(ids) for ids in texts])  # (num_texts, longest, vocab_size), at the right edge
        seen = [torch.stack([logits[text, num - 1 - len(texts[text])] for text, num in step]) for step in _PROBE_STEPS]
        return torch.stack(seen).float()

    def _probe_logits(self, mode: str) -> Tensor:
        """Logits of two rows along the steps, of shape `(num_steps, 2, vocab_size)`."""
        texts = self._probe_texts()
        rows = [PlainContext(texts[text][:num]) for text, num in _PROBE_STEPS[0]]
        state = MemberState(self, rows, mode)
        seen = [state.logits()]
        for step in _PROBE_STEPS[1:]:
            for row, (text, num) in zip(rows, step, strict=True):
                row.change(texts[text][:num])
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


C = TypeVar("C", bound=ContextIds)


class MemberState(Generic[C]):
    """A member's caches for the rows of one call: brings every row to its context and gives the logits after it.

    Args:
        member: The member.
        contexts: One context a row.
        mode: The cache mode; default: the member's.
        num_expected: Number of ids by which each row is expected to grow.

    Attributes:
        num_forwards: Number of forward passes so far.
    """

    def __init__(self, member: Member, contexts: Sequence[C], mode: str | None = None, num_expected: int = 0):
        self.member = member
        self.contexts = list(contexts)
        self.num_forwards = 0
        self._mode = mode
        self._num_expected = num_expected
        self._logits: Tensor | None = None
        self._is_pending = False
        self._lengths: list[int] = []

    @cached_property
    def _rows(self) -> Any:
        """The caches; made when they are first needed, since finding the mode runs the member."""
        mode = self._mode or self.member.cache_mode
        if mode == "static":
            return StaticRows(self.member, len(self.contexts), self._num_expected)
        if mode == "repack":
            return RepackedRows(self.member, len(self.contexts))
        return SeparateRows(self.member, len(self.contexts), mode)

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
        self.start(num_last, rows)
        self._collect()
        assert self._logits is not None
        num_last = num_last if isinstance(num_last, int) else max(num_last)
        logits = self._logits[:, -num_last:]
        return logits[:, -1] if num_last == 1 else logits

    def start(self, num_last: int | Sequence[int] = 1, rows: Sequence[int] | None = None) -> None:
        """Start what `logits` with the same arguments waits for, so that members run side by side."""
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
                    contexts[row] = WaitingContext(self.contexts[row].ids[:kept], kept)
                else:
                    # Nothing of it stays, and a row of nothing but padding is no input for a model.
                    wanted.add(row)
            self._logits = self._rows.forward(contexts, of_rows)
            self._is_pending = True
            self.num_forwards += self._rows.forwards_of_last_call
            # A row that waits is not up to date, whatever its context becomes.
            self._lengths = [-1 if isinstance(c, WaitingContext) else len(c.ids) for c in contexts]
            for row in wanted:
                self.contexts[row].num_kept = len(self.contexts[row].ids)

    def run_ahead(self, last_ids: Tensor) -> bool:
        """Start the step after one more id of every row before the host knows it, where the cache allows.

        The contexts must grow by these ids before they are read again.

        Args:
            last_ids: On the member's device, of shape `(num_rows,)`.

        Returns:
            Whether it was started.
        """
        if not self._lengths:
            return False  # nothing has been read
        rows = self._rows
        if not isinstance(rows, StaticRows) or any(
            not len(context.ids) == length == context.num_kept
            for context, length in zip(self.contexts, self._lengths, strict=True)
        ):
            return False
        limit = self.member.max_positions
        if limit is not None and max(self._lengths) >= limit:
            return False
        logits = rows.run_ahead(last_ids)
        if logits is None:
            return False
        self._logits, self._is_pending = logits, True
        self.num_forwards += 1
        self._lengths = [length + 1 for length in self._lengths]
        for context in self.contexts:
            context.num_kept += 1
        return True

    def beside(self) -> AbstractContextManager[None]:
        """Launch what follows on the device beside everything else, where the cache allows; the rows must have been read."""
        return self._rows.beside() if isinstance(self._rows, StaticRows) else nullcontext()

    def _collect(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self._logits = self._rows.collect(self._logits)

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
        self._collect()
        twin: MemberState[C] = copy.copy(self)
        twin._rows = self._rows.fork(rows)
        twin.contexts = [copy.copy(self.contexts[row]) for row in rows]
        twin.num_forwards = 0
        twin._logits, twin._lengths = None, []
        return twin

    def adopt(self, fork: "MemberState[C]", rows: Sequence[int | None]) -> None:
        """Let row n continue from row `rows[n]` of a fork, or, where that is None, stay as it is."""
        self._collect()
        fork._collect()
        self._rows.adopt(fork._rows, rows)
        taken = [(place, row) for place, row in enumerate(rows) if row is not None]
        for place, row in taken:
            self.contexts[place] = fork.contexts[row]
            self._lengths[place] = fork._lengths[row]
        if self._logits is not None and fork._logits is not None:
            own, new = (logits[:, -1:] for logits in (self._logits, fork._logits))
            places, of_fork = torch.tensor(taken, device=own.device).T
            self._logits = own.index_copy(0, places, new[of_fork])

    def select(self, rows: Sequence[int], contexts: Sequence[C]) -> None:
        """Keep, repeat or drop rows: row n continues from what was row `rows[n]`, and now follows `contexts[n]`."""
        self._collect()
        if "_rows" in vars(self):
            self._rows.select(rows)
        self.contexts = list(contexts)
        self._lengths = [self._lengths[row] for row in rows] if self._lengths else []
        if self._logits is not None:
            self._logits = self._logits[torch.tensor(list(rows), device=self._logits.device, dtype=torch.long)]


def padded_left(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids padded on the left, and 1 for what is no padding, each of shape `(num_rows, longest)`."""
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    ids = torch.tensor([[pad] * n + list(row) for n, row in zip(missing, rows, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(row) for n, row in zip(missing, rows, strict=True)])
    return ids, mask
