"""Finds the conversation behind the primary's ids.

The stock pipeline passes nothing but ids from the tokenizer to `generate`. So the conversation that each member needs
for its own prompt is kept here, under the ensemble it was rendered for and the exact ids of the primary's rendering.
A plain text may have the same ids; then their last use counts.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .conversation import Conversation

MAX_IDS = 1 << 22
"""Number of ids to keep, over all conversations; beyond that, the conversations unused for longest are dropped."""


class _Kept(NamedTuple):
    conversation: Conversation
    size: int  # what it counts towards `MAX_IDS`
    is_text: bool


_Key = tuple[str, bytes]
_lock = threading.Lock()
_conversations: OrderedDict[_Key, _Kept] = OrderedDict()
_num_ids = 0


def remember(chat_id: str, ids: Sequence[int], conversation: Conversation, is_text: bool = False) -> None:
    """Keep a conversation.

    Args:
        chat_id: The `chat_id` of the ensemble that may read it.
        ids: What the primary's tokenizer renders the conversation to, without padding.
        conversation: The conversation.
        is_text: Whether it was rendered to a text, which has yet to be tokenized.
    """
    global _num_ids
    key = _key(chat_id, ids)
    with _lock:
        # A text may be tokenized again, whatever has been rendered since.
        is_text |= key in _conversations and _drop(key).is_text
        # Short ones count as 64 ids, to limit their number.
        _conversations[key] = kept = _Kept(conversation, max(64, len(ids)), is_text)
        _num_ids += kept.size
        while _num_ids > MAX_IDS and len(_conversations) > 1:
            _drop(next(iter(_conversations)))


def recall(chat_id: str, ids: Sequence[int]) -> Conversation | None:
    """Return the conversation that renders to these ids, if it is kept.

    Args:
        chat_id: The ensemble's `chat_id`.
        ids: The primary's ids, without padding.
    """
    key = _key(chat_id, ids)
    with _lock:
        if key not in _conversations:
            return None
        _conversations.move_to_end(key)
        return _conversations[key].conversation


def forget(chat_id: str, rows: Iterable[Sequence[int]]) -> None:
    """Treat ids as plain text from now on, unless a conversation was rendered to their text.

    Args:
        chat_id: The `chat_id` of the ensemble whose tokenizer encoded them.
        rows: The ids of each text, without padding; not read if nothing is kept.
    """
    if not _conversations:
        return
    for key in [_key(chat_id, ids) for ids in rows]:
        with _lock:
            if key in _conversations and not _conversations[key].is_text:
                _drop(key)


def _drop(key: _Key) -> _Kept:
    global _num_ids
    kept = _conversations.pop(key)
    _num_ids -= kept.size
    return kept


def _key(chat_id: str, ids: Sequence[int]) -> _Key:
    return chat_id, hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()
