"""A strategy: building it proves that its pieces fit together, or raises.

What cannot be right is refused here, before any client is asked: noise over weights that depend on
data, shares of noise that would tell who was drawn, an adjacency under which no bound is proven, a
promise that nothing keeps.
"""

from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Adjacency, Observer, Phase, Terms
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.stages import Stage
from dpfl.strategy.accounting import Accounting


@dataclass(frozen=True, kw_only=True)
class Strategy(Accounting):
    """Plugs in their slots, a promise, and the assumptions it rests on (:class:`Slots`).

    >>> from dpfl.plugs.local_work import Sgd
    >>> from dpfl.core.types import ClientSettings, Unit
    >>> work = Sgd(client_settings=ClientSettings(lr=0.1, batch_size=8, local_steps=2))
    >>> promise = {"unit": Unit.CLIENT, "adjacency": Adjacency.ZERO_OUT}
    >>> try:
    ...     Strategy(name="bare", observer=Observer.SERVER, local=work, **promise)
    ... except PrivacyRefusal as refusal:
    ...     print(refusal.problem)
    nothing protects a client from the server
    """

    def __post_init__(self) -> None:
        check(
            self.local.unit.of_data is self.unit.of_data,
            self.name,
            f"its local work protects a {self.local.unit}, the promise is about a {self.unit}",
            "make the two agree",
        )
        if not self.channel.sees_rows:
            self._check_sum()
        if self.local.pooled:
            self._check_pool()
        if self.central_noise is not None:
            self._check_central_noise()
        self._check_shares()
        for stage in self.stages:
            kind = type(stage).__name__
            check(
                self.sums_only or not stage.needs_sum,
                self.name,
                f"{kind} learns from a noisy sum, and single updates are weighed or cleaned",
                "use noise = 'distributed' without personal starts, or a fixed clip",
            )
        if self.observer is not Observer.NOBODY:
            self._check_promise()
        if self.releases:
            self._check_releases()

    def _refuse_unless(self, good: bool, problem: str, remedy: str) -> None:
        check(good, self.name, problem, remedy, PrivacyRefusal)

    def _check_sum(self) -> None:
        lost = self.channel.tolerated_dropouts
        given = self.tolerated_dropouts
        check(
            lost == given,
            self.name,
            f"its channel plans for {lost} dropouts, {given} are tolerated",
            "make the two agree",
        )
        remedy = "use a digital channel"
        check(self.clean is None, self.name, "a summing channel delivers no rows to clean", remedy)
        check(
            not self.weights.needs_rows,
            self.name,
            f"{type(self.weights).__name__} need rows, a summing channel delivers none",
            "use uniform or constant weights",
        )
        nonlinear = next((type(stage).__name__ for stage in self.stages if not stage.linear), "")
        check(
            not nonlinear,
            self.name,
            f"the server half of {nonlinear} is not linear and cannot act on a sum",
            remedy,
        )

    def _check_pool(self) -> None:
        problem = "a curator of pooled records sees them as they are"
        self._refuse_unless(self.observer is Observer.WORLD, problem, "promise it to the world")
        alone = self.personal is None and not self.stages and not self.releases
        alone = alone and self.selection.sampling == "none" and self.channel.sees_rows
        check(
            alone,
            self.name,
            "pooled records are worked on together, and clients do nothing themselves",
            "leave out cohorts, stages, releases and personal parts",
        )

    def _check_central_noise(self) -> None:
        kind = type(self.weights).__name__
        problem = f"central noise over {kind}, which are not constants fixed before sampling"
        self._refuse_unless(self.weights.constant, problem, "use ExpectedCohortWeights")
        problem = "central noise over rows that were cleaned against each other"
        self._refuse_unless(self.clean is None, problem, "drop one of the two")
        # Linear server halves act on the sum once it carries its noise.
        problem = "central noise comes after what a stage does with single uploads on arrival"
        sums = all(stage.linear and type(stage).learn is Stage.learn for stage in self.stages)
        self._refuse_unless(sums, problem, "use stages with a linear server half")

    def _check_shares(self) -> None:
        sharing: list[Stage | LocalWork] = [stage for stage in self.stages if stage.shares_noise]
        sharing += [self.local] if self.local.shares_noise else []
        problem = "its local work ends in shares of noise, which nothing but a secure sum adds up"
        alone = self.secure and not self.stages and self.sums_only
        remedy = "use with_secure_sum, and no client stages"
        self._refuse_unless(alone or not self.local.shares_noise, problem, remedy)
        problem = "shares of noise over a cohort of random size would tell who was drawn"
        remedy = "draw a fixed number of clients (sampling = 'uniform'), or use noise = 'local'"
        self._refuse_unless(not sharing or self.selection.sampling != "poisson", problem, remedy)
        dropouts = self.tolerated_dropouts
        colluders = self.channel.colluders
        known = f"{dropouts} are tolerated" + f" beside {colluders} colluders" * bool(colluders)
        for noise in sharing:
            made = getattr(noise, "tolerated_dropouts", 0)
            check(
                made == dropouts + colluders,
                self.name,
                f"noise is shared out for {made} dropouts, {known}",
                "make the two agree",
            )

    def _check_promise(self) -> None:
        change = f"one changed {self.unit} may change a whole clipped update"
        problem = f"nothing protects a {self.unit}: {change}"
        good = not self.unit.of_data or self.local.private
        self._refuse_unless(good, problem, "use DP-SGD, or promise to protect a client")
        problem = (
            f"whether a {self.unit} is there at all is not hidden: the number of {self.unit}s is "
            "public, and denominators and noise levels follow from it"
        )
        good = self.adjacency is not Adjacency.ADD_REMOVE
        self._refuse_unless(good, problem, "state zero_out")
        fixed = self.hides_the_draw and self.selection.sampling == "uniform"
        problem = f"fixed-size cohorts have no proven bound under {self.adjacency}"
        good = not fixed or self.adjacency is Adjacency.REPLACE_ONE
        self._refuse_unless(good, problem, "charge them as replace_one")
        phases = (_PHASE,) if self.local.private else ()
        prototype = self.resolve(PROTOTYPE).exposure(self.observer, PROTOTYPE, phases, 10)
        problem = f"nothing protects a {self.unit} from the {self.observer}"
        remedy = "clip and add noise, or declare observer = NOBODY"
        self._refuse_unless(prototype.finite, problem, remedy)

    def _check_releases(self) -> None:
        known = self.channel.sees_rows or self.secure
        good = self.local.private and known
        problem = "releases before round one protect records, by noise that each client adds"
        self._refuse_unless(good, problem, "use them with DP-SGD, and not over the air")
        self.check_measured(0.0)

    def check_measured(self, measured: float) -> None:
        """Refuse an accounted metric, of this share of the budget, that does not fit."""
        if measured:
            good = self.unit.of_data and self.local.private and not self.local.pooled
            problem = "an accounted metric protects records, and this method other things"
            self._refuse_unless(good, problem, "use it with a method that protects records")
        total = measured + sum(release.share for release in self.releases)
        problem = f"the releases take {total:g} of the budget and leave nothing for the rounds"
        self._refuse_unless(total < 1, problem, "give shares that sum to less than 1")


_PHASE = Phase(steps=1, batch_size=1, sampling="poisson", lr=1.0, clip=1.0, noise_multiplier=1.0)
PROTOTYPE = Terms(
    rounds=1,
    population=10**7,  # which no cohort exceeds
    expected_cohort=10,
    participations=1,
    smallest_epsilon=1,
    largest_epsilon=1,
    parameters=1,
    noise_multiplier=1.0,
)
"""Stand-in numbers, to fold once before there are any: whether a result is finite, what a clip is.
"""
