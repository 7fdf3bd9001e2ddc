"""Public weights to start from, and parts of a model that stay as they are."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.core.files import content_of


def read_weights(path: Path) -> bytes:
    """The content of a file of weights."""
    try:
        return content_of(path)
    except OSError as error:
        raise ConfigurationError(
            f"weights {path}", f"cannot be read ({error.strerror})", "check the path"
        ) from error


def load_weights(model: nn.Module, path: Path | str, sha256: str | None = None) -> set[str]:
    """Copy the tensors of the .safetensors file ``path`` into a ``model``, by their names.

    Parameters that the file does not have stay as they are. A tensor whose name or shape the model
    does not have is refused, as is a file with another digest than ``sha256``. The weights must be
    public: no budget is charged for what they were made of. Returns the names.
    """
    where = f"weights {path}"
    content = read_weights(Path(path))
    check(
        sha256 in (None, hashlib.sha256(content).hexdigest()),
        where,
        "has changed: its digest is not the one on record",
        "give back the file, or leave weights_sha256 out to start from this one",
    )
    try:
        found = load(content)
    except SafetensorError as error:
        raise ConfigurationError(
            where, f"is not a .safetensors file ({error})", "save it with safetensors"
        ) from error
    own = model.state_dict()
    for name, tensor in found.items():
        if name not in own:
            raise ConfigurationError(where, f"'{name}' is not in the model", _nearest(name, own))
        shapes = tuple(tensor.shape), tuple(own[name].shape)
        check(
            shapes[0] == shapes[1],
            where,
            f"'{name}' has shape {shapes[0]}, and the model's has {shapes[1]}",
            "leave it out of the file, or fit the model",
        )
    model.load_state_dict(found, strict=False)
    return set(found)


def _nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name, or the first of them: a model may have hundreds."""
    near = did_you_mean(name, known)
    return near if "?" in near else f"use its names, such as {', '.join(sorted(known)[:6])}"


def freeze(model: nn.Module, prefixes: Iterable[str]) -> set[str]:
    """Freeze the parameters whose names begin with one of these prefixes; return their names.

    A prefix is the name of a parameter or of a layer: ``"body"`` stands for ``"body.0.weight"``,
    not for ``"body2.weight"``.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> sorted(freeze(model, ["0"]))
    ['0.bias', '0.weight']
    """
    parameters = dict(model.named_parameters())
    frozen = set()
    for prefix in prefixes:
        names = {name for name in parameters if f"{name}.".startswith(f"{prefix}.")}
        if not names:
            parts = [name.split(".") for name in parameters]
            known = {".".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
            raise ConfigurationError(
                "freeze", f"'{prefix}' begins the name of no parameter", _nearest(prefix, known)
            )
        frozen |= names
    for name in frozen:
        parameters[name].requires_grad_(False)
    return frozen
