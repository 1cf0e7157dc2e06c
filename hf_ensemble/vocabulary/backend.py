"""The `tokenizers.Tokenizer` behind a tokenizer, and its parts."""

import copy
import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..errors import VocabularyError


def fast_backend(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> Any:
    """Return the `tokenizers.Tokenizer` behind a tokenizer, without dropout, or raise naming it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise VocabularyError(
            f"the tokenizer of {name or tokenizer.name_or_path!r} is not supported: {type(tokenizer).__name__} has no "
            "fast backend. Load a fast tokenizer (one saved with a tokenizer.json)."
        )
    return without_dropout(backend)


def without_dropout(backend: Any) -> Any:
    """Return the tokenizer itself, or, if it skips merges at random as in training, a copy that does not."""
    if getattr(backend.model, "dropout", None):
        backend = copy.deepcopy(backend)
        backend.model.dropout = None
    return backend


def component_state(component: Any) -> dict[str, Any] | None:
    """The JSON description of a normalizer, pre-tokenizer, decoder or post-processor; None for none."""
    return None if component is None else json.loads(component.__getstate__())


def flatten_component(state: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Flatten a component's description, whose sequences are under `key`, into a list."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state[key] for part in flatten_component(inner, key)]


def bare_view(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same vocabulary, normalizer and pre-tokenizer, and nothing else."""
    view = Tokenizer(backend.model)
    view.normalizer, view.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    return view


def prefix_ids(view: Tokenizer, backend: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer puts in front of a text (its BOS rule), using a view of it, which is changed."""
    ids, is_framing = _framed(view, backend)
    first_text = is_framing.index(0) if 0 in is_framing else 0
    return ids[:first_text]


def suffix_ids(view: Tokenizer, backend: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer puts after a text, using a view of it, which is changed."""
    ids, is_framing = _framed(view, backend)
    num_behind = is_framing[::-1].index(0) if 0 in is_framing else 0
    return ids[len(ids) - num_behind :]


def _framed(view: Tokenizer, backend: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a text in its frame, with 1 for ids of the frame."""
    view.post_processor = backend.post_processor
    encoded = view.encode("a", add_special_tokens=True)
    return list(encoded.ids), list(encoded.special_tokens_mask)
