"""Pages that need no network: their frame, safe texts, and display in a notebook."""

import html
from collections.abc import Mapping, Sequence
from importlib import resources

PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
"""A visible sign for every control character that a page cannot show; tab and newline have signs of their own."""

MOST_IN_NOTEBOOK = 20
"""Number of texts, or prompts, that a notebook shows of a record."""


def page(package: str, name: str, title: str, parts: Mapping[str, str], has_script: bool = False) -> str:
    """Return a page that loads nothing.

    Args:
        package: The package with `name.html`, the body below the heading, in which a name between `@@` and `@@` stands
            for a part, and `name.css`, its style in addition to the frame's.
        name: Name of both files.
        title: Heading, as plain text.
        parts: HTML by the names in the body.
        has_script: Whether the body runs a script.
    """
    frame = {
        "title": escaped(title),
        "scripts": "; script-src 'unsafe-inline'" if has_script else "",
        "style": _read(package, f"{name}.css").strip(),
        "body": _filled(_read(package, f"{name}.html").strip(), parts),
    }
    return _filled(_read(__package__, "page_frame.html"), frame)


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text("utf-8")


def _filled(template: str, parts: Mapping[str, str]) -> str:
    # Split first, then filled, so that a text with `@@` is not mistaken for a placeholder.
    return "".join(piece if n % 2 == 0 else parts[piece] for n, piece in enumerate(template.split("@@")))


def escaped(text: str) -> str:
    """A text as HTML, with signs for control characters."""
    # Characters that UTF-8 lacks could not be written.
    return html.escape(text.translate(PICTURES).encode("utf-8", "replace").decode())


def marked(text: str) -> str:
    """Escape a text, and put signs before tabs and newlines, which are not copied with the text."""
    return escaped(text).replace("\t", '<b class="tab"></b>\t').replace("\n", '<b class="newline"></b>\n')


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML.

    Args:
        rows: Its texts; the first row holds the titles of the columns, the first text of every other row is its name.
    """
    titles = "".join(f'<th scope="col">{escaped(title)}</th>' for title in rows[0])
    lines = (
        "".join([f'<th scope="row"><bdi>{escaped(name)}</bdi></th>', *(f"<td>{escaped(cell)}</td>" for cell in cells)])
        for name, *cells in rows[1:]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def tables_in_notebook(title: str, tables: Sequence[Sequence[Sequence[str]]], remarks: Sequence[str] = ()) -> str:
    """A page of tables, as a piece of a notebook.

    Args:
        title: Heading, as plain text.
        tables: The tables, as `table` takes them.
        remarks: Paragraphs below the tables.
    """
    parts = {"tables": "\n".join(map(table, tables)), "remarks": "".join(f"<p>{escaped(one)}</p>" for one in remarks)}
    lines = [" ".join(row) for rows in tables for row in rows]
    return in_notebook(page(__package__, "tables_page", title, parts), [*lines, *remarks])


def in_notebook(source: str, texts: Sequence[str]) -> str:
    """A page as a piece of a notebook, in its own frame, so that style and scripts stay separate.

    Args:
        source: The page.
        texts: The texts it shows, to estimate its height: each takes a line or more.
    """
    lines = sum(1 + len(line) // 90 for text in texts for line in text.split("\n"))
    height = min(240 + 24 * lines, 640)
    style = f"display: block; width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(source)}"></iframe>'
