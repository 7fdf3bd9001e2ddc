"""What people ask of a site: whether it runs, what it has served, and what it has spent."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.files import parsed
from dpfl.core.types import Plain
from dpfl.deploy.processes import noted_process
from dpfl.deploy.site_folder import FINISH, MODELS, SAYS, SITE_PROCESS, SiteFolder
from dpfl.privacy.statement import Statement


@dataclass(frozen=True, kw_only=True)
class SiteStatus:
    """Whether a site runs, which studies it has served, and what it has spent.

    ``says``: the last sentence on its screen.
    ``studies``: title and last charged round of each run.
    ``finished``: by run, what its model and the personal finish are worth here, in a sentence.
    """

    site: str
    running: bool
    says: str
    studies: dict[str, tuple[str, int | None]]
    spent: list[Statement]
    finished: dict[str, str]

    @classmethod
    def of(cls, site: SiteFolder) -> SiteStatus:
        """Read the folder of a site."""
        with closing(site.checked_ledger()) as ledger:
            studies = {one.run: (one.title, one.last_round) for one in ledger.studies()}
        running = noted_process(site.folder / SITE_PROCESS) is not None
        said = site.folder / SAYS
        says = said.read_text(errors="replace").strip() if running and said.exists() else ""
        return cls(
            site=site.id,
            running=running,
            says=says,
            studies=studies,
            spent=site.spent(),
            finished=_finished(site.folder),
        )

    def to_dict(self) -> Plain:
        """Return plain values."""
        studies = [
            {"run": run, "title": title, "last_round": last}
            | ({"finish": self.finished[run]} if run in self.finished else {})
            for run, (title, last) in self.studies.items()
        ]
        spent = [line.to_dict() for line in self.spent]
        state = {"site": self.site, "running": self.running, "says": self.says or None}
        return {**state, "studies": studies, "spent": spent}


def _finished(folder: Path) -> dict[str, str]:
    """The sentences of the personal finishes that are kept in a folder, by run."""
    found = {}
    for path in (folder / MODELS).glob(f"*/{FINISH}"):
        # A file that cannot be read is made again by dpfl site evaluate.
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = parsed(path.read_text())
            found[str(values["run"])] = str(values["sentence"])
    return found
