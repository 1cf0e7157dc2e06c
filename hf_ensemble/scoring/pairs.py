"""A prompt and a continuation as ids: read from the user's input, or cut as one member cuts it."""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import messages
from ..chat.memory import forget
from ..decoding.prompts import Prompts
from ..errors import ConfigurationError
from ..members.member import Member
from ..vocabulary.context import MemberContext


@dataclass(frozen=True)
class Pair:
    """A prompt and the continuation after it, in the ids of one member.

    Attributes:
        prompt: Ids of the prompt, at least one.
        continuation: Ids of the continuation; empty if the member cannot write it.
        num_bytes: Number of UTF-8 bytes of the continuation.
        end_ids: Ids, any of which has to follow the continuation; None if nothing has to.
    """

    prompt: list[int]
    continuation: list[int]
    num_bytes: int
    end_ids: tuple[int, ...] | None = None

    @property
    def targets(self) -> list[int]:
        """The ids that have to follow; the first end id stands for all."""
        return [*self.continuation, *(self.end_ids or ())[:1]]


def read_pairs(
    primary: Member,
    prompts: Sequence[str | Sequence[int]],
    continuations: Sequence[str | Sequence[int]],
    chat_id: str,
) -> list[Pair]:
    """Turn prompts and continuations, each pair as texts or as the primary's ids, into ids of the primary.

    Args:
        primary: The primary.
        prompts: Texts, or lists of ids.
        continuations: One for each prompt, also as text or as ids.
        chat_id: The `chat_id` of the ensemble, for which texts are plain.

    Raises:
        ConfigurationError: If they do not match, one is neither text nor ids, or one cannot be separated from its
            prompt.
    """
    for name, values in (("prompts", prompts), ("continuations", continuations)):
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise ConfigurationError(f"`{name}` has to be a list, one entry per continuation, but is {values!r:.80}.")
    if len(prompts) != len(continuations):
        raise messages.wrong_count("continuations", len(continuations), len(prompts), "prompt")
    pairs = []
    for n, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        if isinstance(prompt, str) and isinstance(continuation, str):
            pairs.append(_pair_of_texts(primary, prompt, continuation) if continuation else Pair([], [], 0))
            forget(chat_id, [pairs[-1].prompt])
        elif isinstance(prompt, str) or isinstance(continuation, str):
            raise ConfigurationError(f"prompt and continuation {n} have to be both texts or both ids, but are not.")
        else:
            pairs.append(_pair_of_ids(primary, _as_ids(prompt, n), _as_ids(continuation, n)))
    return pairs


def encode_text(primary: Member, text: str, starts: bool = True) -> list[int]:
    """Encode text with the primary's tokenizer.

    Args:
        primary: The primary.
        text: The text; control tokens that it spells are read as control tokens.
        starts: Whether to apply the primary's BOS rule, as at the start of a text that does not spell its BOS.
    """
    ids = primary.encode(text, starts=False)
    prefix = primary.encoder.prefix_ids
    return [*prefix, *ids] if starts and ids[: len(prefix)] != prefix else ids


def _pair_of_texts(primary: Member, prompt: str, continuation: str) -> Pair:
    """Encode prompt and continuation as one text and split them, as lm-evaluation-harness does.

    White space at the prompt's end goes to the continuation. The continuation's ids are those of the whole text after
    the number of ids that the prompt has by itself. An empty prompt becomes the token that starts a text.
    """
    kept = prompt.rstrip()
    continuation = prompt[len(kept) :] + continuation
    num_bytes = len(continuation.encode("utf-8", "replace"))
    if not kept:
        start, ids = _start_ids(primary), encode_text(primary, continuation, starts=False)
        return Pair(start, ids[len(start) :] if ids[: len(start)] == start else ids, num_bytes)
    prompt_ids = encode_text(primary, kept)
    ids = encode_text(primary, kept + continuation)[len(prompt_ids) :]
    if not ids:
        raise ConfigurationError(
            f"the continuation {continuation!r:.80} has no token of its own for the primary {primary.name!r}: after "
            f"{kept[-40:]!r} it becomes part of the prompt's last token. Split the text between words."
        )
    return Pair(prompt_ids, ids, num_bytes)


