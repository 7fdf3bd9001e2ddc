"""A study as data: one base experiment, what varies, which methods, how they are tuned, which seeds. TOML in.

Every method is tuned by the same rule: over the same grid, with the same seeds, on records that are set aside from the
training part; the value with the highest mean accuracy at the end wins, the smaller one where two are equal. The final
runs use other seeds and are tested on the test part, which tuning has not seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from dpfl.algorithms.registry import settings_of
from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.runs.experiment import Experiment, Section, explained, for_method, read_toml

Values = dict[str, Any]
"""Dotted fields of an experiment, such as ``budgets.epsilon``, and what they are set to."""


class Tuning(Section):
    """What is tuned, over which values, with which seeds; ``at`` tunes once, there, instead of in every case."""

    over: dict[str, list[Any]] = Field(min_length=1)
    seeds: list[int] = Field(default=[1000], min_length=1)
    at: dict[str, Any] = Field(default_factory=dict)

    def candidates(self) -> list[Values]:
        """Every combination, in the order they are given."""
        return combinations(self.over)


class Study(Section):
    """One base experiment and everything that is tried on it."""

    title: str
    about: str = ""
    base: dict[str, Any]
    methods: dict[str, dict[str, Any]] = Field(min_length=1)
    vary: dict[str, list[Any]] = Field(default_factory=dict)
    tune: Tuning | None = None
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    metrics: list[str] = Field(default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "study") -> Study:
        """Validate plain values; the first problem becomes one clear sentence."""
        try:
            study = cls.model_validate(values)
        except ValidationError as error:
            raise explained(where, error, cls) from error
        study.check(where)
        return study

    @classmethod
    def from_file(cls, path: Path) -> Study:
        """Read a TOML file."""
        return cls.from_dict(read_toml(path), str(path))

    def check(self, where: str) -> None:
        """Refuse what cannot be run before anything is."""
        for name, values in {**self.vary, **(self.tune.over if self.tune else {})}.items():
            if not values:
                raise ConfigurationError(f"{where}, '{name}'", "has no values", "give a list")
        if self.tune and not set(self.tune.at) <= set(self.vary):
            odd = min(set(self.tune.at) - set(self.vary))
            raise ConfigurationError(f"{where}, [tune] at", f"'{odd}' does not vary", did_you_mean(odd, self.vary))
        if self.tune and set(self.tune.seeds) & set(self.seeds):
            both = min(set(self.tune.seeds) & set(self.seeds))
            raise ConfigurationError(
                f"{where}, [tune] seeds", f"seed {both} is also a final one", "tune with seeds that are not reported"
            )
        for case in self.cases():
            for label in self.methods:
                tuned = self.tune.candidates()[0] if self.tune else {}
                self.experiment(case, label, tuned, self.seeds[0]).check()

    def cases(self) -> list[Values]:
        """Every combination of what varies; one empty case where nothing does."""
        return combinations(self.vary)

    def tuned_in(self, case: Values) -> Values:
        """The case in which this case's settings are tuned."""
        return {**case, **self.tune.at} if self.tune else case

    def method(self, label: str) -> str:
        """The method behind a label."""
        return str(self.methods[label].get("name", label))

    def experiment(self, case: Values, label: str, tuned: Values, seed: int, *, validation: bool = False) -> Experiment:
        """One run; a tuned field that the method does not have is left out."""
        own = {name: value for name, value in self.methods[label].items() if name != "name"}
        name = self.method(label)
        known = settings_of(name)
        values = for_method(_with(self.base, case), name)
        values = _with(values, {k: v for k, v in tuned.items() if not _foreign(k, known)})
        values = _with(values, {f"method.{key}": value for key, value in own.items()})
        values = _with(values, {"run.seed": seed, **({"partition.validation": True} if validation else {})})
        return Experiment.from_dict(values, f"study, method '{label}'")

    def tunable(self, label: str) -> list[Values]:
        """The candidates of one method: those that differ in something it has and does not fix itself."""
        if self.tune is None:
            return [{}]
        known = settings_of(self.method(label)).keys() - self.methods[label].keys()
        kept = [{k: v for k, v in c.items() if not _foreign(k, known)} for c in self.tune.candidates()]
        return [candidate for number, candidate in enumerate(kept) if candidate not in kept[:number]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method in one case."""

    case: Values
    label: str


def cells(study: Study) -> Iterator[Cell]:
    """Every method in every case."""
    for case in study.cases():
        for label in study.methods:
            yield Cell(case=case, label=label)


def combinations(lists: Mapping[str, list[Any]]) -> list[Values]:
    """Every choice of one value per name.

    >>> combinations({"a": [1, 2], "b": [3]})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    return [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())]


def _foreign(field: str, known: Container[str]) -> bool:
    section, _, name = field.partition(".")
    return section == "method" and name not in known


def _with(values: dict[str, Any], fields: Values) -> dict[str, Any]:
    """Set dotted fields in a copy.

    >>> _with({"run": {"rounds": 1}}, {"run.seed": 3})
    {'run': {'rounds': 1, 'seed': 3}}
    """
    result = dict(values)
    for field, value in fields.items():
        section, dot, name = field.partition(".")
        if not dot:
            raise ConfigurationError(f"field '{field}'", "names no section", "write for instance budgets.epsilon")
        result[section] = {**result.get(section, {}), name: value}
    return result
