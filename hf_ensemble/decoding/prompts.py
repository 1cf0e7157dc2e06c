"""What every member reads of a call's prompts."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import messages
from ..chat.conversation import Conversation
from ..chat.memory import forget, recall
from ..errors import ConfigurationError
from ..members.member import Member, RowPrompt
from ..members.state import MemberState, padded_left
from ..vocabulary.context import MemberContext, Resync
from ..vocabulary.encoding import split_begun_character


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        ids: The primary's ids of each distinct prompt, without padding.
        texts: The text of each distinct prompt.
        prompt_of_row: For each row, the number of its prompt. Rows of one prompt (beams, returned sequences) can share
            its forward pass: see `expand_prompts`.
        contexts: For each member that takes part, its context for each distinct prompt.
        conversations: The conversation behind each distinct prompt; None for a plain one.
    """

    ids: list[list[int]]
    texts: list[bytes]
    prompt_of_row: list[int]
    contexts: dict[int, list[MemberContext]]
    conversations: list[Conversation | None]


class OwnPrompts:
    """What members read instead of the text of the primary's ids.

    That is their own prompt, if one is given, or else their rendering of the conversation behind the ids.

    Args:
        members: The members; the first is the primary.
        member_prompts: For each member its own plain text: one for all rows, or a list with one per row; None, also in
            such a list, for no own prompt.
        num_rows: Number of prompts.
        chat_id: The `chat_id` of the ensemble, to find its conversations; None to find none.

    Attributes:
        texts: For each prompt each member's own text, or None.
        starts: For each prompt, what stands in for its first id, for example the source of a primary that reads one.
            None if all are plain ids.

    Raises:
        ConfigurationError: If there is not one entry per member, or not one text per row, or the primary has one.
    """

    def __init__(
        self,
        members: Sequence[Member],
        member_prompts: Sequence[Any] | None = None,
        num_rows: int = 1,
        chat_id: str | None = None,
    ):
        count = len(members)
        given = [None] * count if member_prompts is None else member_prompts
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) != count:
            raise ConfigurationError(
                f"`member_prompts` must be a list with one entry for each of the {count} members, but is "
                f"{given!r:.200}."
            )
        texts = [list(entry) if isinstance(entry, (list, tuple)) else [entry] * num_rows for entry in given]
        for member, rows in zip(members, texts, strict=True):
            if len(rows) != num_rows or not all(text is None or isinstance(text, str) for text in rows):
                raise ConfigurationError(
                    f"`member_prompts` of member {member.name!r} must be a text, None, or a list of one of these for "
                    f"each of the {num_rows} rows, but is {rows!r:.200}."
                )
        if any(text is not None for text in texts[0]):
            raise ConfigurationError(
                "the primary reads `input_ids`: pass None as its entry of `member_prompts`, or leave out `input_ids`."
            )
        self.texts = list(zip(*texts, strict=True))
        self.starts: list[int] | None = None
        self._chat_id = chat_id
        self._conversations: dict[tuple[int, ...], Conversation | None] = {}

    def conversation(self, ids: Sequence[int]) -> Conversation | None:
        """The conversation behind a prompt, the same throughout a call; None for a plain prompt."""
        key = tuple(ids)
        if self._chat_id is not None and key not in self._conversations:
            self._conversations[key] = recall(self._chat_id, ids)
        return self._conversations.get(key)

    def numbers_of(self, num_rows: int) -> Tensor:
        """The prompt index of each row, of shape `(num_rows,)`: a prompt may have several consecutive rows."""
        return torch.arange(num_rows) * len(self.texts) // num_rows

    def shared_by_rows(self, num_rows: int) -> Tensor:
        """Which rows share a prompt, of shape `(num_rows, num_rows)`; equal ids may be read differently."""
        numbers = self.numbers_of(num_rows)
        return numbers[:, None] == numbers

    def of_rows(self, rows: Sequence[int]) -> "OwnPrompts":
        """Those of some of the prompts."""
        twin = copy.copy(self)
        twin.texts = [self.texts[row] for row in rows]
        twin.starts = None if self.starts is None else [self.starts[row] for row in rows]
        return twin


