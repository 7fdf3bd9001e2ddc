"""The renderer: what comes from data is text, and a value that a template lacks is an error."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from dpfl import report
from dpfl.report.page import full_page
from dpfl.report.reading import of_folders
from dpfl.report.rendering import Page, render, write_page

NAME = "</p><script>alert('1')</script>&amp;"


def test_everything_from_data_is_escaped() -> None:
    page = Page(title=NAME, template="waiting", values={"said": NAME})
    text = render(page, live=NAME, version=NAME)
    assert "<script>alert" not in text and "</p><script" not in text
    escaped = "&lt;/p&gt;&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;amp;"
    assert f"<h1>{escaped}</h1>" in text and f"<p>{escaped}</p>" in text


def test_a_value_that_a_template_needs_and_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="said"):
        render(Page(title="t", template="waiting", values={}))


@pytest.mark.parametrize("template", ["run", "running", "public", "ledger"])
def test_no_page_is_made_of_nothing(template: str) -> None:
    with pytest.raises(UndefinedError):
        render(Page(title="t", template=template, values={}))


def test_parts_are_the_sections_of_the_page_in_order(tmp_path: Path) -> None:
    page = Page(title="t", template="waiting", values={"said": "nothing yet"}, finished=False)
    assert list(page.parts) == ["summary"]
    text = write_page(page, tmp_path / "deep" / "page.html").read_text()
    assert f'<section data-part="summary">{page.parts["summary"]}</section>' in text
    assert "data-live" not in text.split("<script")[0]
    live = render(page, live="/news.json", version="7")
    assert '<body data-live="/news.json" data-version="7">' in live


def directives(text: str) -> dict[str, str]:
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    return dict(line.split(" ", 1) for line in html.unescape(policy).split("; "))


def test_a_page_lets_its_scripts_run_and_nothing_be_fetched_or_sent(weiavg: Path) -> None:
    waiting = Page(title="t", template="waiting", values={"said": "yet"}, finished=False)
    for page in (waiting, full_page(of_folders([weiavg]))):
        for live in ("", "/news.json"):
            text = render(page, live=live)
            scripts = re.findall("<script>(.*?)</script>", text, flags=re.S)
            assert len(scripts) == 1 + bool(page.charts or live)
            digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
            hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
            policy = directives(text)
            assert policy.pop("connect-src", None) == (
                "'self'" if live and not page.finished else None
            )
            assert policy == {
                "default-src": "'none'",
                "script-src": " ".join(hashes),
                "style-src": "'unsafe-inline'",
                "img-src": "data:",
                "form-action": "'none'",
                "base-uri": "'none'",
            }


def test_the_package_draws_nothing_before_it_is_asked_to() -> None:
    code = (
        "import sys; from dpfl import report; from dpfl.report import write_report, LiveServer, "
        "of_folders, write_figures, write_ledger_page; "
        "print([m for m in ('plotly', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_no_other() -> None:
    for name in dir(report):
        assert getattr(report, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        report.nonsense  # noqa: B018


def test_a_folder_by_its_name_is_enough(weiavg: Path, tmp_path: Path) -> None:
    page = report.write_report(str(weiavg), str(tmp_path / "page.html"))
    assert page == tmp_path / "page.html"
    assert "weiavg: one run" in page.read_text()
    public = report.write_report([weiavg], tmp_path / "public.html", public=True)
    assert "What this training guarantees" in public.read_text()
