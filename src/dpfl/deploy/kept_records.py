"""What a site's process keeps between messages: its records, and what was made of them."""

from dataclasses import dataclass, field

from dpfl.data.federation import Federation
from dpfl.engine import make_engine
from dpfl.engine.base import Engine


@dataclass
class Records:
    """The records of one site, kept between messages, and what they were read from.

    ``learned`` are the same records with targets as the task of the last study takes them,
    ``featured`` public features of them, as the last study's model takes them. ``checked`` is the
    study whose model was found to take them. ``engine`` keeps what does not change between rounds.
    """

    key: object = None
    federation: Federation | None = None
    learned: Federation | None = None
    featured: tuple[object, Federation] | None = None
    checked: object = None
    engine: Engine = field(default_factory=lambda: make_engine("stacked"))
