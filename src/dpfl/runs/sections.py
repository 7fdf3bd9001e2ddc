"""The sections of an experiment file; unknown keys are refused, with the nearest known one."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dpfl.core.checks import MOST_ROUNDS, check
from dpfl.core.types import Plain
from dpfl.methods import find, make_strategy
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection
from dpfl.runs.data_section import DataSection as DataSection
from dpfl.runs.model_section import ModelSection as ModelSection, OfferedModel as OfferedModel
from dpfl.runs.server_section import ServerSection as ServerSection
from dpfl.runs.site_file import ClientSection as ClientSection
from dpfl.runs.toml_file import Section, in_section
from dpfl.secure_sum.trust import LEAST_HONEST
from dpfl.strategy import Strategy, with_secure_sum
from dpfl.tasks import Task, make_task


class PartitionSection(Section):
    """How records are shared out: a law and its settings.

    ``kind`` names the law (:mod:`dpfl.data.partition`); left out, it is the data set's natural
    silos, or equal shares where it has none. The other keys are settings of single laws.
    ``validation`` tests on records that are set aside from the training part, as tuning must.
    Data from a folder is shared out already.
    """

    kind: str | None = None
    clients: int | None = None
    shards_per_client: int = 2
    classes_per_client: int = 2
    alpha: float = 1.0
    records: int | None = None
    smallest: int = 2
    validation: bool = False


class BudgetsSection(Section):
    """The budget of each client: a distribution's name, a number, a list or a table; and delta.
    Neither has a default.

    A person may name a file instead, which is read in (:mod:`dpfl.runs.named_files`). ``scale``
    multiplies every epsilon, to see what more or less would buy.
    """

    epsilon: str | float | list[float] | dict[str, float] | None = None
    delta: float | list[float] | dict[str, float] | None = None
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class TaskSection(BaseModel):
    """What is learned: a task's ``name``, the ``metric`` that ranks, and the task's own settings
    (:mod:`dpfl.tasks`). Without a name, it is the data set's own task, or classification.

    >>> TaskSection(name="regression", loss="huber").task().metric
    'rmse'
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str | None = None
    metric: str | None = None

    def task(self, own: Task | None = None) -> Task:
        """Build the task with its settings; without a name, over those of a data set's ``own``."""
        known = own.to_dict() if own is not None and self.name in (None, own.name) else {}
        if "metric" in known and self.metric is None:
            del known["metric"]
        with in_section("task"):
            return make_task({**known, **self.model_dump(exclude_none=True)})


class RoundsSection(Section):
    """How many rounds, and with how many clients.

    ``rounds`` may be left out for methods that plan them themselves. ``cohort`` is a whole number
    of clients, or a fraction of them; left out, everyone takes part. ``least_willing`` clients must
    be able to pay for a round, or the plan ends: amplification by sampling is charged at this
    number. ``sampling`` left out is the one of the method.
    """

    rounds: int | None = Field(default=None, ge=1, le=MOST_ROUNDS)
    cohort: int | float | None = None
    least_willing: int | None = Field(default=None, ge=1)
    sampling: Literal["uniform", "poisson"] | None = None

    def selection(self, method: str, population: int) -> Selection:
        """Return who takes part: everyone, a number of clients, or a fraction of the population."""
        cohort = self.cohort
        least = self.least_willing
        sampling = self.sampling or find(method).sampling
        fixed = cohort is not None and sampling != "poisson"
        check(
            least is None or fixed,
            "[run] least_willing",
            f"{least} is a number for cohorts of a fixed size, and this study draws none",
            "leave it out, or give a cohort with sampling = 'uniform'",
        )
        if cohort is None:
            return Everyone()
        share = isinstance(cohort, float)
        check(
            0 < cohort <= (1 if share else population),
            "[run] cohort",
            f"{cohort} of {population} clients",
            "give a whole number of clients, or a fraction above 0 and at most 1",
        )
        if sampling == "poisson":
            return PoissonCohort(sampling_rate=cohort if share else cohort / population)
        size = max(1, round(cohort * population)) if share else int(cohort)
        return FixedCohort(size=size, least=least)


class RunSection(RoundsSection):
    """How many rounds, with whom, and where randomness comes from.

    ``noise``: "seeded" can be repeated and protects nobody, "system" is drawn by the operating
    system. ``engine``, ``device`` and ``workers`` say how local work is executed. ``misreports``
    are clients that claim a multiple of their epsilon, ``dropout`` is the probability that an
    upload gets lost. ``personal_finish`` compares the final model with what each client could make
    of its own records; left out, it is not computed.
    """

    seed: int = Field(default=0, ge=0)
    noise: Literal["seeded", "system"] = "seeded"
    engine: str = "stacked"
    device: str = "cpu"
    workers: int = Field(default=1, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    misreports: dict[str, float] = Field(default_factory=dict)
    dropout: float = Field(default=0.0, ge=0, le=1)
    personal_finish: bool | None = None  # not False: runs that are kept keep their digest


class ClientSettingsSection(Section):
    """Settings that each client draws from a list, by the public seed; its own section wins."""

    batch_size: list[int] = Field(default_factory=list)
    local_steps: list[int] = Field(default_factory=list)
    local_epochs: list[int] = Field(default_factory=list)
    lr: list[float] = Field(default_factory=list)


class SecureSumSection(Section):
    """Uploads are added up over a secure sum (:func:`dpfl.with_secure_sum`).

    ``tolerated_dropouts`` are the uploads that a round may lack, ``colluders`` the members who may
    work together with the server.
    """

    tolerated_dropouts: int = Field(default=0, ge=0)
    colluders: int = Field(default=1, ge=0)

    @property
    def least_members(self) -> int:
        """How many sites a study needs: enough to sign, and honest ones to be hidden among."""
        dropouts = self.tolerated_dropouts
        colluders = self.colluders
        return max(2 * dropouts + colluders + 1, dropouts + colluders + LEAST_HONEST)

    def over(self, strategy: Strategy) -> Strategy:
        """Return a strategy over this secure sum; a method that cannot be one is refused."""
        return with_secure_sum(strategy, **self.model_dump())


class MethodSection(BaseModel):
    """A method by name, with its own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def settings(self) -> Plain:
        """Everything but the name."""
        return dict(self.__pydantic_extra__ or {})

    def strategy(
        self,
        run: RoundsSection,
        server: ServerSection | None,
        secure_sum: SecureSumSection | None,
        population: int | None = None,
    ) -> Strategy:
        """Build the method with its settings, the server's, over a secure sum if there is one, and
        who takes part if the population is known.
        """
        settings = self.settings()
        declared = find(self.name)
        if population is not None:
            settings["selection"] = run.selection(self.name, population)
        if declared.secure:
            settings |= (secure_sum or SecureSumSection()).model_dump()
        strategy = make_strategy(self.name, settings)
        planned = declared.model is not None
        check(
            planned or run.rounds is not None,
            "[run] rounds",
            "is missing",
            "say how many rounds to train",
        )
        if server is not None:
            check(
                not planned,
                "[server]",
                f"'{self.name}' plans its own step",
                "leave the section out",
            )
            assert run.rounds is not None
            strategy = server.over(strategy, run.rounds)
        if secure_sum is None or declared.secure:
            return strategy
        return secure_sum.over(strategy)
