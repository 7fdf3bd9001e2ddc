"""The options that commands share, and what they ask for: one experiment, or several methods."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dpfl
from dpfl.cli.values import FIELDS, LIGHT_DEFAULTS, ROUNDS, Values, check_complete, lay_over, wanted
from dpfl.core.checks import check
from dpfl.core.errors import unknown_name

if TYPE_CHECKING:
    from dpfl.runs.experiment import Experiment

# -- names that the shell can complete -------------------------------------------------------------


def method_names() -> list[str]:
    """The names of the methods that ship with dpfl, read from their files: importing them takes too
    long for the shell.
    """
    folder = Path(dpfl.__file__).parent / "methods"
    texts = [path.read_text() for path in sorted(folder.glob("*.py"))]
    return [name for text in texts for name in re.findall(r"(?ms)^@method\(.*?^def (\w+)", text)]


_NAMES = {
    "dataset": ("dpfl.datasets.named:DATASETS",),
    "budgets": ("dpfl.privacy.budgets:DISTRIBUTIONS",),
    "model": ("dpfl.models:MODELS", "dpfl.models:TEXT_MODELS"),
}
"""Where the names lie that an option completes."""


def completing(option: str) -> dict[str, Any]:
    """Return the settings with which an option completes the last name of its list."""

    def complete(incomplete: str) -> list[str]:
        """Offer the names that begin like the last word."""
        names: list[str] = []
        for place in _NAMES.get(option, ()):
            module, _, table = place.partition(":")
            names += getattr(importlib.import_module(module), table)
        before, comma, last = incomplete.rpartition(",")
        found = names or method_names()
        return [f"{before}{comma}{name}" for name in found if name.startswith(last)]

    return {"autocompletion": complete} if option in (*_NAMES, "method", "methods") else {}


# -- options ---------------------------------------------------------------------------------------


def opt(text: str, *names: str, **more: Any) -> Any:
    """Return an option with this help, under these names or that of the argument."""
    return typer.Option(*names, help=text, **more)


def option(kind: Any, text: str, *names: str, **more: Any) -> Any:
    """Return the annotation of an option that may be left out, for the tables below."""
    return Annotated[kind | None, opt(text, *names, **more)]


File = Annotated[Path | None, typer.Argument(help="Experiment file (TOML).", show_default=False)]
Data = Annotated[Path | None, opt("Where data sets that do not ship with dpfl lie.")]
Json = Annotated[bool, opt("Write one JSON document to stdout.", "--json")]
Quiet = Annotated[bool, opt("No progress bar.", "--quiet")]
Workers = Annotated[int, opt("Runs at a time, one process each.", min=1)]
Seeds = Annotated[str, opt("How many seeds, or a list such as 0,1,2.")]
Over = Annotated[list[str] | None, opt("A field and its values.", metavar="FIELD=VALUE,...")]
Port = Annotated[int, opt("Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)]
Kept = Annotated[Path, opt("Where runs are kept by content, not to be repeated.")]
Out = Annotated[Path | None, opt("Folder of the results (default: a new one in runs/).", "--out")]
_Methods = Annotated[str, opt("Methods, separated by commas; or all.", **completing("methods"))]
_Family = Annotated[str | None, opt("Instead: heterogeneous, client or wireless.")]

MANY: dict[str, tuple[Any, Any]] = {"methods": (_Methods, ""), "family": (_Family, None)}
"""Options of commands that take several methods, with their defaults."""

STORE: dict[str, tuple[Any, Any]] = {
    "workers": (Workers, 2),
    "folder": (Out, None),
    "kept": (Kept, Path("runs/kept")),
    "quiet": (Quiet, False),
}
"""Options of commands that run several experiments, with their defaults."""

_DATASET = "Data set, or a folder with one CSV or Parquet file per client."
_SET = "Any other setting, or any field: --set k=1 --set server.lr=0.1."
_LIES = "A client that claims a multiple of its epsilon."
_SPECIAL = {
    "dataset": option(str, _DATASET, **completing("dataset")),
    "misreport": option(list[str], _LIES, "--misreport", metavar="ID:FACTOR"),
    "liar": option(list[str], "The name of --misreport in 0.1.", "--liar", hidden=True),
    "set": option(list[str], _SET, "--set", metavar="KEY=VALUE"),
}
_ONE = ("method", "seed", "workers")


def _experiment_options(one_method: bool) -> dict[str, Any]:
    """The options that describe an experiment, of one method or of methods named elsewhere."""
    return _SPECIAL | {
        name: option(kind, text, **completing(name))
        for name, (_, kind, text) in FIELDS.items()
        if one_method or name not in _ONE
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the options of a command ask for.

    ``given`` are the options that describe the experiment, by name, None where they are left out.
    ``data`` is where data sets lie. ``methods`` and ``family`` name the methods of a command that
    takes several; ``workers``, ``folder``, ``kept`` and ``quiet`` say how and where they run.
    """

    file: Path | None = None
    data: Path | None = None
    json: bool = False
    given: Values = field(default_factory=dict)
    methods: str = ""
    family: str | None = None
    workers: int = 1
    folder: Path | None = None
    kept: Path = Path("runs/kept")
    quiet: bool = False

    def values(self) -> Values:
        """Lay the options over the file. Without a file, what does not decide privacy has a light
        default.
        """
        from dpfl.runs.toml_file import read_toml

        values = lay_over(read_toml(self.file) if self.file else {}, self.given)
        if self.file is None:
            method = values.setdefault("method", {})
            for name, value in LIGHT_DEFAULTS.items():
                if wanted(method, name):
                    method.setdefault(name, value)
            values.setdefault("run", {}).setdefault("rounds", ROUNDS)
        return values

    def experiment(self, method: str | None = None) -> Experiment:
        """Build the experiment, or the same one for another method."""
        from dpfl.runs.experiment import Experiment, for_method

        values = self.values()
        if method is not None:
            values = for_method(values, method)
        check_complete(values, values.get("method", {}).get("name"))
        return Experiment.from_dict(values, str(self.file) if self.file else "options")

    def method_names(self, values: Values, settings: dict[str, Values] | None = None) -> list[str]:
        """The methods asked for; of ``all`` or a family, those that this federation cannot run are
        named and left out.
        """
        from dpfl.cli.console import note
        from dpfl.experiments.compare import fitting

        names, complete = self.candidates()
        own = settings or {}
        if complete:
            for name in names:
                with_own = {**values.get("method", {}), **own.get(name, {})}
                check_complete({**values, "method": with_own}, name)
            return names
        check_complete(values, None, any_method=True)
        fit, refused = fitting(values, names, settings=own, data_folder=self.data)
        for name, why in refused.items():
            note(f"left out: {name} ({why})")
        check(bool(fit), "--methods", "none of the methods fits this federation", "see why above")
        return fit

    def candidates(self) -> tuple[list[str], bool]:
        """The methods asked for, and whether each must fit: not those of ``all`` or a family."""
        from dpfl.methods import METHODS, families

        names = list(dict.fromkeys(word.strip() for word in self.methods.split(",")))
        names = [name for name in names if name]
        if self.family is not None:
            check(not names, "--family", "--methods was given as well", "give one of the two")
            if self.family not in families():
                raise unknown_name("--family", "family", self.family, families())
            return list(families()[self.family]), False
        if names == ["all"]:
            return list(METHODS), False
        remedy = "name some that dpfl methods lists, all, or a --family"
        check(bool(names), "--methods", "names no method", remedy)
        return names, True


def takes_experiment(
    *more: dict[str, tuple[Any, Any]], one_method: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that describe an experiment.

    The command receives them as its first argument, an :class:`Asked`; its other arguments are
    options of its own. ``more`` are tables of further options, such as :data:`MANY`. With
    ``one_method`` the experiment has a --method and a --seed.
    """
    given = _experiment_options(one_method)
    common: dict[str, tuple[Any, Any]] = {"file": (File, None)}
    common |= {name: (kind, None) for name, kind in given.items()} | {"data": (Data, None)}
    for one in more:
        common |= one
    common["json"] = (Json, False)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        """Put the options into the signature that typer reads."""
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            """Call the command with everything that was asked for."""
            described = {name: values.pop(name) for name in given}
            shared = {name: values.pop(name) for name in common if name not in given}
            command(Asked(given=described, **shared), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, (kind, default) in common.items()
        ]
        parameters = [*added, *(p.replace(kind=keyword) for p in own)]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate
