"""What every member reads of a call's prompts."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import messages
from ..chat.memory import recall
from ..chat.rendering import ChatRenderer
from ..errors import ConfigurationError
from ..members.member import Member
from ..members.state import MemberState
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


class OwnPrompts:
    """What members read in place of the text that the primary's ids write.

    That is a prompt of their own where one is given, else their rendering of the conversation that the ids stand for.

    Args:
        renderers: For each member, how it reads conversations.
        member_prompts: For each member its own plain text: one for all rows, or a list with one per row; None, also in
            such a list, where it has none.
        num_rows: Number of prompts.

    Raises:
        ConfigurationError: If there is not one entry per member, or not one text per row, or the primary has one.
    """

    def __init__(
        self, renderers: Sequence[ChatRenderer], member_prompts: Sequence[Any] | None = None, num_rows: int = 1
    ):
        self.renderers = renderers
        count = len(renderers)
        given = [None] * count if member_prompts is None else member_prompts
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) != count:
            raise ConfigurationError(
                f"`member_prompts` must be a list with one entry for each of the {count} members, but is {given!r:.200}."
            )
        texts = [list(entry) if isinstance(entry, (list, tuple)) else [entry] * num_rows for entry in given]
        for renderer, rows in zip(renderers, texts, strict=True):
            if len(rows) != num_rows or not all(text is None or isinstance(text, str) for text in rows):
                raise ConfigurationError(
                    f"`member_prompts` of member {renderer.name!r} must be a text, None, or a list of one of these for "
                    f"each of the {num_rows} rows, but is {rows!r:.200}."
                )
        if any(text is not None for text in texts[0]):
            raise ConfigurationError(
                "the primary reads `input_ids`: give None as its entry of `member_prompts`, or no `input_ids`."
            )
        self.texts = list(zip(*texts, strict=True))

    def of_row(self, row: int, num_rows: int) -> tuple[str | None, ...]:
        """Each member's own prompt in one of the call's rows, of which every prompt has the same number."""
        return self.texts[row * len(self.texts) // num_rows]


def read_prompts(
    members: Sequence[Member],
    participants: Collection[int],
    resync: Resync,
    ids: Tensor,
    mask: Tensor | None,
    own: OwnPrompts | None = None,
) -> Prompts:
    """Let every member read the prompts.

    Args:
        members: The members, the primary first.
        participants: Numbers of the members that take part.
        resync: How assistants follow the text.
        ids: The primary's ids, of shape `(batch_size, length)`.
        mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.
        own: What members read in place of the primary's text.

    Raises:
        ConfigurationError: If a member has nothing to start from, or not enough positions, or its chat template
            refuses a conversation.
    """
    primary = members[0]
    kept = [[1] * ids.shape[1]] * ids.shape[0] if mask is None else mask.tolist()
    rows = [tuple(i for i, keep in zip(*row, strict=True) if keep) for row in zip(ids.tolist(), kept, strict=True)]
    own_texts = [own.of_row(n, len(rows)) if own else (None,) * len(members) for n in range(len(rows))]
    keys = list(zip(rows, own_texts, strict=True))
    number_of = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    distinct = [list(row) for row, _ in number_of]
    assistants = sorted(set(participants) - {0})
    conversations = [recall(primary.tokenizer, row) if own and assistants else None for row in distinct]
    by_text = [
        row
        for (row, texts), conversation in zip(number_of, conversations, strict=True)
        if conversation is None and any(texts[index] is None for index in assistants)
    ]
    _warn_of_control_tokens(primary, by_text)
    texts = [primary.encoder.token_bytes.write_from_start(row) for row in distinct]
    contexts: dict[int, list[MemberContext]] = {}
    for index, member in enumerate(members):
        if index > 0 and index in participants:
            contexts[index] = []
            for (_, own_text), conversation, text in zip(number_of, conversations, texts, strict=True):
                given = own_text[index]
                if given is None and conversation is not None:
                    assert own is not None
                    rendered = own.renderers[index].ids(conversation)
                    contexts[index].append(MemberContext.of_rendering(member.encoder, resync, rendered))
                else:
                    data = text if given is None else given.encode("utf-8", "replace")
                    contexts[index].append(MemberContext(member.encoder, resync, data))
            if not all(context.ids for context in contexts[index]):
                raise ConfigurationError(
                    f"member {member.name!r} has nothing to start from: a prompt is empty, and its tokenizer has "
                    "neither a BOS nor an EOS token. Give a prompt that is not empty."
                )
        lengths = [len(context.ids) for context in contexts.get(index, [])] if index else list(map(len, distinct))
        if member.max_positions is not None and max(lengths, default=0) > member.max_positions:
            raise messages.too_long(
                member.name, member.max_positions, "the prompt takes", max(lengths), "Shorten the prompt"
            )
    return Prompts(distinct, texts, [number_of[key] for key in keys], contexts)


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
            f"{', '.join(tokens)}. For a conversation, pass the ids of `ensemble.apply_chat_template(messages, ...)` as "
            "they are: every member then reads it in its own template.",
            stacklevel=3,
        )
