"""Work on many rows at once, or on fewer where memory does not do for all."""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..members.member_model import is_out_of_memory

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def in_parts(items: Sequence[_Item], run: Callable[[Sequence[_Item]], list[_Made]]) -> list[_Made]:
    """Run all items together, or, where memory runs out, one half after the other.

    Args:
        items: The items; none is split.
        run: Runs some of them.

    Raises:
        MemberError: If memory does not do for one item alone, or whatever else `run` raises.
    """
    if not items:
        return []
    try:
        return run(items)
    except Exception as error:
        if len(items) == 1 or not is_out_of_memory(error):
            raise
    # Here nothing holds what the call has held.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(items) // 2
    return in_parts(items[:half], run) + in_parts(items[half:], run)
