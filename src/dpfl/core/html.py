"""Small HTML tables, by which results show themselves in notebooks."""

from collections.abc import Iterable, Sequence
from html import escape


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
