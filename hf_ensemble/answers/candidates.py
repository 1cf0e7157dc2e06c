"""Turns written answers into candidates: cuts them to fit, merges equal answers, and finds their ids."""

import codecs
import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ConfigurationError
from ..members.member import Member
from ..vocabulary.encoding import ByteEncoder
from .base import Candidate, Written

_REPLACEMENT = "\ufffd"


class PrimaryIds:
    """The primary's ids of answers.

    Args:
        primary: The primary.
        end_ids: The primary's ids that end a text.
    """

    def __init__(self, primary: Member, end_ids: Sequence[int]):
        self._primary = primary
        self._eos = [i for i in primary.ids_with_row(end_ids) if primary.is_control(i)][:1]

    def of(self, candidate: Candidate) -> list[int]:
        """Return the primary's ids of a candidate: those it wrote, or else its encoding of the text and its first EOS.

        Raises:
            ConfigurationError: If it cannot write the text, nor U+FFFD in place of what it cannot.
        """
        own = [written for written in candidate.writers if written.is_in_primary_ids]
        return self.of_written((own or list(candidate.writers))[0])

    def of_written(self, written: Written) -> list[int]:
        """Return the primary's ids for the text of one writer, which may have been cut since.

        Raises:
            ConfigurationError: If it cannot write the text, nor U+FFFD in place of what it cannot.
        """
        if written.is_in_primary_ids:
            write = self._primary.encoder.token_bytes.write
            for length in range(len(written.ids), -1, -1):
                if write(written.ids[:length]) == written.data:
                    return list(written.ids[:length])
        return [*self.of_bytes(written.data), *(self._eos if written.end == "eos" else [])]

    def of_bytes(self, data: bytes) -> list[int]:
        """Return the primary's ids for a text, with U+FFFD for each character that it cannot write.

        Raises:
            ConfigurationError: If it cannot write U+FFFD either.
        """
        encoder = self._primary.encoder
        ids = encoder.encode(data)
        if ids is None:
            ids = encoder.encode(_writable(encoder, data))
        if ids is None:
            raise ConfigurationError(
                f"the primary {self._primary.name!r} can write neither the answer "
                f"{data.decode('utf-8', 'replace')!r:.80} nor U+FFFD for the characters that it lacks. Make another "
                "member the primary."
            )
        return ids

    def cut(self, written: Written, max_new_tokens: int) -> Written:
        """Cut an answer to fit a number of the primary's ids, EOS included; a cut answer counts as not ended.

        Args:
            written: What was written.
            max_new_tokens: Most ids.
        """
        write = self._primary.encoder.token_bytes.write
        while True:
            if written.end is None:
                written = replace(written, data=_without_begun(written.data))
            ids = self.of_written(written)
            if len(ids) <= max_new_tokens:
                return written
            num_kept = len(_chars(_without_begun(write(ids[:max_new_tokens]))))
            written = replace(written, data=_bytes_of(_chars(written.data)[:num_kept]), end=None)


def merged(written: Sequence[Written], weights: Sequence[float], num_candidates: int) -> tuple[Candidate, ...]:
    """Merge equal texts into one candidate, if both or neither have ended.

    Args:
        written: All answers of a question.
        weights: Mixing weights of the members.
        num_candidates: Number of answers that each member wrote.

    Returns:
        The candidates, in the order of their first writers: members before methods, samples in number order.
    """
    # Methods come last, in their order, because the sort is stable.
    in_order = sorted(written, key=lambda one: (one.writer is None, one.writer or 0, one.number))
    total = math.fsum(weights)
    shares = [
        1 / len(weights) if one.writer is None else weights[one.writer] / total / num_candidates for one in in_order
    ]
    whole = math.fsum(shares)
    found: dict[tuple[bytes, bool], list[tuple[Written, float]]] = {}
    for one, share in zip(in_order, shares, strict=True):
        found.setdefault((one.data, one.end is not None), []).append((one, share / whole))
    return tuple(
        Candidate(data, ended, tuple(one for one, _ in of_text), tuple(share for _, share in of_text))
        for (data, ended), of_text in found.items()
    )


def _writable(encoder: ByteEncoder, data: bytes) -> bytes:
    can_write: dict[str, bool] = {}
    for char in set(_chars(data)):
        can_write[char] = encoder.encode(_bytes_of(char)) is not None
    return "".join(char if can_write[char] else _REPLACEMENT for char in _chars(data)).encode(
        "utf-8", "surrogateescape"
    )


def _without_begun(data: bytes) -> bytes:
    """The bytes without an incomplete character at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data[: len(data) - len(decoder.getstate()[0])]


def _chars(data: bytes) -> str:
    """The characters, with a stand-in for each byte that belongs to no character."""
    return data.decode("utf-8", "surrogateescape")


def _bytes_of(chars: str) -> bytes:
    return chars.encode("utf-8", "surrogateescape")
