"""A strategy: building it proves that its pieces fit together, or raises.

What cannot be right is refused here, before any client is asked: noise over weights that depend on
data, shares of noise that would tell who was drawn, an adjacency under which no bound is proven, a
promise that nothing keeps.
"""

from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency, Observer, Phase, Terms, Unit
from dpfl.plugs.channels import Channel
from dpfl.plugs.stages import Stage
from dpfl.privacy.exposure import Exposure
from dpfl.strategy.accounting import Accounting


@dataclass(frozen=True, kw_only=True)
class Strategy(Accounting):
    """Plugs in their slots, a promise, and the assumptions it rests on (:class:`Slots`).

    >>> from dpfl.plugs.local_work import Sgd
    >>> from dpfl.core.types import ClientSettings
    >>> work = Sgd(client_settings=ClientSettings(lr=0.1, batch_size=8, local_steps=2))
    >>> promise = {"unit": Unit.CLIENT, "adjacency": Adjacency.ZERO_OUT}
    >>> try:
    ...     Strategy(name="bare", observer=Observer.SERVER, local=work, **promise)
    ... except PrivacyRefusal as refusal:
    ...     print(refusal.problem)
    nothing protects a client from the server
    """

    def __post_init__(self) -> None:
        problem = f"its local work protects a {self.local.unit}, the promise is about a {self.unit}"
        check(self.local.unit is self.unit, self.name, problem, "make the two agree")
        if not self.channel.sees_rows:
            self._check_sum()
        if self.central_noise is not None:
            self._check_central_noise()
        sharing: tuple[Stage | Channel, ...] = (*self.stages, self.channel)
        for piece in sharing:
            if piece.shares_noise:
                self._check_shares(piece)
        if self.observer is not Observer.NOBODY:
            self._check_adjacency()
            protected = self._prototype().finite
            problem = f"nothing protects a {self.unit} from the {self.observer}"
            self._refuse_unless(
                protected, problem, "clip and add noise, or declare observer = NOBODY"
            )
        if self.releases:
            self._check_releases()

    def _refuse_unless(self, good: bool, problem: str, remedy: str) -> None:
        check(good, self.name, problem, remedy, PrivacyRefusal)

    def _check_sum(self) -> None:
        remedy = "use a digital channel"
        problem = "a summing channel delivers no rows to clean"
        check(self.clean is None, self.name, problem, remedy)
        problem = f"{type(self.weights).__name__} need rows, a summing channel delivers none"
        good = not self.weights.needs_rows
        check(good, self.name, problem, "use uniform or constant weights")
        nonlinear = next((type(stage).__name__ for stage in self.stages if not stage.linear), "")
        problem = f"the server half of {nonlinear} is not linear and cannot act on a sum"
        check(not nonlinear, self.name, problem, remedy)

    def _check_central_noise(self) -> None:
        kind = type(self.weights).__name__
        self._refuse_unless(
            self.weights.constant,
            f"central noise over {kind}, which are not constants fixed before sampling",
            "use weights such as ExpectedCohortWeights",
        )
        problem = "central noise over rows that were cleaned against each other"
        self._refuse_unless(self.clean is None, problem, "drop one of the two")
        self._refuse_unless(
            not any(_acts_on_arrival(stage) for stage in self.stages),
            "central noise is scaled by what leaves a client, but a stage changes it on arrival or "
            "learns from rows",
            "use stages without a server half",
        )

    def _check_shares(self, noise: Stage | Channel) -> None:
        self._refuse_unless(
            self.selection.sampling != "poisson" or not isinstance(noise, Stage),
            "shares of noise over a cohort of random size would tell who was drawn",
            "draw a fixed number of clients (sampling = 'uniform'), or use noise = 'local'",
        )
        tolerated = getattr(noise, "tolerated_dropouts", 0)
        problem = (
            f"noise is shared out for {tolerated} dropouts, {self.tolerated_dropouts} are tolerated"
        )
        check(tolerated == self.tolerated_dropouts, self.name, problem, "make the two agree")

    def _check_adjacency(self) -> None:
        self._refuse_unless(
            self.unit is not Unit.RECORD or self.local.private,
            "nothing protects a record: one changed record may change a whole clipped update into "
            "another",
            "use DP-SGD, or promise to protect a client",
        )
        self._refuse_unless(
            self.adjacency is not Adjacency.ADD_REMOVE,
            f"whether a {self.unit} is there at all is not hidden: the number of {self.unit}s is "
            "public, and denominators and noise levels follow from it",
            "state zero_out",
        )
        fixed = self.hides_the_draw and self.selection.sampling == "uniform"
        problem = f"fixed-size cohorts have no proven bound under {self.adjacency}"
        good = not fixed or self.adjacency is Adjacency.REPLACE_ONE
        self._refuse_unless(good, problem, "charge them as replace_one")

    def _check_releases(self) -> None:
        good = self.unit is Unit.RECORD and self.local.private and self.channel.sees_rows
        self._refuse_unless(
            good,
            "releases before round one protect records, by noise that each client adds",
            "use them with DP-SGD and a digital channel",
        )
        total = sum(release.share for release in self.releases)
        problem = f"the releases take {total:g} of the budget and leave nothing for the rounds"
        self._refuse_unless(total < 1, problem, "give shares that sum to less than 1")

    def _prototype(self) -> Exposure:
        """Fold once with stand-in numbers, for a population no cohort exceeds: only whether it is
        finite matters.
        """
        terms = Terms(
            rounds=1,
            population=10**7,
            expected_cohort=10,
            participations=1,
            smallest_epsilon=1,
            largest_epsilon=1,
            parameters=1,
            noise_multiplier=1.0,
        )
        if self.local.private:
            phase = Phase(
                steps=1, batch_size=1, sampling="poisson", lr=1.0, clip=1.0, noise_multiplier=1.0
            )
            work = self.local.exposure((phase,), 10, 1)
            return self.exposure(self.observer, work, terms)
        work = self.local.exposure((), 10, 1)
        return self.resolve(terms).exposure(self.observer, work, terms)


def _acts_on_arrival(stage: Stage) -> bool:
    return type(stage).server is not Stage.server or type(stage).learn is not Stage.learn
