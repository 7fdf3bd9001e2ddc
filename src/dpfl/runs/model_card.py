"""``model.json``: what a saved model is, so that it can predict without its federation.

The file lies beside ``model.safetensors`` and is meant for the world. It holds public constants
only: the task, how records become inputs, the schema, how the model was built, and the public
flags. It holds no count of records or clients, no client's name and nothing that was measured.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, read_problem
from dpfl.core.files import parsed, write_safely
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.data.inputs import NUMBERS, Inputs, Numbers, Pixels, Tokens
from dpfl.data.schema import Schema
from dpfl.models import make_model
from dpfl.privacy.flags import public_note
from dpfl.runs.deployment import Offer
from dpfl.runs.folder import RunFolder, tensors_digest
from dpfl.runs.validation import check_types
from dpfl.tasks import Task, make_task

if TYPE_CHECKING:
    from torch import Tensor, nn

CARD_FORMAT = "dpfl-model-1"
"""The card's format, and its version."""
_INPUTS = {"numbers": Numbers, "pixels": Pixels, "tokens": Tokens}


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a saved model is.

    ``task`` is what it has learned, as plain values; ``inputs`` say how stored records become its
    input, and ``shape`` is that of one record. ``schema`` prepares tables, and is None where the
    model was trained on arrays. ``built`` are name and settings of a model that dpfl built, None
    for a module of the user's own, whose class is ``module``. ``frozen`` is the digest of such a
    module's frozen parameters, which are not saved. ``note`` holds the public flags.
    """

    task: Plain
    inputs: Plain
    shape: tuple[int, ...]
    schema: Plain | None = None
    built: Plain | None = None
    module: str = ""
    frozen: str = ""
    note: str = ""

    @classmethod
    def of(
        cls, model: "nn.Module", federation: Federation, *, built: Plain | None, note: str
    ) -> Self:
        """Describe the ``model`` of a federation; ``built`` and ``note`` are those of the card."""
        schema = federation.schema
        frozen = {k: p for k, p in model.named_parameters() if not (built or p.requires_grad)}
        kind = next(name for name, own in _INPUTS.items() if isinstance(federation.inputs, own))
        return cls(
            task=federation.task.to_dict(),
            inputs={"kind": kind, **_plain(federation.inputs)},
            shape=federation.record_shape,
            schema=None if schema is None else schema.to_dict(),
            built=built,
            module=type(model).__qualname__,
            frozen=tensors_digest(frozen) if frozen else "",
            note=note,
        )

    @classmethod
    def of_study(cls, study: Offer) -> Self:
        """Describe the model of a study between sites: it follows from what they agreed to."""
        model = study.model
        schema = study.study.schema
        shape = tuple(study.study.feature_shape)
        built = model.model_dump(include={"name", "hidden"})
        if (features := model.named_features(shape, NUMBERS, None)) is not None:
            built["features"] = features
        return cls(
            task=study.learned().to_dict(),
            inputs={"kind": "numbers", **_plain(NUMBERS)},
            shape=shape,
            schema=schema,
            built=built,
            note=public_note(study.flags),
        )

    def make_task(self, given: Task | None = None) -> Task:
        """Return the task; one with functions of the user's own must be ``given``."""
        return make_task(self.task) if given is None else given

    def make_inputs(self) -> Inputs:
        """Return how records become the model's input."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in self.inputs.items()}
        kind: Any = _INPUTS[str(values.pop("kind"))]
        found: Inputs = kind(**values)
        return found

    def make_schema(self) -> Schema | None:
        """Return what prepares tables, None for a model of arrays."""
        if self.schema is None:
            return None
        return Schema.from_dict(self.schema, "model.json")

    def make_model(self, task: Task) -> "nn.Module":
        """Build the model that dpfl built for training, its weights still those of a start."""
        check(
            self.built is not None,
            "model.json",
            f"holds the weights of a {self.module} of the user's own",
            f"give one: dpfl.load(folder, model={self.module}(...))",
        )
        settings = dict(self.built or {})
        own: Any = {"seed": PublicSeed(0), "inputs": self.make_inputs()}
        try:
            return make_model(settings.pop("name"), self.shape, task.width, **settings, **own)
        except (KeyError, TypeError) as error:
            raise FolderError(
                "model.json", f"describes no model ({read_problem(error)})", "restore it"
            ) from error

    def write(self, path: Path) -> None:
        """Write the card as JSON, with the version of its format, to ``path``."""
        told = {"format": CARD_FORMAT, **asdict(self)}
        write_safely(path, (json.dumps(told, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file back; anything else is refused."""
        remedy = "name the folder of a finished run, or of a saved result"
        check(path.is_file(), str(path), "is not there", remedy, FolderError)
        try:
            values: Mapping[str, Any] = parsed(path.read_text())
            if values["format"] != CARD_FORMAT:
                raise ValueError(f"its format is '{values['format']}'")
            told = {name: own for name, own in values.items() if name != "format"}
            found = cls(**{**told, "shape": tuple(told["shape"])})
            check_types(found)
            check_types(found.make_inputs())
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FolderError(str(path), f"describes no model ({error})", remedy) from error


def _plain(inputs: Inputs) -> Plain:
    """The settings of inputs, as a file holds them."""
    settings: Plain = json.loads(json.dumps(asdict(inputs)))
    return settings


def save_model(
    place: RunFolder,
    model: "nn.Module",
    card: ModelCard,
    layout: Layout,
    *,
    vector: "Tensor | None" = None,
    buffers: "Mapping[str, Tensor]",
) -> None:
    """Write a model and what it is: every saved model is written here.

    ``layout`` is that of its learned parameters and ``vector`` their values, those that it holds if
    None; ``buffers`` are public. What is frozen is written too where dpfl built the model, which
    could not be built again without it.
    """
    constants = dict(buffers)
    if card.built:
        learned = {block.name for block in layout}
        frozen = {name: p for name, p in model.named_parameters() if name not in learned}
        constants |= {name: parameter.detach() for name, parameter in frozen.items()}
    place.save_model(layout.read(model) if vector is None else vector, layout, card.note, constants)
    card.write(place.card)
