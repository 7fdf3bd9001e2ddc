"""Describe an experiment without running it: what would happen, and what it would cost whom.

All clients are enrolled exactly as a run would enrol them, against a ledger in memory. What the
components send, share and assume is asked of the components; nothing here knows a method.
"""

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from dpfl.core.html import html_table, text_of
from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, Downlink, Observer, Plain, Promise, Unit
from dpfl.engine import slow_layers
from dpfl.engine.stacked import assumptions_of
from dpfl.experiments import planned_costs as costs
from dpfl.privacy.accountant import shown
from dpfl.privacy.flags import RaisedFlag
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Agreement, Run, first_state
from dpfl.rounds.codec import FRAME_BYTES, encode_download
from dpfl.rounds.members import Member
from dpfl.runs.experiment import Experiment
from dpfl.runs.result import Spread
from dpfl.secure_sum.session import Group
from dpfl.sim.forecast import NoiseForecast, forecast
from dpfl.sim.loop import Simulation
from dpfl.sim.summary import flags_of

MOST_FORECAST = 32
"""Clients that stand for all in a forecast before a run."""


@dataclass(frozen=True, kw_only=True)
class ClientNoise:
    """One ``client`` before training: how many ``records`` it has, and its ``budget``.

    ``noise_multiplier`` is None where it adds no noise.
    """

    client: str
    records: int
    budget: float | None
    noise_multiplier: float | None


@dataclass(frozen=True, kw_only=True)
class Description:
    """An experiment before it is run: ``method``, ``rounds``, ``clients``, number of
    ``parameters``.

    ``promise`` says what every epsilon is about, ``assumptions`` what it rests on,
    ``participations`` how often a client takes part, and ``noise_multiplier`` how much noise
    clients add. ``pipeline`` lists the components in the order they act. ``epsilon`` is what the
    plan costs, by adversary. ``published`` is what the method's paper would print.
    ``by_assumption`` holds epsilons over this run's own channel, by whose noise is counted on; it
    is empty where the channel makes no noise. ``bytes_up`` and ``bytes_down`` are those of one
    client in one round, ``cohort`` is the expected number of clients in a round. ``forecast`` says
    how much noise a round would leave beside its signal. ``slow_layers`` are layers without a rule
    for per-record gradients, and why: with them DP-SGD is slow. ``counted`` is what clients hold:
    records, or persons. ``group`` adds up a round's uploads, where there is a secure sum.
    ``flags`` are those that a run would carry, as far as they are known before it.
    """

    method: str
    pipeline: tuple[tuple[str, str], ...]
    promise: Promise
    assumptions: tuple[str, ...]
    rounds: int
    participations: int
    cohort: float
    parameters: int
    bytes_up: int
    bytes_down: int
    epsilon: Mapping[Observer, costs.PlannedEpsilon]
    published: costs.Published | None
    by_assumption: Mapping[str, Spread] = field(default_factory=dict)
    noise_multiplier: Spread | None = None
    clients: tuple[ClientNoise, ...] = ()
    counted: Unit = Unit.RECORD
    forecast: NoiseForecast
    slow_layers: Mapping[str, str] = field(default_factory=dict)
    group: Group | None = None
    flags: tuple[RaisedFlag, ...] = ()

    @property
    def secure_sum(self) -> str:
        """The secure sum in words; empty where there is none."""
        return "" if self.group is None else costs.sum_text(self.group, self.assumptions)

    @property
    def protects(self) -> bool:
        """Whether anybody is protected."""
        return self.promise.observer is not Observer.NOBODY

    @property
    def running_out(self) -> int:
        """How many clients run out of budget before their planned participations."""
        return max(planned.running_out for planned in self.epsilon.values())

    def __str__(self) -> str:
        """The tables that a notebook shows, as text."""
        return text_of(self._repr_html_())

    def _repr_html_(self) -> str:
        costs = [
            [f"epsilon against the {observer}", shown(one.spread.largest)]
            for observer, one in self.epsilon.items()
        ]
        size = f"{self.rounds} rounds, {len(self.clients)} clients, {self.parameters} parameters"
        facts = [["promise", str(self.promise)], *costs]
        if self.noise_multiplier:
            spread = " / ".join(f"{value:.3g}" for value in vars(self.noise_multiplier).values())
            facts += [["noise multiplier", f"{spread} (smallest / median / largest)"]]
        facts += [["size", size], *([f"planned: {k}", v] for k, v in self.forecast.planned)]
        facts += [["secure sum", self.secure_sum]] if self.secure_sum else []
        facts += [["assumption", assumption] for assumption in self.assumptions]
        facts += [
            ["slow layer", f"{name or 'the model itself'}: {why}"]
            for name, why in self.slow_layers.items()
        ]
        facts += [["flag", str(raised)] for raised in self.flags]
        facts += [["warning", self.forecast.warning]] if self.forecast.warning else []
        return html_table(("step", "component"), self.pipeline) + html_table((), facts)

    def to_dict(self) -> Plain:
        """Return plain values that JSON can carry."""
        same = ("method", "rounds", "participations", "cohort", "parameters")
        spread = self.noise_multiplier
        ratio = self.forecast.noise_to_signal
        losses = {name: one.to_dict() for name, one in self.by_assumption.items()}
        return {
            **{name: getattr(self, name) for name in same},
            "pipeline": [list(row) for row in self.pipeline],
            **self.promise.to_dict(),
            "assumptions": list(self.assumptions),
            "slow_layers": dict(self.slow_layers),
            "clients": len(self.clients),
            "secure_sum": self.group and costs.sum_values(self.group),
            "epsilon": {str(observer): one.to_dict() for observer, one in self.epsilon.items()},
            "as_published": vars(self.published) if self.published else None,
            "if_honest": losses or None,
            "noise_multiplier": spread.to_dict() if spread else None,
            "bytes_up_per_client": self.bytes_up,
            "bytes_down_per_client": self.bytes_down,
            "noise_to_signal": "infinite" if ratio == math.inf else ratio,
            "flags": [raised.to_dict() for raised in self.flags],
            "warning": self.forecast.warning,
            "planned": dict(self.forecast.planned),
            "reach": self.forecast.reach,
        }


