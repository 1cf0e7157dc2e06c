"""Stop strings, whose tables are made once for a tokenizer: for 262,144 entries that takes a second or two."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria

_NUM_KEPT = 8
"""Sets of stop strings that are kept for a tokenizer; the one that was longest not asked for is dropped."""

_NUM_PROBES = 4096
"""Entries of the vocabulary that are looked at to tell whether it is another one; of a smaller one all."""

_made: "WeakKeyDictionary[Any, OrderedDict[tuple[str, ...], tuple[Any, StopStringCriteria]]]" = WeakKeyDictionary()
"""By tokenizer and stop strings: the state of the tokenizer for which the criterion was made, and the criterion."""


def stop_string_criteria(stop_strings: str | list[str], tokenizer: Any) -> StopStringCriteria:
    """The criterion that `transformers` makes for stop strings, with the tables of an earlier call if there are any.

    `StopStringCriteria` has a cache of its own, but looks it up by the whole vocabulary, which takes half as long as new
    tables (and finds nothing where the tokenizer lists its vocabulary in another order each time). Tables are made anew if
    the tokenizer's added tokens, decoder, size or any of some thousand entries have changed since.

    Args:
        stop_strings: One or more.
        tokenizer: Of the ids; read, never changed.
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
    """Stop strings in texts whose first word loses the space that its tokenizer puts before it: that is none of the text.

    Args:
        criterion: The criterion of these strings.
        loses_space: For each prompt whether its text does so. A prompt may have several rows, one after the other.
        write: The bytes that ids write.
    """

    def __init__(
        self, criterion: StopStringCriteria, loses_space: Sequence[bool], write: Callable[[Sequence[int]], bytes]
    ):
        self._criterion, self._loses_space, self._write = criterion, loses_space, write

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Say which rows have ended, of shape `(num_rows,)`."""
        found: Any = self._criterion(input_ids, scores, **kwargs).clone()
        for row in found.nonzero().flatten().tolist():
            if self._loses_space[row * len(self._loses_space) // len(found)]:
                text = self._write(input_ids[row].tolist()).removeprefix(b" ").decode("utf-8", "replace")
                found[row] = any(string in text for string in self._criterion.stop_strings)
        return found


def without_stop_strings(generation_config: GenerationConfig) -> GenerationConfig:
    """A generation config that is the same but for stop strings."""
    twin = copy.copy(generation_config)
    twin.stop_strings = None
    return twin


def _state_of(tokenizer: Any) -> Any:
    """What changes when somebody changes what a tokenizer's ids write; None where nothing tells it quickly."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    size = backend.get_vocab_size(with_added_tokens=False)
    entries = [backend.id_to_token(i) for i in range(0, size, max(1, size // _NUM_PROBES))]
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    decoder = None if backend.decoder is None else backend.decoder.__getstate__()
    # The backend itself: another one may have been put in its place.
    return backend, size, entries, added, decoder
