"""The time that the members of a call take."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class MemberSeconds:
    """Seconds spent starting members or waiting for them.

    Args:
        members: Indices of the members.

    Attributes:
        total: By member index.
    """

    def __init__(self, members: Iterable[int]):
        self.total = dict.fromkeys(members, 0.0)

    @contextmanager
    def of(self, member: int) -> Iterator[None]:
        """Count the time of a block for a member."""
        began = time.perf_counter()
        yield
        self.total[member] += time.perf_counter() - began
