"""All decisions of one call, as a table and as a page."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..pages import MOST_IN_NOTEBOOK, in_notebook
from ..tables import data_frame
from .decision import Decision, MemberDecision
from .decisions_html import decisions_page


@dataclass(frozen=True)
class Decisions:
    """All decisions of one `generate` call.

    Attributes:
        rows: For each row of the output, its decisions.
        members: The members' names, the primary's first; equal names are numbered.
        prompts: For each row, its prompt.
        is_by_spans: Whether the decisions are about spans, not tokens.
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
        """Return the decisions as a `pandas.DataFrame`, with one row per decision and member.

        Columns of the decision, the same in the rows of all members: `row`; `decision`, counted from 0 in its row;
        `start`, the number of new ids before it; `num_ids`; `text`; `control`; `probability`; `decided_by`, a name;
        `agreement`; `is_gate_open`. Columns of the member: `member`, a name; `is_heard`; `weight`;
        `member_probability`; `agrees`; `proposes`; `best_text` and `best_probability` of its best entry; `best`, the
        list of all recorded ones. Values that a member did not give are missing.

        Raises:
            ConfigurationError: If pandas is not installed.
        """
        lines = []
        for row, decisions in enumerate(self.rows):
            start = 0
            for number, one in enumerate(decisions):
                who = None if one.decided_by is None else self.members[one.decided_by]
                place = (row, number, start, len(one.ids))
                shared = (*place, one.text, one.control, one.probability, who, one.agreement, one.is_gate_open)
                for name, said in zip(self.members, one.members, strict=True):
                    lines.append((*shared, name, said is not None, *_values_of(said)))
                start += len(one.ids)
        numbers = ["probability", "weight", "member_probability", "best_probability"]
        truths = ["is_gate_open", "agrees", "proposes"]
        types = dict.fromkeys(numbers, "float64") | dict.fromkeys(truths, "boolean")
        return data_frame("to_dataframe", lines, (*_OF_DECISION, *_OF_MEMBER, *_OF_BEST), types)

    def to_html(self, path: str | os.PathLike[str], title: str = "Decisions") -> None:
        """Write a page that needs no network: the texts, coloured by the deciding member, with the numbers on hover.

        Colour and underline show which member decided, and the strength of the colour how sure it was. Details appear
        under the pointer or, with the arrow keys, the focus.

        Args:
            path: File to write.
            title: Heading of the page.
        """
        page = decisions_page(self.rows, self.members, self.prompts, self.is_by_spans, title)
        Path(path).write_text(page, "utf-8")

    def _repr_html_(self) -> str:
        """The page of the first rows, for notebooks."""
        rows, prompts = self.rows[:MOST_IN_NOTEBOOK], self.prompts[:MOST_IN_NOTEBOOK]
        title = "Decisions" if len(rows) == len(self.rows) else f"Decisions: {len(rows)} of {len(self.rows)} texts"
        source = decisions_page(rows, self.members, prompts, self.is_by_spans, title)
        texts = [prompt + "".join(one.text for one in row) for prompt, row in zip(prompts, rows, strict=True)]
        return in_notebook(source, [*self.members, *texts])


_OF_DECISION = (
    *("row", "decision", "start", "num_ids", "text", "control"),
    *("probability", "decided_by", "agreement", "is_gate_open"),
)
_OF_MEMBER = ("member", "is_heard", "weight", "member_probability", "agrees", "proposes")
_OF_BEST = ("best_text", "best_probability", "best")


def _values_of(said: MemberDecision | None) -> tuple[Any, ...]:
    """The values of a member's columns from `weight` on."""
    if said is None:
        return (None,) * 7
    best = said.best[0] if said.best else (None, None)
    return said.weight, said.probability, said.agrees, said.proposes, *best, list(said.best)
