"""One decision: what was chosen, by whom, how surely, and who agreed."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Entry(NamedTuple):
    """One of a member's best entries, or a span that was offered.

    Attributes:
        text: What it writes, with `�` for bytes that are no whole character; a control token by its name.
        probability: See `MemberDecision.probability`.
    """

    text: str
    probability: float


@dataclass(frozen=True)
class MemberDecision:
    """What one member said to a decision.

    Attributes:
        weight: Its mixing weight there, after gates, draws and members that sat out. None for spans.
        probability: Its own probability of what was chosen, between 0 and 1, from its softmax over all that it may
            write, ids that write the same taken together. Where the decision is for one of the primary's ids, it is that
            of all entries that the primary begins to write with this id. 0 where the member has no such entry; of
            methods that then read the first id with which the member would write it (UniTE, log space), that id's. Of a
            span the geometric mean over the member's tokens, or over bytes with `score="bits_per_byte"`; None where only
            one span was offered.
        best: Its best entries, the best first; of a span those that were offered.
        agrees: Whether its own best entry is what was chosen (or, of a span, it wrote just that).
        proposes: Whether what was chosen is among `best` (or, of a span, it wrote just that).
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
        text: What it adds to the text. A character that several decisions write belongs to the last of them, so the
            texts of a row, joined, are the row's text.
        control: Names of the control tokens among `ids`.
        probability: The ensemble's probability of what was chosen, between 0 and 1, before processors and warpers. None
            for spans.
        decided_by: Number of the member that decided: the one whose weighted probability of what was chosen is the
            largest (of equals the first; a drawn one, where members are drawn); of a span, the one of its proposers that
            gives it the highest probability. None if no member that counts has such an entry, as where a method moved
            others to it.
        is_gate_open: Whether members were mixed; None without a gate.
        members: What each member said; None for members that were not asked, or did not count.
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
        """Numbers of the members whose own best entry is what was chosen."""
        return tuple(index for index, said in enumerate(self.members) if said is not None and said.agrees)

    @property
    def proposers(self) -> tuple[int, ...]:
        """Numbers of the members that have what was chosen among their best entries."""
        return tuple(index for index, said in enumerate(self.members) if said is not None and said.proposes)

    @property
    def agreement(self) -> float:
        """The share of the members heard whose own best entry is what was chosen."""
        return len(self.agreeing) / max(1, sum(said is not None for said in self.members))

    @property
    def label(self) -> str:
        """Its text; for control tokens their names, and for bytes that complete no character their values."""
        return (self.text + self.control) or self.data.hex(" ").upper()


def texts_of_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Decode pieces of one text: a character belongs to the piece that completes it, bytes that are none are `�`.

    Args:
        pieces: Bytes, in order.

    Returns:
        One text a piece; joined, they are the text of the joined bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(piece, final=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
