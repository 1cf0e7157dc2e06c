"""The page that shows the candidates of a call."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..pages import escaped, marked, page

if TYPE_CHECKING:
    from .record import Answer, Answers, AnswerWriter

_ENDS = {"eos": "end token", "text": "text", None: "not ended"}


def answers_page(answers: "Answers", title: str) -> str:
    """Return a page that needs no network and no script: a table of candidates per prompt, the best first.

    Args:
        answers: The candidates.
        title: Heading of the page.
    """
    sections = []
    for number, (row, prompt, written) in enumerate(
        zip(answers, answers.prompts, answers.written, strict=True), start=1
    ):
        heading = f"<h2>Prompt {number}</h2>" if len(answers) > 1 else ""
        sections.append(f"<section>{heading}{_section(row, prompt, written, answers.criteria)}</section>")
    parts = {"notes": "; ".join(_notes(answers)), "rows": "\n".join(sections)}
    return page(__package__, "answers_page", title, parts)


def _notes(answers: "Answers") -> Iterator[str]:
    yield f"Chosen by <bdi>{escaped(answers.method)}</bdi>"
    num, num_written = sum(map(len, answers)), sum(len(one.writers) for row in answers for one in row)
    yield f"{_counted(num, 'candidate')} of {_counted(num_written, 'written answer')}"
    yield _counted(len(answers), "prompt")
    yield "the best first, returned ones with a ✓"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _section(row: Sequence["Answer"], prompt: str, written: str | None, criteria: Sequence[str]) -> str:
    head = f'<div class="text prompt" dir="auto">{_text(prompt)}</div>'
    if written is not None:
        head += '<p><span class="tick">✓</span> Written from the candidates:</p>'
        head += f'<div class="text written" dir="auto">{_text(written)}</div>'
    ranked = sorted(row, key=lambda one: len(row) if one.rank is None else one.rank)
    has_answers = any(one.answer is not None for one in row)
    columns = ["rank", "returned", "weight", *(["answer"] if has_answers else [])]
    columns += [f"score: {name}" for name in criteria]
    columns += ["written by", "tokens", "seconds, its share", "ended by", "log-probability"]
    titles = "".join(f'<th scope="col">{escaped(column)}</th>' for column in columns)
    is_numbered = any(writer.number for one in row for writer in one.writers)
    num_places = sum(len(one.places) for one in row)
    bodies = "".join(
        _candidate(one, criteria, has_answers, is_numbered, num_places > 1, len(columns)) for one in ranked
    )
    return f'{head}<div class="scroll"><table><thead><tr>{titles}</tr></thead>{bodies}</table></div>'


def _candidate(
    one: "Answer", criteria: Sequence[str], has_answers: bool, is_numbered: bool, has_places: bool, num_columns: int
) -> str:
    """A candidate's rows: one per writer, the first with the candidate's own data, and its text."""
    places = " " + ", ".join(str(place + 1) for place in one.places) if has_places else ""
    cells = ["–" if one.rank is None else str(one.rank + 1)]
    cells.append(f'<span class="tick">✓{places}</span>' if one.places else "")
    cells.append(_number(one.weight))
    if has_answers:
        cells.append("–" if one.answer is None else f'<bdi class="text">{_text(one.answer)}</bdi>')
    cells += [_number(one.scores.get(name)) for name in criteria]
    height = max(1, len(one.writers))
    shared = "".join(f'<td rowspan="{height}">{cell}</td>' for cell in cells)
    lines = [_writer(writer, is_numbered) for writer in one.writers] or ['<td colspan="5"></td>']
    lines[0] = shared + lines[0]
    lines.append(f'<td colspan="{num_columns}"><div class="text" dir="auto">{_text(one.text)}</div></td>')
    kind = ' class="chosen"' if one.places else ""
    return f"<tbody{kind}>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody>"


def _writer(writer: "AnswerWriter", is_numbered: bool) -> str:
    kind = " <small>method</small>" if writer.member is None else ""
    number = f" <small>answer {writer.number + 1}</small>" if is_numbered else ""
    cells = (f"<bdi>{escaped(writer.name)}</bdi>{kind}{number}", str(writer.num_tokens), _number(writer.seconds))
    return "".join(f"<td>{cell}</td>" for cell in (*cells, _ENDS[writer.ended_by], _number(writer.log_prob)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _text(text: str) -> str:
    """A text with signs for its white space, except for spaces between words."""
    inner = text.strip(" ")
    start = len(text) - len(text.lstrip(" "))
    space = '<b class="space"> </b>'
    return space * start + marked(inner) + space * (len(text) - len(inner) - start)
