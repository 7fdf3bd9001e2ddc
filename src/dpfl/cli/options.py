"""The options that commands share, and what they ask for: one experiment, or several methods."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import typer

import dpfl
from dpfl.cli.values import FIELDS, Values, check_complete, lay_over, with_light_defaults
from dpfl.core.checks import check, one_of

if TYPE_CHECKING:
    from dpfl.runs.experiment import Experiment

# -- names that the shell can complete -------------------------------------------------------------


def method_names() -> list[str]:
    """The names of the methods that ship with dpfl, read from their files: importing them takes too
    long for the shell. Methods of other packages are not offered, but can be typed.
    """
    folder = Path(dpfl.__file__).parent / "methods"
    texts = [path.read_text() for path in sorted(folder.glob("*.py"))]
    return [name for text in texts for name in re.findall(r"(?ms)^@method\(.*?^def (\w+)", text)]


_TABLES = {
    "dataset": ("dpfl.datasets.named:DATASETS",),
    "budgets": ("dpfl.privacy.budgets:DISTRIBUTIONS",),
    "model": ("dpfl.models:MODELS", "dpfl.models:TEXT_MODELS"),
}
"""Where the names lie that an option completes, beside those of methods."""


def completing(option: str) -> dict[str, Any]:
    """Return the settings with which an option completes the last name of its list."""

    def complete(incomplete: str) -> list[str]:
        """Offer the names that begin like the last word."""
        before, comma, last = incomplete.rpartition(",")
        tables = map(resolve_name, _TABLES[option]) if option in _TABLES else [method_names()]
        names = [name for table in tables for name in table]
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return {"autocompletion": complete} if option in (*_TABLES, "method", "methods") else {}


# -- options ---------------------------------------------------------------------------------------


def arg(text: str, default: Any = ...) -> Any:
    """Return an argument with this help; without a default it must be given.

    Like :func:`opt`, it is the default of a parameter, from which typer reads it.
    """
    return typer.Argument(default, help=text, show_default=False)


def opt(text: str, default: Any = None, name: str = "", **more: Any) -> Any:
    """Return an option with this help, under this name or that of the parameter.

    ``...`` as the default means that it must be given.
    """
    return typer.Option(default, *([name] if name else []), help=text, **more)


def flag(name: str, text: str) -> Any:
    """Return an option that is off unless it is given, without a --no-... beside it."""
    return opt(text, False, name)


def group(text: str) -> typer.Typer:
    """Return a command that has commands of its own, be it only one."""
    made = typer.Typer(no_args_is_help=True, add_completion=False, help=text)
    made.callback()(lambda: None)
    return made


FILE = arg("Experiment file (TOML).", None)
DATA = opt("Where data sets that do not ship with dpfl lie.")
JSON = flag("--json", "Write one JSON document to stdout.")
QUIET = flag("--quiet", "No progress bar.")
WORKERS = opt("Runs at a time, one process each.", 2, min=1)
SEEDS = opt("How many seeds, or a list such as 0,1,2.", "3")
OVER = opt("A field and its values.", metavar="FIELD=VALUE,...")

Command = Callable[..., None]
Options = dict[str, tuple[Any, Any]]
"""Options by the name of their parameter: the kind of value, and what typer knows of it."""

MANY: Options = {
    "methods": (str, opt("Methods, separated by commas; or all.", "", **completing("methods"))),
    "family": (str | None, opt("Instead: heterogeneous, client or wireless.")),
}
"""Options of commands that take several methods."""

_RESULTS = "Folder of the results (default: a new one in runs/)."
STORE: Options = {
    "workers": (int, WORKERS),
    "folder": (Path | None, opt(_RESULTS, None, "--out")),
    "kept": (Path, opt("Where runs are kept by content, not to be repeated.", Path("runs/kept"))),
    "quiet": (bool, QUIET),
}
"""Options of commands that run several experiments."""

_DATASET = "Data set, or a folder with one CSV or Parquet file per client."
_SET = "Any other setting, or any field: --set k=1 --set server.lr=0.1."
_SUM = "Uploads are added up over a secure sum: --set secure_sum.tolerated_dropouts=1."
_LIES = "A client that claims a multiple of its epsilon."
_EXPERIMENT: Options = {
    "dataset": (str | None, opt(_DATASET, **completing("dataset"))),
    "secure_sum": (bool | None, opt(_SUM, None, "--secure-sum")),
    "misreport": (list[str] | None, opt(_LIES, metavar="ID:FACTOR")),
    "set": (list[str] | None, opt(_SET, metavar="KEY=VALUE")),
} | {name: (kind | None, opt(text, **completing(name))) for name, (_, kind, text) in FIELDS.items()}
"""Options that describe an experiment; all of them may be left out."""


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
        from dpfl.runs.for_method import for_method
        from dpfl.runs.toml_file import check_tables, read_toml

        if self.file is not None:
            read = read_toml(self.file)
            check_tables(read, str(self.file))
            method = self.given.get("method")
            if method not in (None, read.get("method", {}).get("name")):
                _note_foreign(read, [method])
                read = for_method(read, method, compared=False)
            return lay_over(read, self.given)
        return with_light_defaults(lay_over({}, self.given))

    def experiment(self, method: str | None = None) -> Experiment:
        """Build the experiment, or the same one for another method."""
        from dpfl.runs.experiment import Experiment, for_method

        values = self.values()
        values = values if method is None else for_method(values, method, compared=False)
        check_complete(values, values.get("method", {}).get("name"))
        return Experiment.from_options(values, str(self.file) if self.file else "options")

    def method_names(self, values: Values, settings: dict[str, Values] | None = None) -> list[str]:
        """The methods asked for; of ``all`` or a family, those that this federation cannot run are
        named and left out.

        ``values`` is the experiment as plain values, ``settings`` what single methods have of their
        own, by name. A method that was named and lacks something it needs is refused.
        """
        from dpfl.cli.console import note
        from dpfl.experiments.compare import fitting

        (names, complete), own = self.candidates(), settings or {}
        _note_foreign(values, names)
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
        from dpfl.methods import METHODS

        words = [word.strip() for word in self.methods.split(",")]
        names = list(dict.fromkeys(filter(None, words)))
        if self.family is not None:
            check(not names, "--family", "--methods was given as well", "give one of the two")
            return methods_of(self.family), False
        if names == ["all"]:
            return list(METHODS), False
        check(
            bool(names),
            "--methods",
            "names no method",
            "name some that dpfl methods lists, all, or a --family",
        )
        return names, True


def _note_foreign(values: Values, methods: list[str]) -> None:
    """Say which settings none of the methods has."""
    from dpfl.cli.console import note
    from dpfl.runs.for_method import foreign_settings

    if foreign := foreign_settings(values, methods):
        note(f"left aside, since no method here has such a setting: {', '.join(foreign)}")


def methods_of(family: str) -> list[str]:
    """The names of the methods of a family."""
    from dpfl.methods import families

    one_of("--family", families(), family=family)
    return list(families()[family])


def takes_experiment(more: Options | None = None) -> Callable[[Command], Command]:
    """Give a command the options that describe an experiment.

    The command receives them as its first argument, an :class:`Asked`; its other arguments are
    options of its own. ``more`` are further options, :data:`MANY` for instance, of a command that
    takes several methods; without them the experiment has a --method and a --seed.
    """
    left_out = ("method", "seed", "workers") if more else ()
    given = {name: own for name, own in _EXPERIMENT.items() if name not in left_out}
    common: Options = {"file": (Path | None, FILE), **given, "data": (Path | None, DATA)}
    common |= {**(more or {}), "json": (bool, JSON)}

    def decorate(command: Command) -> Command:
        """Put the options into the signature that typer reads."""

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            """Call the command with everything that was asked for."""
            described = {name: values.pop(name) for name in given}
            shared = {name: values.pop(name) for name in common if name not in given}
            command(Asked(given=described, **shared), **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = inspect.signature(command, eval_str=True)
        parameters = [
            inspect.Parameter(name, keyword, default=option, annotation=kind)
            for name, (kind, option) in common.items()
        ]
        parameters += [one.replace(kind=keyword) for one in list(own.parameters.values())[1:]]
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapped

    return decorate
