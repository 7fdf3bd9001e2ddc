"""The page as a PDF, by a Chromium that is on the machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from dpfl.core.errors import ConfigurationError, FolderError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-pdf-header-footer", "--virtual-time-budget=20000", "--run-all-compositor-stages-before-draw",
)  # fmt: skip
_SECONDS = 120


def browser() -> str | None:
    """The first Chromium on the path."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def print_page(page: Path, pdf: Path) -> Path:
    """Print a page that was written; nothing leaves the machine."""
    found = browser()
    if found is None:
        raise ConfigurationError(
            "--pdf",
            "there is no Chromium on this machine",
            "install one (Debian: apt-get install chromium), or print the page",
        )
    if pdf.resolve() == page.resolve():
        raise ConfigurationError(
            "--pdf", f"{page} would be overwritten by its own PDF", "name the page .html"
        )
    pdf.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        # A sandbox needs user namespaces, which containers and root lack; the page is our own file.
        command = [
            found,
            *_FLAGS,
            "--no-sandbox",
            f"--user-data-dir={profile}",
            f"--print-to-pdf={pdf.absolute()}",
        ]
        try:
            done = subprocess.run(
                [*command, page.absolute().as_uri()],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FolderError(
                str(pdf), "the browser took too long", "print the page from a browser"
            ) from None
    if done.returncode != 0 or not pdf.exists():
        raise FolderError(
            str(pdf),
            f"the browser could not print ({done.stderr.strip()[-200:]})",
            "print the page by hand",
        )
    return pdf
