"""What was decided while a text was written: by whom, how surely, and who agreed; as a table and as a page."""

import codecs
import html
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigurationError


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


@dataclass(frozen=True)
class Decisions:
    """All decisions of one `generate` call.

    Attributes:
        rows: For each row of the output, its decisions.
        members: The members' names, the primary's first; equal ones numbered.
        prompts: For each row, its prompt.
        is_by_spans: Whether spans were decided, not tokens.
    """

    rows: tuple[tuple[Decision, ...], ...]
    members: tuple[str, ...]
    prompts: tuple[str, ...]
    is_by_spans: bool = False

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Decision, ...]:
        """A row's decisions."""
        return self.rows[row]

    def __iter__(self) -> Iterator[tuple[Decision, ...]]:
        """Iterate over the rows."""
        return iter(self.rows)

    def __repr__(self) -> str:
        num = sum(map(len, self.rows))
        return f"Decisions(rows={len(self.rows)}, decisions={num}, members={list(self.members)})"

    def to_dataframe(self) -> Any:
        """Give the decisions as a `pandas.DataFrame`: one line for each decision and member.

        Columns of the decision, the same on the lines of all members: `row`; `decision`, counted from 0 in its row;
        `start`, the number of new ids before it; `num_ids`; `text`; `control`; `probability`; `decided_by`, a name;
        `agreement`; `is_gate_open`. Columns of the member: `member`, a name; `is_heard`; `weight`;
        `member_probability`; `agrees`; `proposes`; `best_text` and `best_probability` of its best entry; `best`, the list
        of all that were kept. What a member did not say is missing.

        Raises:
            ConfigurationError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigurationError(
                "`to_dataframe` needs pandas, which is not installed. Install `hf_ensemble[decisions]`, or pandas."
            ) from error
        lines = []
        for row, decisions in enumerate(self.rows):
            start = 0
            for number, decision in enumerate(decisions):
                shared = {
                    "row": row,
                    "decision": number,
                    "start": start,
                    "num_ids": len(decision.ids),
                    "text": decision.text,
                    "control": decision.control,
                    "probability": decision.probability,
                    "decided_by": None if decision.decided_by is None else self.members[decision.decided_by],
                    "agreement": decision.agreement,
                    "is_gate_open": decision.is_gate_open,
                }
                for name, said in zip(self.members, decision.members, strict=True):
                    best = said.best[0] if said and said.best else None
                    lines.append(
                        {
                            **shared,
                            "member": name,
                            "is_heard": said is not None,
                            "weight": said.weight if said else None,
                            "member_probability": said.probability if said else None,
                            "agrees": said.agrees if said else None,
                            "proposes": said.proposes if said else None,
                            "best_text": best.text if best else None,
                            "best_probability": best.probability if best else None,
                            "best": list(said.best) if said else None,
                        }
                    )
                start += len(decision.ids)
        frame = pandas.DataFrame(lines, columns=_COLUMNS)
        numbers = ["probability", "weight", "member_probability", "best_probability"]
        truths = ["is_gate_open", "agrees", "proposes"]
        return frame.astype(dict.fromkeys(numbers, "float64") | dict.fromkeys(truths, "boolean"))

    def to_html(self, path: str | os.PathLike[str], title: str = "Decisions") -> None:
        """Write one page that needs no network: the texts, coloured by who decided, with the numbers on hover.

        Colour and underline say who decided, the strength of the colour how sure that member was; details show under the
        pointer or, with the arrow keys, the focus.

        Args:
            path: File to write.
            title: Heading of the page.
        """
        template = resources.files(__package__).joinpath("decisions_page.html").read_text("utf-8")
        data = {
            "members": self.members,
            "isBySpans": self.is_by_spans,
            "rows": [[_as_json(decision) for decision in row] for row in self.rows],
        }
        parts = {
            "title": _escaped(title),
            "summary": self._summary_html(),
            "rows": "\n".join(self._row_html(row) for row in range(len(self.rows))),
            "data": json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"),
        }
        # Split, not replaced one after the other: a text may look like a place.
        pieces = template.split("@@")
        page = "".join(piece if n % 2 == 0 else parts[piece] for n, piece in enumerate(pieces))
        Path(path).write_text(page, "utf-8")

    def _summary_html(self) -> str:
        decisions = [decision for row in self.rows for decision in row]
        total = max(1, len(decisions))
        lines = []
        for index, name in enumerate(self.members):
            heard = [said for decision in decisions if (said := decision.members[index]) is not None]
            probs = [said.probability for said in heard if said.probability is not None]
            decided = sum(decision.decided_by == index for decision in decisions)
            cells = [
                f'<th scope="row"><span class="key m{index % 8}">{_escaped(name)}</span></th>',
                _share(decided, total, f"m{index % 8}"),
                _share(sum(said.agrees for said in heard), len(heard)),
                f"<td>{sum(probs) / len(probs):.2f}</td>" if probs else "<td>–</td>",
                f"<td>{len(heard)}</td>",
            ]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        nobody = sum(decision.decided_by is None for decision in decisions)
        if nobody:
            lines.append(
                f'<tr><th scope="row"><span class="key none">no single member</span></th>{_share(nobody, total, "none")}'
                "<td>–</td><td>–</td><td>–</td></tr>"
            )
        several = [d for d in decisions if sum(said is not None for said in d.members) > 1]
        kind = "spans" if self.is_by_spans else "decisions"
        notes = [f"{len(decisions)} {kind} in {len(self.rows)} {'text' if len(self.rows) == 1 else 'texts'}"]
        if several:
            agreed = sum(decision.agreement == 1 for decision in several)
            notes.append(f"all members agreed in {agreed} of the {len(several)} in which several were heard")
        gated = [decision.is_gate_open for decision in decisions if decision.is_gate_open is not None]
        if gated:
            notes.append(f"the gate was open in {sum(gated)} of {len(gated)}")
        agreed_as = "wrote the chosen span" if self.is_by_spans else "own best was chosen"
        return (
            '<table><thead><tr><th scope="col">Member</th><th scope="col">decided</th>'
            f'<th scope="col">{agreed_as}</th><th scope="col">mean probability of the chosen</th><th scope="col">heard</th></tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table><p>{_escaped('; '.join(notes))}.</p>"
        )

    def _row_html(self, row: int) -> str:
        spans = []
        for number, decision in enumerate(self.rows[row]):
            who = decision.decided_by
            classes = ["d", "none" if who is None else f"m{who % 8}"]
            if not decision.text:
                classes.append("control" if decision.control else "fragment")
            said = None if who is None else decision.members[who]
            sure = decision.probability if said is None or said.probability is None else said.probability
            strength = 0.35 if sure is None else 0.06 + 0.5 * sure
            inner = _marked(decision.text) + (f"<i>{_escaped(decision.control)}</i>" if decision.control else "")
            name = "no single member" if who is None else self.members[who]
            spans.append(
                f'<span class="{" ".join(classes)}" style="--p:{strength:.2f}" data-n="{number}" '
                f'tabindex="{-1 if number else 0}" aria-label="{_escaped(f"{decision.label}, {name}")}">{inner}</span>'
            )
        prompt = _marked(self.prompts[row])
        heading = f"<h2>Text {row + 1}</h2>" if len(self.rows) > 1 else ""
        return (
            f'<section>{heading}<div class="text" dir="auto" data-row="{row}" role="group" '
            f'aria-label="Text {row + 1}"><span class="prompt">{prompt}</span>{"".join(spans)}</div></section>'
        )


_COLUMNS = (
    "row",
    "decision",
    "start",
    "num_ids",
    "text",
    "control",
    "probability",
    "decided_by",
    "agreement",
    "is_gate_open",
    "member",
    "is_heard",
    "weight",
    "member_probability",
    "agrees",
    "proposes",
    "best_text",
    "best_probability",
    "best",
)

# What a page cannot hold or show as it is: C0 controls as their pictures, but for tab and newline.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def texts_of_pieces(pieces: Sequence[bytes]) -> list[str]:
    """Decode pieces of one text: a character belongs to the piece that completes it, bytes that are none are `�`.

    Args:
        pieces: Bytes, in order.

    Returns:
        One text a piece; joined, they are the text of the joined bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(piece, final=n == len(pieces) - 1) for n, piece in enumerate(pieces)]


def _as_json(decision: Decision) -> list[Any]:
    members = [
        said
        and [
            _rounded(said.weight),
            _rounded(said.probability),
            said.agrees,
            said.proposes,
            [[entry.text.translate(_PICTURES), _rounded(entry.probability)] for entry in said.best],
        ]
        for said in decision.members
    ]
    label = decision.label.translate(_PICTURES)
    gate = decision.is_gate_open
    return [label, decision.decided_by, _rounded(decision.probability), gate, len(decision.ids), members]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _escaped(text: str) -> str:
    return html.escape(text.translate(_PICTURES))


def _marked(text: str) -> str:
    """Escape a text, and put signs for tabs and newlines before them, which are not copied with the text."""
    return _escaped(text).replace("\t", '<b class="tab"></b>\t').replace("\n", '<b class="newline"></b>\n')


def _share(count: int, total: int, kind: str = "plain") -> str:
    if not total:
        return "<td>–</td>"
    share = 100 * count / total
    return f'<td><span class="bar {kind}" style="width:{share * 0.9:.1f}px"></span>{share:.0f} %</td>'
