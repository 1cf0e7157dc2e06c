"""The stopping criterion that ends a span."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ...methods.sweetspan import SweetSpanConfig
from ...vocabulary.token_bytes import TokenBytes
from ...vocabulary.words import Span, read_span


class SpanStoppingCriteria(StoppingCriteria):
    """Ends a row when it holds `span_length` complete words, counted from where the span began.

    A word is a run of characters with the white space before it, or a grapheme of a script written without spaces. It
    is complete when something follows. A row also ends at an end of text, or at `max_span_tokens` ids.

    Args:
        tokenizer: The fast tokenizer of the model that writes, or its `TokenBytes`.
        span_length: Number of words.
        max_span_tokens: Largest number of ids in a span. Default: 16 times `span_length`.
        eos_token_id: Ids that end a text. Default: the tokenizer's EOS token.
        start: Number of ids before the span, padding included. Default: all ids of the first call except the last one.
            A text that does not continue the previous one counts as a first call.
        begun: For each row, bytes of an unfinished character before the span.

    Raises:
        ConfigurationError: If `span_length` is not a positive integer, or `max_span_tokens` is below it.

    Example:
        ```python
        criterion = SpanStoppingCriteria(tokenizer, span_length=4)
        ids = model.generate(**inputs, stopping_criteria=[criterion], max_new_tokens=64)
        ```

    Reference:
        Xu, Chen, Wu and Zhang, "Hit the Sweet Spot! Span-Level Ensemble for Large Language Models"
        (https://arxiv.org/abs/2409.18583).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | TokenBytes,
        span_length: int = 4,
        max_span_tokens: int | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        start: int | None = None,
        begun: Sequence[bytes] | None = None,
    ):
        # The method checks these options.
        config = SweetSpanConfig(span_length=span_length, max_span_tokens=max_span_tokens)
        self.span_length = config.span_length
        self.token_limit = config.token_limit
        if eos_token_id is None and not isinstance(tokenizer, TokenBytes):
            eos_token_id = tokenizer.eos_token_id
        eos_ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        self._eos_ids = frozenset(eos_ids)
        self._token_bytes = tokenizer if isinstance(tokenizer, TokenBytes) else TokenBytes(tokenizer, end_ids=eos_ids)
        self._start = start
        self._begun = begun
        self._before: Tensor | None = None
        self._found_start = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Return which rows contain a complete span, of shape `(batch_size,)`.

        Args:
            input_ids: All ids so far, of shape `(batch_size, length)`.
            scores: Not read.
            **kwargs: Not read.
        """
        start = self._start
        if start is None:
            if not self._continues(input_ids):
                self._found_start = input_ids.shape[1] - 1
            self._before = input_ids
            start = self._found_start
        done = [self.read(row, ids).is_complete for row, ids in enumerate(input_ids[:, start:].tolist())]
        if all(done):
            # What follows is the next span.
            self._before = None
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]

    def read(self, row: int, ids: Sequence[int]) -> Span:
        """Return the span that ids write in a row, complete or not.

        Args:
            row: The row.
            ids: The ids written in it since the span began.
        """
        begun = b"" if self._begun is None else self._begun[row]
        return read_span(ids, self._token_bytes, self._eos_ids, self.span_length, self.token_limit, begun)

    def _continues(self, input_ids: Tensor) -> bool:
        """Whether every row continues one of the last call's by one id (beams move between rows)."""
        before = self._before
        if before is None or before.shape != (input_ids.shape[0], input_ids.shape[1] - 1):
            return False
        return bool((input_ids[:, None, :-1] == before.to(input_ids.device)).all(-1).any(-1).all())
