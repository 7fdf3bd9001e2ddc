"""What a site has of a study that has ended: the model, and how good it is on the site's records.

::

    models/RUN/study.toml           what the model was trained by
    models/RUN/model.safetensors    the common model, and model.json: what it is
    models/RUN/private.safetensors  the site's own model, where a part of it never left the site

Beside them is the personal finish, where the model has one (:mod:`dpfl.deploy.finish`).
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, torch as safetensors
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, FolderError, PeerError
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.deploy.records import fits, for_task
from dpfl.engine.evaluation import Evaluation, Scores
from dpfl.numerics.clipping import all_finite
from dpfl.rounds import buffer_shapes
from dpfl.runs.deployment import STUDY_FILE, Offer, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.model_card import ModelCard, save_model
from dpfl.runs.predictor import PRIVATE as PRIVATE, load, saved_models
from dpfl.runs.site_file import MODELS as MODELS
from dpfl.runs.toml_file import read_toml

_NAMES_BYTES = 1 << 20  # for names and shapes, beside the numbers themselves


def keep_model(folder: Path, run: str, study: Offer, payload: bytes) -> Path:
    """Write a model that a server has sent, once it is found to fit the study.

    ``run`` and ``study`` say what it is a model of, ``payload`` is the model as safetensors. What
    the model is, is written from the study. Returns the folder that the model is in.
    """
    model, layout, vector, buffers = _read(payload, study)
    place = RunFolder(folder / MODELS / _file_name(run))
    write_safely(place.path / STUDY_FILE, study.to_toml().encode())
    card = ModelCard.of_study(study)
    save_model(place, model, card, layout, vector=vector, buffers=buffers)
    return place.path


def own_part(folder: Path, study: Offer, private: Tensor) -> bytes:
    """Write the parameters of a site's own model: what it was sent, with its ``private`` part."""
    personal = study.strategy().personal
    assert personal is not None
    model = load(folder, common=True).model
    layout = Layout.of_module(model)
    named = layout.unflatten(personal.merge(layout.read(model), private, layout))
    return safetensors.save({name: tensor.contiguous() for name, tensor in named.items()})


