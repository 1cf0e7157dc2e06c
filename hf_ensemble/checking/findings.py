"""What a check found, and the report."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..tables import aligned, shown_size


@dataclass(frozen=True)
class Finding:
    """A fault of a member, or one that will show later.

    Attributes:
        member: The member's name.
        check: The check's name, one or two words: `"EOS"`.
        what: What was found, with the values.
        why: Why it matters.
        remedy: What to do.
    """

    member: str
    check: str
    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        """The finding in three lines."""
        return f"{self.member}: {self.check}: {self.what}\n    {self.why}\n    {self.remedy}"


@dataclass(frozen=True)
class MemberReport:
    """How a member runs here.

    Attributes:
        name: Its name.
        runs: Its kind, device and dtype.
        steps: How its steps follow the text: the cache mode (see `LocalMember.cache_mode`), captured or not.
        weight_bytes: Bytes of its weights in this process; None for a member elsewhere.
        cache_bytes: Bytes of cache for a row of 1,000 tokens; None if unknown.
        reads: The parts of a conversation that its chat template reads: system turns, tools, tool calls.
    """

    name: str
    runs: str
    steps: str
    weight_bytes: int | None
    cache_bytes: int | None
    reads: tuple[str, ...]


@dataclass(frozen=True)
class CheckReport:
    """The findings of a check of an ensemble; `str()` returns them as text.

    Attributes:
        findings: The faults; empty if there are none.
        members: How each member runs, the primary first.
    """

    findings: tuple[Finding, ...]
    members: tuple[MemberReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries and lists."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """How the members run, and what was found."""
        rows = [["member", "runs", "steps", "weights", "cache of 1,000 tokens", "its template reads"]]
        for one in self.members:
            sizes = [shown_size(one.weight_bytes), shown_size(one.cache_bytes)]
            rows.append([one.name, one.runs, one.steps, *sizes, ", ".join(one.reads) or "no template"])
        found = "\n".join(map(str, self.findings)) or "nothing found"
        return f"{aligned(rows)}\n\n{found}"
