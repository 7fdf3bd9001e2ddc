"""Predict with a model that was trained and saved: :func:`load` gives everything it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, FolderError
from dpfl.data.inputs import Inputs
from dpfl.data.schema import Schema
from dpfl.data.sources import number_columns
from dpfl.data.tables import check_kind, read_columns
from dpfl.models.checks import outputs_of
from dpfl.numerics.clipping import all_finite
from dpfl.runs.folder import RunFolder, tensors_digest
from dpfl.runs.model_card import ModelCard
from dpfl.runs.site_file import MODELS, SCHEMA_FILE, SITE_FILE
from dpfl.tasks import Task

PRIVATE, HEAD = "private.safetensors", "head.safetensors"
PERSONAL = {PRIVATE: "with the site's own part", HEAD: "with the site's own head"}
"""Files beside a site's model that hold what replaces parts of it, and what they make of it."""

_RECORDS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model, ready to predict.

    ``model`` is the module, ``task`` what it has learned, ``schema`` what prepares tables (None
    where it was trained on arrays), ``inputs`` how records become its input and ``shape`` that of
    one record. ``note`` says what limits the guarantee of the model, such as a seed. ``personal``
    says which part of the model is a site's own; empty where all of it is common.
    """

    model: nn.Module
    task: Task
    inputs: Inputs
    shape: tuple[int, ...]
    schema: Schema | None = None
    note: str = ""
    personal: str = ""

    def __repr__(self) -> str:
        """Say what it is in a line."""
        about = [type(self.model).__name__, str(self.task), f"records of shape {self.shape}"]
        about += [text for text in (self.personal, self.note) if text]
        return f"Predictor({', '.join(about)})"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The categories that class numbers stand for; empty where no schema names them."""
        outcomes = () if self.schema is None else self.schema.outcomes
        return outcomes[0].categories if len(outcomes) == 1 else ()

    def predict(self, x: Any) -> np.ndarray:
        """Predict for records, in the form of the targets: class numbers, numbers or tokens.

        ``x`` is an array of records as the model was trained on. A model with a schema also takes
        tables: pandas and polars frames, or a dict of columns.
        """
        predictions: np.ndarray = self.task.predictions(self.outputs(x)).numpy()
        return predictions

    def predict_proba(self, x: Any) -> np.ndarray:
        """Return probabilities, a column for each class; ``x`` as for :meth:`predict`.

        A task without probabilities, such as regression, is refused.
        """
        found = self.task.probabilities(self.outputs(x))
        check(
            found is not None,
            "predict_proba",
            f"{self.task.name} has no probabilities",
            "use predict",
        )
        assert found is not None
        probabilities: np.ndarray = found.numpy()
        return probabilities

    def outputs(self, x: Any) -> Tensor:
        """Return what the model itself gives for records ``x``: scores, logits or numbers."""
        records = self._records(x)
        run = partial(outputs_of, self.model, {})
        with torch.no_grad():
            parts = torch.split(records, _RECORDS_AT_ONCE)
            found = [self.task.outputs(run, self.inputs(part)) for part in parts]
        return torch.cat(found)

    def _records(self, x: Any) -> Tensor:
        """Stored records: features of a table, or an array as it is."""
        table = isinstance(x, dict) or hasattr(x, "columns") or hasattr(x, "column_names")
        if self.schema is not None and table:
            x = self.schema.features(x)
        try:
            given = x if isinstance(x, Tensor) else np.array(x)
            if isinstance(given, np.ndarray) and given.dtype.kind not in "biuf":
                given = given.astype(np.float32)
            records = torch.as_tensor(given)
        except (TypeError, ValueError) as error:
            raise DataError(
                "records",
                "cannot be read as an array of numbers",
                "give one row of numbers per record",
            ) from error
        if records.dtype == torch.float64:
            records = records.to(torch.float32)
        flat = tuple(records.shape[1:])
        check(
            flat == self.shape,
            "records",
            f"have shape {flat}, the model takes {self.shape}",
            "give the features of training",
            DataError,
        )
        check(len(records) > 0, "records", "there are none", "give at least one", DataError)
        check(
            bool(torch.isfinite(records).all()) if records.is_floating_point() else True,
            "records",
            "hold something that is not a number",
            "fill or drop missing values first",
            DataError,
        )
        return records