def encode_primary_prompt(primary: Member, given: Any, chat_id: str) -> tuple[Tensor, Tensor]:
    """Encode the primary's entry of `member_prompts`, for a call without ids.

    Args:
        primary: The primary.
        given: A text, or a list with one for each row.
        chat_id: The `chat_id` of the ensemble.

    Returns:
        Its ids and mask, each of shape `(batch_size, length)` on the primary's device and padded on the left.

    Raises:
        ConfigurationError: If it is neither.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"`member_prompts` of the primary {primary.name!r} must be a text or a list of texts, or None if you pass "
            f"`input_ids`, but is {texts!r:.200}."
        )
    rows = [primary.encode(text) for text in texts]
    forget(chat_id, rows)
    # Its tokenizer may have no padding token.
    ids, mask = padded_left(rows, primary.tokenizer.pad_token_id or 0)
    return ids.to(primary.device), mask.to(primary.device)


def prepare_prompt(primary: Member, ids: Any, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Check a prompt, move its padding to the left and give empty rows a start.

    Public methods call this directly, so that a warning points at the user's line.

    Args:
        primary: The primary.
        ids: Its ids, of shape `(batch_size, length)`, as users give them.
        mask: 1 for ids of the prompt and 0 for padding, of the same shape; None for no padding.

    Returns:
        Ids and mask, of the same shape, or longer if a row was empty.

    Raises:
        TypeError: If `ids` is not a tensor.
        ConfigurationError: If ids or mask do not fit, or an empty row has nothing to start from.
    """
    _check_ids(primary, ids, mask)
    ids = ids.long()
    if mask is not None and ids.shape[1] and bool((mask[:, :-1] > mask[:, 1:]).any()):
        # A decoder needs left padding; the order of the real ids stays.
        messages.warn("the prompt is padded on the right: its padding is moved to the left.")
        order = (mask != 0).long().argsort(dim=-1, stable=True)
        ids, mask = ids.gather(-1, order), mask.gather(-1, order)
    if mask is None and ids.shape[1]:
        return ids, None
    mask = torch.ones_like(ids) if mask is None else mask
    empty = (mask.sum(-1) == 0).nonzero()[:, 0]
    if len(empty):
        start = primary.encoder.start_ids
        if not start:
            raise messages.nothing_to_start_from(primary.name, f"row {int(empty[0])} of the prompt is empty")
        missing = max(0, len(start) - ids.shape[1])
        ids, mask = torch.nn.functional.pad(ids, (missing, 0)), torch.nn.functional.pad(mask, (missing, 0))
        ids[empty, -len(start) :] = torch.tensor(start, device=ids.device)
        mask[empty, -len(start) :] = 1
    return ids, mask


