"""The table that the scripts print, line by line, with a count of broken promises."""

import sys
from collections.abc import Sequence

from report import print_heads, print_row

_MOST_DETAILS = 5
_MOST_CHARACTERS = 300


class Table:
    """Prints lines that end in "yes" or "NO".

    Args:
        heads: Of the columns, but for the last, which says whether a line is as promised.

    Attributes:
        num_failed: How many lines were not as promised.
    """

    def __init__(self, *heads: str):
        self.num_failed = 0
        print_heads(*heads, "as promised")

    def row(self, *cells: str, is_right: bool, details: Sequence[str] = ()) -> None:
        """Print a line.

        Args:
            *cells: All but the last.
            is_right: Whether it is as promised.
            details: What was not; goes to the error output.
        """
        self.num_failed += not is_right
        print_row(*(_shortened(cell) for cell in cells), "yes" if is_right else "NO")
        for detail in details[:_MOST_DETAILS]:
            print(f"    {detail}", file=sys.stderr, flush=True)


def _shortened(cell: str) -> str:
    cell = " ".join(cell.replace("|", "¦").split())
    return cell if len(cell) <= _MOST_CHARACTERS else f"{cell[:_MOST_CHARACTERS]}…"
