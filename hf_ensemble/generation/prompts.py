"""What every member reads of a call's prompts."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigurationError
from ..member import Member, MemberState
from ..vocabulary.context import MemberContext, Resync


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        ids: The primary's ids of each distinct prompt, without padding.
        texts: What each distinct prompt writes.
        prompt_of_row: For each row, the number of its prompt. Rows of one prompt (beams, returned sequences) can share
            its forward pass: see `expand_prompts`.
        contexts: For each assistant that takes part, its context for each distinct prompt.
    """

    ids: list[list[int]]
    texts: list[bytes]
    prompt_of_row: list[int]
    contexts: dict[int, list[MemberContext]]


def read_prompts(
    members: Sequence[Member], participants: Collection[int], resync: Resync, ids: Tensor, mask: Tensor | None
) -> Prompts:
    """Let every member read the prompts.

    Args:
        members: The members, the primary first.
        participants: Numbers of the members that take part.
        resync: How assistants follow the text.
        ids: The primary's ids, of shape `(batch_size, length)`.
        mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.

    Raises:
        ConfigurationError: If a member has nothing to start from, or not enough positions.
    """
    primary = members[0]
    kept = [[1] * ids.shape[1]] * ids.shape[0] if mask is None else mask.tolist()
    rows = [tuple(i for i, keep in zip(*row, strict=True) if keep) for row in zip(ids.tolist(), kept, strict=True)]
    number_of = {row: n for n, row in enumerate(dict.fromkeys(rows))}
    distinct = [list(row) for row in number_of]
    if set(participants) - {0}:
        _warn_of_control_tokens(primary, distinct)
    texts = [primary.encoder.token_bytes.write_from_start(row) for row in distinct]
    contexts: dict[int, list[MemberContext]] = {}
    for index, member in enumerate(members):
        if index > 0 and index in participants:
            contexts[index] = [MemberContext(member.encoder, resync, text) for text in texts]
            if not all(context.ids for context in contexts[index]):
                raise ConfigurationError(
                    f"member {member.name!r} has nothing to start from: a prompt is empty, and its tokenizer has "
                    "neither a BOS nor an EOS token. Give a prompt that is not empty."
                )
        lengths = [len(context.ids) for context in contexts.get(index, [])] if index else list(map(len, distinct))
        if member.max_positions is not None and max(lengths, default=0) > member.max_positions:
            raise ConfigurationError(
                f"member {member.name!r} has positions for {member.max_positions} ids, but the prompt takes "
                f"{max(lengths)} of its ids. Shorten the prompt."
            )
    return Prompts(distinct, texts, [number_of[row] for row in rows], contexts)


def expand_prompts(
    states: Mapping[int, MemberState[MemberContext]], prompt_of_row: Sequence[int], waiting: Collection[int] = ()
) -> None:
    """Run every distinct prompt once and give each row a copy of its prompt's state.

    Args:
        states: The members' states, a row per distinct prompt; a row per row afterwards.
        prompt_of_row: For each row, the number of its prompt.
        waiting: Members that are not run yet.
    """
    if list(prompt_of_row) != list(range(len(prompt_of_row))):
        for index, state in states.items():
            if index not in waiting:
                state.logits()
            state.select(prompt_of_row, [state.contexts[prompt].copy() for prompt in prompt_of_row])


def warn_of_losses(
    members: Sequence[Member], contexts: Mapping[int, Sequence[MemberContext]], warned: set[int]
) -> None:
    """Warn once of every member whose view of the text has lost something.

    Args:
        members: The members.
        contexts: The running members' contexts.
        warned: Members that have been warned of; changed in place.
    """
    for index, rows in contexts.items():
        if index not in warned and any(context.is_lossy for context in rows):
            warned.add(index)
            warnings.warn(
                f"member {members[index].name!r} does not read the text exactly: its tokenizer rewrites some of it, or "
                "cannot write it. What the ensemble writes is not affected.",
                stacklevel=3,
            )


def _warn_of_control_tokens(primary: Member, rows: Sequence[Sequence[int]]) -> None:
    dropped: set[int] = set()
    for ids in rows:
        start = primary.encoder.prefix_ids
        bos = [] if start and list(ids[: len(start)]) == start else [primary.tokenizer.bos_token_id]
        leading = int(list(ids[:1]) == bos) if bos else len(start)
        dropped.update(i for i in ids[leading:] if primary.is_control(i))
    if dropped:
        tokens = primary.tokenizer.convert_ids_to_tokens(sorted(dropped))
        warnings.warn(
            f"the prompt holds control tokens of the primary {primary.name!r}, which the other members do not read: "
            f"{', '.join(tokens)}.",
            stacklevel=3,
        )
