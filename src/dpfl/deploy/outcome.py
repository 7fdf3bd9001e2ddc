"""What a site has of a study that has ended: the model, tried on its own test records for its own
eyes.

::

    models/RUN/study.toml           what the model was trained by
    models/RUN/model.safetensors    the common model
    models/RUN/private.safetensors  the part that never left the site, where the method has one
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from dpfl.core.errors import ConfigurationError, DataError, FolderError, PeerError
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.folder import RunFolder

MODELS, PRIVATE = "models", "private.safetensors"
_ROOM = 1 << 20  # for names and shapes, above the numbers themselves


def keep_model(folder: Path, run: str, study: StudyFile, payload: bytes, private: bytes) -> Path:
    """Write a model that a server has sent, once it is seen to be one of the study's; the private
    part is as it was kept.
    """
    layout = Layout.of_module(study.build_model())
    vector = _read(payload, layout, "the server's model")
    place = folder / MODELS / _file_name(run)
    write_safely(place / STUDY_FILE, study.to_toml().encode())
    if private:
        write_safely(place / PRIVATE, private, secret=True)
    RunFolder(place).save_model(
        vector, layout, "NOT PRIVATE: SEEDED" if study.run.noise == "seeded" else ""
    )
    return place


def _file_name(run: str) -> str:
    """A server chooses the run's name: as a folder it must stay inside ``models``, and be no other
    run's.
    """
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", run)[:60]
    return plain if plain == run else f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"


def _read(payload: bytes, layout: Layout, where: str) -> Tensor:
    largest = 8 * layout.size + _ROOM
    if len(payload) > largest:
        raise PeerError(where, f"has {len(payload)} bytes", f"send at most {largest}")
    try:
        vector = layout.flatten(safetensors.load(payload))
    except (SafetensorError, ValueError) as error:
        raise PeerError(where, f"cannot be read ({error})", "send it as safetensors") from error
    if not torch.isfinite(vector).all():
        raise PeerError(
            where, "holds numbers that are not finite", "look at the last rounds of the study"
        )
    return vector


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A model to be tried: one that was delivered, or one that was brought by hand."""

    name: str
    study: StudyFile
    model: Path
    private: Path | None = None

    def tried(self, site: str, federation: Federation) -> dict[str, Any]:
        """How good it is on the site's test records, beside always naming the most common class."""
        shard = federation.shards[site]
        if len(shard.test_labels) == 0:
            raise DataError(f"site '{site}'", "has no test records", "give it more records")
        about, own = self.study.study, list(federation.feature_shape)
        if own != about.feature_shape or federation.classes > about.classes:
            raise ConfigurationError(
                f"study '{about.name}'",
                f"is about records of shape {about.feature_shape} and {about.classes} classes, not {own} and "
                f"{federation.classes}",
                "name the study that the model belongs to",
            )
        model = self.study.build_model()
        layout = Layout.of_module(model)
        try:
            vector = _read(_bytes(self.model), layout, str(self.model))
        except PeerError as error:
            raise DataError(
                str(self.model),
                f"is no model of this study ({error.problem})",
                "name a model and the study it belongs to",
            ) from error
        private = {} if self.private is None else dict(safetensors.load(_bytes(self.private)))
        tested = Evaluation(model=model, layout=layout, federation=federation, device="cpu")
        commonest = torch.bincount(shard.test_labels).max().item() / len(shard.test_labels)
        return {
            "run": self.name,
            "study": self.study.study.name,
            "method": self.study.method.name,
            "test_records": len(shard.test_labels),
            "commonest_class": commonest,
            **vars(tested(vector, self.study.strategy().personal, private)),
        }


def outcomes(folder: Path) -> list[Outcome]:
    """What has been delivered to a site, the newest last."""
    found = sorted(
        (folder / MODELS).glob("*/model.safetensors"),
        key=lambda path: (path.stat().st_mtime_ns, str(path)),
    )
    return [
        Outcome(
            name=path.parent.name,
            study=StudyFile.from_file(path.parent / STUDY_FILE),
            model=path,
            private=path.with_name(PRIVATE) if path.with_name(PRIVATE).exists() else None,
        )
        for path in found
    ]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FolderError(
            str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from error
