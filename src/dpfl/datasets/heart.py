"""UCI Heart Disease: patients of four hospitals, encoded by fixed, public rules.

The files come with the package. Numbers are scaled by ranges chosen here, not read off the data.
"""

from importlib import resources

import numpy as np

from dpfl.data.records import Span, spans_of

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Column: centre and half-width of the clinically usual range; fixed by us, not read off the data.
_NUMBERS = {0: (55, 25), 3: (130, 40), 4: (240, 100), 7: (140, 50), 9: (1, 2), 11: (1, 2)}
_CATEGORIES = {2: (1, 2, 3, 4), 6: (0, 1, 2), 10: (1, 2, 3), 12: (3, 6, 7)}
_YES_OR_NO = (1, 5, 8)
_ZERO_IS_MISSING = (3, 4)  # nobody has no blood pressure and no cholesterol


def read_heart_disease() -> tuple[np.ndarray, np.ndarray, dict[str, Span]]:
    """Return features, labels, and each hospital's stretch of them.

    A label is 1 where the patient is ill, to whatever degree.
    """
    folder = resources.files("dpfl.datasets").joinpath("embedded")
    tables = []
    for hospital in HOSPITALS:
        lines = folder.joinpath(f"processed.{hospital}.data").read_text().split()
        rows = [[np.nan if c == "?" else float(c) for c in line.split(",")] for line in lines]
        tables.append(np.array(rows))
    whole = np.concatenate(tables)
    silos = dict(zip(HOSPITALS, spans_of(tables), strict=True))
    return _encode(whole[:, :13]), (whole[:, 13] > 0).astype(np.int64), silos


def _encode(table: np.ndarray) -> np.ndarray:
    """Scale by fixed ranges, one indicator per category, zero where a value is missing.

    One more column for each that may be missing says where it is.
    """
    for column in _ZERO_IS_MISSING:
        table[table[:, column] == 0, column] = np.nan
    columns = [
        *(np.clip((table[:, i] - mid) / width, -3, 3) for i, (mid, width) in _NUMBERS.items()),
        *(2 * table[:, column] - 1 for column in _YES_OR_NO),
        *(table[:, i] == value for i, values in _CATEGORIES.items() for value in values),
        *np.isnan(table[:, 3:]).T,
    ]
    encoded: np.ndarray = np.nan_to_num(np.stack(columns, axis=1), nan=0.0)
    return encoded
