"""The page that shows the decisions of a call."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..pages import PICTURES, escaped, marked, page
from .decision import Decision, MemberDecision


def decisions_page(
    rows: Sequence[Sequence[Decision]], members: Sequence[str], prompts: Sequence[str], is_by_spans: bool, title: str
) -> str:
    """Return a page that needs no network: the texts, coloured by the deciding member, with the numbers on hover.

    Args:
        rows: For each row of the output, its decisions.
        members: The members' names.
        prompts: For each row, its prompt.
        is_by_spans: Whether the decisions are about spans, not tokens.
        title: Heading of the page.
    """
    data = {
        "members": members,
        "isBySpans": is_by_spans,
        "rows": [[_as_json(decision) for decision in row] for row in rows],
    }
    texts = [_text(n, row, members, prompt) for n, (row, prompt) in enumerate(zip(rows, prompts, strict=True))]
    if len(texts) > 1:
        texts = [f"<h2>Text {n}</h2>{text}" for n, text in enumerate(texts, start=1)]
    decisions = [decision for row in rows for decision in row]
    parts = {
        "agrees": "wrote the chosen span" if is_by_spans else "own best was chosen",
        "members": "".join(_lines(decisions, members)),
        "notes": "; ".join(_notes(decisions, len(rows), "spans" if is_by_spans else "decisions")),
        "rows": "\n".join(f"<section>{text}</section>" for text in texts),
        "data": json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return page(__package__, "decisions_page", title, parts, has_script=True)


def _lines(decisions: Sequence[Decision], members: Sequence[str]) -> Iterator[str]:
    """The rows of the table of members; the last is for decisions without a single decider, if there are any."""
    total = max(1, len(decisions))
    for who in (*range(len(members)), None):
        decided = sum(decision.decided_by == who for decision in decisions)
        if who is None and not decided:
            return
        heard = [said for one in decisions if who is not None and (said := one.members[who]) is not None]
        probs = [said.probability for said in heard if said.probability is not None]
        yield (
            f'<tr><th scope="row"><span class="key {_kind(who)}">{escaped(_name(who, members))}</span></th>'
            f"{_share(decided, total, _kind(who))}{_share(sum(said.agrees for said in heard), len(heard))}"
            f"<td>{f'{sum(probs) / len(probs):.2f}' if probs else '–'}</td>"
            f"<td>{'–' if who is None else len(heard)}</td></tr>"
        )


def _notes(decisions: Sequence[Decision], num_rows: int, kind: str) -> Iterator[str]:
    yield f"{len(decisions)} {kind} in {num_rows} {'text' if num_rows == 1 else 'texts'}"
    several = [d for d in decisions if sum(said is not None for said in d.members) > 1]
    if several:
        agreed = sum(decision.agreement == 1 for decision in several)
        yield f"all members agreed in {agreed} of the {len(several)} in which several were heard"
    gated = [decision.is_gate_open for decision in decisions if decision.is_gate_open is not None]
    if gated:
        yield f"the gate was open in {sum(gated)} of {len(gated)}"


def _kind(who: int | None) -> str:
    return "none" if who is None else f"m{who % 8}"


def _name(who: int | None, members: Sequence[str]) -> str:
    return "no single member" if who is None else members[who]


def _text(number: int, row: Sequence[Decision], members: Sequence[str], prompt: str) -> str:
    spans = []
    for n, decision in enumerate(row):
        who = decision.decided_by
        classes = ["d", _kind(who)]
        if not decision.text:
            classes.append("control" if decision.control else "fragment")
        said = None if who is None else decision.members[who]
        sure = decision.probability if said is None or said.probability is None else said.probability
        strength = 0.35 if sure is None else 0.06 + 0.5 * sure
        inner = marked(decision.text) + (f"<i>{escaped(decision.control)}</i>" if decision.control else "")
        spans.append(
            f'<span class="{" ".join(classes)}" style="--p:{strength:.2f}" data-n="{n}" '
            f'tabindex="{-1 if n else 0}" aria-label="{escaped(f"{decision.label}, {_name(who, members)}")}">{inner}</span>'
        )
    return (
        f'<div class="text" dir="auto" data-row="{number}" role="group" aria-label="Text {number + 1}">'
        f'<span class="prompt">{marked(prompt)}</span>{"".join(spans)}</div>'
    )


def _as_json(decision: Decision) -> list[Any]:
    label = decision.label.translate(PICTURES)
    gate, members = decision.is_gate_open, [_said_as_json(said) for said in decision.members]
    return [label, decision.decided_by, _rounded(decision.probability), gate, len(decision.ids), members]


def _said_as_json(said: MemberDecision | None) -> list[Any] | None:
    if said is None:
        return None
    best = [[entry.text.translate(PICTURES), _rounded(entry.probability)] for entry in said.best]
    return [_rounded(said.weight), _rounded(said.probability), said.agrees, said.proposes, best]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _share(count: int, total: int, kind: str = "plain") -> str:
    if not total:
        return "<td>–</td>"
    share = 100 * count / total
    return f'<td><span class="bar {kind}" style="width:{share * 0.9:.1f}px"></span>{share:.0f} %</td>'