def load(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    task: Task | None = None,
    common: bool = False,
) -> Predictor:
    """Load a trained model, ready to predict.

    Parameters
    ----------
    folder
        A finished run, a saved result, the server's folder of a study, a site's folder (its newest
        model) or one of the models in it (``models/RUN``).
    model
        For a module of your own: a new one of the same kind, which is filled with the trained
        weights. A model that dpfl built by name is built again.
    task
        Needed only where the task has functions of your own.
    common
        Leave out the part of the model that is a site's own. It is in the site's folder, and is
        never taken from any other.

    Examples
    --------
    ::

        predictor = dpfl.load("runs/first")
        predictor.predict(records)
    """
    place = RunFolder(_model_folder(Path(folder)))
    site = _site_of(place.path)
    card = ModelCard.read(place.card)
    learned = card.make_task(task)
    module = card.make_model(learned) if model is None else model
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            "load", f"model = {module!r} is not a module", "give a torch.nn.Module"
        )
    _fill(module, place.model, card.frozen)
    personal = ""
    for file, words in PERSONAL.items() if site is not None and not common else ():
        if (place.path / file).exists():
            personal = words
            _replace(module, place.path / file, _read_tensors(place.path / file))
    schema = card.make_schema()
    if schema is None and site is not None and (site / SCHEMA_FILE).exists():
        schema = Schema.read(site / SCHEMA_FILE)
    return Predictor(
        model=module.eval(),
        task=learned,
        inputs=card.make_inputs(),
        shape=card.shape,
        schema=schema,
        note=card.note,
        personal=personal,
    )


def saved_models(site: Path) -> list[Path]:
    """Return the folders of the models that a site was sent, the newest last."""
    files = list((site / MODELS).glob("*/model.safetensors"))
    files.sort(key=lambda path: (path.stat().st_mtime_ns, str(path)))
    return [path.parent for path in files]


def _model_folder(folder: Path) -> Path:
    """Return where the model of a folder is: of a site's, its newest."""
    if not (folder / SITE_FILE).is_file():
        return folder
    models = saved_models(folder)
    if not models:
        raise FolderError(str(folder), "has no model yet", "wait for the end of a study")
    return models[-1]


def _site_of(folder: Path) -> Path | None:
    """Return the site's folder that a model's folder is in, if it is in one."""
    models = folder.resolve().parent
    held = models.name == MODELS and (models.parent / SITE_FILE).is_file()
    return models.parent if held else None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors by name, all of them finite numbers."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise FolderError(
            str(path), f"cannot be read ({error})", "name the folder of a finished run"
        ) from error
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise FolderError(
                str(path),
                f"'{name}' holds numbers that are not finite",
                "look at the last rounds of training",
            )
    return tensors


def _fill(module: nn.Module, path: Path, frozen: str) -> None:
    """Copy the weights of a file into a module, which must hold all that the module learns.

    ``frozen`` is the digest that the module's other parameters must have, if any.
    """
    tensors = _read_tensors(path)
    wanted = {name for name, one in module.named_parameters() if one.requires_grad}
    _replace(module, path, {**dict.fromkeys(wanted), **tensors})
    kept = {name: one for name, one in module.named_parameters() if name not in tensors}
    check(
        not frozen or tensors_digest(kept) == frozen,
        str(path),
        "the model's frozen parameters are not those of training, and the file has none",
        "give a model with the same frozen weights",
    )


def _replace(module: nn.Module, path: Path, tensors: Mapping[str, Tensor | None]) -> None:
    """Copy tensors of a file into a module; what does not fit, or is None, is named."""
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        shapes = [None if x is None else tuple(x.shape) for x in (parameters.get(name), tensor)]
        if tensor is None or shapes[0] != shapes[1]:
            raise ConfigurationError(
                str(path),
                f"'{name}' has shape {shapes[0]} in the model and {shapes[1]} in the file",
                "give the model that was trained, with the same settings",
            )
        with torch.no_grad():
            parameters[name].copy_(tensor)


# -- files -----------------------------------------------------------------------------------------


def read_records(path: Path, predictor: Predictor, drop: tuple[str, ...] = ()) -> Any:
    """Read a CSV or Parquet file as records for a predictor.

    ``path`` is the file; a model with a schema takes its columns by name. Without one, the file's
    columns but for those in ``drop`` are the features, in their order.
    """
    check_kind(path)
    check(path.is_file(), str(path), "is not there", "check the path", DataError)
    columns, rows = read_columns(path)
    for name in drop:
        check(
            columns.pop(name, None) is not None,
            str(path),
            f"has no column '{name}'",
            f"its columns are {', '.join(columns)}",
            DataError,
        )
    check(bool(rows), str(path), "holds no record", "give at least one", DataError)
    if predictor.schema is not None:
        return predictor.schema.features(columns, str(path), rows)
    size = int(np.prod(predictor.shape))
    check(
        len(columns) == size,
        str(path),
        f"has {len(columns)} columns, the model takes {size}",
        "give the features of training in their order; leave the label out",
        DataError,
    )
    features = np.stack(list(number_columns(columns, str(path), rows).values()), axis=1)
    return features.astype(np.float32).reshape(len(rows), *predictor.shape)
