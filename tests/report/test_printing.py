"""The page as a PDF: by a Chromium that is there; without one, or with one that fails, in one
sentence.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import FolderError
from dpfl.report import printing


def pretender(place: Path, script: str) -> str:
    """A program that stands in for Chromium."""
    path = place / "chromium"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_chromium_the_page_is_written_and_the_pdf_refused(
    weiavg: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert printing.browser() is None
    assert run_command(["report", str(weiavg), "--pdf", "--out", str(tmp_path / "r.html")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dpfl: --pdf: there is no Chromium on this machine; install one")
    assert err.count("\n") == 1
    assert (tmp_path / "r.html").exists() and not (tmp_path / "r.pdf").exists()


def test_the_first_known_browser_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pretender(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert printing.browser() == own


def test_the_browser_is_given_the_file_and_told_to_keep_off_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pretender(tmp_path, f'echo "$@" > {tmp_path}/asked; for a in "$@"; do case "$a" in --print-to-pdf=*) '
                     'echo %PDF > "${a#--print-to-pdf=}";; esac; done')  # fmt: skip
    monkeypatch.setattr(printing, "browser", lambda: fake)
    page = tmp_path / "a page.html"
    page.write_text("<p>x</p>")
    assert printing.print_page(page, tmp_path / "a page.pdf") == tmp_path / "a page.pdf"
    asked = (tmp_path / "asked").read_text()
    assert asked.rstrip().endswith(page.as_uri())
    assert (
        "--headless" in asked
        and "--disable-background-networking" in asked
        and "--user-data-dir=" in asked
    )


@pytest.mark.parametrize("script", ["echo broken >&2; exit 1", "exit 0"])
def test_a_browser_that_prints_nothing_is_one_sentence(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "browser", lambda: pretender(tmp_path, script))
    with pytest.raises(FolderError, match="the browser could not print"):
        printing.print_page(tmp_path / "page.html", tmp_path / "page.pdf")


def test_a_pdf_of_an_earlier_page_is_not_taken_for_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing, "browser", lambda: pretender(tmp_path, "exit 0"))
    (tmp_path / "page.pdf").write_bytes(b"%PDF old")
    with pytest.raises(FolderError, match="the browser could not print"):
        printing.print_page(tmp_path / "page.html", tmp_path / "page.pdf")


def test_a_browser_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "browser", lambda: pretender(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(printing, "_SECONDS", 0.3)
    with pytest.raises(FolderError, match="took too long"):
        printing.print_page(tmp_path / "page.html", tmp_path / "page.pdf")


def test_chromium_prints_the_figures_too(chromium: str, fedavg: Path, tmp_path: Path) -> None:
    assert run_command(["report", str(fedavg), "--pdf", "--out", str(tmp_path / "r.html")]) == 0
    content = (tmp_path / "r.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", content)) >= 2
    drawn = b"".join(_streams(content))
    assert (
        b".8196 .3765 .2392 RG" in drawn
    )  # the second colour of the figures, which nothing else on the page has


def _streams(content: bytes) -> list[Any]:
    found = []
    for match in re.finditer(rb"stream\r?\n(.*?)endstream", content, re.S):
        try:
            found.append(zlib.decompress(match[1]))
        except zlib.error:
            continue
    return found