def _file_name(run: str) -> str:
    """Make a folder's name of a run's, which a server chooses: it must not lead elsewhere."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", run)[:60]
    return plain if plain == run else f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"


def _read(payload: bytes, study: Offer) -> tuple[nn.Module, Layout, Tensor, dict[str, Tensor]]:
    """Read the parameters of a study's model, as one vector, and the buffers that it released.

    The model and its layout are returned with them, as it was first built; what is frozen is the
    site's own, whatever was sent.
    """
    where = "the server's model"
    model, strategy = study.trained()
    layout = Layout.of_module(model)
    shapes = buffer_shapes(model, strategy.releases)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    numbers += sum(math.prod(shape) for shape in shapes.values())
    largest = 8 * numbers + _NAMES_BYTES
    check(
        len(payload) <= largest,
        where,
        f"has {len(payload)} bytes",
        f"send at most {largest}",
        PeerError,
    )
    try:
        tensors = safetensors.load(payload)
        buffers = {
            name: tensors.pop(name).reshape(shapes[name]) for name in shapes if name in tensors
        }
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
        vector = layout.flatten({name: tensors[name] for name in tensors.keys() - frozen})
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise PeerError(where, f"cannot be read ({error})", "send it as safetensors") from error
    check(
        all(map(all_finite, (vector, *buffers.values()))),
        where,
        "holds numbers that are not finite",
        "look at the last rounds of the study",
        PeerError,
    )
    return model, layout, vector, buffers


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

    ``folder`` is where it is, with its card and its study. ``delivered`` says that it is kept in
    the site's folder.
    """

    folder: Path
    study: Offer
    delivered: bool = False

    @property
    def name(self) -> str:
        """The run that the model is of, as its folder is called."""
        return self.folder.name

    @property
    def model(self) -> Path:
        """The model's file."""
        return RunFolder(self.folder).model

    def loaded(self) -> nn.Module:
        """Load the model, with the part that never left the site but without its personal finish.

        One that is not a model of its study is refused.
        """
        model = load(self.folder, common=not (self.folder / PRIVATE).exists()).model
        shapes = {name: one.shape for name, one in self.study.build_model().named_parameters()}
        if shapes != {name: one.shape for name, one in model.named_parameters()}:
            raise DataError(
                str(self.model),
                "is not a model of the study beside it",
                "name a model and the study it belongs to",
            )
        return model

    def tried(self, site: str, federation: Federation, metric: str | None = None) -> TriedModel:
        """Try the model on the test records of ``site``, the one client of ``federation``.

        ``metric`` is another one than the study's. Nothing is sent. A model or records that do not
        belong to the study are refused.
        """
        about = self.study.study
        check(
            len(federation.shards[site].without_blanks().test_labels) > 0,
            f"site '{site}'",
            "has no test records",
            "give it more records",
            DataError,
        )
        learned = self.learned(federation, metric)
        task = learned.task.single
        labels = learned.task.records(learned.shards[site].without_blanks().test_labels)
        model = self.loaded()
        layout = Layout.of_module(model)
        constant = task.constant(labels)
        evaluate = Evaluation(model=model, layout=layout, federation=learned, device="cpu")
        return TriedModel(
            run=self.name,
            study=about.name,
            method=self.study.method.name,
            test_records=len(labels),
            task=task.name,
            constant=None
            if constant is None
            else task.score(constant.repeat(len(labels), 1), labels),
            scores=evaluate(layout.read(model), None, {}, details=True),
        )

    def learned(self, federation: Federation, metric: str | None = None) -> Federation:
        """Return a site's records with targets as the study takes them, or refuse other records.

        ``metric`` is another one than the study's.
        """
        about = self.study.study
        task = self.study.learned().with_metric(metric)
        shape = about.feature_shape
        own = list(federation.record_shape)
        problem = f"is about records of shape {shape} and targets ({task}), not {own} and"
        problem = f"{problem} {federation.task}"
        check(
            fits(federation, self.study),
            f"study '{about.name}'",
            problem,
            "name the study that the model belongs to",
        )
        return for_task(federation, task)


def outcomes(folder: Path) -> list[Outcome]:
    """Return what has been delivered to a site, the newest last."""
    return [outcome_in(model, delivered=True) for model in saved_models(folder)]


def outcome_in(folder: Path, *, delivered: bool = False) -> Outcome:
    """Return the model in a folder; the study beside it opens no file."""
    path = folder / STUDY_FILE
    study = StudyFile.from_dict(read_toml(path), str(path))
    return Outcome(folder=folder, study=study, delivered=delivered)


def find_outcome(folder: Path, run: str | None, model: Path | None) -> Outcome:
    """Find the model that a person means.

    ``run`` names a study whose model was delivered; without it, the latest one is meant. ``model``
    is the folder of one that was brought by other means.
    """
    if model is not None:
        check(run is None, "--run", "a model was named as well", "give --run, or --model")
        return outcome_in(model)
    known = {outcome.name: outcome for outcome in outcomes(folder)}
    check(
        bool(known),
        str(folder),
        "has no model yet",
        "wait for a study's end, or give --model",
        FolderError,
    )
    name = list(known)[-1] if run is None else run
    check(
        name in known,
        "--run",
        f"there is no model of '{name}'",
        f"name one of: {', '.join(known)}",
        ConfigurationError,
    )
    return known[name]


def pack_private(private: Mapping[str, Tensor]) -> bytes:
    """Write the private parts of a model; nothing where there are none."""
    tensors = {name: tensor.contiguous() for name, tensor in private.items()}
    return safetensors.save(tensors) if tensors else b""


def unpack_private(packed: bytes) -> dict[str, Tensor]:
    """Read what :func:`pack_private` wrote."""
    return dict(safetensors.load(packed)) if packed else {}
