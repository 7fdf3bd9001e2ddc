"""A site's own file: its records, its budget, and what it accepts, whatever a server says."""

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, did_you_mean
from dpfl.core.types import Budget, ClientSettings, Observer, Plain, Unit
from dpfl.privacy.accountant import SMALLEST_DELTA
from dpfl.runs.toml_file import Section, TomlFile
from dpfl.runs.validation import IDENTITY_KEY
from dpfl.secure_sum.trust import LEAST_HONEST, Trust

SITE_FILE, SCHEMA_FILE, MODELS = "site.toml", "schema.toml", "models"
"""In a site's folder: its file, what its columns hold, and the folder of the models it was sent."""
_UNITS = "give 'record', 'client', or the schema's word for a person"
Name = Annotated[str, Field(pattern=r"^[^./\\\s\x00-\x1f][^/\\\x00-\x1f]{0,99}$")]
"""A site's name; it is also a file's name."""


class ClientSection(Section):
    """The settings of one client, where they differ from the method's."""

    batch_size: int | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    lr: float | None = None

    def settings(self) -> ClientSettings:
        """Return the settings, checked."""
        return ClientSettings(**self.model_dump())


class SiteSection(Section):
    """The site's name in studies."""

    id: Name


with warnings.catch_warnings():  # pydantic's models have an old method of the name schema
    warnings.simplefilter("ignore", UserWarning)

    class SiteDataSection(Section):
        """The site's own records: a CSV or Parquet file.

        ``schema``: what the columns of the file hold (:class:`dpfl.data.schema.Schema`), the path
        of a TOML file or a table. It names the target and its classes.
        Without it, ``targets`` is what the label column holds, "classes" or "numbers" (for
        regression), and ``classes`` how many classes there are, as everyone may know. All of this
        is declared, not found out: whether a study fits is answered to any server, and must not
        depend on the records.
        """

        file: str
        label: str | None = None
        targets: Literal["classes", "numbers"] = "classes"
        classes: int | None = Field(default=None, ge=2)
        schema: str | Plain | None = None  # type: ignore[assignment]

        @model_validator(mode="before")
        @classmethod
        def _without_data_set(cls, values: Any) -> Any:
            """Leave out what earlier versions wrote beside every file: it said nothing there."""
            if not isinstance(values, dict):
                return values
            silent: Plain = {"seed": 0, "partition": {}}
            return {k: value for k, value in values.items() if silent.get(k, ...) != value}

        def agrees(self, at: str) -> None:
            """Refuse what does not belong together; ``at`` names the section."""
            if self.schema is not None:
                own = self.model_dump(exclude_defaults=True)
                for name in ("label", "targets", "classes"):
                    check(
                        name not in own,
                        f"{at} {name}",
                        "is given beside a schema, which describes a file and its target",
                        "leave one of the two out",
                    )
                return
            numbers = self.targets == "numbers"
            given = self.classes is not None
            check(
                not (numbers and given),
                f"{at} classes",
                f'{self.classes} classes were declared, and targets = "numbers"',
                "leave one of the two out",
            )
            check(
                numbers or given,
                f"{at} classes",
                "is missing",
                'declare how many classes there are, or targets = "numbers": servers are told',
            )


class BudgetSection(Section):
    """This site's budget over all studies. What decides privacy has no default.

    ``unit``: whose presence is hidden, a "record", the whole site ("client"), or a person by the
    word of the site's schema.
    ``per_study``: the part of epsilon that noise is planned for in one study; without it, a study
    may use all of it. ``filter``: how studies that are chosen one after the other add up. ``renyi``
    pays round by round, and what a study does not use is left for the next; ``allotments`` gives
    every study an epsilon and a delta of its own, taken when it begins; ``gaussian`` is exact, for
    studies without sampling only. It is fixed when the site's ledger is made.
    """

    epsilon: float
    delta: float
    per_study: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    unit: str = "record"
    observer: Literal["server", "world"] = "server"
    filter: Literal["renyi", "allotments", "gaussian"] = "renyi"


class PolicySection(Section):
    """What this site accepts, whatever a server says.

    A study outside these limits is refused before any work is done and before anything is charged.
    """

    methods: list[str] | None = None
    trust_server: bool = False
    least_noise_multiplier: float = Field(default=0.3, ge=0)
    largest_clip: float | None = Field(default=None, gt=0)
    largest_sampling_rate: float = Field(default=1.0, gt=0, le=1)
    most_rounds: int | None = Field(default=None, ge=1)
    least_sites: int = Field(default=2, ge=1)
    allow_seeded: bool = False
    allow_unprotected: bool = False


class SecureSumSection(Section):
    """Whom this site counts on in a secure sum, where nobody may see its upload alone.

    ``members``: the identity keys of other sites that were compared with their owners, by name;
    ``dpfl site identity`` prints a site's own. ``colluders``: how many of them may work together
    with the server. ``count_on``: those of them who are trusted not to. A member whose key is not
    here counts as a colluder. ``least_honest``: how many honest sites every sum must hold, this one
    included.
    """

    members: dict[Name, Annotated[str, Field(pattern=IDENTITY_KEY)]] = Field(default_factory=dict)
    colluders: int = Field(default=1, ge=1)
    count_on: list[str] = Field(default_factory=list)
    least_honest: int = Field(default=LEAST_HONEST, ge=LEAST_HONEST)


