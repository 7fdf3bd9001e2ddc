"""The sections of an experiment file; unknown keys are refused, with the nearest known one."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dpfl.core.checks import check
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection
from dpfl.plugs.step import (
    AveragedIterates,
    Decay,
    LearningRate,
    ServerAdam,
    ServerSgd,
    ServerYogi,
    Step,
)
from dpfl.runs.toml_file import Section


class DataSection(Section):
    """Which records: a named data set, or a ``folder`` with one CSV or Parquet file per client."""

    name: str | None = None
    folder: str | None = None
    label: str | None = None


class PartitionSection(Section):
    """How records are shared out: a law and its settings.

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
    """The budget of each client: a distribution's name, a number, a list, a file or a table; and
    delta. Neither has a default.

    ``scale`` multiplies every epsilon, to see what more or less would buy.
    """

    epsilon: str | float | list[float] | dict[str, float] | None = None
    delta: float | list[float] | dict[str, float] | None = None
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ModelSection(Section):
    """A model by name."""

    name: str = "logistic"
    hidden: int = 64


class MethodSection(BaseModel):
    """A method by name, with its own settings beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def settings(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.__pydantic_extra__ or {})


class RunSection(Section):
    """How many rounds, with whom, and where randomness comes from."""

    rounds: int = Field(ge=1)
    cohort: int | float | None = None
    least_willing: int | None = Field(default=None, ge=1)
    sampling: Literal["uniform", "poisson"] | None = None
    seed: int = 0
    noise: Literal["seeded", "system"] = "seeded"
    engine: str = "stacked"
    device: str = "cpu"
    workers: int = Field(default=1, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    misreports: dict[str, float] = Field(default_factory=dict)
    dropout: float = Field(default=0.0, ge=0, le=1)


class ClientSettingsSection(Section):
    """Settings that each client draws from a list, by the public seed; its own section wins."""

    batch_size: list[int] = Field(default_factory=list)
    local_steps: list[int] = Field(default_factory=list)
    local_epochs: list[int] = Field(default_factory=list)
    lr: list[float] = Field(default_factory=list)


class ServerSection(Section):
    """The server optimiser, for any method. What is left out stays as the method has it.

    ``optimizer``: sgd (plain or with ``momentum``), adam or yogi (with ``beta1``, ``beta2``,
    ``tau``). ``lr`` and its ``schedule``, where ``factor`` belongs to the exponential one.
    ``average``: evaluate and publish the mean of all models ("uniform"), or an exponential mean
    with this decay.

    >>> ServerSection(lr=0.1).step(ServerSgd(), rounds=10).lr.rate
    0.1
    """

    optimizer: Literal["sgd", "adam", "yogi"] | None = None
    lr: float | None = None
    schedule: Decay | None = None
    factor: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    tau: float | None = None
    average: Literal["uniform"] | float | None = None

    def step(self, own: Step, rounds: int) -> Step:
        """Return the step that this section asks for, in place of a method's ``own``."""
        step = own
        if self.model_dump(exclude_none=True, exclude={"average"}):
            known = own.lr if isinstance(own, ServerSgd) else LearningRate()
            lr = self._learning_rate(known, rounds)
            step = self._sgd(own, lr) if self.optimizer in (None, "sgd") else self._adaptive(lr)
        if self.average is None:
            return step
        return AveragedIterates(
            step=step, decay=None if self.average == "uniform" else self.average
        )

    def _learning_rate(self, own: LearningRate, rounds: int) -> LearningRate:
        """The learning rate, over what the method's own step has."""
        adaptive = self.optimizer in ("adam", "yogi")
        self._need(
            not adaptive or self.lr is not None or own != LearningRate(),
            "lr",
            f"{self.optimizer} has no default",
            "give lr, for instance 0.1",
        )
        decay = self.schedule or own.decay
        exponential, factor = decay == "exponential", self.factor
        self._need(
            exponential or factor is None,
            "factor",
            f"a schedule '{decay}' has none",
            "leave it out",
        )
        self._need(
            not exponential or factor is not None or own.decay == decay,
            "factor",
            "an exponential schedule needs it",
            "give a number below 1",
        )
        return LearningRate(
            rate=own.rate if self.lr is None else self.lr,
            decay=decay,
            factor=own.factor if factor is None else factor,
            rounds=rounds if decay == "cosine" else None,
        )

    def _sgd(self, own: Step, lr: LearningRate) -> Step:
        """Plain averaging, or with momentum."""
        for name in ("beta1", "beta2", "tau"):
            problem = "belongs to adam and yogi"
            self._need(getattr(self, name) is None, name, problem, "leave it out, or say which")
        kept = own if isinstance(own, ServerSgd) else ServerSgd()
        momentum = kept.momentum if self.momentum is None else self.momentum
        nesterov = kept.nesterov if self.nesterov is None else self.nesterov
        looks_ahead = "looks ahead along the momentum, and there is none"
        self._need(momentum > 0 or not nesterov, "nesterov", looks_ahead, "give momentum")
        return ServerSgd(lr=lr, momentum=momentum, nesterov=nesterov)

    def _adaptive(self, lr: LearningRate) -> Step:
        """Adam or Yogi."""
        for name in ("momentum", "nesterov"):
            problem = f"{self.optimizer} has a momentum of its own"
            self._need(getattr(self, name) is None, name, problem, "give beta1 instead")
        names = ("beta1", "beta2", "tau")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return (ServerAdam if self.optimizer == "adam" else ServerYogi)(lr=lr, **given)

    def _need(self, good: bool, key: str, problem: str, remedy: str) -> None:
        """Refuse a key of this section unless ``good``."""
        check(good, f"[server] {key}", problem, remedy)


def selection_of(
    cohort: int | float | None, sampling: str, population: int, least_willing: int | None = None
) -> Selection:
    """Return who takes part: everyone, a number of clients, or a fraction of the population."""
    check(
        least_willing is None or (cohort is not None and sampling != "poisson"),
        "[run] least_willing",
        f"{least_willing} is a number for cohorts of a fixed size, and this study draws none",
        "leave it out, or give a cohort with sampling = 'uniform'",
    )
    if cohort is None:
        return Everyone()
    share = isinstance(cohort, float)
    check(
        cohort > 0 and cohort <= (1 if share else population),
        "[run] cohort",
        f"{cohort} of {population} clients",
        "give a whole number of clients, or a fraction above 0 and at most 1",
    )
    if sampling == "poisson":
        return PoissonCohort(sampling_rate=cohort if share else cohort / population)
    size = max(1, round(cohort * population)) if isinstance(cohort, float) else cohort
    return FixedCohort(size=size, least=least_willing)
