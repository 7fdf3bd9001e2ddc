"""What the commands of attacks leave: a folder with results and a page, and tables on stdout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpfl.cli import console as c, options as o
from dpfl.core.checks import check
from dpfl.core.errors import DataError

if TYPE_CHECKING:
    from dpfl.report.rendering import Page

OUT = o.opt("Folder of the results (default: a new one in runs/).", None, "--out")


class Found(Protocol):
    """What an attack found, as plain values for a file."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        ...


_DEPLOYED = ("site.toml", "study.toml", "enrolment.json", "token", "signing.key")
"""Files of a site's or a server's folder."""


def check_own_files(values: Mapping[str, Any]) -> None:
    """Refuse data that are part of a deployment: attacks are played on an operator's own copies."""
    folder = values.get("data", {}).get("folder")
    found = [name for name in _DEPLOYED if folder is not None and (Path(folder) / name).exists()]
    check(
        not found,
        str(folder),
        f"is the folder of a deployment (it holds {', '.join(found)})",
        "copy the records that may be attacked to a folder of their own",
        DataError,
    )


def finish(
    found: Found,
    page: Page,
    show: Callable[[], None],
    *,
    stem: str,
    folder: Path | None,
    as_json: bool,
) -> Path:
    """Write ``results.json`` and ``report.html``, print the result, and return the folder.

    ``stem`` names a new folder in ``runs/`` where none is given; ``show`` prints for people.
    """
    import json

    from dpfl.core.files import write_safely
    from dpfl.report.rendering import write_page
    from dpfl.runs.folder import new_folder

    place = folder or new_folder(Path("runs"), stem)
    values = found.to_dict()
    write_safely(place / "results.json", json.dumps(values, indent=1).encode())
    report = write_page(page, place / "report.html")
    c.answer(as_json, {"folder": str(place), **values}, show)
    c.note_files({"Results": place, "Report": report})
    return place
