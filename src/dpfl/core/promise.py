"""What an epsilon is about: whose presence is hidden, from whom, and what counts as a neighbour."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from dpfl.core.checks import check


class Unit(StrEnum):
    """Whose presence is hidden: a whole client, or the smallest unit that the data declare.

    That unit is a record, unless a schema names persons: then it goes by the schema's word. Two
    words are two units, and nothing that is stated of one holds for the other.

    >>> Unit("patient"), Unit("patient") is Unit("patient"), Unit("patient").of_data
    (<Unit.patient: 'patient'>, True, True)
    """

    RECORD = "record"
    CLIENT = "client"

    @classmethod
    def _missing_(cls, value: object) -> Unit | None:
        """Make the unit of a schema's word; words are letters, with spaces or hyphens between."""
        word = r"[^\W\d_]+([ -][^\W\d_]+)*"
        if not isinstance(value, str) or len(value) > 60 or not re.fullmatch(word, value):
            return None
        if value.lower() in ("record", "client", "site"):  # these would pass for other units
            return None
        unit = str.__new__(cls, value)
        unit._name_ = unit._value_ = value
        return cls._value2member_map_.setdefault(value, unit)  # type: ignore[return-value]

    @property
    def of_data(self) -> bool:
        """Whether a client holds many of it, as it holds records."""
        return self is not Unit.CLIENT

    def reworded(self, text: str) -> str:
        """Return a sentence about records as one about this unit, where that is a person.

        >>> Unit("patient").reworded("the number of records is public")
        'the number of patients is public'
        """
        return text if self in (Unit.RECORD, Unit.CLIENT) else re.sub(r"\brecord", self, text)


def unit_called(word: str) -> Unit:
    """The unit of data that goes by this word; a word that names none is refused.

    >>> unit_called("patient")
    <Unit.patient: 'patient'>
    """
    remedy = "give a word for one person, such as 'patient'"
    try:
        unit = Unit(word)
    except ValueError:
        unit = Unit.CLIENT
    check(unit.of_data, "unit", f"'{word}' is no word for a unit of the data", remedy)
    return unit


class Observer(StrEnum):
    """From whom. What the world sees is a function of what the server sees, never the reverse."""

    SERVER = "server"
    WORLD = "world"
    NOBODY = "nobody"


class Adjacency(StrEnum):
    """Which two data sets count as neighbours."""

    ADD_REMOVE = "add_remove"
    ZERO_OUT = "zero_out"
    REPLACE_ONE = "replace_one"


SUMMED = "over a secure sum"
"""Part of the title, in a ledger, of a study whose server sees sums alone."""


@dataclass(frozen=True, kw_only=True, order=True)
class Promise:
    """What an epsilon is about: two of them compare only where all of it agrees.

    ``colluders``: so many clients may work together with the server. It is finite where clients
    share noise over a secure sum, and that of the others is counted on.
    """

    unit: Unit
    adjacency: Adjacency
    observer: Observer
    colluders: float = math.inf

    @property
    def adversary(self) -> str:
        """Against whom, in words."""
        return str(self.observer) + colluding(self.colluders)

    def __str__(self) -> str:
        return f"per {self.unit}, {self.adjacency} adjacency, against the {self.adversary}"

    def to_dict(self) -> dict[str, str | float]:
        """Return plain values; colluders where their number counts."""
        about = {name: str(value) for name, value in vars(self).items() if name != "colluders"}
        return {**about} if math.isinf(self.colluders) else {**about, "colluders": self.colluders}


def colluding(number: float, who: str = "client") -> str:
    """Say how many may work together with the server, to follow its name; nothing if all may.

    >>> colluding(2), colluding(0), colluding(math.inf)
    (' with up to 2 colluding clients', ' with all clients trusted', '')
    """
    if math.isinf(number):
        return ""
    many = f"up to {number:g} colluding {who}{'s' * (number > 1)}"
    return f" with {many if number else f'all {who}s trusted'}"
