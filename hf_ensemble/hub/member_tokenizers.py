"""Loading the tokenizers of members."""

import difflib
import inspect
import json
import re
from pathlib import Path
from types import FunctionType
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .. import messages
from ..config import MemberConfig
from ..errors import ConfigurationError, VocabularyError
from ..vocabulary.token_bytes import check_holes
from .finding import source_options
from .member_files import check_folder
from .references import HUB_OPTIONS, Place, hub_options, name_of

_PYTHON_TOKENIZERS = {"marian": "MarianTokenizer", "m2m_100": "M2M100Tokenizer"}
"""Tokenizers that are SentencePiece models with Python code around them, by the model type that they are the default of."""

_REMEDY = "Set `MemberConfig(tokenizer=...)`, or pass `tokenizers=[...]` with one per member."

_OF_LOADING = {
    "use_fast",
    "tokenizer_type",
    "from_slow",
    "legacy",
    "fix_mistral_regex",
    "revision",
    "subfolder",
    *HUB_OPTIONS,
}
"""Options of loading, which leave no trace in the tokenizer."""

_LARGE_NUMBER = re.compile(rb'":\s*\d{7}')
"""What a tokenizer.json with an id of at least a million holds; reading all of a file takes longer than looking for it."""

_MOST_PADDING = 1 << 24
"""Limit on the ids to which a tokenizer pads every text by itself."""


def load_tokenizer(
    item: MemberConfig, given: Any, kwargs: dict[str, Any], known: dict[Any, PreTrainedTokenizerBase] | None = None
) -> PreTrainedTokenizerBase:
    """Load a member's tokenizer.

    Args:
        item: The member.
        given: A tokenizer, or the id or path of one; None for that of the member.
        kwargs: Options of its loading.
        known: Tokenizers that have been loaded, by where they lie, for others to share. Extended in place.

    Raises:
        VocabularyError: If there is none, or it cannot be used.
        ConfigurationError: If its files could do harm, or it has no such option as `tokenizer_kwargs` names.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    hub = hub_options(kwargs)
    source = given or item.tokenizer
    options: dict[str, Any] = {}
    if source is None and item.path is None:
        raise VocabularyError(
            f"member {name_of(item)!r} is behind a server, which does not provide a tokenizer. {_REMEDY}"
        )
    if source is None:
        # What an adapter was trained with lies beside it.
        beside = Place.of_adapter(item)
        is_beside = item.adapter is not None and beside.file("tokenizer_config.json", hub) is not None
        source, options = (beside.path, beside.options) if is_beside else (item.path, source_options(item))
    known = {} if known is None else known
    options |= item.tokenizer_kwargs or {}
    key = str(source), repr(options)
    if key not in known:
        folder = Path(str(source), options.get("subfolder") or "")
        check_folder(f"the tokenizer of member {name_of(item)!r}", folder)
        _check_ids(item, folder / "tokenizer.json")
        known[key] = _read_tokenizer(item, source, {**options, **hub})
        _check_options(item, known[key])
        _check_padding(item, known[key])
    return known[key]


def _read_tokenizer(item: MemberConfig, source: Any, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:
        class_name = _python_class(source, options)
        if class_name is not None:
            raise messages.python_tokenizer(name_of(item), class_name) from error
        if "trust_remote_code" in str(error):
            raise VocabularyError(
                f"the tokenizer of member {name_of(item)!r} comes with code of its own (`auto_map` in its tokenizer_config.json), "
                "which is never run. If you trust that code, load the tokenizer yourself and pass it: `tokenizers=[...]`."
            ) from error
        raise VocabularyError(
            f"member {name_of(item)!r} has no tokenizer that can be loaded from {str(source)!r}: {error} {_REMEDY}"
        ) from error
    if len(tokenizer) == 0:
        raise VocabularyError(f"member {name_of(item)!r} has an empty tokenizer. {_REMEDY}")
    return tokenizer


def _check_ids(item: MemberConfig, file: Path) -> None:
    """Refuse a tokenizer.json with a far too large id: some versions of `transformers` list all ids up to it."""
    if not file.is_file() or _LARGE_NUMBER.search(data := file.read_bytes()) is None:
        return
    try:
        vocab = json.loads(data)["model"]["vocab"]
        highest = max(i for i in vocab.values() if isinstance(i, int))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return  # no such vocabulary, or no tokenizer: loading it tells
    check_holes(name_of(item), len(vocab), highest)


def _check_options(item: MemberConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse options that the tokenizer does not have: `transformers` ignores them."""
    known = set(_OF_LOADING)
    for kind in type(tokenizer).__mro__:
        if isinstance(init := vars(kind).get("__init__"), FunctionType):
            known |= set(inspect.signature(init).parameters)
    for key in item.tokenizer_kwargs or {}:
        if key in known or hasattr(tokenizer, key):
            continue
        near = difflib.get_close_matches(key, [*known, *vars(tokenizer), *dir(type(tokenizer))], 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"member {name_of(item)!r} has {key!r} in its `tokenizer_kwargs`, but {type(tokenizer).__name__} has no such "
            f"option.{meant}"
        )


def _check_padding(item: MemberConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that pads every text to a length that takes all memory."""
    padding = getattr(getattr(tokenizer, "backend_tokenizer", None), "padding", None) or {}
    for key in ("length", "pad_to_multiple_of"):
        if (padding.get(key) or 0) > _MOST_PADDING:
            raise VocabularyError(
                f"the tokenizer.json of member {name_of(item)!r} pads every text to {padding[key]} ids (`padding`: {key!r}); the "
                f"limit is {_MOST_PADDING}. Set its `padding` to null."
            )


def _python_class(source: Any, options: dict[str, Any]) -> str | None:
    """The class of a tokenizer that cannot be loaded, if it is one that no member can have."""
    try:
        name = get_tokenizer_config(source, trust_remote_code=False, **options).get("tokenizer_class")
        name = name or _PYTHON_TOKENIZERS.get(
            AutoConfig.from_pretrained(source, trust_remote_code=False, **options).model_type
        )
    except Exception:  # the error before tells more
        return None
    return name if name in _PYTHON_TOKENIZERS.values() else None
