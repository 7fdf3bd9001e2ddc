"""A TOML file as data: sections that refuse unknown keys, and one clear sentence for the first
problem.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, time
from pathlib import Path
from typing import Any, ClassVar, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DpflError, FolderError, did_you_mean
from dpfl.core.files import text_of
from dpfl.core.types import Plain
from dpfl.runs.validation import Problem, first_problem


@contextmanager
def in_section(name: str) -> Iterator[None]:
    """Let the errors of what is built from a section say in which section it stands.

    >>> with in_section("task"):
    ...     raise ConfigurationError("task metric", "is unknown", "leave it out")
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: [task] metric: is unknown; leave it out
    """
    try:
        yield
    except DpflError as error:
        raise type(error)(
            f"[{name}] {error.where.removeprefix(name).strip()}".rstrip(),
            error.problem,
            error.remedy,
        ) from error


class Section(BaseModel):
    """A table of the file: unknown keys are refused, with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        """Refuse unknown keys here, where the known ones are known."""
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_key",
                    "there is no key '{key}'",
                    {"key": key, "near": did_you_mean(key, cls.model_fields)},
                )
        return values


class TomlFile(Section):
    """A whole file, made of sections.

    A subclass names its sections as fields. ``called`` names the file where there is no path, and
    in a folder that was ``made_with`` a command. ``incidental`` keys do not change the digest.
    """

    called: ClassVar[str] = "file"
    made_with: ClassVar[str] = "an editor"
    incidental: ClassVar[Plain] = {}

    @classmethod
    def from_dict(cls, values: Plain, where: str | None = None) -> Self:
        """Validate plain values; the first problem becomes one clear sentence.

        ``where`` names their source in that sentence. An unknown key is refused with the nearest
        known one.
        """
        place = cls.called if where is None else where
        check_moments(values, place)
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            raise _explained(place, first_problem(error, values), cls.called) from error
        found.agrees(place)
        return found

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read and validate a TOML file; messages name its path."""
        return cls.from_dict(read_toml(path), str(path))

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Read the file of a folder that belongs to a server or a site."""
        path = folder / f"{cls.called}.toml"
        check(
            path.exists(),
            str(folder),
            f"holds no {cls.called}",
            f"make one with {cls.made_with}",
            FolderError,
        )
        return cls.from_file(path)

    def agrees(self, where: str) -> None:
        """Refuse values that are right one by one and wrong together."""

    def to_dict(self) -> Plain:
        """Return plain values, complete but for what is left to its natural absence."""
        values: Plain = self.model_dump(exclude_none=True)
        return values

    def to_toml(self) -> str:
        """Write a complete file."""
        return tomli_w.dumps(self.to_dict())

    def digest(self) -> str:
        """Name what the file describes: equal digests give equal bits."""
        values = self.model_dump(exclude_none=True, exclude=self.incidental)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_tables(values: Plain, where: str) -> None:
    """Refuse sections that are not tables, before anything looks into them."""
    for name, own in values.items():
        check(
            isinstance(own, dict),
            f"{where}, [{name}]",
            f"{own!r:.60} was given",
            f"write a table: [{name}] and its keys below",
        )


def check_moments(values: Plain, where: str) -> None:
    """Refuse dates and times, which no key takes; methods could not write them down."""
    waiting: list[tuple[str, Any]] = [*values.items()]
    while waiting:
        key, own = waiting.pop()
        check(
            not isinstance(own, date | time),
            f"{where}, {key}",
            f"a date or time was given ({own})",
            f"give {key} a number or a text",
        )
        parts = own.values() if isinstance(own, dict) else own if isinstance(own, list) else ()
        names = own if isinstance(own, dict) else (key for _ in parts)
        waiting += zip(names, parts, strict=False)


def read_toml(path: Path) -> Plain:
    """Read a TOML file as plain values."""
    try:
        return tomllib.loads(text_of(path))
    except OSError as error:
        raise ConfigurationError(
            str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            str(path), "is not text in UTF-8", "save it as UTF-8 text"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(str(path), f"is not TOML ({error})", "fix that line") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            str(path),
            "holds a number of thousands of digits, or lists within lists without end",
            "check the file",
        ) from error


def _explained(where: str, problem: Problem, called: str) -> ConfigurationError:
    """Make one sentence of the first problem."""
    path = [key if key.isprintable() else repr(key) for key in problem.path]
    at = f"{where}, [{path[0]}] {'.'.join(path[1:])}".rstrip() if path else where
    if problem.kind == "unknown_key":
        return ConfigurationError(at, f"there is no key {problem.given!r}", problem.near)
    if problem.kind == "missing":
        return ConfigurationError(at, "is missing", "give a value: it has no default")
    return ConfigurationError(
        at,
        f"{problem.given} was given",
        f"give {problem.wanted}" if problem.wanted else f"see docs on the {called} file",
    )
