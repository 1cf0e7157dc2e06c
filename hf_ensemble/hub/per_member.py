"""Options of loading, given once for all members or as a list with one per member."""

from collections.abc import Sequence
from typing import Any

from .. import messages


def listed(name: str, given: Any, count: int) -> list[Any] | None:
    """Return the entries of a list with one per member; None if the option is given for all.

    Args:
        name: The option's name.
        given: Its value.
        count: Number of members.

    Raises:
        ConfigurationError: If the list has another length.
    """
    if not isinstance(given, (list, tuple)):
        return None
    if len(given) != count:
        raise messages.wrong_count(name, len(given), count)
    return list(given)


def per_member(name: str, given: Any, own: Sequence[Any]) -> list[Any]:
    """Return an option for each member: from a list, else the member's own, else the one for all.

    Args:
        name: The option's name.
        given: Its value.
        own: Each member's own value; None for no value.

    Raises:
        ConfigurationError: If a list does not have one entry per member.
    """
    entries = listed(name, given, len(own))
    return [given if one is None else one for one in own] if entries is None else entries
