"""What a check found, and the report of all that was looked at."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..tables import aligned, shown_size


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or will go wrong, with a member.

    Attributes:
        member: The member's name.
        check: What was looked at, in one word or two: `"EOS"`.
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
        runs: What it is, and on which device in which dtype.
        steps: How its steps follow the text: the cache mode (see `LocalMember.cache_mode`), captured or not.
        weight_bytes: Bytes of its weights in this process; None for a member elsewhere.
        cache_bytes: Bytes of cache that a row of 1,000 tokens takes; None where that is not known.
        reads: What of a conversation its chat template reads: of system turns, tools, tool calls.
    """

    name: str
    runs: str
    steps: str
    weight_bytes: int | None
    cache_bytes: int | None
    reads: tuple[str, ...]


@dataclass(frozen=True)
class CheckReport:
    """What a check of an ensemble found; `str()` gives it as text.

    Attributes:
        findings: What is wrong; empty if nothing is.
        members: How each member runs here, the primary first.
    """

    findings: tuple[Finding, ...]
    members: tuple[MemberReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as dictionaries and lists."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """How the members run, and what was found."""
        rows = [["member", "runs", "steps", "weights", "cache of 1,000 tokens", "its template reads"]]
        for one in self.members:
            sizes = [shown_size(one.weight_bytes), shown_size(one.cache_bytes)]
            rows.append([one.name, one.runs, one.steps, *sizes, ", ".join(one.reads) or "no template"])
        found = "\n".join(map(str, self.findings)) or "nothing found"
        return f"{aligned(rows)}\n\n{found}"
