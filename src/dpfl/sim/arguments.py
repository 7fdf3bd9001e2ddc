"""What :func:`dpfl.train` is given: the wrong kind of thing is refused, with what to give."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import MOST_ROUNDS, check, finite, one_of, whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.engine import ENGINES
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.sim.callbacks import EarlyStopping
from dpfl.strategy import Strategy

_KINDS: dict[str, tuple[Any, str, str]] = {
    "model": (
        nn.Module,
        "a Module",
        "give a torch.nn.Module; dpfl.models.make_model builds one by name",
    ),
    "federation": (
        Federation,
        "a Federation",
        "build one, for instance with dpfl.Federation.from_arrays",
    ),
    "strategy": (
        Strategy,
        "a Strategy",
        "call a method: one of dpfl.methods, with its settings",
    ),
    "ledger": (
        str | Path | None,
        "a path",
        "give a path, or leave it out to keep the ledger in memory",
    ),
    "folder": (str | Path | None, "a path", "give a path"),
    "accounted": (
        AccountedMetric | None,
        "an AccountedMetric",
        "give dpfl.AccountedMetric(metric=..., every=..., share=...)",
    ),
    "early_stopping": (
        EarlyStopping | None,
        "an EarlyStopping",
        "give dpfl.EarlyStopping(metric=..., patience=...)",
    ),
    "personal_finish": (bool, "True or False", "give one of the two"),
}
"""What an argument may be, and what to give."""


def check_arguments(
    *,
    rounds: Any,
    seed: Any,
    workers: Any,
    evaluate_every: Any,
    engine: Any,
    new_ledger: bool,
    misreports: Any,
    progress: Any,
    resume: bool,
    callbacks: Any,
    **typed: Any,
) -> None:
    """Refuse arguments of the wrong kind, before anything is copied, opened or charged.

    ``typed`` are the arguments that are told by their type alone, all of :data:`_KINDS`.
    """
    for name, (kind, article, remedy) in _KINDS.items():
        if not isinstance(typed[name], kind):
            raise ConfigurationError(
                "train", f"{name} is {_named(typed[name])}, not {article}", remedy
            )
    lazy = any(map(nn.parameter.is_lazy, typed["model"].parameters()))
    check(not lazy, "train", "the model has layers without shapes", "call it on one batch first")
    counts = {"rounds": rounds, "workers": workers, "evaluate_every": evaluate_every}
    if rounds is None and typed["strategy"].recipe is not None:
        del counts["rounds"]  # it plans them
    for name, value in counts.items():
        whole_number("train", name, value, most=MOST_ROUNDS)
    if seed is not None:
        PublicSeed(seed)
    one_of("train", ENGINES, engine=engine)
    for name, needed, given in (
        ("resume", "folder", resume),
        ("new_ledger", "ledger", new_ledger),
    ):
        if given and typed[needed] is None:
            raise ConfigurationError(
                "train", f"{name}=True without a {needed}", f"say which: give {needed}=..."
            )
    remedy = "give True, False, or a function of rounds done, rounds planned and the last record"
    if not (isinstance(progress, bool) or callable(progress)):
        raise ConfigurationError("train", f"progress is {_named(progress)}, not a function", remedy)
    claims = misreports or {}
    check(
        isinstance(claims, Mapping) and all(map(_factor, claims.values())),
        "train",
        f"misreports = {claims!r:.100}",
        "give {client: factor}, factors above 0",
    )
    remedy = "give a list of functions of one argument"
    check(
        isinstance(callbacks, Sequence) and all(map(callable, callbacks)),
        "train",
        f"callbacks = {callbacks!r:.100}",
        remedy,
    )


def _factor(value: Any) -> bool:
    return isinstance(value, int | float) and finite(value) and value > 0


def _named(value: Any) -> str:
    """A value as a message names it: a short text as it is, anything else by its kind."""
    return repr(value) if isinstance(value, str) and len(value) < 40 else type(value).__name__