def _pair_of_ids(primary: Member, prompt: list[int], continuation: list[int]) -> Pair:
    for i in (*prompt, *continuation):
        if not 0 <= i < primary.vocab_size:
            raise messages.id_outside(f"a text contains id {i}", primary.name, primary.vocab_size)
    return Pair(prompt or _start_ids(primary), continuation, num_bytes_after(primary, prompt, continuation))


def _as_ids(values: Sequence[int], n: int) -> list[int]:
    ids = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigurationError(
            f"prompt and continuation {n} have to be texts or lists of ids, but contain {ids!r:.80}."
        )
    return ids


def _start_ids(primary: Member) -> list[int]:
    if not primary.encoder.start_ids:
        raise messages.nothing_to_start_from(primary.name, "a prompt is empty")
    return list(primary.encoder.start_ids)


def num_bytes_after(member: Member, before: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many bytes ids write after others.

    Args:
        member: The member of the ids.
        before: The ids before them, from the start of the text.
        ids: The ids.
    """
    write = member.encoder.token_bytes.write_from_start
    return len(write([*before, *ids])) - len(write(before))


def reads_as_cut(member: Member, prompt: MemberContext, before: bytes) -> bool:
    """Whether a member reads a prompt as it cuts the prompt's text; not if it has its own rendering.

    Args:
        member: The member.
        prompt: What it reads of the prompt: `Prompts.contexts`.
        before: The bytes of the prompt.
    """
    alone = MemberContext(member.encoder, "retokenize", before)
    return alone.ids == list(prompt.ids) and not alone.sits_out


def own_pair(
    member: Member, prompt: MemberContext, before: bytes, text: bytes, is_own_cut: bool | None = None
) -> Pair:
    """Cut a text as a member cuts it after its prompt.

    That is its encoding of prompt and text together, if this begins with the prompt's ids; otherwise the text is
    encoded by itself.

    Args:
        member: The member.
        prompt: What it reads of the prompt: `Prompts.contexts`; not changed.
        before: The bytes of the prompt.
        text: The bytes of the text.
        is_own_cut: The result of `reads_as_cut` for the prompt, if known.
    """
    start = list(prompt.ids)
    if reads_as_cut(member, prompt, before) if is_own_cut is None else is_own_cut:
        joint = MemberContext(member.encoder, "retokenize", before + text)
        # An empty prompt may start from a token that no text begins with: an EOS.
        shared = start if before or not text else member.encoder.prefix_ids
        if joint.ids[: len(shared)] == shared and not joint.sits_out:
            return Pair(start, joint.ids[len(shared) :], len(text))
    grown = prompt.copy()
    grown.write(text)
    return Pair(start, grown.ids[len(start) :], len(text))


def own_pairs(members: Sequence[Member], prompts: Prompts, pairs: Sequence[Pair]) -> dict[int, list[Pair]]:
    """Cut the primary's continuations as every member that has read the prompts cuts them.

    Args:
        members: The members, the primary first.
        prompts: What they read of the pairs' prompts, one prompt for each pair.
        pairs: The primary's prompts and continuations.

    Returns:
        By member index, its own ids of every pair.
    """
    write = members[0].encoder.token_bytes.write_from_start
    found: dict[int, list[Pair]] = {index: [] for index in prompts.contexts}
    for number, pair in zip(prompts.prompt_of_row, pairs, strict=True):
        before = prompts.texts[number]
        text = write([*pair.prompt, *pair.continuation])[len(before) :]
        for index, contexts in prompts.contexts.items():
            found[index].append(own_pair(members[index], contexts[number], before, text) if index else pair)
    return found
