"""What :func:`dpfl.train` is given: the wrong kind of thing is refused, with what to give."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dpfl.core.checks import MOST_ROUNDS, check, finite, one_of, whole_number
from dpfl.core.random import PublicSeed
from dpfl.data.federation import Federation
from dpfl.engine import ENGINES
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.sim.callbacks import EarlyStopping
from dpfl.strategy import Strategy

_KINDS: dict[str, tuple[type, str]] = {
    "model": (nn.Module, "give a torch.nn.Module; dpfl.models.make_model builds one by name"),
    "federation": (Federation, "build one, for instance with dpfl.Federation.from_arrays"),
    "strategy": (Strategy, "call a method: one of dpfl.methods, with its settings"),
}


def check_arguments(
    *, rounds: Any, seed: Any, workers: Any, evaluate_every: Any, **given: Any
) -> None:
    """Refuse arguments of the wrong kind, before anything is copied, opened or charged.

    ``given`` are ``model``, ``federation``, ``strategy``, ``engine``, ``ledger``, ``new_ledger``,
    ``misreports``, ``accounted`` and ``progress``; what is left out is not checked.
    """
    for name, (kind, remedy) in _KINDS.items():
        own = given.get(name)
        good = name not in given or isinstance(own, kind)
        check(good, "train", f"{name} is {_named(own)}, not a {kind.__name__}", remedy)
    parameters = given["model"].parameters() if "model" in given else ()
    known = not any(map(nn.parameter.is_lazy, parameters))
    check(known, "train", "the model has layers without shapes", "call it on one batch first")
    counts = {"rounds": rounds, "workers": workers, "evaluate_every": evaluate_every}
    own = given.get("strategy")
    if rounds is None and isinstance(own, Strategy) and own.recipe is not None:
        del counts["rounds"]  # it plans them
    for name, value in counts.items():
        whole_number("train", name, value, most=MOST_ROUNDS)
    if seed is not None:
        PublicSeed(seed)
    if "engine" in given:
        one_of("train", ENGINES, engine=given["engine"])
    ledger = given.get("ledger")
    remedy = "give a path, or leave it out to keep the ledger in memory"
    path = ledger is None or isinstance(ledger, str | Path)
    check(path, "train", f"ledger is {_named(ledger)}, not a path", remedy)
    opened = ledger is not None or not given.get("new_ledger")
    check(opened, "train", "new_ledger=True without a ledger", "say which: give ledger=...")
    metric = given.get("accounted")
    remedy = "give dpfl.AccountedMetric(metric=..., every=..., share=...)"
    measured = metric is None or isinstance(metric, AccountedMetric)
    check(measured, "train", f"accounted is {_named(metric)}, not an AccountedMetric", remedy)
    progress = given.get("progress")
    remedy = "give True, False, or a function of rounds done, rounds planned and the last record"
    called = progress is None or isinstance(progress, bool) or callable(progress)
    check(called, "train", f"progress is {_named(progress)}, not a function", remedy)
    claims = given.get("misreports") or {}
    good = isinstance(claims, Mapping) and all(map(_factor, claims.values()))
    check(good, "train", f"misreports = {claims!r:.100}", "give {client: factor}, factors above 0")


def check_hooks(*, folder: Any, resume: Any, callbacks: Any, early_stopping: Any) -> None:
    """Refuse a ``folder`` that is not a path, a ``resume`` of nothing, ``callbacks`` that cannot be
    called, and an ``early_stopping`` of another kind.
    """
    path, remedy = folder is None or isinstance(folder, str | Path), "give a path"
    check(path, "train", f"folder is {_named(folder)}, not a path", remedy)
    remedy = "say which: give folder=..."
    check(folder is not None or not resume, "train", "resume=True without a folder", remedy)
    good = isinstance(callbacks, Sequence) and all(map(callable, callbacks))
    remedy = "give a list of functions of one argument"
    check(good, "train", f"callbacks = {callbacks!r:.100}", remedy)
    good = early_stopping is None or isinstance(early_stopping, EarlyStopping)
    remedy = "give dpfl.EarlyStopping(metric=..., patience=...)"
    check(good, "train", f"early_stopping = {early_stopping!r:.100}", remedy)


def _factor(value: Any) -> bool:
    return isinstance(value, int | float) and finite(value) and value > 0


def _named(value: Any) -> str:
    """A value as a message names it: a short text as it is, anything else by its kind."""
    return repr(value) if isinstance(value, str) and len(value) < 40 else type(value).__name__
