"""From values to HTML: one renderer for every page.

HTML lives in the folder ``templates``, which escapes everything that comes from data:
``layout.html.j2`` is around every page, ``macros.html.j2`` holds tables, tiles, flags and figures,
``texts.html.j2`` sentences. There is one template per kind of page. Each of its blocks is one part
of the page; a part without content is left out. A value that a template needs and does not get is
an error.
"""

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpfl.core.files import write_safely
from dpfl.core.types import Plain
from dpfl.core.version import __version__
from dpfl.experiments.ranking import remarks
from dpfl.privacy.accountant import shown
from dpfl.report import words
from dpfl.report.charts import Chart, asset
from dpfl.report.interactive import plotly_script, specification


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page before it is rendered: its template, the values for it, and its figures.

    ``template`` is the name of a file in ``templates``, without its ending. ``charts`` are all
    figures that its parts have places for. ``finished`` is False while the page of a running run
    expects news.
    """

    title: str
    template: str
    values: Mapping[str, object]
    charts: Sequence[Chart] = ()
    finished: bool = True

    @property
    def parts(self) -> dict[str, Markup]:
        """Render every part, by name, in order."""
        template = _environment().get_template(f"{self.template}.html.j2")
        context = template.new_context(dict(self.values))
        parts = {name: "".join(block(context)) for name, block in template.blocks.items()}
        return {name: Markup(part) for name, part in parts.items() if part.strip()}

    def figures(self) -> Plain:
        """Return what the page draws, by the names of the figures."""
        return {chart.name: specification(chart) for chart in self.charts}


def render(page: Page, *, live: str = "", version: str = "") -> str:
    """Return the whole file.

    It fetches nothing, except news from the address ``live`` of its own server while the run is
    running; ``version`` names the state that it shows.
    """
    template = _environment().get_template("layout.html.j2")
    return template.render(
        page=page,
        css=Markup(asset("page.css")),
        policy=content_policy(page, live=live),
        scripts=[Markup(script) for script in _scripts(page, live)],
        live="" if page.finished else live,
        version=version,
    )


def content_policy(page: Page, *, live: str = "") -> str:
    """Return the Content-Security-Policy of a page: its scripts run, and nothing is sent.

    Only while a page is ``live`` may it connect to its own server.
    """
    digests = [sha256(script.encode()).digest() for script in _scripts(page, live)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data:; form-action 'none'; base-uri 'none'"
    )
    return policy if page.finished or not live else f"{policy}; connect-src 'self'"


def _scripts(page: Page, live: str) -> list[str]:
    """The scripts of a page, as its template writes them."""
    drawing = [plotly_script()] if page.charts or live else []
    return [*drawing, asset("page.js")]


def write_page(page: Page, path: Path) -> Path:
    """Write the page to a file, whole or not at all."""
    write_safely(path, render(page).encode())
    return path


@cache
def _environment() -> Environment:
    """The templates, with their macros known everywhere."""
    environment = Environment(
        loader=PackageLoader("dpfl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {
        "shown": shown,
        "exact": lambda value: "infinite" if value == math.inf else value,
        "is_finite": math.isfinite,
        "mean": statistics.mean,
        "remarks": remarks,
    }
    environment.globals |= {"words": words, "dpfl_version": __version__}
    for name in ("texts.html.j2", "macros.html.j2"):
        environment.globals |= vars(environment.get_template(name).module)
    return environment
