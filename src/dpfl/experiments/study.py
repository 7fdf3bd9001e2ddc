"""A study as data: one base experiment, what varies, which methods, how they are tuned, which
seeds.

Every method is tuned by the same rule: over the same grid, with the same seeds, on records that are
set aside from the training part (or on another, public data set); the value with the highest mean
accuracy at the end wins, the smaller one where two are equal. The final runs use other seeds and
are tested on the test part, which tuning has not seen.
"""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, did_you_mean
from dpfl.core.files import hold_folder, write_safely
from dpfl.core.types import Plain
from dpfl.methods import find
from dpfl.runs.experiment import Experiment, for_method
from dpfl.runs.toml_file import Section, TomlFile, check_tables

Values = Plain
"""Dotted fields of an experiment, such as ``budgets.epsilon``, and what they are set to."""


Choices = Annotated[list[Any], Field(min_length=1)]
"""The values that a field may take."""


class Tuning(Section):
    """What is tuned, over which values, with which seeds.

    ``own`` adds knobs that one method has, by method. ``at`` tunes once, there, instead of in every
    case. ``on`` names a data set to tune on instead of the federation's own records. ``search =
    "halving"`` drops the worse half of the candidates after a quarter and after half of the rounds.
    """

    over: dict[str, Choices] = Field(min_length=1)
    own: dict[str, dict[str, Choices]] = Field(default_factory=dict)
    seeds: list[NonNegativeInt] = Field(default=[1000], min_length=1)
    at: Plain = Field(default_factory=dict)
    on: Plain | None = None
    search: Literal["grid", "halving"] = "grid"


class Sweep(TomlFile):
    """A study file: one base experiment and everything that is tried on it.

    ``title`` and ``about`` are for people, ``base`` is the experiment, ``tune`` how settings are
    chosen, and ``seeds`` are those of the final runs. ``vary`` lists values of dotted fields, which
    are crossed. ``methods`` holds the settings of each method by its label; ``name`` names the
    method where the label does not. ``metrics`` are dotted names of a round's record that the
    results condense.
    """

    called: ClassVar[str] = "study"

    title: str
    about: str = ""
    base: Plain
    methods: dict[str, Plain] = Field(min_length=1)
    vary: dict[str, Choices] = Field(default_factory=dict)
    tune: Tuning | None = None
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    metrics: list[str] = Field(default_factory=list)

    def agrees(self, where: str) -> None:
        """Refuse what cannot be run before anything is."""
        check_tables(self.base, f"{where}, [base]")
        if self.tune is not None:
            for name in sorted(set(self.tune.at) - set(self.vary)):
                check(
                    False,
                    f"{where}, [tune] at",
                    f"'{name}' does not vary",
                    did_you_mean(name, self.vary),
                )
            for seed in sorted(set(self.tune.seeds) & set(self.seeds)):
                check(
                    False,
                    f"{where}, [tune] seeds",
                    f"seed {seed} is also a final one",
                    "tune with other seeds",
                )
        for case, label in self.cells():
            for tuned in self.tunable(label):
                self.experiment(case, label, tuned, self.seeds[0]).check()

    def claim(self, folder: Path) -> None:
        """Take a folder for the results of this study, by writing the study into it.

        A folder that holds this very study is taken again. One that holds anything else, the
        results of another study above all, is refused and left as it is.
        """
        where = str(folder)
        remedy = "give another --out; runs that are kept are not repeated"
        check(
            folder.is_dir() or not folder.exists(),
            where,
            "is a file",
            "give another --out",
            FolderError,
        )
        with hold_folder(folder):
            file = folder / "study.toml"
            if file.exists():
                check(
                    file.read_bytes() == self.to_toml().encode(),
                    where,
                    "already holds another comparison, sweep or search",
                    remedy,
                    FolderError,
                )
                return
            ours = {".lock", "study.toml.new"}  # left by a command that was killed before it began
            check(
                all(entry.name in ours for entry in folder.iterdir()),
                where,
                "is not empty",
                remedy,
                FolderError,
            )
            write_safely(file, self.to_toml().encode())

    def cases(self) -> list[Values]:
        """Every combination of what varies; one empty case where nothing does."""
        return combinations(self.vary)

    def cells(self) -> list[tuple[Values, str]]:
        """Every case with the label of every method."""
        return list(itertools.product(self.cases(), self.methods))

    def tuned_in(self, case: Values) -> Values:
        """The case in which this case's settings are tuned."""
        return {**case, **self.tune.at} if self.tune else case

    def method(self, label: str) -> str:
        """The method behind a label."""
        return str(self.methods[label].get("name", label))

    def experiment(self, case: Values, label: str, tuned: Values, seed: int) -> Experiment:
        """One run; a tuned field that the method does not have is left out."""
        name = self.method(label)
        own = self.methods[label]
        known = find(name).settings
        fields = {field: value for field, value in tuned.items() if not _foreign(field, known)}
        fields |= {f"method.{key}": value for key, value in own.items() if key != "name"}
        values = set_fields(for_method(set_fields(self.base, case), name), fields)
        values = set_fields(values, {"run.seed": seed})
        return Experiment.from_options(values, f"study, method '{label}'")

    def rehearsal(
        self, case: Values, label: str, tuned: Values, seed: int, ids: Sequence[str]
    ) -> Experiment:
        """One run of the tuning: on records set aside from the training part, or on the data set
        named for it.
        """
        values = self.experiment(case, label, tuned, seed).to_dict()
        if self.tune is None or self.tune.on is None:
            values = set_fields(values, {"partition.validation": True})
        else:
            values = on_proxy(values, self.tune.on, ids)
        return Experiment.from_options(values, f"study, [tune], method '{label}'")

    def tunable(self, label: str) -> list[Values]:
        """Return the candidates of one method, as far as they differ in settings that it has and
        that its label does not fix.
        """
        if self.tune is None:
            return [{}]
        name = self.method(label)
        known = find(name).settings.keys() - self.methods[label].keys()
        lists = {**self.tune.over, **self.tune.own.get(name, {})}
        return combinations({k: own for k, own in lists.items() if not _foreign(k, known)})


