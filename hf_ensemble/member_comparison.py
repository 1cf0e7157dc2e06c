"""How well members go together: what their tokenizers share, and in what they differ."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .dev_set import mean_length, read_prompt, run_members
from .errors import ConfigurationError
from .members.member import Member
from .tables import aligned
from .vocabulary.encoding import ByteEncoder
from .vocabulary.token_bytes import TEXT
from .vocabulary.union import UnionVocabulary

_NUM_COMMON_WORDS = 1000


@dataclass(frozen=True)
class MemberFigures:
    """What concerns one member.

    Attributes:
        name: Its name.
        num_entries: Number of different texts that its tokens write.
        shared_with_primary: Number of these that the primary has too.
        words_cut_alike: Share of the words that it cuts into the same pieces as the primary; None if there are none.
        tokens_per_word: Mean number of its tokens a word, the space before it included; None if there are none.
        context_length: Most positions by its configuration; None if that says nothing.
        eos_tokens: What ends its texts, as its tokenizer spells it.
        chat_template: `"none"`, `"own"`, or `"as the primary"`.
        mean_length: Mean number of characters of its responses; None without responses.
        length_ratio: Its mean length over the primary's; None without responses, or if the primary's is 0.
    """

    name: str
    num_entries: int
    shared_with_primary: int
    words_cut_alike: float | None
    tokens_per_word: float | None
    context_length: int | None
    eos_tokens: tuple[str, ...]
    chat_template: str
    mean_length: float | None
    length_ratio: float | None


@dataclass(frozen=True)
class CompatibilityReport:
    """How well members go together; `str()` gives the table.

    Attributes:
        members: Figures of each member, the primary first.
        union_size: Number of ids of the union vocabulary.
        num_shared: Number of entries that all members have.
        num_words: Number of words that were cut.
        words_cut_alike: Share of the words that all members cut into the same pieces; None if there are none.
    """

    members: tuple[MemberFigures, ...]
    union_size: int
    num_shared: int
    num_words: int
    words_cut_alike: float | None

    def to_dict(self) -> dict[str, Any]:
        """All figures, as dictionaries and lists."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The table, one column a member."""
        rows = [
            ["", *(member.name for member in self.members)],
            ["entries", *(f"{member.num_entries:,}" for member in self.members)],
            ["shared with the primary", *(f"{member.shared_with_primary:,}" for member in self.members)],
            ["words cut like the primary", *(_percent(member.words_cut_alike) for member in self.members)],
            ["tokens per word", *(_decimal(member.tokens_per_word) for member in self.members)],
            ["context length", *(f"{member.context_length or 'not said'}" for member in self.members)],
            ["EOS", *(" ".join(map(repr, member.eos_tokens)) or "none" for member in self.members)],
            ["chat template", *(member.chat_template for member in self.members)],
        ]
        if self.members[0].mean_length is not None:
            rows.append(["mean response length", *(_decimal(member.mean_length) for member in self.members)])
            rows.append(["length, of the primary's", *(_decimal(member.length_ratio) for member in self.members)])
        shared = f"all members: {self.num_shared:,} shared entries, union of {self.union_size:,}, "
        return f"{aligned(rows)}\n{shared}{_percent(self.words_cut_alike)} of {self.num_words:,} words cut alike"


def compare_members(
    members: Sequence[Member],
    union: UnionVocabulary,
    text: str | None = None,
    responses: Sequence[Sequence[str]] | None = None,
    prompts: Sequence[str] | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 8,
    **generate_options: Any,
) -> CompatibilityReport:
    """Compare the members of an ensemble; see `EnsembleForCausalLM.compatibility`."""
    if prompts is not None:
        if responses is not None:
            raise ConfigurationError("give `responses`, or `prompts` to make them from, not both.")
        if isinstance(prompts, str) or not prompts:
            raise ConfigurationError(f"`prompts` has to be a list of at least one text, but is {prompts!r:.200}.")
        prompts = [read_prompt(prompt, n) for n, prompt in enumerate(prompts)]
        responses = run_members(members, prompts, max_new_tokens, batch_size, generate_options)
    elif max_new_tokens is not None or generate_options:
        raise ConfigurationError("options of `generate` have no use without `prompts`.")
    if responses is not None and (len(responses) != len(members) or not all(map(len, responses))):
        raise ConfigurationError(
            f"`responses` must have one list that is not empty per member: got {[*map(len, responses)]} responses for "
            f"{len(members)} members."
        )
    encoders = [member.encoder for member in members]
    words = Counter(_common_words(encoders) if text is None else text.split())
    if text is not None and not words:
        raise ConfigurationError("`text` has no words.")
    num_words = words.total()
    cuts = [_cut(encoder, list(words)) for encoder in encoders]
    alike = [
        sum(words[word] for word in words if own[word] == cuts[0][word]) / num_words if words else None for own in cuts
    ]
    lengths = [None] * len(members) if responses is None else [mean_length(texts) for texts in responses]
    has_primary = union.union_to_member[0] >= 0
    figures = []
    for m, member in enumerate(members):
        template, primary_template = member.tokenizer.chat_template, members[0].tokenizer.chat_template
        is_same = m > 0 and template == primary_template
        length, primary_length = lengths[m], lengths[0]
        num_tokens = sum(count * len(cuts[m][word]) for word, count in words.items())
        figures.append(
            MemberFigures(
                name=member.name,
                num_entries=len(encoders[m].id_of),
                shared_with_primary=(
                    int((has_primary & (union.union_to_member[m] >= 0)).sum()) if m else len(encoders[0].id_of)
                ),
                words_cut_alike=alike[m],
                tokens_per_word=num_tokens / num_words if words else None,
                context_length=getattr(
                    member.model.config.get_text_config(decoder=True), "max_position_embeddings", None
                ),
                eos_tokens=tuple(map(str, member.tokenizer.convert_ids_to_tokens(member.eos_token_ids))),
                chat_template="none" if template is None else "as the primary" if is_same else "own",
                mean_length=length,
                length_ratio=None if length is None or not primary_length else length / primary_length,
            )
        )
    all_alike = sum(words[word] for word in words if all(own[word] == cuts[0][word] for own in cuts))
    return CompatibilityReport(
        members=tuple(figures),
        union_size=len(union),
        num_shared=union.num_shared if len(members) > 1 else len(encoders[0].id_of),
        num_words=num_words,
        words_cut_alike=all_alike / num_words if words else None,
    )


def _common_words(encoders: Sequence[ByteEncoder]) -> list[str]:
    """The first words of every vocabulary: entries of a space and two or more letters, in the order of ids.

    A tokenizer's training takes up frequent pieces first, and numbers them in that order.
    """
    found: dict[str, None] = {}
    for encoder in encoders:
        token_bytes = encoder.token_bytes
        own = []
        for i in (token_bytes.kinds == TEXT).nonzero()[0].tolist():
            text = token_bytes.entry(i).decode("utf-8", "replace")
            if len(text) > 2 and text[0] == " " and text[1:].isalpha():
                own.append(text[1:])
                if len(own) == _NUM_COMMON_WORDS:
                    break
        found |= dict.fromkeys(own)
    return list(found)


def _cut(encoder: ByteEncoder, words: Sequence[str]) -> dict[str, tuple[bytes, ...]]:
    """The pieces into which each word is cut, after a space and inside a text."""
    spaced = [b" " + word.encode("utf-8", "replace") for word in words]
    return {
        word: tuple(encoder.token_bytes.entry(i) for i in ids or encoder.encode_context_bytes(data))
        for word, data, ids in zip(words, spaced, encoder.encode_batch(spaced), strict=True)
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
