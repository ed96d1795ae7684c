"""Writes tables of text as HTML, which notebooks show."""

import html
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    r"""Writes a table, and a note under it.

    >>> table(["rank"], [["1\n<2>"]])
    '<table><tr><th>rank</th></tr>\n<tr><td>1<br/>&lt;2&gt;</td></tr></table>'
    """

    def row(cells: Iterable[str], tag: str) -> str:
        texts = (html.escape(cell).replace("\n", "<br/>") for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    lines = [row(header, "th"), *(row(cells, "td") for cells in rows)]
    text = "\n".join(lines)
    return f"<table>{text}</table>" + (f"<p>{html.escape(note)}</p>" if note else "")
