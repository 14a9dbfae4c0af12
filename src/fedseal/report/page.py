"""HTML: the page, its sections and tables. A page needs no network and no script."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources


def render_page(title: str, sections: Sequence[str]) -> bytes:
    """A complete page in one file."""
    style = (resources.files("fedseal.report") / "report.css").read_text("utf-8")
    page = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name=color-scheme content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )
    return page.encode("utf-8", "backslashreplace")  # names of files need not be UTF-8


def section(title: str, content: str) -> str:
    """A heading, as text, with its content, as HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def notes(sentences: Iterable[str]) -> str:
    """Explanations below a chart, each of them once."""
    lines = "".join(f"<li>{escape(sentence)}</li>" for sentence in dict.fromkeys(sentences))
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; the first row is its head."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
