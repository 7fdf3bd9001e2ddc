"""``dpfl predict``: what a trained model says of the records in a file.

The folder of a finished run, or of a study at its server, holds the model with its task and its
schema; a site's folder holds the models it was sent, of which the newest is taken with the site's
own part. Predictions go to stdout as CSV, or to a file.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dpfl.cli import console as c, options as o

if TYPE_CHECKING:
    import numpy as np

    from dpfl.runs.predictor import Predictor


def predict(
    folder: Path = o.arg("Folder of a finished run, a study at its server, or a site."),
    file: Path = o.arg("CSV or Parquet file with a record a line."),
    path: Path | None = o.opt("Write a CSV file instead of stdout.", None, "--out"),
    probabilities: bool = o.flag("--probabilities", "Probabilities of the classes as well."),
    drop: list[str] | None = o.opt("A column that is not a feature, such as the label."),
    common: bool = o.flag("--common", "Leave out the part of the model that is the site's own."),
    json: bool = o.JSON,
) -> None:
    """Predict for the records of a file.

    A model that was trained with a schema takes the columns by name. Without one, the columns are
    the features in the order of training; name those that are not with --drop.

    For instance: dpfl predict runs/weiavg-digits-1 new.csv --out predictions.csv
    """
    from dpfl.core.files import write_safely
    from dpfl.runs.predictor import load, read_records

    predictor = load(folder, common=common)
    records = read_records(file, predictor, tuple(drop or ()))
    columns = _columns(predictor, records, probabilities)
    c.warn([predictor.note] if predictor.note else [])
    if predictor.personal:
        c.note(f"The common model is used {predictor.personal} (--common leaves it out)")
    if path is None:
        c.answer(json, columns, lambda: typer.echo(_csv(columns), nl=False))
        return
    write_safely(path, _csv(columns).encode())
    c.answer(json, {"predictions": str(path)}, c.note_files, {"Predictions": path})


def _columns(
    predictor: Predictor, records: np.ndarray, probabilities: bool
) -> dict[str, list[float | str]]:
    """Predictions by column: one, or as many as a target has; then probabilities.

    Classes go by the names that the schema gives them.
    """
    import numpy as np

    found = {"prediction": predictor.predict(records)}
    names = predictor.class_names
    if names and found["prediction"].dtype.kind == "i":
        found["prediction"] = np.array(names, dtype=object)[found["prediction"]]
    if probabilities:
        found["probability"] = predictor.predict_proba(records)
    columns = {}
    for name, values in found.items():
        if values.ndim == 1:
            columns[name] = values.tolist()
        else:
            flat = values.reshape(len(values), -1)
            ends = names if len(names) == flat.shape[1] else range(flat.shape[1])
            columns |= {
                f"{name}_{end}": own.tolist() for end, own in zip(ends, flat.T, strict=True)
            }
    return columns


def _csv(columns: dict[str, list[float | str]]) -> str:
    """The columns as the text of a CSV file."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue()
