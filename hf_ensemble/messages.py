"""Error messages and warnings used in several places, each worded once."""

import sys
import traceback
import warnings
from collections.abc import Sequence

import torch

from .errors import ConfigurationError, MemberError, VocabularyError

_TAIL = 60
"""Number of characters at the end of a text that an error shows."""

_BETWEEN = {"hf_ensemble", "torch", "transformers", "functools", "contextlib"}
"""Packages whose frames are between the user's and this package's."""


def warn(message: str) -> None:
    """Warn at the user's line: the one that called this package, possibly through other libraries."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    entry = max(n for n, package in enumerate(packages) if package == __package__)
    outer = zip(frames[entry:], packages[entry:], strict=True)
    user = next((frame for frame, package in outer if package not in _BETWEEN), frames[-1])
    registry = user.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, user.f_code.co_filename, user.f_lineno, user.f_globals.get("__name__"), registry
    )


def not_finite(name: str, dtype: torch.dtype, where: str) -> MemberError:
    """The error for a member that returned NaN or infinite logits.

    Args:
        name: The member's name.
        dtype: Its dtype, on which the remedy depends.
        where: Its place: "in row 0 at step 1".
    """
    remedy = {
        torch.float32: "Run it alone on this text: its weights may be damaged",
        torch.bfloat16: "Load it in float32",
    }.get(dtype, "Load it in bfloat16 or float32")
    return MemberError(f"member {name!r} returned NaN or infinite logits {where} (its dtype is {dtype}). {remedy}.")


def failed_pass(name: str, error: Exception, what: str = "its forward pass") -> MemberError:
    """The error for a model that raised.

    Args:
        name: The member's name.
        error: What it raised.
        what: What it was doing.
    """
    return MemberError(f"member {name!r} failed in {what}: {error}")


def written_so_far(texts: Sequence[str], num_steps: int) -> str:
    """The sentence in an error about the text written so far.

    Args:
        texts: One text per row.
        num_steps: Number of steps, which is ids per row.
    """
    if not any(texts):
        return "Nothing had been written."
    tail = texts[0] if len(texts[0]) <= _TAIL else f"…{texts[0][-_TAIL:]}"
    others = f" (row 0 of {len(texts)})" if len(texts) > 1 else ""
    return f"Written so far, in {num_steps} steps{others}: {tail!r}."


def nothing_left(method_name: str, where: str) -> MemberError:
    """The error for a choice whose candidates were all filtered out.

    Args:
        method_name: The method's name.
        where: Where: "in row 0 at step 1".
    """
    return MemberError(
        f"nothing is left to choose from {where}: the primary can write nothing that method {method_name!r} proposes, "
        "or options, processors and filters removed every candidate. Loosen them, or let the members propose more "
        "entries."
    )


def too_many_allowed(member_name: str, count: int, most: int, where: str) -> MemberError:
    """The error for constraints that allow none of the proposals, and too many other ids.

    Args:
        member_name: The member that lists few ids.
        count: Number of its ids that are left.
        most: Largest number of ids to ask about.
        where: Where: "in row 0 at step 1".
    """
    return MemberError(
        f"the constraints allow none of the proposed entries {where}, but {count} other ids of member "
        f"{member_name!r}, which can be asked about {most} at most. Let the members propose more entries, or load "
        f"{member_name!r} into this process."
    )


def changed_beside(member_names: Sequence[str], where: str) -> MemberError:
    """The error for processors that change scores which members that list few ids cannot give beforehand.

    Args:
        member_names: These members.
        where: Where: "in row 0 at step 1".
    """
    names = ", ".join(map(repr, member_names))
    return MemberError(
        f"the constraints allow none of the proposed entries {where}, and change the scores of other ids. {names} can "
        "give the probabilities of these ids only after the constraints have run. Use processors that only ban, or "
        "load the member into this process."
    )


def no_position_left(name: str, limit: int | None, row: int, num_new: int) -> str:
    """The warning for a row that ends because a member has no position left.

    Args:
        name: The member's name.
        limit: Number of its positions.
        row: The row.
        num_new: Number of new ids in it.
    """
    return f"row {row} ends after {num_new} new ids: member {name!r} has positions for {limit} ids only."


def python_tokenizer(name: str, class_name: str) -> VocabularyError:
    """Return the error for a tokenizer that is SentencePiece models and Python code around them."""
    return VocabularyError(
        f"member {name!r} cannot be used: its tokenizer ({class_name}) is Python code around SentencePiece models, "
        "which does not say what its ids write. Pass a tokenizer with the same ids and a `tokenizers` backend (a "
        "tokenizer.json): `MemberConfig(tokenizer=...)`. Or choose a model that has one, such as NLLB or T5."
    )


def too_long(name: str, limit: int, what: str, length: int, remedy: str) -> ConfigurationError:
    """The error for a text that is too long for a member's positions.

    Args:
        name: The member's name.
        limit: Number of its positions.
        what: What is too long, with its verb: "the prompt takes".
        length: Number of the member's ids in it.
        remedy: What to do: "Shorten the prompt".
    """
    return ConfigurationError(
        f"member {name!r} has positions for {limit} ids, but {what} {length} of its ids. {remedy}."
    )


def nothing_to_start_from(name: str, what: str) -> ConfigurationError:
    """The error for an empty prompt if the primary's tokenizer has no token to start a text from.

    Args:
        name: The primary's name.
        what: What is empty, with its verb: "row 0 of the prompt is empty".
    """
    return ConfigurationError(
        f"{what}, and the tokenizer of the primary {name!r} has neither a BOS nor an EOS token to start from. Give a "
        "non-empty prompt."
    )


def wrong_count(option: str, got: int, count: int, each: str = "member") -> ConfigurationError:
    """The error for an option that is a list of the wrong length.

    Args:
        option: Its name.
        got: Its length.
        count: The length that it must have.
        each: The word for one entry.
    """
    return ConfigurationError(f"`{option}` must have one entry per {each}: got {got} for {count} {each}s.")


def id_outside(what: str, name: str, vocab_size: int) -> ConfigurationError:
    """The error for an id that the primary does not have.

    Args:
        what: What contains the id, with its verb and the id: "`input_ids` contains 7".
        name: The primary's name.
        vocab_size: Number of its ids.
    """
    return ConfigurationError(
        f"{what}, but ids of the primary {name!r} go from 0 to {vocab_size - 1}. Encode text with "
        "`ensemble.tokenizer`."
    )
