"""From an experiment file and command-line options to one experiment. Options win over the file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.datasets.named import DATASETS
from dpfl.methods import METHODS, find
from dpfl.runs.experiment import Experiment
from dpfl.runs.toml_file import read_toml

File = Annotated[Path | None, typer.Argument(help="Experiment file (TOML).", show_default=False)]
Data = Annotated[Path | None, typer.Option(help="Where data sets that do not ship with dpfl lie.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


def _option(kind: Any, text: str, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=text, show_default=False, **more)]


# What describes an experiment on the command line, whichever command asks for it.
EXPERIMENT: dict[str, Any] = {
    "dataset": _option(str, "Data set, or a folder with one CSV or Parquet file per client."),
    "label": _option(str, "Label column of files in a folder (default: the last)."),
    "budgets": _option(str, "Distribution, number, list or file of epsilons."),
    "delta": _option(float, "Delta of every client."),
    "clip": _option(
        float,
        "Largest norm of one record's gradient (client-level methods: of one client's update).",
    ),
    "noise_multiplier": _option(
        float, "Noise of a client-level method, over its clip (default: from the budgets)."
    ),
    "partition": _option(str, "natural, iid, shards, classes, dirichlet or unequal."),
    "clients": _option(int, "Number of clients."),
    "records": _option(int, "Training records per client."),
    "alpha": _option(float, "Knob of the dirichlet and unequal partitions."),
    "model": _option(str, "Model."),
    "lr": _option(float, "Learning rate of local work."),
    "batch_size": _option(int, "Expected records per local step."),
    "local_steps": _option(int, "Local steps per round."),
    "local_epochs": _option(int, "Local epochs per round, instead of steps."),
    "spending": _option(str, "heterogeneous or uniform."),
    "rounds": _option(int, "Rounds."),
    "cohort": _option(str, "Clients per round: a number, or a fraction such as 0.8."),
    "sampling": _option(str, "How the cohort is drawn: uniform or poisson."),
    "least_willing": _option(
        int, "Willing clients below which a plan with fixed-size cohorts ends (default: all)."
    ),
    "dropout": _option(float, "Share of uploads that get lost, to see what a method makes of it."),
    "engine": _option(str, "stacked, one_by_one, or ray (a cluster; RAY_ADDRESS names it)."),
    "device": _option(str, "Where local work is computed: cpu, or cuda where torch has it."),
    "liar": _option(
        list[str], "A client that claims a multiple of its epsilon.", "--liar", metavar="ID:FACTOR"
    ),
    "set": _option(list[str], "Any other setting of the method.", "--set", metavar="KEY=VALUE"),
}
ONE_METHOD: dict[str, Any] = {
    "method": _option(str, "Method."),
    "seed": _option(int, "Seed; the run is repeatable, and NOT PRIVATE."),
}


def takes_experiment(**more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that describe an experiment; it receives them as one dict,
    ``given``.
    """
    common = more | EXPERIMENT

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in common}
            command(given=given, **values)

        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name != "given"
        ]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in common.items()
        ]
        first = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        first.sort(
            key=lambda p: p.name != "file"
        )  # the file, then what describes the experiment, then the rest
        wrapped.__signature__ = inspect.Signature([*first[:1], *added, *first[1:]])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in (*first, *added)}
        return wrapped

    return decorate


_SETTINGS = ("lr", "clip", "batch_size", "spending", "noise_multiplier")
_LIGHT_DEFAULTS: dict[str, Any] = {"lr": 0.1, "batch_size": 16, "local_steps": 10}
_ROUNDS = 30


