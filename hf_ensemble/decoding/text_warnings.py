"""Warnings, each given once, about text that was written or read inexactly."""

from collections.abc import Collection, Mapping

from .. import messages
from ..members.member import Member
from ..members.state import MemberState


def warn_of_losses(states: Mapping[int, MemberState], warned: set[int]) -> None:
    """Warn once about every member whose view of the text has lost something.

    Args:
        states: The states of the running members, by member index.
        warned: Members that have been warned of; changed in place.
    """
    for index, state in states.items():
        if index not in warned and any(context.is_lossy for context in state.contexts):
            warned.add(index)
            messages.warn(
                f"member {state.member.name!r} does not read the text exactly: its tokenizer rewrites some of it, or "
                "cannot write it. The ensemble's text is not affected."
            )


def warn_of_control(primary: Member, primary_id: int, end_ids: Collection[int], warned: set[int]) -> None:
    """Warn once about a control token that was written and does not end the row.

    Args:
        primary: The primary.
        primary_id: The id that was written.
        end_ids: The primary's ids that end a text.
        warned: Ids that have been warned of; changed in place.
    """
    if primary_id in warned or primary_id in end_ids:
        return
    warned.add(primary_id)
    token = primary.tokenizer.convert_ids_to_tokens(primary_id)
    messages.warn(
        f"the primary {primary.name!r} wrote the control token {token!r} (id {primary_id}), which adds no text and "
        f"does not end the row. If it should end the row, pass `eos_token_id` with {primary_id} in it."
    )
