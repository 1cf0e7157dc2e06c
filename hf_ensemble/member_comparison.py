"""How well members fit together: what their tokenizers share, and how the members differ."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from .dev_set import mean_lengths_of, read_prompt, run_members
from .errors import ConfigurationError
from .members.member import Member
from .tables import aligned
from .vocabulary.encoding import ByteEncoder
from .vocabulary.token_bytes import TEXT
from .vocabulary.union import UnionVocabulary


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shown(title: str, write: Callable[[Any], str]) -> Any:
    """A field with its title and format in the table."""
    return field(metadata={"title": title, "write": write})


@dataclass(frozen=True)
class MemberFigures:
    """Figures of one member.

    Attributes:
        name: Its name.
        num_entries: Number of different texts that its tokens write.
        shared_with_primary: Number of them that the primary has too.
        words_cut_alike: Share of the words that it cuts into the same pieces as the primary; None without words.
        tokens_per_word: Mean number of its tokens per word, including the space before it; None without words.
        context_length: Number of positions in its configuration; None if unknown.
        eos_tokens: The tokens that end its texts, as its tokenizer spells them.
        chat_template: `"none"`, `"own"`, or `"as the primary"`.
        mean_length: Mean number of characters of its responses; None without responses.
        length_ratio: Its mean length over the primary's; None without responses, or if the primary's is 0.
    """

    name: str
    num_entries: int = _shown("entries", "{:,}".format)
    shared_with_primary: int = _shown("shared with the primary", "{:,}".format)
    words_cut_alike: float | None = _shown("words cut like the primary", _percent)
    tokens_per_word: float | None = _shown("tokens per word", _decimal)
    context_length: int | None = _shown("context length", lambda length: f"{length or 'not said'}")
    eos_tokens: tuple[str, ...] = _shown("EOS", lambda tokens: " ".join(map(repr, tokens)) or "none")
    chat_template: str = _shown("chat template", str)
    mean_length: float | None = _shown("mean response length", _decimal)
    length_ratio: float | None = _shown("length, of the primary's", _decimal)


@dataclass(frozen=True)
class CompatibilityReport:
    """How well members fit together; `str()` returns the table.

    Attributes:
        members: Figures of each member, the primary first.
        union_size: Number of ids of the union vocabulary.
        num_shared: Number of entries that all members have.
        num_words: Number of words that were cut.
        words_cut_alike: Share of the words that all members cut into the same pieces; None without words.
    """

    members: tuple[MemberFigures, ...]
    union_size: int
    num_shared: int
    num_words: int
    words_cut_alike: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as dictionaries and lists."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The table, one column per member."""
        rows = [["", *(member.name for member in self.members)]]
        for figure in dataclasses.fields(MemberFigures)[1:]:
            if figure.name not in ("mean_length", "length_ratio") or self.members[0].mean_length is not None:
                values = (getattr(member, figure.name) for member in self.members)
                rows.append([figure.metadata["title"], *map(figure.metadata["write"], values)])
        return f"{aligned(rows)}\n{self.summary}"

    @property
    def summary(self) -> str:
        """One line about what all members share."""
        shared = f"all members: {self.num_shared:,} shared entries, union of {self.union_size:,}, "
        return f"{shared}{_percent(self.words_cut_alike)} of {self.num_words:,} words cut alike"


