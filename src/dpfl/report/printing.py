"""Print a page as a PDF, with a Chromium that is on the machine.

The browser runs headless, with a profile of its own that is thrown away afterwards. It opens one
file and is told to do nothing in the background.
"""

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, FolderError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# A sandbox needs user namespaces, which containers and root lack; the page is our own file.
_OPTIONS = shlex.split(
    "--headless --disable-gpu --no-first-run --no-sandbox --disable-background-networking "
    "--disable-component-update --disable-sync --no-pdf-header-footer "
    "--virtual-time-budget=20000 --run-all-compositor-stages-before-draw"
)
_SECONDS = 120
_BY_HAND = "print the page from a browser"


def browser() -> str | None:
    """Return the first Chromium on the path, None if there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def print_page(page: Path, pdf: Path) -> Path:
    """Print a page that was written, to the file ``pdf``; nothing leaves the machine.

    A PDF that is already there is replaced. Without a Chromium on the machine, or with one that
    fails, an error says what to do.
    """
    found = browser()
    if found is None:
        remedy = "install one (Debian: apt-get install chromium), or print the page"
        raise ConfigurationError("--pdf", "there is no Chromium on this machine", remedy)
    problem = f"{page} would be overwritten by its own PDF"
    check(pdf.resolve() != page.resolve(), "--pdf", problem, "name the page .html")
    pdf.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        places = [f"--user-data-dir={profile}", f"--print-to-pdf={pdf.absolute()}"]
        command = [found, *_OPTIONS, *places, page.absolute().as_uri()]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise FolderError(str(pdf), "the browser took too long", _BY_HAND) from None
    problem = f"the browser could not print ({done.stderr.strip()[-200:]})"
    check(done.returncode == 0 and pdf.exists(), str(pdf), problem, _BY_HAND, FolderError)
    return pdf
