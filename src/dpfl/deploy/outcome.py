"""What a site has of a study that has ended: the model, and how good it is on the site's records.

::

    models/RUN/study.toml           what the model was trained by
    models/RUN/model.safetensors    the common model
    models/RUN/private.safetensors  the part that never left the site, where the method has one

Beside them is the personal finish, where the model has one (:mod:`dpfl.deploy.finish`).
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, torch as safetensors
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, FolderError, PeerError
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.deploy.records import fits, for_task
from dpfl.deploy.site_folder import MODELS as MODELS
from dpfl.engine.evaluation import Evaluation, Scores
from dpfl.privacy.flags import public_note
from dpfl.rounds import buffer_shapes, write_buffers
from dpfl.runs.deployment import STUDY_FILE, Offer, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.toml_file import read_toml

PRIVATE = "private.safetensors"
_NAMES_BYTES = 1 << 20  # for names and shapes, beside the numbers themselves


def keep_model(folder: Path, run: str, study: Offer, payload: bytes) -> Path:
    """Write a model that a server has sent, once it is found to fit the study.

    ``run`` and ``study`` say what it is a model of, ``payload`` is the model as safetensors.
    Returns the folder that the model is in.
    """
    model = study.build_model()
    layout = Layout.of_module(model)
    vector, buffers = _read(payload, study, model, "the server's model")
    own = folder / MODELS / _file_name(run)
    write_safely(own / STUDY_FILE, study.to_toml().encode())
    RunFolder(own).save_model(vector, layout, public_note(study.flags), buffers)
    return own


def _file_name(run: str) -> str:
    """Make a folder's name of a run's, which a server chooses: it must not lead elsewhere."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", run)[:60]
    return plain if plain == run else f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"


def _read(
    payload: bytes, study: Offer, model: nn.Module, where: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Read the parameters of a study's model, as one vector, and the buffers that it released."""
    strategy = study.strategy().for_model(model)
    layout, shapes = Layout.of_module(model), buffer_shapes(model, strategy.releases)
    numbers = layout.size + sum(math.prod(shape) for shape in shapes.values())
    largest, given = 8 * numbers + _NAMES_BYTES, f"has {len(payload)} bytes"
    check(len(payload) <= largest, where, given, f"send at most {largest}", PeerError)
    try:
        tensors = safetensors.load(payload)
        buffers = {
            name: tensors.pop(name).reshape(shapes[name]) for name in shapes if name in tensors
        }
        vector = layout.flatten(tensors)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise PeerError(where, f"cannot be read ({error})", "send it as safetensors") from error
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (vector, *buffers.values()))
    remedy = "look at the last rounds of the study"
    check(finite, where, "holds numbers that are not finite", remedy, PeerError)
    return vector, buffers