def compare_members(
    ensemble: Any,
    text: str | None,
    responses: Sequence[Sequence[str]] | None,
    prompts: Sequence[str] | None,
    max_new_tokens: int | None,
    batch_size: int,
    options: Mapping[str, Any],
) -> CompatibilityReport:
    """Compare the members of an ensemble.

    Args:
        ensemble: An `EnsembleForCausalLM`.
        text: A text whose words are compared; None for common words.
        responses: For each member its responses; None if lengths are not compared.
        prompts: Prompts to run every member on, for such responses.
        max_new_tokens: Largest number of ids of a response to `prompts`.
        batch_size: Number of prompts that run together.
        options: Other options of the members' `generate`.

    Raises:
        ConfigurationError: If `text` has no words, or the number of responses or prompts is wrong.
    """
    members: Sequence[Member] = ensemble.member_views
    union: UnionVocabulary = ensemble.union_vocabulary
    if prompts is not None:
        if responses is not None:
            raise ConfigurationError("give `responses`, or `prompts` to write them, but not both.")
        if isinstance(prompts, str) or not prompts:
            raise ConfigurationError(f"`prompts` has to be a list of at least one text, but is {prompts!r:.200}.")
        prompts = [read_prompt(prompt, n) for n, prompt in enumerate(prompts)]
        options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **options}
        responses = run_members(ensemble, prompts, **options)
    elif max_new_tokens is not None or options:
        raise ConfigurationError("options of `generate` have no effect without `prompts`.")
    lengths = mean_lengths_of(responses, len(members), "member")
    common = (islice(_words_of(member.encoder), 1000) for member in members)
    words = Counter(dict.fromkeys(chain.from_iterable(common), 1) if text is None else text.split())
    if text is not None and not words:
        raise ConfigurationError("`text` has no words.")
    cuts = [_cut(member.encoder, words) for member in members]
    counts = list(words.values())
    in_primary = union.union_to_member[0] >= 0
    num_shared = [int((in_primary & (own >= 0)).sum()) for own in union.union_to_member]
    # The primary's ids include control tokens, which are not entries.
    num_shared[0] = len(members[0].encoder.id_of)
    figures = [
        MemberFigures(
            name=member.name,
            num_entries=len(member.encoder.id_of),
            shared_with_primary=num_shared[m],
            words_cut_alike=_share_alike(counts, cuts[0], cuts[m]),
            tokens_per_word=_mean_number(counts, cuts[m]),
            context_length=member.context_length,
            eos_tokens=tuple(map(str, member.tokenizer.convert_ids_to_tokens(member.eos_token_ids))),
            chat_template=_whose_template([other.tokenizer.chat_template for other in members], m),
            mean_length=lengths[m],
            length_ratio=_quotient(lengths[m], lengths[0]),
        )
        for m, member in enumerate(members)
    ]
    return CompatibilityReport(
        members=tuple(figures),
        union_size=len(union),
        num_shared=union.num_shared if len(members) > 1 else num_shared[0],
        num_words=sum(counts),
        words_cut_alike=_share_alike(counts, *cuts),
    )


def _share_alike(counts: Sequence[int], *cuts: Sequence[tuple[bytes, ...]]) -> float | None:
    """Share of the words, by frequency, that are cut into the same pieces in all of these."""
    alike = sum(count for count, *pieces in zip(counts, *cuts, strict=True) if len(set(pieces)) == 1)
    return _quotient(alike, sum(counts))


def _mean_number(counts: Sequence[int], cut: Sequence[tuple[bytes, ...]]) -> float | None:
    """Mean number of pieces per word, by frequency."""
    return _quotient(sum(count * len(pieces) for count, pieces in zip(counts, cut, strict=True)), sum(counts))


def _quotient(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _whose_template(templates: Sequence[str | None], m: int) -> str:
    if templates[m] is None:
        return "none"
    return "as the primary" if m and templates[m] == templates[0] else "own"


def _words_of(encoder: ByteEncoder) -> Iterator[str]:
    """Words of a vocabulary, common ones first: entries of a space and two or more letters, in the order of ids.

    A tokenizer's training adds frequent pieces first, and numbers them in that order.
    """
    for i in (encoder.token_bytes.kinds == TEXT).nonzero()[0].tolist():
        text = encoder.token_bytes.entry(i).decode("utf-8", "replace")
        if len(text) > 2 and text[0] == " " and text[1:].isalpha():
            yield text[1:]


def _cut(encoder: ByteEncoder, words: Iterable[str]) -> list[tuple[bytes, ...]]:
    """The pieces into which each word is cut, after a space and inside a text."""
    spaced = [b" " + word.encode("utf-8", "replace") for word in words]
    return [
        tuple(encoder.token_bytes.entry(i) for i in ids or encoder.encode_context_bytes(data))
        for data, ids in zip(spaced, encoder.encode_batch(spaced), strict=True)
    ]
