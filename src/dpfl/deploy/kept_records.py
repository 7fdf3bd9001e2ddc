"""What a site's process keeps between messages: its records, and what was made of them."""

from dataclasses import dataclass, field

from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.data.units import Units
from dpfl.engine import make_engine
from dpfl.engine.base import Engine
from dpfl.privacy.site_ledger import PlannedUnits


@dataclass
class Records:
    """The records of one site, kept between messages, and what they were read from.

    ``units`` are those of the file, and ``options`` how they become a federation. ``federation``
    holds those of the study that the last message was about, and ``planned`` names them.
    ``learned`` are the same records with targets as the task of the last study takes them,
    ``featured`` public features of them, as the last study's model takes them. ``checked`` is the
    study whose model was found to take them. ``engine`` keeps what does not change between rounds.
    """

    key: object = None
    units: Units | None = None
    options: Plain = field(default_factory=dict)
    study: object = None
    planned: PlannedUnits | None = None
    federation: Federation | None = None
    learned: Federation | None = None
    featured: tuple[object, Federation] | None = None
    checked: object = None
    engine: Engine = field(default_factory=lambda: make_engine("stacked"))
