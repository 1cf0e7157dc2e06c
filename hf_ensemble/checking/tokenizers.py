"""Checks of a member's tokenizer: what it loses, and whether it fits the model."""

from collections.abc import Iterator

from ..members.member import Member
from .findings import Finding

_TEXTS = (
    "The cost is 3.14 (isn't it?), said Ms. O'Neill: “quite so” … and left.",
    "Zürich, naïve café, Ελλάδα, Привет мир, 你好世界, こんにちは, ไทย, مرحبا, 🙂",
)
_SPACED = "def f(x):\n\treturn x  +  1\n\n\n    # done"

_READ_BADLY = (
    "The members read the ensemble's text through their tokenizers, so this one responds to a different text."
)


def check_tokenizer(member: Member) -> Iterator[Finding]:
    """Check a member's tokenizer."""
    yield from _check_reading(member)
    yield from _check_ids(member)
    yield from _check_ends(member)


def _check_reading(member: Member) -> Iterator[Finding]:
    name, encoder = member.name, member.encoder

    def read(text: str) -> str:
        ids = encoder.encode_context(text, start=True)
        return encoder.token_bytes.write_from_start(ids).decode("utf-8", "replace")

    lost = next(((text, read(text)) for text in _TEXTS if "".join(read(text).split()) != "".join(text.split())), None)
    if lost is not None:
        at = next((n for n, pair in enumerate(zip(*lost, strict=False)) if pair[0] != pair[1]), min(map(len, lost)))
        was, now = (text[max(0, at - 8) : at + 8] for text in lost)
        yield Finding(
            name,
            "round trip",
            f"its tokenizer reads {was!r} as {now!r}",
            _READ_BADLY,
            "Use a model whose tokenizer keeps case and characters. As the primary, this one would also write such "
            "texts.",
        )
    if lost is None and any(read(text) != text for text in (*_TEXTS, _SPACED)):
        yield Finding(
            name,
            "spaces",
            f"its tokenizer reads {_SPACED!r} as {read(_SPACED)!r}",
            "This member loses the shape of code, tables and paragraphs.",
            "Load the tokenizer with its own settings, or leave this member out for texts in which spaces matter.",
        )


def _check_ids(member: Member) -> Iterator[Finding]:
    name, tokenizer, token_bytes = member.name, member.tokenizer, member.encoder.token_bytes
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        yield Finding(
            name,
            "dropout",
            f"its tokenizer skips merges at random (dropout {tokenizer.backend_tokenizer.model.dropout})",
            "The ensemble ignores the dropout, but if you encode prompts with this tokenizer, you get different ids "
            "every time.",
            "Encode prompts with `ensemble.tokenizer`, or set `tokenizer.backend_tokenizer.model.dropout = None`.",
        )
    if token_bytes.num_rowless:
        yield Finding(
            name,
            "head",
            f"its tokenizer has {token_bytes.num_rowless} more tokens than the model has rows ({member.vocab_size})",
            "The model can neither read nor write these tokens; text that spells them is read in pieces.",
            "Use the tokenizer that the model was trained with, or call the model's `resize_token_embeddings` and train it.",
        )


def _check_ends(member: Member) -> Iterator[Finding]:
    name, tokenizer = member.name, member.tokenizer
    bos = tokenizer.bos_token_id
    ids = tokenizer("a").input_ids
    if bos is not None and ids[:2] == [bos, bos]:
        yield Finding(
            name,
            "BOS",
            f"its tokenizer puts {tokenizer.bos_token!r} in front of a text twice",
            "Models are trained with one, and perform worse with two.",
            "Fix the tokenizer's post-processor. If the post-processor adds the token as well, set "
            "`add_bos_token=False`.",
        )
    own = tokenizer.eos_token_id
    if own is not None and own not in member.eos_token_ids:
        ends = [tokenizer.convert_ids_to_tokens(i) for i in member.eos_token_ids]
        yield Finding(
            name,
            "EOS",
            f"its configuration ends texts with {ends}, but its tokenizer's EOS token is {tokenizer.eos_token!r} (id "
            f"{own})",
            "If the model writes the tokenizer's EOS, its texts continue until `max_new_tokens`.",
            f"Add that id too, if the model was trained to end with it: `MemberConfig(eos_token_id=[{own}])`.",
        )