def on_proxy(values: Values, proxy: Values, ids: Sequence[str]) -> Values:
    """Return the federation of ``values`` over the records of a ``proxy``: as many clients
    (``ids``), the same budgets and settings in the same order.

    >>> ours = {"data": {"folder": "sites"}, "budgets": {"epsilon": {"b": 2.0, "a": 1.0}}}
    >>> theirs = on_proxy(ours, {"name": "digits"}, ["a", "b"])
    >>> theirs["data"], theirs["budgets"], theirs["partition"]
    ({'name': 'digits'}, {'epsilon': [1.0, 2.0]}, {'kind': 'iid', 'clients': 2})
    """
    partition = dict(values.get("partition", {}))
    kind = partition.get("kind")
    partition |= {"kind": "iid" if kind in (None, "natural") else kind, "clients": len(ids)}
    budgets = {
        name: [given[client] for client in ids] if isinstance(given, dict) else given
        for name, given in values.get("budgets", {}).items()
    }
    here = {**values, "data": proxy, "budgets": budgets}
    here["partition"] = {} if "folder" in proxy else partition
    here.pop("clients", None)  # settings of single clients: nobody has these names there
    if "run" in here:
        here["run"] = {name: own for name, own in here["run"].items() if name != "misreports"}
    return here


def combinations(lists: Mapping[str, list[Any]]) -> list[Values]:
    """Every choice of one value per name in ``lists``.

    >>> combinations({"a": [1, 2], "b": [3]})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    >>> combinations({"a": [0.1, 0.1]})
    [{'a': 0.1}]
    """
    products = itertools.product(*lists.values())
    return distinct(dict(zip(lists, chosen, strict=True)) for chosen in products)


def distinct(found: Iterable[Values]) -> list[Values]:
    """Keep the first of equal combinations in ``found``."""
    kept: list[Values] = []
    for one in found:
        kept += [] if one in kept else [one]
    return kept


def _foreign(field: str, known: Container[str]) -> bool:
    """Whether a dotted field is a setting that a method does not have."""
    section, _, name = field.partition(".")
    return section == "method" and name not in known


def set_fields(values: Plain, fields: Values) -> Plain:
    """Set dotted ``fields`` in a copy of ``values``.

    >>> set_fields({"run": {"rounds": 1}}, {"run.seed": 3})
    {'run': {'rounds': 1, 'seed': 3}}
    """
    result = dict(values)
    for field, value in fields.items():
        section, dot, name = field.partition(".")
        check(
            bool(dot), f"field '{field}'", "names no section", "write for instance budgets.epsilon"
        )
        result[section] = {**result.get(section, {}), name: value}
    return result
