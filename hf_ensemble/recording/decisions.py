"""All decisions of one call, as a table and as a page."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .decision import Decision
from .decisions_html import decisions_page


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
                    "decided_by": None if decision.decided_by is None else self.members[decision.decided_by],
                    **{name: getattr(decision, name) for name in _OF_DECISION},
                }
                for name, said in zip(self.members, decision.members, strict=True):
                    best = said.best[0] if said and said.best else None
                    lines.append(
                        {
                            **shared,
                            "member": name,
                            "is_heard": said is not None,
                            "member_probability": said.probability if said else None,
                            **{name: getattr(said, name, None) for name in _OF_MEMBER},
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
        page = decisions_page(self.rows, self.members, self.prompts, self.is_by_spans, title)
        Path(path).write_text(page, "utf-8")


_OF_DECISION = ("text", "control", "probability", "agreement", "is_gate_open")
_OF_MEMBER = ("weight", "agrees", "proposes")
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
