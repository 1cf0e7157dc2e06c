"""Words in a model's text: where they end, and which ids form a span of them."""

import codecs
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import regex

from .token_bytes import TokenBytes

_SPACE = "\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space as in `str.isspace`."""
_SPACELESS = "".join(
    rf"\p{{Script={script}}}" for script in ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar")
)
_STRETCH = regex.compile(f"[^{_SPACE}]+")
_WORD = regex.compile(rf"(?=[{_SPACELESS}])\X|(?:(?![{_SPACELESS}])\X)+")
_ESCAPED_BYTES = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")


def word_ends(text: str) -> Iterator[int]:
    """Yield where each word of a text ends.

    A word is a run of characters other than white space, or a grapheme of a script written without spaces (Han,
    Hiragana, Katakana, Thai, Lao, Khmer, Myanmar).
    """
    for stretch in _STRETCH.finditer(text):
        for word in _WORD.finditer(text, *stretch.span()):
            yield word.end()


def end_of_words(text: str, count: int) -> int | None:
    """Find where the first `count` words of a text end; None if they are not complete.

    A word is complete when something follows it.

    Args:
        text: The text.
        count: Number of words, at least 1.

    Returns:
        A position in the text, in characters.
    """
    end = next(itertools.islice(word_ends(text), count - 1, None), len(text))
    return end if end < len(text) else None


@dataclass(frozen=True)
class Span:
    """A span of words as one member wrote it.

    Attributes:
        data: Its bytes, without what only showed its completion.
        has_eos: Whether the text ends with it.
        is_complete: Whether it can no longer change.
    """

    data: bytes
    has_eos: bool
    is_complete: bool


def read_span(
    ids: Sequence[int],
    token_bytes: TokenBytes,
    eos_ids: Collection[int],
    span_length: int,
    max_tokens: int,
    begun: bytes = b"",
) -> Span:
    """Read a span of at most `span_length` words from the beginning of a member's text.

    Args:
        ids: Ids that the member wrote since the span began.
        token_bytes: The bytes of its ids.
        eos_ids: Ids that end a text. One that writes text ends the span after its text, if no word was complete before
            it; the others make the span end with EOS.
        span_length: Number of words.
        max_tokens: Number of ids after which the span ends in any case; an unfinished character is cut off.
        begun: Bytes of an unfinished character before the span.
    """
    last = next((n for n, i in enumerate(ids[:max_tokens]) if i in eos_ids), None)
    data = begun + token_bytes.write(ids[:max_tokens] if last is None else ids[: last + 1])
    # An invalid byte becomes one character, so that ends of words can be converted back into bytes.
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(data)
    end = end_of_words(text.translate(_ESCAPED_BYTES), span_length)
    if end is not None:
        return Span(text[:end].encode("utf-8", "surrogateescape")[len(begun) :], False, True)
    if last is not None:
        return Span(data[len(begun) :], token_bytes.is_control(ids[last]), True)
    return Span(text.encode("utf-8", "surrogateescape")[len(begun) :], False, len(ids) >= max_tokens)
