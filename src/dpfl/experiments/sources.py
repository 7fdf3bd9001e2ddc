"""What functions of studies take from Python: experiments, methods and seeds in several forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl.core.checks import check, whole_number
from dpfl.core.types import Plain
from dpfl.runs.experiment import Experiment
from dpfl.runs.toml_file import read_toml

Source = Experiment | Path | str | Mapping[str, Any]
"""An experiment, the path of its TOML file, or its sections as a dict."""


def values_of(experiment: Source) -> Plain:
    """Return an ``experiment`` as plain values, whatever it was given as."""
    if isinstance(experiment, Experiment):
        return experiment.to_dict()
    if isinstance(experiment, Mapping):
        return dict(experiment)
    check(
        isinstance(experiment, Path | str),
        "experiment",
        f"{experiment!r} is not an experiment",
        "give an Experiment, a TOML file or a dict",
    )
    return read_toml(Path(experiment))


def seed_list(seeds: int | Sequence[int]) -> list[int]:
    """Return ``seeds`` as a list: a number means 0, 1, ...

    >>> seed_list(3), seed_list([4, 7])
    ([0, 1, 2], [4, 7])
    """
    if isinstance(seeds, int):
        return list(range(whole_number("seeds", "seeds", seeds)))
    found = [whole_number("seeds", "seed", seed, least=0) for seed in seeds]
    check(
        bool(found) and len(set(found)) == len(found),
        "seeds",
        f"{found} repeats a seed, or names none",
        "name each seed once",
    )
    return found


def method_list(where: str, methods: Sequence[str]) -> list[str]:
    """Return the names of ``methods``; ``where`` names the function in messages."""
    names = [methods] if isinstance(methods, str) else list(methods)
    check(
        bool(names) and all(isinstance(name, str) for name in names),
        where,
        f"methods = {methods!r} names no method",
        "give a list of names",
    )
    return names


def path_of(given: Path | str | None) -> Path | None:
    """Return a path that was ``given`` as text or not at all."""
    return None if given is None else Path(given)
