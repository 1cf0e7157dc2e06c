"""JSON answers: the grammar of a `response_format`, as a processor of fused scores."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM
from ..optional_packages import not_installed

_NUM_KEPT = 64
"""Number of compiled schemas to keep."""


class _Without(LogitsProcessor):
    """Bans ids. The stock processor compares every id with every other one at each step, which costs a tenth of a second.

    Args:
        is_banned: Which, of shape `(width,)`.
    """

    def __init__(self, is_banned: Tensor):
        self._is_banned = is_banned

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores for the next processor, of shape `(num_rows, width)`."""
        self._is_banned = self._is_banned.to(scores.device)
        return scores.masked_fill(self._is_banned, -torch.inf)  # type: ignore[return-value]


class Grammars:
    """Compiles grammars for the primary's tokenizer, and keeps them.

    Args:
        ensemble: The ensemble; texts are written in its primary's ids.
    """

    def __init__(self, ensemble: EnsembleForCausalLM):
        self._ensemble = ensemble
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def processors(self, response_format: Any) -> Callable[[], Sequence[Any]]:
        """Return a function that creates the processors for this format.

        Args:
            response_format: The value from OpenAI's clients; None for any text.

        Raises:
            ConfigurationError: If there is no such format, its schema cannot be compiled, or `xgrammar` is not installed.
        """
        kind = response_format.get("type") if isinstance(response_format, dict) else None
        if response_format is None or kind == "text":
            return tuple
        if kind == "json_object":
            compiled = self._get("json", lambda compiler: compiler.compile_builtin_json_grammar())
        elif kind == "json_schema":
            given = response_format.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if not isinstance(schema, dict):
                raise ConfigurationError(
                    "`response_format` of type 'json_schema' needs `json_schema.schema`, an object."
                )
            text = json.dumps(schema)
            # With white space everywhere JSON allows it, no schema would bound a text.
            compiled = self._get(text, lambda compiler: compiler.compile_json_schema(text, any_whitespace=False))
        else:
            raise ConfigurationError(
                f"`response_format.type` has to be 'text', 'json_object' or 'json_schema', but is {kind!r}."
            )
        from xgrammar.contrib import hf

        if kind == "json_object":
            return lambda: [hf.LogitsProcessor(compiled)]
        # Bounded strings may contain them, which makes the text invalid JSON.
        return lambda: [_Without(self._writes_control), hf.LogitsProcessor(compiled)]

    @cached_property
    def _writes_control(self) -> Tensor:
        """Which ids write a control character, such as a line break."""
        primary = self._ensemble.member_views[0]
        entries = primary.encoder.token_bytes.entries
        found = [i for i, entry in enumerate(entries) if not primary.is_control(i) and min(entry, default=32) < 32]
        return torch.zeros(primary.vocab_size, dtype=torch.bool).index_fill(
            0, torch.tensor(found, dtype=torch.long), True
        )

    def _get(self, key: str, compile_with: Callable[[Any], Any]) -> Any:
        with self._lock:
            if key not in self._compiled:
                compiler = self._made_compiler()
                try:
                    self._compiled[key] = compile_with(compiler)
                except Exception as error:
                    raise ConfigurationError(f"the schema of `response_format` cannot be compiled: {error}") from error
            self._compiled.move_to_end(key)
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[key]

    def _made_compiler(self) -> Any:
        if self._compiler is None:
            try:
                import xgrammar
            except ImportError as error:
                raise not_installed("`response_format` compiles a grammar", "xgrammar") from error
            primary = self._ensemble.member_views[0]
            info = xgrammar.TokenizerInfo.from_huggingface(
                primary.tokenizer, vocab_size=primary.vocab_size, stop_token_ids=list(primary.eos_token_ids)
            )
            self._compiler = xgrammar.GrammarCompiler(info)
        return self._compiler
