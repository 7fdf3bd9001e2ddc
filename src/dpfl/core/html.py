"""Small tables, by which results show themselves: HTML in notebooks, text when printed."""

import re
from collections.abc import Iterable, Sequence
from html import escape, unescape


def html_table(headings: Sequence[str], rows: Iterable[Iterable[object]], most: int = 100) -> str:
    """Return a table as HTML without scripts and styles; every cell is escaped.

    ``headings`` may be empty. Of more than ``most`` rows the first ones are shown, and how many
    there are is said.

    >>> html_table(("a",), [["<1>"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;1&gt;</td></tr></table>'
    """
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    lines = ["".join(f"<th>{escape(one)}</th>" for one in headings)] if headings else []
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in cells[:most]]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    left = f"<p>... and {len(cells) - most} more</p>" if len(cells) > most else ""
    return f"<table>{table}</table>{left}"


def text_of(page: str) -> str:
    """Return tables and paragraphs of HTML, as results write them, as text for ``print``.

    ``page`` holds what :func:`html_table` returns, ``p`` and ``h4``.

    >>> print(text_of(html_table(("a", "b"), [["<1>", 2], [33, 4]]) + "<p>and <b>so on</b></p>"))
    a    b
    <1>  2
    33   4
    <BLANKLINE>
    and so on
    """
    parts = []
    for table, words in re.findall(r"<table>(.*?)</table>|<(?:p|h4)>(.*?)</(?:p|h4)>", page, re.S):
        rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.S) for row in table.split("</tr>")]
        cells = [[unescape(cell) for cell in row] for row in rows if row]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        parts.append("\n".join(lines) if table else unescape(re.sub("</?b>", "", words)))
    return "\n\n".join(parts)