class ServerSection(Section):
    """How to reach the server, and with which key."""

    address: str = "127.0.0.1:9092"
    certificate: str = "ca.crt"
    key: str = "site.key"


class SiteFile(TomlFile):
    """A site's own file: who it is, its records, its budget, what it accepts, and its server.

    It never leaves the site. Paths in it are relative to the site's folder.
    """

    called: ClassVar[str] = "site"
    made_with: ClassVar[str] = "dpfl site init"

    site: SiteSection
    data: SiteDataSection
    budget: BudgetSection | None = None
    policy: PolicySection = PolicySection()
    secure_sum: SecureSumSection = SecureSumSection()
    client_settings: ClientSection = ClientSection()
    server: ServerSection = ServerSection()

    def agrees(self, where: str) -> None:
        """Refuse a file without a budget, records or an address, or whose policy contradicts it."""
        if self.budget is not None:
            self._check_unit(self.budget.unit, f"{where}, [budget] unit")
        check(
            self.own_budget() is not None or self.policy.allow_unprotected,
            f"{where}, [budget]",
            "is missing",
            "give an epsilon and a delta: neither has a default",
        )
        if self.budget is not None:
            self._check_budget(self.budget, f"{where}, [budget]")
        address = self.server.address
        host, _, port = address.rpartition(":")
        good = host and "/" not in host and port.isdecimal() and 1 <= int(port) <= 65535
        check(
            bool(good),
            f"{where}, [server] address",
            f"'{address}' is not a name and port",
            "give it as in study.org:9092",
        )
        self.data.agrees(f"{where}, [data]")
        for name in self.secure_sum.count_on:
            check(
                name in self.secure_sum.members,
                f"{where}, [secure_sum] count_on",
                f"'{name}' has no key in members",
                "pin its identity key first",
            )
        taken: dict[str, str] = {}
        for name, key in self.secure_sum.members.items():
            other = taken.setdefault(key, name)
            check(
                other == name,
                f"{where}, [secure_sum] members",
                f"'{other}' and '{name}' have one key",
                "ask both for theirs: dpfl site identity",
            )

    def _check_unit(self, word: str, at: str) -> None:
        """A word for persons comes from a schema; whether it is the schema's is checked there."""
        try:
            person = Unit(word) not in (Unit.RECORD, Unit.CLIENT)
            check(
                not person or self.data.schema is not None,
                at,
                f"'{word}' was given, and no [data] schema that names persons",
                _UNITS,
            )
        except ValueError as error:
            raise ConfigurationError(at, f"'{word}' was given", _UNITS) from error

    def _check_budget(self, budget: BudgetSection, at: str) -> None:
        part = budget.per_study or 0.0
        delta = budget.delta
        check(
            part <= budget.epsilon,
            f"{at} per_study",
            f"{part:g} is more than the whole budget",
            "give a part of epsilon",
        )
        check(
            not 0 < delta < SMALLEST_DELTA,
            f"{at} delta",
            f"{delta:g} is below {SMALLEST_DELTA:g}, where the accountant's rounding matters",
            "give a larger one",
        )
        check(
            budget.observer != "world" or self.policy.trust_server,
            f"{at} observer",
            "a budget against the world alone trusts the server with everything it sees",
            'set trust_server = true in [policy], or observer = "server"',
        )

    def own_budget(self) -> Budget | None:
        """Return what the ledger enforces; None where the site allows unprotected methods."""
        own = self.budget
        if own is None:
            return None
        return Budget(
            epsilon=own.epsilon,
            delta=own.delta,
            unit=Unit(own.unit),
            observer=Observer(own.observer),
            accountant="renyi" if own.filter == "renyi" else None,
        )

    def study_budget(self) -> Budget | None:
        """Return what noise is planned for in one study; the ledger enforces the whole budget."""
        whole = self.own_budget()
        if whole is None or self.budget is None or self.budget.per_study is None:
            return whole
        part = self.budget.per_study / self.budget.epsilon
        # An allotment has a delta of its own; studies that pay round by round share one.
        delta = whole.delta * part if self.budget.filter == "allotments" else whole.delta
        return replace(whole, epsilon=self.budget.per_study, delta=delta)

    def check_methods(self, known: Collection[str], where: str) -> None:
        """Refuse a policy that names a method which does not exist.

        Methods are known where torch is imported: a site's small process does not ask.
        """
        for name in self.policy.methods or ():
            check(
                name in known,
                f"{where}, [policy] methods",
                f"there is no method '{name}'",
                did_you_mean(name, known),
            )

    def trust(self) -> Trust:
        """Return whom this site counts on in a secure sum."""
        own = self.secure_sum
        return Trust(
            name=self.site.id,
            pinned=own.members,
            colluders=own.colluders,
            count_on=frozenset(own.count_on),
            least_honest=own.least_honest,
        )
