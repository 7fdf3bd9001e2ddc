"""The model of an experiment file: its name, the weights it starts from, and what is frozen."""

from pydantic import Field
from torch import nn

from dpfl.core.checks import check
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.models import freeze, load_weights, make_model
from dpfl.models.features import auto_features
from dpfl.runs.toml_file import Section, in_section


class ModelSection(Section):
    """A model by name; ``hidden`` is the width of the models that leave it open.

    ``features`` names public features (:mod:`dpfl.models.features`) that the model is built on, or
    is "auto": those that fit the records and the budgets. ``weights`` is a .safetensors file of
    public weights to start from. ``freeze`` lists the names of layers or parameters that stay as
    they start. ``weights_sha256`` is the digest of the file: it is filled in where a person names
    the file (:mod:`dpfl.runs.named_files`), and a file that has changed since is refused.
    """

    name: str = "logistic"
    features: str | None = None
    hidden: int = Field(default=64, ge=1)
    weights: str | None = None
    weights_sha256: str | None = None
    freeze: list[str] | None = None

    def named_features(
        self, shape: tuple[int, ...], inputs: Inputs, signal: float | None
    ) -> str | None:
        """The name of the features; None for a model of the records themselves."""
        return auto_features(shape, inputs, signal) if self.features == "auto" else self.features

    def build(
        self,
        shape: tuple[int, ...],
        classes: int,
        seed: PublicSeed,
        inputs: Inputs = NUMBERS,
        signal: float | None = None,
    ) -> nn.Module:
        """Build the model with its reproducible start.

        ``signal`` is that of the federation, by which "auto" chooses features; None where budgets
        are not known.
        """
        own = seed.child("model")
        features = self.named_features(shape, inputs, signal)
        model = make_model(self.name, shape, classes, own, self.hidden, inputs, features)
        loaded = None
        if self.weights is not None:
            loaded = load_weights(model, self.weights, self.weights_sha256)
        with in_section("model"):
            missing = freeze(model, self.freeze or ()) - (set() if loaded is None else loaded)
        check(
            loaded is None or not missing,
            "[model] freeze",
            f"'{min(missing, default='')}' is frozen, and {self.weights} does not hold it",
            "learn it, or add it to the weights",
        )
        return model


class OfferedModel(ModelSection):
    """The model of a study between sites, which build it themselves: no file is at all of them."""

    weights: None = None
    weights_sha256: None = None