def experiment_values(file: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """Lay options over the file; without a file, what does not decide privacy has a light default."""
    values: dict[str, Any] = read_toml(file) if file else {}
    given = {name: value for name, value in options.items() if value is not None}

    def put(section: str, key: str, value: Any) -> None:
        values.setdefault(section, {})[key] = value

    for name, (section, key) in _PLACES.items():
        if name in given:
            put(section, key, given[name])
    if "dataset" in given:
        values["data"] = data_values(given["dataset"], given.get("label"))
    elif "label" in given:
        put("data", "label", given["label"])
    if "cohort" in given:
        put("run", "cohort", number(given["cohort"], "--cohort"))
    if given.get("system_noise"):
        put("run", "noise", "system")
    settings: dict[str, Any] = {name: given[name] for name in _SETTINGS if name in given}
    if "local_steps" in given or "local_epochs" in given:
        values.setdefault("method", {}).pop("local_steps", None)
        values["method"].pop("local_epochs", None)
        settings |= {name: given[name] for name in ("local_steps", "local_epochs") if name in given}
    for text in given.get("liar", []):
        client, _, factor = text.rpartition(":")
        if not client or not isinstance(number(factor, None), int | float):
            raise ConfigurationError(
                "--liar", f"'{text}' is no ID:FACTOR", "write for instance --liar 12:100"
            )
        values.setdefault("run", {}).setdefault("liars", {})[client] = number(factor, None)
    for pair in given.get("set", []):
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigurationError(
                "--set", f"'{pair}' is no KEY=VALUE", "write for instance --set k=1"
            )
        settings[key] = number(text, None)
    values.setdefault("method", {}).update(settings)
    if file is None:
        method = values["method"]
        for name, value in _LIGHT_DEFAULTS.items():
            if not (name == "local_steps" and "local_epochs" in method) and _wanted(
                method.get("name"), name
            ):
                method.setdefault(name, value)
        values.setdefault("run", {}).setdefault("rounds", _ROUNDS)
    return values


def _wanted(method: str | None, setting: str) -> bool:
    """Whether a method cannot do without a setting; of a method not named yet, or not known,
    anything may be wanted.
    """
    if method is None or method not in METHODS:
        return True
    known = find(method).settings.get(setting)
    return known is not None and (
        known.default is inspect.Parameter.empty or setting == "local_steps"
    )


_PLACES = {
    "partition": ("partition", "kind"),
    "clients": ("partition", "clients"),
    "records": ("partition", "records"),
    "alpha": ("partition", "alpha"),
    "budgets": ("budgets", "epsilon"),
    "delta": ("budgets", "delta"),
    "model": ("model", "name"),
    "method": ("method", "name"),
    "rounds": ("run", "rounds"),
    "sampling": ("run", "sampling"),
    "least_willing": ("run", "least_willing"),
    "dropout": ("run", "dropout"),
    "seed": ("run", "seed"),
    "engine": ("run", "engine"),
    "device": ("run", "device"),
    "workers": ("run", "workers"),
}


def data_values(name: str, label: str | None) -> dict[str, Any]:
    """A data set by name, or a folder."""
    if name not in DATASETS and (Path(name).is_dir() or "/" in name):
        return {"folder": str(Path(name).absolute()), **({"label": label} if label else {})}
    return {"name": name}


def number(text: str, where: str | None) -> Any:
    """Read a number, true or false, or leave a word a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if where is not None:
        raise ConfigurationError(
            where, f"'{text}' is no number", "give a number of clients or a fraction"
        )
    return {"true": True, "false": False}.get(text.lower(), text)


def build(file: Path | None, values: dict[str, Any]) -> Experiment:
    """Validate, and name what is missing in the words of the command line."""
    if not values.get("data"):
        raise ConfigurationError(
            "options",
            "no data set was named",
            "give --dataset, or an experiment file; dpfl datasets lists them",
        )
    if "name" not in values.get("method", {}):
        raise ConfigurationError(
            "options",
            "no method was named",
            "give --method, or an experiment file; dpfl methods lists them",
        )
    known = find(values["method"]["name"]).settings
    if "clip" in known and "clip" not in values["method"]:
        raise ConfigurationError(
            "options",
            "no clip was given, and it has no default",
            "give --clip: the largest norm of one record's gradient",
        )
    if "clip" in known and "epsilon" not in values.get("budgets", {}):
        raise ConfigurationError(
            "options",
            "no budgets were given, and they have no default",
            "give --budgets and --delta; dpfl budgets lists distributions",
        )
    return Experiment.from_dict(values, str(file) if file else "options")


def check_settings(values: dict[str, Any], methods: list[str]) -> None:
    """Refuse a setting that none of the methods has."""
    known = {name for method in methods for name in find(method).settings}
    for setting in values.get("method", {}):
        if setting != "name" and setting not in known:
            raise ConfigurationError(
                "settings", f"none of the methods has '{setting}'", did_you_mean(setting, known)
            )
