"""Stop strings, whose tables are made once per tokenizer: for 262,144 entries, that takes a second or two."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria

_NUM_KEPT = 8
"""Number of sets of stop strings kept per tokenizer; the one unused for longest is dropped."""

_NUM_PROBES = 4096
"""Number of entries to compare to detect another vocabulary; all entries of a smaller one."""

_made: "WeakKeyDictionary[Any, OrderedDict[tuple[str, ...], tuple[Any, StopStringCriteria]]]" = WeakKeyDictionary()
"""By tokenizer and stop strings: the tokenizer's state when the criterion was made, and the criterion."""


def stop_string_criteria(stop_strings: str | list[str], tokenizer: Any) -> StopStringCriteria:
    """Return the criterion of `transformers` for stop strings, with the tables of an earlier call if there are any.

    `StopStringCriteria` has a cache of its own, but looks it up by the whole vocabulary, which takes half as long as
    new tables (and finds nothing if the tokenizer lists its vocabulary in a different order each time). Tables are
    rebuilt if the tokenizer's added tokens, decoder, size or any of about a thousand entries have changed.

    Args:
        stop_strings: One or more.
        tokenizer: The tokenizer of the ids; never changed.
    """
    state = _state_of(tokenizer)
    if state is None:
        return StopStringCriteria(tokenizer, stop_strings)
    key = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    kept = _made.setdefault(tokenizer, OrderedDict())
    found = kept.pop(key, None)
    if found is None or found[0] != state:
        found = state, StopStringCriteria(tokenizer, stop_strings)
    kept[key] = found
    if len(kept) > _NUM_KEPT:
        kept.popitem(last=False)
    # A call moves the tables of its own criterion to its device.
    return copy.copy(found[1])


class AfterLostSpace(StoppingCriteria):
    """Stop strings in texts whose first word loses the space that its tokenizer adds, which is not part of the text.

    Args:
        criterion: The criterion of these strings.
        loses_space: For each prompt whether its text does so. A prompt may have several consecutive rows.
        write: Returns the bytes that ids write.
    """

    def __init__(
        self, criterion: StopStringCriteria, loses_space: Sequence[bool], write: Callable[[Sequence[int]], bytes]
    ):
        self._criterion, self._loses_space, self._write = criterion, loses_space, write

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended, of shape `(num_rows,)`."""
        found: Any = self._criterion(input_ids, scores, **kwargs).clone()
        for row in found.nonzero().flatten().tolist():
            if self._loses_space[row * len(self._loses_space) // len(found)]:
                text = self._write(input_ids[row].tolist()).removeprefix(b" ").decode("utf-8", "replace")
                found[row] = any(string in text for string in self._criterion.stop_strings)
        return found


def without_stop_strings(generation_config: GenerationConfig) -> GenerationConfig:
    """Return the same generation config without stop strings."""
    twin = copy.copy(generation_config)
    twin.stop_strings = None
    return twin


def _state_of(tokenizer: Any) -> Any:
    """A value that changes when a tokenizer's ids change their text; None if that cannot be computed quickly."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    size = backend.get_vocab_size(with_added_tokens=False)
    entries = [backend.id_to_token(i) for i in range(0, size, max(1, size // _NUM_PROBES))]
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    decoder = None if backend.decoder is None else backend.decoder.__getstate__()
    # The backend itself, because it may have been replaced.
    return backend, size, entries, added, decoder
