"""What is said of a step that went wrong, or was odd: the same whichever loop decodes."""

import warnings
from collections.abc import Collection

from ..errors import MemberError
from ..members.member import Member


def not_finite_error(member: Member, row: int, step: int) -> MemberError:
    """The error for a member that gave NaN or infinite logits."""
    return MemberError(
        f"member {member.name!r} gave NaN or infinite logits in row {row} at step {step} "
        f"(its dtype is {member.model.dtype}). Load it in bfloat16 or float32."
    )


def nothing_left_error(method_name: str, row: int, step: int) -> MemberError:
    """The error for a row in which everything was filtered out."""
    return MemberError(
        f"nothing is left to choose from in row {row} at step {step}: of what method {method_name!r} proposes "
        "the primary can write nothing, or its options, processors and filters removed every candidate. Loosen them, "
        "or let the members propose more entries."
    )


def no_position_left(member: Member, row: int, num_new: int) -> str:
    """The warning for a row that ends because a member has no position left."""
    return (
        f"row {row} ends after {num_new} new ids: member {member.name!r} has positions for {member.max_positions} ids "
        "only."
    )


def warn_of_control(primary: Member, primary_id: int, end_ids: Collection[int], warned: set[int]) -> None:
    """Warn once of a control token that was written and does not end the row.

    Args:
        primary: The primary.
        primary_id: What was written.
        end_ids: The primary's ids that end a text.
        warned: Ids that have been warned of; changed in place.
    """
    if primary_id in warned or primary_id in end_ids:
        return
    warned.add(primary_id)
    token = primary.tokenizer.convert_ids_to_tokens(primary_id)
    warnings.warn(
        f"the primary {primary.name!r} wrote the control token {token!r} (id {primary_id}), which writes no "
        f"text and does not end the row. If it should end it, pass `eos_token_id` with {primary_id} in it.",
        stacklevel=3,
    )
