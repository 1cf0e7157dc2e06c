"""A causal language model of this process, as a member."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ConfigurationError
from ..offers import ALL_OFFERS
from ..vocabulary.token_bytes import TEXT
from .adapted import plain_tensors
from .cache_probe import NUM_TRIAL_IDS, find_cache_mode
from .cached_rows import CACHE_MODES, CAPTURED_MODES, CachedRows
from .member import Member, end_ids_of
from .member_model import MemberModel
from .per_row_cache import SeparateRows
from .repacked_cache import RepackedRows
from .shared_weights import SharedRows, SharedWeights
from .static_buffers import BufferPool
from .static_cache import StaticRows

_MAX_MODES = 8
"""Number of states of a model, such as with different adapters, for which the cache mode is kept."""


_NUM_PROBES = 64
"""Number of weights of each tensor in a member's description."""


class LocalMember(MemberModel, Member):
    """A causal language model of this process with its tokenizer.

    Args:
        model: A causal language model.
        tokenizer: Its fast tokenizer.
        name: Name in errors. Default: the last part of the model's `name_or_path`, else its class.
        extra_eos_token_ids: More ids that end a text, in addition to its generation config's.
        chat_template: A template to use instead of the tokenizer's own.
        system_prompt: A system turn to use instead of every conversation's; empty for none.

    Attributes:
        shared: The members with which it shares its weights; None if there are none.

    Raises:
        ConfigurationError: If the model is not a decoder-only causal language model.
        VocabularyError: If the tokenizer is not supported.
    """

    offers = ALL_OFFERS
    kind = "a causal language model of this process"
    runs_in_loop = True
    shares_beginnings = True
    cache_modes: ClassVar[Sequence[str]] = CACHE_MODES
    """The possible cache modes, the fastest first and `recompute` last."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        system_prompt: str | None = None,
    ):
        MemberModel.__init__(self, model, name)
        self._given_mode: str | None = None
        self._found_modes: dict[Any, str] = {}
        self.shared: SharedWeights | None = None
        self.generation_config = getattr(model, "generation_config", None)
        ends = end_ids_of(self.name, self.generation_config, model.config, tokenizer, extra_eos_token_ids)
        Member.__init__(self, self.name, tokenizer, self.vocab_size, ends, chat_template, system_prompt)

    @property
    def config(self) -> Any:  # type: ignore[override]
        """The model's configuration."""
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.model.dtype

    @property
    def num_parameters(self) -> int:
        """Number of the model's weights."""
        return int(self.model.num_parameters())

    def description(self) -> list[Any]:
        """Architecture, tokenizer, EOS ids, and a few weights of every tensor."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.named_parameters()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            for part in plain_tensors(weight) if weight.device.type != "meta" and weight.numel() else ():
                flat = part.detach().reshape(-1)
                sample = flat[:: max(1, len(flat) // _NUM_PROBES)][:_NUM_PROBES]
                digest.update(json.dumps(sample.to(torch.float64).tolist()).encode())
        description = json.loads(self.model.config.to_json_string(use_diff=True))
        for key in ("transformers_version", "_name_or_path"):
            description.pop(key, None)
        return [description, self.encoder.token_bytes.fingerprint, self.eos_token_ids, digest.hexdigest()]

    def input_embeddings(self) -> Any:
        """The module whose `weight` holds the input embeddings."""
        return self.model.get_input_embeddings()

    def output_embeddings(self) -> Any:
        """The module whose `weight` holds the output embeddings."""
        return self.model.get_output_embeddings()

    @property
    def cache_mode(self) -> str:
        """How the member's cache follows a text that changes at its end.

        `static`: a cache of fixed size, with steps captured as CUDA graphs (on a GPU). `fused`: the same with our own
        kernels, for known kinds of models. `repack`: one cache for all rows, each row moved to the right edge.
        `row_chunks`, `row_tokens`: one cache per row with snapshots, fed in chunks or token by token (recurrent and
        hybrid models). `recompute`: no cache.

        It is found by a trial on a few ids, and again after the model has changed. Checking for changes looks at the
        whole model, so ask once per call. A mode that you set stays.
        """
        if self._given_mode is not None:
            return self._given_mode
        made_for = self.fingerprint()
        mode = self._found_modes.get(made_for)
        if mode is None:

            def new_rows(num_rows: int, mode: str) -> CachedRows:
                return self.new_rows(num_rows, mode=mode)

            modes, start = self.modes_of_device[:-1], self._trial_start()
            mode, is_final = find_cache_mode(self, self.trial_ids(), new_rows, modes, start)
            if is_final:
                if len(self._found_modes) >= _MAX_MODES:
                    self._found_modes.clear()
                self._found_modes[made_for] = mode
        return mode

    @cache_mode.setter
    def cache_mode(self, mode: str) -> None:
        if mode not in self.cache_modes:
            raise ConfigurationError(
                f"member {self.name!r} has no cache mode {mode!r}. Modes: {', '.join(self.cache_modes)}."
            )
        self._given_mode = mode

    def trial_ids(self) -> list[int]:
        """Ids that write text, for the trial of its caches."""
        text_ids = (self.encoder.token_bytes.kinds == TEXT).nonzero()[0]
        return [int(text_ids[(n * 7919 + 13) % len(text_ids)]) for n in range(NUM_TRIAL_IDS)]

    def _trial_start(self) -> Sequence[int]:
        """Ids that a trial text has to begin with."""
        return ()

    @property
    def is_captured(self) -> bool:
        """Whether its steps run as CUDA graphs."""
        # On other devices, finding the mode by a trial can wait.
        is_possible = self._given_mode is not None or self.device.type == "cuda"
        return is_possible and self.cache_mode in CAPTURED_MODES

    @property
    def modes_of_device(self) -> list[str]:
        """The cache modes that can run on its device, the fastest first."""
        return [mode for mode in self.cache_modes if self.device.type == "cuda" or mode not in CAPTURED_MODES]

    def new_rows(self, num_rows: int, num_expected: int = 0, mode: str | None = None) -> CachedRows:
        """Make caches for the rows of a call.

        Args:
            num_rows: Number of rows.
            num_expected: Expected number of new ids per row.
            mode: The cache mode; default: the member's.
        """
        if mode is None and self.shared is not None and self.cache_mode == "repack":
            return SharedRows(self.shared, RepackedRows(self, num_rows))
        mode = mode or self.cache_mode
        if mode in CAPTURED_MODES:
            return StaticRows(self.buffer_pool, num_rows, num_expected, mode)
        if mode == "repack":
            return RepackedRows(self, num_rows)
        return SeparateRows(self, num_rows, mode)

    @cached_property
    def buffer_pool(self) -> BufferPool:
        """The member's static buffers."""
        return BufferPool(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy creates its own buffers, because they hold graphs of a device.
        return {key: value for key, value in vars(self).items() if key != "buffer_pool"}