def describe(experiment: Experiment, data_folder: Path | None = None) -> Description:
    """Plan everything, charge nothing and run nothing.

    ``data_folder`` is where data sets lie that do not ship with dpfl.

    ::

        found = describe(Experiment.from_file(Path("experiment.toml")))
        print(found.promise, found.epsilon[Observer.SERVER].spread, found.forecast.warning)
    """
    return description_of(prepared(experiment, data_folder), experiment.public_seed())


def description_of(sim: Simulation, seed: PublicSeed) -> Description:
    """Describe a simulation (``sim``) that was not played; ``seed`` is its public randomness."""
    agreement = sim.agreement
    strategy = sim.strategy
    terms = sim.agreement.terms
    clients = tuple(_client(agreement, sim.members[client]) for client in sorted(sim.members))
    return Description(
        method=strategy.name,
        pipeline=tuple(strategy.describe()),
        promise=strategy.promise_with(sim.accounted is not None),
        assumptions=assumptions_of(strategy, sim.model, sim.layout, task=sim.federation.task),
        rounds=terms.rounds,
        participations=terms.participations,
        cohort=terms.expected_cohort,
        parameters=sim.layout.size,
        bytes_up=_bytes_up(agreement),
        bytes_down=_bytes_down(sim),
        epsilon={one: costs.planned(sim, one) for one in (Observer.SERVER, Observer.WORLD)},
        published=costs.published(sim),
        by_assumption=costs.by_assumption(sim, seed.child("run")),
        noise_multiplier=Spread.of(one.noise_multiplier for one in clients if one.noise_multiplier),
        clients=clients,
        counted=sim.federation.unit,
        forecast=forecast(agreement, sim.members, seed),
        slow_layers=slow_layers(sim.model) if strategy.local.private else {},
        group=strategy.channel.group(max(1, round(terms.expected_cohort))),
        flags=flags_of(sim, played=False),
    )


def noise_forecast(experiment: Experiment, data_folder: Path | None = None) -> NoiseForecast:
    """Work out how much noise a round of an ``experiment`` would leave beside its signal.

    ``data_folder`` is where data sets lie that do not ship with dpfl. Of many clients a few stand
    for all, evenly from the smallest budget to the largest: planning the noise of everyone would
    take as long as a short run.
    """
    sim = prepared(experiment, data_folder)

    def epsilon(member: Member) -> float:
        return member.budget.epsilon if member.budget else math.inf

    ordered = sorted(sim.members.values(), key=epsilon)
    few = ordered[:: math.ceil(len(ordered) / MOST_FORECAST)]
    members = {member.id: member for member in few}
    return forecast(sim.agreement, members, experiment.public_seed())


def prepared(experiment: Experiment, data_folder: Path | None = None) -> Simulation:
    """Enrol all clients of an ``experiment`` against a ledger in memory.

    ``data_folder`` is where data sets lie that do not ship with dpfl. What cannot be run is
    refused, as a run would refuse it.
    """
    experiment.check()
    federation = experiment.federation(data_folder)
    with closing(Ledger.create(":memory:", "plan")) as ledger:
        return Simulation(
            model=experiment.build_model(federation),
            federation=federation,
            strategy=experiment.strategy(len(federation.ids)),
            rounds=experiment.run.rounds,
            run=Run(name="plan", ledger=ledger, seed=None, public=experiment.public_seed()),
            misreports=experiment.run.misreports,
            accounted=experiment.accounted_metric(),
        )


def _client(agreement: Agreement, member: Member) -> ClientNoise:
    """What one client holds, has as a budget, and adds as noise."""
    noise = [phase.noise_multiplier for phase in agreement.phases(member.participant)]
    return ClientNoise(
        client=member.id,
        records=member.shard.examples,
        budget=member.budget.epsilon if member.budget else None,
        noise_multiplier=max(noise, default=0.0) or agreement.strategy.noise_multiplier,
    )


def _bytes_up(agreement: Agreement) -> int:
    """A round's upload, averaged over clients, once the method is under way."""
    numbers = float(agreement.layout.size)
    for _, plug in agreement.strategy.slots():
        numbers = plug.upload_size(numbers, agreement.terms, agreement.layout)
    return math.ceil(4 * numbers) + FRAME_BYTES


def _bytes_down(sim: Simulation) -> int:
    """What a client receives in a round: the model, and what the components share."""
    agreement = sim.agreement
    members = sim.members
    state = first_state(agreement, sim.layout.read(sim.model))
    drawn = sorted(members)[: max(1, round(agreement.terms.expected_cohort))]
    cohort = Cohort.of({client: members[client].claims for client in drawn})
    shared = {}
    more = 0
    for slot, plug in agreement.strategy.slots():
        shared[slot] = plug.open(state.plugs[slot], 0, cohort, PublicSeed(0).child(slot))
        more += 4 * plug.download_size(agreement.layout)
    told = {slot: tensors for slot, tensors in shared.items() if tensors}
    start = Downlink(round=0, start=state.model, shared=told, drawn=len(cohort))
    return len(encode_download(start)) + more
