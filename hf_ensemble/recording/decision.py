"""One decision: the choice, the member that decided, how sure it was, and which members agreed."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Entry(NamedTuple):
    """One of a member's best entries, or a span that was offered.

    Attributes:
        text: Its text, with `�` for bytes that are not a whole character; a control token by its name.
        probability: See `MemberDecision.probability`.
    """

    text: str
    probability: float


@dataclass(frozen=True)
class MemberDecision:
    """One member's part in a decision.

    Attributes:
        weight: Its mixing weight there, after gates, draws and members that sat out. None for spans.
        probability: Its own probability of the choice, between 0 and 1, from its softmax over everything it may write,
            with ids that write the same added up. If the choice is one of the primary's ids, it is the probability of
            all entries that the primary begins to write with this id. If the member has no such entry, it is 0, or, in
            methods that then read the first id with which the member would write it (UniTE, log space), the
            probability of that id. For a span, it is the geometric mean over the member's tokens, or over bytes with
            `score="bits_per_byte"`; None if only one span was on offer.
        best: Its best entries, the best first; for a span, the spans on offer.
        agrees: Whether its own best entry was chosen (for a span, whether it wrote the chosen span).
        proposes: Whether the choice is among `best` (for a span, whether it wrote the chosen span).
    """

    weight: float | None
    probability: float | None
    best: tuple[Entry, ...]
    agrees: bool
    proposes: bool


@dataclass(frozen=True)
class Decision:
    """One decision: an entry of one or more of the primary's ids, or a span.

    Attributes:
        ids: The primary's ids that were written for it.
        data: The bytes that they write; empty for control tokens.
        text: The text it adds. A character that several decisions write belongs to the last of them, so the texts of a
            row, joined, are the row's text.
        control: Names of the control tokens among `ids`.
        probability: The ensemble's probability of the choice, between 0 and 1, before processors and warpers. None for
            spans.
        decided_by: Index of the member that decided: the one with the largest weighted probability of the choice (the
            first of equals; if members are drawn, the drawn one). For a span, the proposer that gives it the highest
            probability. None if no participating member has such an entry, for example if a method moved others to it.
        is_gate_open: Whether members were mixed; None without a gate.
        members: Each member's part; None for members that were not asked, or did not count.
    """

    ids: tuple[int, ...]
    data: bytes
    text: str
    control: str
    probability: float | None
    decided_by: int | None
    is_gate_open: bool | None
    members: tuple[MemberDecision | None, ...]

    @property
    def agreeing(self) -> tuple[int, ...]:
        """Indices of the members whose own best entry was chosen."""
        return tuple(index for index, said in enumerate(self.members) if said is not None and said.agrees)

    @property
    def proposers(self) -> tuple[int, ...]:
        """Indices of the members that have the choice among their best entries."""
        return tuple(index for index, said in enumerate(self.members) if said is not None and said.proposes)

    @property
    def agreement(self) -> float:
        """The share of the participating members whose own best entry was chosen."""
        return len(self.agreeing) / max(1, sum(said is not None for said in self.members))

    @property
    def label(self) -> str:
        """Its text; names for control tokens, and values for bytes that do not complete a character."""
        return (self.text + self.control) or self.data.hex(" ").upper()


def texts_of_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Decode pieces of one text: a character belongs to the piece that completes it; invalid bytes become `�`.

    Args:
        pieces: Bytes, in order.

    Returns:
        One text per piece; joined, they are the text of the joined bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(piece, final=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
