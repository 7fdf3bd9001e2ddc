"""A strategy: about ten plugs in one fixed order. Building it proves that they fit, or raises.

::

    select -> local work -> client stages -> channel -> server halves, reversed -> clean rows ->
    weigh
           -> central noise -> denoise -> step

The same objects are folded twice: over data, by :mod:`dpfl.rounds`, and over an exposure, here, to
bill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.types import Adjacency, Claims, Observer, Phase, Promise, Terms, Unit
from dpfl.plugs.base import NoiseMaker, Plug
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel, Digital
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.figures import FigureSpec
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.selection import Everyone, Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.step import Step
from dpfl.plugs.weights import UniformWeights, Weights
from dpfl.privacy.accountant import SMALLEST_DELTA
from dpfl.privacy.calibrate import calibrate
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.exposure import Exposure


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """``unit`` and ``observer`` are the promise: whose presence is hidden, and from whom. NOBODY
    must be said aloud.

    ``tolerated_dropouts``: where noise shares of the clients carry the guarantee against the world,
    how many of the drawn may be missing; with more missing, nothing is published, unless the
    secrecy of the draw is counted on: then the server adds the missing shares.
    """

    name: str
    unit: Unit
    observer: Observer
    adjacency: Adjacency
    local: LocalWork
    selection: Selection = field(default_factory=Everyone)
    stages: tuple[Stage, ...] = ()
    channel: Channel = field(default_factory=Digital)
    clean: RowDenoiser | None = None
    weights: Weights = field(default_factory=UniformWeights)
    central_noise: CentralNoise | None = None
    denoise: tuple[Denoiser, ...] = ()
    step: Step = field(default_factory=Step)
    personal: Personal | None = None
    tolerated_dropouts: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def promise(self) -> Promise:
        """What an epsilon of this strategy is about."""
        return Promise(unit=self.unit, adjacency=self.adjacency, observer=self.observer)

    def __post_init__(self) -> None:
        if self.local.unit is not self.unit:
            raise ConfigurationError(
                self.name,
                f"its local work protects a {self.local.unit}, the promise is about a {self.unit}",
                "make the two agree",
            )
        if not self.channel.sees_rows:
            self._check_sum()
        if self.central_noise is not None and not self.weights.constant:
            raise PrivacyRefusal(
                self.name, f"central noise over {type(self.weights).__name__}, which are not constants fixed before sampling",
                "use weights such as ExpectedCohortWeights",
            )  # fmt: skip
        if self.central_noise is not None and self.clean is not None:
            raise PrivacyRefusal(
                self.name,
                "central noise over rows that were cleaned against each other",
                "drop one of the two",
            )
        if self.central_noise is not None and any(_acts_on_arrival(stage) for stage in self.stages):
            raise PrivacyRefusal(
                self.name,
                "central noise is scaled by what leaves a client, but a stage changes it on arrival or learns from rows",
                "use stages without a server half",
            )
        sharing: list[Stage | Channel] = [*self.stages, self.channel]
        for piece in sharing:
            if piece.shares_noise:
                self._check_shares(piece)
        if self.observer is not Observer.NOBODY:
            self._check_adjacency()
        if self.observer is not Observer.NOBODY and not self._prototype().finite:
            raise PrivacyRefusal(
                self.name, f"nothing protects a {self.unit} from the {self.observer}",
                "clip and add noise, or declare observer = NOBODY",
            )  # fmt: skip

    def _check_adjacency(self) -> None:
        if self.unit is Unit.RECORD and not self.local.private:
            raise PrivacyRefusal(
                self.name,
                "nothing protects a record: one changed record may change a whole clipped update into another",
                "use DP-SGD, or promise to protect a client",
            )
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise PrivacyRefusal(
                self.name,
                f"whether a {self.unit} is there at all is not hidden: the number of {self.unit}s is public, and "
                "denominators and noise levels follow from it",
                "state zero_out",
            )
        if (
            self._hides_the_draw()
            and self.selection.sampling == "uniform"
            and self.adjacency is not Adjacency.REPLACE_ONE
        ):
            raise PrivacyRefusal(
                self.name,
                f"fixed-size cohorts have no proven bound under {self.adjacency}",
                "charge them as replace_one",
            )

    def _check_shares(self, noise: Stage | Channel) -> None:
        if self.selection.sampling == "poisson" and isinstance(noise, Stage):
            raise PrivacyRefusal(
                self.name,
                "shares of noise over a cohort of random size would tell who was drawn",
                "draw a fixed number of clients (sampling = 'uniform'), or use noise = 'local'",
            )
        for_dropouts = getattr(noise, "tolerated_dropouts", 0)
        if for_dropouts != self.tolerated_dropouts:
            raise ConfigurationError(
                self.name,
                f"noise is shared out for {for_dropouts} dropouts, {self.tolerated_dropouts} are tolerated",
                "make the two agree",
            )

    def _check_sum(self) -> None:
        if self.clean is not None:
            raise ConfigurationError(
                self.name, "a summing channel delivers no rows to clean", "use a digital channel"
            )
        if self.weights.needs_rows:
            raise ConfigurationError(
                self.name,
                f"{type(self.weights).__name__} need rows, a summing channel delivers none",
                "use uniform or constant weights",
            )
        crooked = next((stage for stage in self.stages if not stage.linear), None)
        if crooked is not None:
            raise ConfigurationError(
                self.name,
                f"the server half of {type(crooked).__name__} is not linear and cannot act on a sum",
                "use a digital channel",
            )

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
            return self.exposure(self.observer, self.local.exposure((phase,), 10, 1), terms)
        resolve = self.resolve(terms)
        return resolve.exposure(self.observer, self.local.exposure((), 10, 1), terms)

    # -- what enrolment settles --------------------------------------------------------------------

    @property
    def noise_multiplier(self) -> float | None:
        """The noise of a client-level method, relative to one client's contribution; None where it
        is left open.
        """
        return next((piece.noise_multiplier for piece in self._noise_makers()), None)

    def _noise_makers(self) -> list[NoiseMaker]:
        pieces = (*self.stages, self.channel, self.central_noise)
        return [piece for piece in pieces if isinstance(piece, NoiseMaker) and piece.makes_noise]

    def settle(self, terms: Terms, claims: Mapping[str, Claims]) -> tuple[Strategy, Terms]:
        """Fill what was left open: noise from the smallest budget anyone claims, denominators from
        the population.
        """
        if self._noise_makers():
            multiplier = self.noise_multiplier
            terms = terms.with_noise(
                self._calibrated(terms, claims) if multiplier is None else multiplier
            )
        return self.resolve(terms), terms

    def resolve(self, terms: Terms) -> Strategy:
        """The strategy with nothing left open under these terms: what a site works with once it was
        told them.
        """
        resolve = {
            "stages": tuple(stage.resolve(terms) for stage in self.stages),
            "channel": self.channel.resolve(terms),
            "clean": self.clean.resolve(terms) if self.clean else None,
            "weights": self.weights.resolve(terms),
            "central_noise": self.central_noise.resolve(terms) if self.central_noise else None,
            "denoise": tuple(denoiser.resolve(terms) for denoiser in self.denoise),
        }
        changed = {name: piece for name, piece in resolve.items() if piece != getattr(self, name)}
        return replace(self, **changed) if changed else self  # type: ignore[arg-type]

    def _calibrated(self, terms: Terms, claims: Mapping[str, Claims]) -> float:
        """The least noise with which all planned rounds cost no more than the smallest claim."""
        usable = [claim for claim in claims.values() if claim.usable]
        if not usable:
            raise PrivacyRefusal(
                self.name,
                "neither a noise_multiplier nor a usable budget was given",
                "give one of the two",
            )
        exposure = self._with_multiplier(1.0, terms)
        amplified = self.amplifies(self.observer)
        steps = terms.rounds if amplified else terms.participations
        delta = min(claim.delta for claim in usable) - exposure.failure * steps
        if delta < SMALLEST_DELTA:
            raise PrivacyRefusal(
                self.name,
                f"bounds that fail with probability {exposure.failure:g} a round use up all of delta in {steps} rounds",
                "plan fewer rounds, grant more delta, or use bounds that do not fail",
            )
        wanted = max(
            calibrate(
                min(claim.epsilon for claim in usable if claim.accountant == accountant),
                delta,
                self.selection.charged_rate(terms.population) if amplified else 1.0,
                steps,
                sampling=self.selection.sampling if amplified else "none",
                adjacency=self.adjacency,
                accountant=accountant,
                numbers=exposure.draws,
            )
            for accountant in {claim.accountant for claim in usable}
        )
        multiplier = wanted * exposure.bound / exposure.noise
        for _ in range(50):  # more noise has a coarser grid, which needs a little more noise again
            exposure = self._with_multiplier(multiplier, terms)
            if exposure.noise / exposure.bound >= wanted:
                return multiplier
            multiplier *= wanted * exposure.bound / exposure.noise * (1 + 1e-9)
        raise PrivacyRefusal(
            self.name,
            f"a noise multiplier of {wanted:.4g} is too much for the grid",
            "plan fewer rounds",
        )

    def _with_multiplier(self, noise_multiplier: float, terms: Terms) -> Exposure:
        """What the strategy's adversary sees of a client at this noise level."""
        resolve = self.resolve(terms.with_noise(noise_multiplier))
        return resolve.exposure(
            self.observer, resolve.local.exposure((), 1, terms.parameters), terms
        )

    def slots(self) -> Iterator[tuple[str, Plug]]:
        """Yield every plug that may keep state, with the name its state and shared tensors go by."""
        yield "selection", self.selection
        for number, stage in enumerate(self.stages):
            yield f"stage{number}", stage
        yield "channel", self.channel
        if self.clean is not None:
            yield "clean", self.clean
        yield "weights", self.weights

    def figures(self) -> list[tuple[str, FigureSpec]]:
        """The pictures that the pieces declare, each with the slot whose metrics it shows."""
        return [(slot, figure) for slot, plug in self.slots() for figure in plug.figures()]

    @property
    def sums_only(self) -> bool:
        """Whether what is published depends on the rows only through a sum with constant weights."""
        return self.weights.constant and self.clean is None

    def shares(self, terms: Terms) -> int:
        """How many clients' noise the bill against the world counts on: a fixed cohort's, else
        one's own alone.
        """
        size = self.selection.cohort_size(terms.population)
        return 1 if size is None else max(1, size - self.tolerated_dropouts)

    def shares_needed(self, terms: Terms, drawn: int) -> int:
        """Uploads without which a published sum carries less noise than was billed."""
        if self.unit is Unit.RECORD or self.observer is Observer.NOBODY or not self.sums_only:
            return 0
        if self.channel.shares_noise or any(
            stage.shares_noise for stage in self.stages
        ):  # shares were made for the clients really drawn
            return max(1, drawn - self.tolerated_dropouts)
        return (
            self.shares(terms)
            if self._sent(self.local.exposure((), 1, terms.parameters), terms).noise > 0
            else 0
        )

    def upload_grid(self, drawn: int) -> Grid | None:
        """The grid on which uploads lie, if the last thing a client does to its update is to add
        noise.
        """
        return self.stages[-1].grid(drawn) if self.stages else None

    def _sent(self, work: Exposure, terms: Terms) -> Exposure:
        """Fold the client stages: what leaves a client."""
        drawn = self.selection.cohort_size(terms.population) or max(1, round(terms.expected_cohort))
        for stage in self.stages:
            work = stage.exposure(work, drawn)
        return work

    def exposure(self, observer: Observer, work: Exposure, terms: Terms) -> Exposure:
        """Fold the pieces over what local work shows, as far as the observer can see."""
        exposure = self._sent(work, terms)
        seen = self.channel.exposure(exposure, max(1, round(terms.expected_cohort)))
        if observer is not Observer.WORLD or work.paid:
            return seen
        if not self.sums_only:
            return seen.processed()
        # Noise made on the way is made for the sum: the world sees no less of it than the server.
        total = seen if seen.noise > exposure.noise else exposure.summed(1.0, self.shares(terms))
        if self.central_noise is not None:
            total = total.noised(self.central_noise.std(total.bound), summands=terms.population)
        return total.scaled(self.weights.value(terms))

    def contribution_bound(self, terms: Terms) -> float:
        """Return the largest norm of what one client adds to the sum: what central noise is scaled
        by.
        """
        return self._sent(self.local.exposure((), 1, terms.parameters), terms).bound

    def amplifies(self, observer: Observer) -> bool:
        """Sampling of clients hides who took part from the world, never from the server that drew
        them.

        Not where clients remember something between rounds: what one of them does later may tell
        that it was drawn, and so who was not; each round would have to be a fresh function of the
        models published before. Nor where the channel makes the noise out of those who take part:
        how much of it there is would tell who they are.
        """
        return (
            observer is Observer.WORLD
            and self._hides_the_draw()
            and self.selection.sampling != "none"
        )

    def _hides_the_draw(self) -> bool:
        on_air = isinstance(self.channel, NoiseMaker) and self.channel.makes_noise
        # Clients' own noise over a cohort of random size: how much noise is published would tell
        # how many were drawn.
        counts = self.selection.sampling == "poisson" and any(
            isinstance(stage, NoiseMaker) and stage.makes_noise for stage in self.stages
        )
        return (
            self.unit is Unit.CLIENT
            and self.sums_only
            and self.personal is None
            and not on_air
            and not counts
        )

    def cost(
        self, observer: Observer, phases: Sequence[Phase], examples: int, terms: Terms
    ) -> PrivacyCost:
        """What one round releases of one unit of a client with this work, to this observer."""
        exposure = self.exposure(
            observer, self.local.exposure(phases, examples, terms.parameters), terms
        )
        if self.amplifies(observer):
            events = exposure.events(
                self.selection.sampling, self.selection.charged_rate(terms.population)
            )
        else:
            events = exposure.events()
        return PrivacyCost(unit=self.unit, adjacency=self.adjacency, events=events)

    def describe(self) -> list[tuple[str, str]]:
        """List the pieces in the order they act, in words."""
        return [
            ("select", _words(self.selection)),
            ("local work", _words(self.local)),
            *([("stays", _words(self.personal))] if self.personal else []),
            *(("client stage", _words(stage)) for stage in self.stages),
            ("channel", _words(self.channel)),
            *([("clean rows", _words(self.clean))] if self.clean else []),
            ("weigh", _words(self.weights)),
            *([("central noise", _words(self.central_noise))] if self.central_noise else []),
            *(("denoise", _words(denoiser)) for denoiser in self.denoise),
            ("step", _words(self.step)),
        ]


def _acts_on_arrival(stage: Stage) -> bool:
    return type(stage).server is not Stage.server or type(stage).learn is not Stage.learn


def _words(piece: object) -> str:
    names = [f.name for f in fields(piece)] if is_dataclass(piece) else []
    settings = ", ".join(f"{name}={_setting(getattr(piece, name))}" for name in names)
    return f"{type(piece).__name__}({settings})"


def _setting(value: object) -> str:
    if not is_dataclass(value):
        return str(value)
    kept = {f.name: getattr(value, f.name) for f in fields(value)}
    return "{" + ", ".join(f"{name}={v}" for name, v in kept.items() if v is not None) + "}"
