"""Finds the conversation behind the primary's ids.

The stock pipeline passes nothing but ids from the tokenizer to `generate`. So the conversation that each member needs
for its own prompt is kept here, under the exact ids of the primary's rendering.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .conversation import Conversation

MAX_IDS = 1 << 22
"""Number of ids to keep, over all conversations; beyond that, the conversations unused for longest are dropped."""

_lock = threading.Lock()
_conversations: OrderedDict[bytes, tuple[Conversation, int]] = OrderedDict()
_num_ids = 0


def remember(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], conversation: Conversation) -> None:
    """Keep a conversation.

    Args:
        tokenizer: The primary's tokenizer.
        ids: What it renders the conversation to, without padding.
        conversation: The conversation.
    """
    global _num_ids
    # Short ones count as 64 ids, to limit their number.
    key, size = _key(tokenizer, ids), max(64, len(ids))
    with _lock:
        _num_ids += size - _conversations.pop(key, (None, 0))[1]
        _conversations[key] = conversation, size
        while _num_ids > MAX_IDS and len(_conversations) > 1:
            _num_ids -= _conversations.popitem(last=False)[1][1]


def recall(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Conversation | None:
    """Return the conversation that renders to these ids, if it is kept.

    Args:
        tokenizer: The primary's tokenizer.
        ids: Its ids, without padding.
    """
    key = _key(tokenizer, ids)
    with _lock:
        if key not in _conversations:
            return None
        _conversations.move_to_end(key)
        return _conversations[key][0]


def _key(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bytes:
    # With their tokens, because the same ids of another vocabulary are another text.
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    return hashlib.blake2b(repr((list(ids), tokens)).encode("utf-8", "replace"), digest_size=16).digest()
