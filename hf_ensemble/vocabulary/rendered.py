"""Encodes what a chat template rendered: its control tokens are real, and content stays text."""

import re
import secrets
from collections.abc import Collection
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from .backend import bare_view, prefix_ids
from .tokenizer_views import TokenizerView


class RenderedEncoder:
    """Encodes rendered conversations with one tokenizer, as the tokenizer itself does, except for content.

    Content is marked before rendering, with a mark inside everything that spells a control token. A control token that
    remains afterwards was written by the template. The marks are removed before encoding. It works on a view of the
    tokenizer in which control tokens have names that text cannot spell, so content never becomes one; the tokenizer
    itself is only read.

    Args:
        backend: The tokenizer.
        control: Ids of its control tokens.
        num_ids: Number of ids that the model has rows for; added tokens beyond are spelled out. None: all have a row.
    """

    def __init__(self, backend: Tokenizer, control: Collection[int], num_ids: int | None = None):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {i: token for i, token in sorted(added.items()) if num_ids is None or i < num_ids}
        self._control = {i: self._added[i].content for i in sorted(control) if i in self._added}
        self._id_of = {surface: i for i, surface in self._control.items()}
        self._scanners: dict[str, re.Pattern[str]] = {}
        self._secret = secrets.token_hex(8)

    # Marking content

    def mark(self, text: str, sign: str) -> str:
        """Put a mark inside every control token that a text spells, and at its end if that begins one."""
        text = self._whole.sub(rf"\1{sign}", text) if self._control else text
        end = len(text.rstrip())
        return text[:end] + sign + text[end:] if text[:end].endswith(self._beginnings) else text

    def mark_all(self, text: str, sign: str) -> str:
        """Also put a mark after everything that may begin a control token, in case a template joins pieces."""
        return self.mark(self._begun.sub(rf"\1{sign}", text) if self._control else text, sign)

    def controls(self, text: str, sign: str) -> list[str]:
        """The control tokens in a rendering of marked content."""
        return self._scanner(sign).findall(text) if self._control else []

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return _each_start(self._id_of)

    @cached_property
    def _begun(self) -> re.Pattern[str]:
        return _each_start({surface[0] for surface in self._id_of})

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        return tuple({surface[:n] for surface in self._id_of for n in range(1, len(surface))})

    def _scanner(self, sign: str) -> re.Pattern[str]:
        if sign not in self._scanners:
            surfaces = sorted(self._id_of, key=len, reverse=True)
            # A single character cannot be split by a mark, so the mark follows it.
            escaped = [re.escape(s) + (f"(?!{sign})" if len(s) == 1 else "") for s in surfaces]
            self._scanners[sign] = re.compile("(" + "|".join(escaped) + ")", re.DOTALL)
        return self._scanners[sign]

    # Encoding

    def encode(self, text: str, sign: str) -> list[int]:
        """Encode a rendering of marked content."""
        if self._control:
            text = self._scanner(sign).sub(lambda control: self._name(self._id_of[control[0]]), text)
        return self._encode(text.replace(sign, ""))

    def _encode(self, text: str) -> list[int]:
        places = self._view.encode_with_places(text)
        for i, a, b in places:
            # A model may have control tokens among its pieces. If one stands for unknown characters, it is the
            # tokenizer's view of the text, and stays.
            is_piece = i in self._control and self._name(i) not in text[a:b]
            if is_piece and b - a > 1 and self._control[i] in self._view.normalized(text[a:b]):
                return self._encode(text[: a + 1]) + self._encode(text[a + 1 :])
        return [i for i, _, _ in places]

    @property
    def start(self) -> str:
        """The control tokens that the tokenizer puts in front of a text (its BOS rule)."""
        return "".join(self._control.get(i, "") for i in prefix_ids(bare_view(self._backend), self._backend))

    def _name(self, i: int) -> str:
        return f"\U0010fffe{self._secret}:{i}\U0010ffff"

    @cached_property
    def _view(self) -> TokenizerView:
        vocab = self._backend.get_vocab(with_added_tokens=False)
        num_holes = max(0, max(vocab.values(), default=-1) + 1 - len(vocab))
        added = {i: _renamed(t, self._name(i)) if i in self._control else t for i, t in self._added.items()}
        return TokenizerView(bare_view(self._backend), added, num_holes)


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(**{**token.__getstate__(), "content": name, "special": True})


def _each_start(surfaces: Collection[str]) -> re.Pattern[str]:
    """The first character of every occurrence of any of these, overlapping ones too."""
    first = "".join(re.escape(c) for c in sorted({surface[0] for surface in surfaces}))
    return re.compile(f"(?=[{first}])(?={'|'.join(map(re.escape, surfaces))})(.)", re.DOTALL)