def _check_ids(primary: Member, ids: Any, mask: Tensor | None) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"`input_ids` has to be a tensor of the primary's ids, but is {type(ids).__name__}. Encode text with "
            "`ensemble.tokenizer(text, return_tensors='pt')`."
        )
    if ids.ndim != 2 or (ids.is_floating_point() and ids.numel()):
        raise ConfigurationError(
            f"`input_ids` has to be of shape (batch_size, length) and integer, but is {tuple(ids.shape)}, {ids.dtype}."
        )
    if ids.shape[0] == 0:
        raise ConfigurationError("`input_ids` has no rows: give at least one prompt.")
    if mask is not None and mask.shape != ids.shape:
        raise ConfigurationError(
            f"`attention_mask` has shape {tuple(mask.shape)}, but `input_ids` has {tuple(ids.shape)}: it has to cover "
            "the whole text, also with a cache."
        )
    outside = ids[(ids < 0) | (ids >= primary.vocab_size)]
    if outside.numel():
        raise messages.id_outside(f"`input_ids` contains {int(outside[0])}", primary.name, primary.vocab_size)


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
        own: What members read instead of the primary's text.

    Raises:
        ConfigurationError: If a member has nothing to start from, or not enough positions, or its chat template
            refuses a conversation.
    """
    primary = members[0]
    kept = [[1] * ids.shape[1]] * ids.shape[0] if mask is None else mask.tolist()
    rows = [tuple(i for i, keep in zip(*row, strict=True) if keep) for row in zip(ids.tolist(), kept, strict=True)]
    own_texts = [(None,) * len(members)] * len(rows)
    if own is not None:
        numbers = own.numbers_of(len(rows)).tolist()
        own_texts = [own.texts[number] for number in numbers]
        if own.starts is not None:
            rows = [(own.starts[number], *row[1:]) for number, row in zip(numbers, rows, strict=True)]
    keys = list(zip(rows, own_texts, strict=True))
    number_of = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    distinct = [list(row) for row, _ in number_of]
    assistants = sorted(set(participants) - {0})
    conversations = [own.conversation(row) if own is not None else None for row in distinct]
    by_text = [
        row
        for (row, texts), conversation in zip(number_of, conversations, strict=True)
        if conversation is None and any(texts[index] is None for index in assistants)
    ]
    _warn_of_control_tokens(primary, by_text)
    texts = [primary.encoder.token_bytes.write_from_start(row) for row in distinct]
    contexts: dict[int, list[MemberContext]] = {}
    for index, member in enumerate(members):
        if index in participants:
            contexts[index] = []
            for (row, own_text), conversation, text in zip(number_of, conversations, texts, strict=True):
                if index == 0:
                    contexts[index].append(MemberContext.of_ids(member.encoder, row))
                else:
                    prompt = RowPrompt(text, own_text[index], conversation, _is_open(primary, row, text))
                    contexts[index].append(member.read(prompt, resync))
            if not all(context.ids for context in contexts[index]):
                raise ConfigurationError(
                    f"member {member.name!r} has nothing to start from: a prompt is empty, and its tokenizer has "
                    "neither a BOS nor an EOS token. Give a non-empty prompt."
                )
        lengths = [len(context.ids) for context in contexts.get(index, [])] if index else list(map(len, distinct))
        if member.max_positions is not None and max(lengths, default=0) > member.max_positions:
            raise messages.too_long(
                member.name, member.max_positions, "the prompt takes", max(lengths), "Shorten the prompt"
            )
    return Prompts(distinct, texts, [number_of[key] for key in keys], contexts, conversations)


def _is_open(primary: Member, ids: Sequence[int], text: bytes) -> bool:
    """Whether a word after a prompt takes no space; see `RowPrompt.is_open`."""
    return not text or primary.is_control(ids[-1]) or split_begun_character(text)[0][-1:].isspace()


def expand_prompts(
    states: Mapping[int, MemberState], prompt_of_row: Sequence[int], waiting: Collection[int] = ()
) -> None:
    """Run every distinct prompt once and give each row a copy of its prompt's state.

    Args:
        states: The members' states, a row per distinct prompt; a row per row afterwards.
        prompt_of_row: For each row, the number of its prompt.
        waiting: Members that are not run yet.
    """
    if list(prompt_of_row) != list(range(len(prompt_of_row))):
        for index, state in states.items():
            if index not in waiting and not state.caches.is_elsewhere:
                state.logits()
            state.select(prompt_of_row, [state.contexts[prompt].copy() for prompt in prompt_of_row])


def _warn_of_control_tokens(primary: Member, rows: Sequence[Sequence[int]]) -> None:
    dropped: set[int] = set()
    for ids in rows:
        starts = (primary.encoder.start_ids, [primary.tokenizer.bos_token_id])
        leading = next((len(start) for start in starts if list(ids[: len(start)]) == start), 0)
        dropped.update(i for i in ids[leading:] if primary.is_control(i))
    if dropped:
        tokens = primary.tokenizer.convert_ids_to_tokens(sorted(dropped))
        messages.warn(
            f"the prompt contains control tokens of the primary {primary.name!r}, which the other members do not "
            f"read: {', '.join(tokens)}. For a conversation, pass the ids of `ensemble.apply_chat_template(messages, "
            "...)` unchanged: then every member reads it in its own template."
        )
