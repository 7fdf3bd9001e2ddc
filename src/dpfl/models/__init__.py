"""Models by name, and the checks that any ``nn.Module`` of the user's must pass.

``make_model`` builds one of the papers' networks; ``check_model`` is run on every model before it
is trained. ``replace_batch_norm`` makes a model with BatchNorm fit, ``load_weights`` and ``freeze``
let it start from public weights and keep a part of them. ``make_features`` builds public features,
and ``linear_head`` a classifier on them.
"""

import inspect
from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, unknown_name
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.models import networks
from dpfl.models.batch_norm import replace_batch_norm as replace_batch_norm
from dpfl.models.checks import check_model as check_model
from dpfl.models.features import auto_features, make_features as make_features
from dpfl.models.preconditioning import OnFeatures, linear_head as linear_head
from dpfl.models.pretrained import freeze as freeze, load_weights as load_weights

_NUMBERS = "alexnet cnn cnn_cifar cnn_small lenet5 logistic mlp resnet18"
MODELS: dict[str, networks.Build] = {name: getattr(networks, name) for name in _NUMBERS.split()}
"""Models of numbers and images: ``MODELS[name](shape, classes, hidden)``."""

_TEXTS = ("lstm", "lstm_shakespeare")
TEXT_MODELS: dict[str, networks.BuildText] = {name: getattr(networks, name) for name in _TEXTS}
"""Models of tokens: ``TEXT_MODELS[name](vocabulary, classes, hidden)``."""


MOST_PARAMETERS = 1 << 26
"""No model with more can be sent: a message has at most 4 GiB."""

_SMALLER = f"give sizes with which it has at most {MOST_PARAMETERS}"

LINEAR_HEAD = "linear_head"
"""A linear classifier on public features, for methods that condition them."""


def about(name: str) -> str:
    """Return the first line of the description of the model called ``name``.

    >>> about("logistic")
    'Multinomial logistic regression.'
    """
    known = {**MODELS, **TEXT_MODELS, LINEAR_HEAD: linear_head}
    return (inspect.getdoc(known[name]) or "").splitlines()[0]


def make_model(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    seed: PublicSeed,
    hidden: int = 64,
    inputs: Inputs = NUMBERS,
    features: str | None = None,
) -> nn.Module:
    """Build a model with a reproducible start that does not touch the global generator.

    ``name`` is one of :data:`MODELS` or :data:`TEXT_MODELS`, ``classes`` how many numbers it gives
    for a record, ``seed`` where its start comes from. ``shape`` is that of one record; ``inputs``
    says how records are read. ``hidden`` is the width of the models that leave it open.
    ``features`` names public features (:mod:`dpfl.models.features`) that the model is built on;
    the model "linear_head" needs them.

    >>> sum(p.numel() for p in make_model("logistic", (64,), 10, PublicSeed(0)).parameters())
    650
    """
    if name not in [*MODELS, *TEXT_MODELS, LINEAR_HEAD]:
        raise unknown_name("model", "model", name, [*MODELS, *TEXT_MODELS, LINEAR_HEAD])
    if features is not None or name == LINEAR_HEAD:
        public = make_features(features or auto_features(shape, inputs, None), shape, inputs)
        if name == LINEAR_HEAD:
            return linear_head(public, classes)
        model = make_model(name, (public.size,), classes, seed, hidden)
        return OnFeatures(OrderedDict(features=public, model=model))
    where = f"model '{name}'"
    tokens = isinstance(inputs, Tokens)
    have, want = ("tokens", "numbers") if tokens else ("numbers", "tokens")
    fitting = TEXT_MODELS if tokens else MODELS
    check(
        name in fitting,
        where,
        f"reads {want}, and the data are {have}",
        f"choose one of {', '.join(sorted(fitting))}",
    )
    build = partial(MODELS.get(name, networks.logistic), shape, classes, hidden)
    if isinstance(inputs, Tokens):
        build = partial(TEXT_MODELS[name], inputs.vocabulary, classes, hidden)
    try:
        with torch.random.fork_rng(devices=[]):
            with torch.device("meta"):  # counted before memory is taken for it
                size = sum(parameter.numel() for parameter in build().parameters())
            check(size <= MOST_PARAMETERS, where, f"has {size} parameters", _SMALLER)
            torch.default_generator.manual_seed(seed.value % 2**63)  # models are built on the CPU
            return build()
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(
            where,
            f"cannot take records of shape {shape}, {classes} classes and hidden = {hidden}",
            "choose another model: logistic and mlp take any shape",
        ) from error