@dataclass(frozen=True, kw_only=True)
class TriedModel:
    """How good a model is on a site's test records.

    ``test_records``: how many they are.
    ``scores``: by the task's metrics, without noise and not accounted: for the site alone.
    ``constant``: what the same prediction for every record scores, the shares of the classes in the
    test records or the mean of their targets.
    """

    run: str
    study: str
    method: str
    test_records: int
    task: str
    constant: float | None
    scores: Scores

    def to_dict(self) -> Plain:
        """Return plain values."""
        told = {name: value for name, value in vars(self).items() if name != "scores"}
        return {**told, **self.scores.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A model that can be tried: one that was delivered, or one brought by other means.

    ``private`` is the part that never left the site, where the method has one. ``delivered`` says
    that it is kept in the site's folder.
    """

    name: str
    study: Offer
    model: Path
    private: Path | None = None
    delivered: bool = False

    def tried(self, site: str, federation: Federation, metric: str | None = None) -> TriedModel:
        """Try the model on the test records of ``site``, the one client of ``federation``.

        ``metric`` is another one than the study's. Nothing is sent. A model or records that do not
        belong to the study are refused.
        """
        about, where = self.study.study, f"site '{site}'"
        some = len(federation.shards[site].without_blanks().test_labels) > 0
        check(some, where, "has no test records", "give it more records", DataError)
        learned = self.learned(federation, metric)
        task = learned.task.single
        labels = learned.task.records(learned.shards[site].without_blanks().test_labels)
        model, vector, _ = self.loaded()
        private = {} if self.private is None else dict(safetensors.load(_bytes(self.private)))
        layout = Layout.of_module(model)
        evaluate = Evaluation(model=model, layout=layout, federation=learned, device="cpu")
        constant = task.constant(labels)
        return TriedModel(
            run=self.name,
            study=about.name,
            method=self.study.method.name,
            test_records=len(labels),
            task=task.name,
            constant=None
            if constant is None
            else task.score(constant.repeat(len(labels), 1), labels),
            scores=evaluate(vector, self.study.strategy().personal, private, details=True),
        )

    def learned(self, federation: Federation, metric: str | None = None) -> Federation:
        """Return a site's records with targets as the study takes them, or refuse other records.

        ``metric`` is another one than the study's.
        """
        about, task = self.study.study, self.study.learned().with_metric(metric)
        shape, own = about.feature_shape, list(federation.record_shape)
        problem = f"is about records of shape {shape} and targets ({task}), not {own} and"
        problem, remedy = f"{problem} {federation.task}", "name the study that the model belongs to"
        check(fits(federation, self.study), f"study '{about.name}'", problem, remedy)
        return for_task(federation, task)

    def loaded(self) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
        """Return the study's model with its released buffers, its parameters as one vector, and the
        buffers. A file that is not a model of the study is refused.
        """
        model = self.study.build_model()
        try:
            vector, buffers = _read(_bytes(self.model), self.study, model, str(self.model))
        except PeerError as error:
            problem = f"is not a model of this study ({error.problem})"
            remedy = "name a model and the study it belongs to"
            raise DataError(str(self.model), problem, remedy) from error
        write_buffers(model, buffers)
        return model, vector, buffers


def outcomes(folder: Path) -> list[Outcome]:
    """Return what has been delivered to a site, the newest last."""
    models = list((folder / MODELS).glob("*/model.safetensors"))
    models.sort(key=lambda path: (path.stat().st_mtime_ns, str(path)))
    return [
        Outcome(
            name=path.parent.name,
            study=_agreed(path.with_name(STUDY_FILE)),
            model=path,
            private=path.with_name(PRIVATE) if path.with_name(PRIVATE).exists() else None,
            delivered=True,
        )
        for path in models
    ]


def _agreed(path: Path) -> Offer:
    """Read a study that a server has offered, and open no file for it."""
    return StudyFile.from_dict(read_toml(path), str(path))


def find_outcome(folder: Path, run: str | None, model: Path | None, study: Path | None) -> Outcome:
    """Find the model that a person means.

    ``run`` names a study whose model was delivered; without it, the latest one is meant. ``model``
    and its ``study`` file name one that was brought by other means.
    """
    both = (model is None) == (study is None)
    check(both, "options", "--model and --study belong together", "give both, or neither")
    if model is not None and study is not None:
        remedy = "give --run, or --model and --study"
        check(run is None, "--run", "a model was named as well", remedy)
        return Outcome(name=str(model), study=StudyFile.from_file(study), model=model)
    known = {outcome.name: outcome for outcome in outcomes(folder)}
    remedy = "wait for a study's end, or give --model and --study"
    check(bool(known), str(folder), "has no model yet", remedy, FolderError)
    name = list(known)[-1] if run is None else run
    remedy = f"name one of: {', '.join(known)}"
    check(name in known, "--run", f"there is no model of '{name}'", remedy, ConfigurationError)
    return known[name]


def _bytes(path: Path) -> bytes:
    """Read a file that a person has named."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise FolderError(str(path), problem, "check the path") from error


def pack_private(private: Mapping[str, Tensor]) -> bytes:
    """Write the private parts of a model; nothing where there are none."""
    tensors = {name: tensor.contiguous() for name, tensor in private.items()}
    return safetensors.save(tensors) if tensors else b""


def unpack_private(packed: bytes) -> dict[str, Tensor]:
    """Read what :func:`pack_private` wrote."""
    return dict(safetensors.load(packed)) if packed else {}
