"""The page of an attack: sections of sentences, tables, figures and pictures.

What an attack found is typed in :mod:`dpfl.attacks`; the functions that turn a result into sections
are in ``inversion_page``, ``membership_page``, ``audit_page`` and ``poison_page``.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.image import imsave
from torch import Tensor

from dpfl.report.charts import Chart
from dpfl.report.rendering import Page


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; the first ``names`` columns are words, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as a page shows it: its address, which holds all of it, and what is said below."""

    address: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Rows of pictures under ``headings``; each row has a name."""

    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Picture]]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page; what is left out is not shown."""

    title: str
    sentences: Sequence[str] = ()
    table: Table | None = None
    gallery: Gallery | None = None
    charts: Sequence[Chart] = field(default_factory=tuple)


def attack_page(title: str, sections: Sequence[Section], warnings: Sequence[str] = ()) -> Page:
    """A page of ``sections``, after ``warnings`` that must not be overlooked.

    Its figures can be drawn for papers as those of any page (:func:`dpfl.report.write_figures`).
    """
    charts = [chart for section in sections for chart in section.charts]
    values = {"sections": sections, "warnings": warnings}
    return Page(title=title, template="attack", values=values, charts=charts)


def picture(pixels: Tensor, caption: str = "") -> Picture:
    """An image of shape (channels, height, width), from 0 to 1, as a PNG in the page itself."""
    image = pixels.detach().clamp(0, 1).permute(1, 2, 0).numpy()
    image = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[:, :, :3]
    stream = io.BytesIO()
    imsave(stream, np.ascontiguousarray(image, dtype=np.float64), format="png")
    code = base64.b64encode(stream.getvalue()).decode()
    return Picture(address=f"data:image/png;base64,{code}", caption=caption)
