"""Work on many rows at once, or on fewer if memory does not suffice."""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..members.member_model import is_out_of_memory

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def in_parts(items: Sequence[_Item], run: Callable[[Sequence[_Item]], list[_Made]]) -> list[_Made]:
    """Run all items together, or, if memory runs out, one half after the other.

    Args:
        items: The items; none is split.
        run: Runs some of them.

    Raises:
        MemberError: If memory does not suffice for one item alone, or anything else that `run` raises.
    """
    if not items:
        return []
    try:
        return run(items)
    except Exception as error:
        if len(items) == 1 or not is_out_of_memory(error):
            raise
    # At this point, the failed call's memory is free again.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(items) // 2
    return in_parts(items[:half], run) + in_parts(items[half:], run)
