"""Answers that are JSON: the grammar of a `response_format`, as a processor of fused scores."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from transformers import SuppressTokensLogitsProcessor

from ..errors import ConfigurationError
from ..model import EnsembleForCausalLM

_NUM_KEPT = 64
"""Compiled schemas that are kept."""


class Grammars:
    """Compiles grammars for the primary's tokenizer, and keeps them.

    Args:
        ensemble: The ensemble, by whose primary texts are written.
    """

    def __init__(self, ensemble: EnsembleForCausalLM):
        self._ensemble = ensemble
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def processors(self, response_format: Any) -> Callable[[], Sequence[Any]]:
        """What makes the processors that let a text be of this format.

        Args:
            response_format: As OpenAI's clients send it; None for any text.

        Raises:
            ConfigurationError: If there is no such format, its schema cannot be compiled, or `xgrammar` is not installed.
        """
        kind = response_format.get("type") if isinstance(response_format, dict) else None
        if response_format is None or kind == "text":
            return tuple
        if kind == "json_object":
            compiled = self._get("json", lambda compiler: compiler.compile_builtin_json_grammar())
        elif kind == "json_schema":
            schema = (response_format.get("json_schema") or {}).get("schema")
            if not isinstance(schema, dict):
                raise ConfigurationError(
                    "`response_format` of type 'json_schema' needs `json_schema.schema`, an object."
                )
            text = json.dumps(schema)
            # With white space wherever JSON allows it, no schema would bound a text.
            compiled = self._get(text, lambda compiler: compiler.compile_json_schema(text, any_whitespace=False))
        else:
            raise ConfigurationError(
                f"`response_format.type` has to be 'text', 'json_object' or 'json_schema', but is {kind!r}."
            )
        from xgrammar.contrib.hf import LogitsProcessor

        if kind == "json_object":
            return lambda: [LogitsProcessor(compiled)]
        # Bounded strings are let have them, with which no text is JSON.
        return lambda: [SuppressTokensLogitsProcessor(self._control_characters), LogitsProcessor(compiled)]

    @cached_property
    def _control_characters(self) -> list[int]:
        """The ids that write a control character, such as a line break."""
        primary = self._ensemble.member_views[0]
        entries = primary.encoder.token_bytes.entries
        return [
            i for i, entry in enumerate(entries) if not primary.is_control(i) and any(byte < 0x20 for byte in entry)
        ]

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
                raise ConfigurationError(
                    '`response_format` needs a package that is not installed: `pip install "hf_ensemble[json]"`.'
                ) from error
            primary = self._ensemble.member_views[0]
            info = xgrammar.TokenizerInfo.from_huggingface(
                primary.tokenizer, vocab_size=primary.vocab_size, stop_token_ids=list(primary.eos_token_ids)
            )
            self._compiler = xgrammar.GrammarCompiler(info)
        return self._compiler
