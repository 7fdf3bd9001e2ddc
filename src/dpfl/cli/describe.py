"""``dpfl describe``: what would happen, to whom, seen by whom, at what price; without running it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from dpfl.cli import options as o
from dpfl.cli.console import bytes_text, out, print_json, table, three_text
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, Downlink, Observer, Unit
from dpfl.engine.stacked import arithmetic_assumptions
from dpfl.methods.pfa import PublicSubspace
from dpfl.plugs.channels import Channel, Dropout
from dpfl.plugs.over_the_air import OverTheAir
from dpfl.privacy.accountant import spend
from dpfl.privacy.classic_rdp import (
    MISREAD_REMARK,
    POISSON_REMARK,
    UNAMPLIFIED_REMARK,
    UNIFORM_REMARK,
    classic_epsilon,
)
from dpfl.privacy.events import Event
from dpfl.rounds import Agreement, enrol, first_state
from dpfl.rounds.codec import FRAME_BYTES, encode_download
from dpfl.rounds.members import Member, false_claims, honest_members
from dpfl.runs.experiment import Experiment


@o.takes_experiment(**o.ONE_METHOD)
def describe(
    given: dict[str, Any], file: o.File = None, data: o.Data = None, json: o.Json = False
) -> None:
    """Print the pipeline, the promise in words, epsilon by observer, noise and bytes: without
    training.
    """
    description = description_of(o.build(file, o.experiment_values(file, given)), data)
    if json:
        print_json(description)
    else:
        show(description)


def description_of(experiment: Experiment, data_folder: Path | None = None) -> dict[str, Any]:
    """Plan everything and run nothing."""
    experiment.check()
    federation = experiment.federation(data_folder)
    strategy = experiment.strategy(len(federation.ids))
    model = experiment.build_model(federation)
    layout = Layout.of_module(model)
    members = honest_members(federation, false_claims(federation, experiment.run.misreports))
    agreement = enrol(
        strategy, {c: m.claims for c, m in members.items()}, experiment.run.rounds, layout
    )
    strategy = agreement.strategy  # with nothing left open
    state = first_state(agreement, layout.read(model))
    cohort = Cohort.of(
        {
            c: members[c].claims
            for c in sorted(members)[: max(1, round(agreement.terms.expected_cohort))]
        }
    )
    shared = {
        slot: plug.open(state.plugs[slot], 0, cohort, PublicSeed(0).child(slot))
        for slot, plug in strategy.slots()
    }
    told = {slot: tensors for slot, tensors in shared.items() if tensors}
    start = encode_download(Downlink(round=0, start=state.model, shared=told, drawn=len(cohort)))
    noise = [
        phase.noise_multiplier
        for m in members.values()
        for phase in agreement.phases(m.participant)
    ]
    if strategy.noise_multiplier is not None:
        noise = [strategy.noise_multiplier]
    return {
        "method": strategy.name,
        "pipeline": [list(row) for row in strategy.describe()],
        "unit": str(strategy.unit),
        "observer": str(strategy.observer),
        "adjacency": str(strategy.adjacency),
        "assumptions": [
            *strategy.assumptions,
            *(arithmetic_assumptions(model, layout) if strategy.local.private else ()),
        ],
        "clients": len(members),
        "rounds": agreement.terms.rounds,
        "participations": agreement.terms.participations,
        "cohort": agreement.terms.expected_cohort,
        "epsilon": {
            str(o): _planned(agreement, members, o) for o in (Observer.SERVER, Observer.WORLD)
        },
        "as_published": _published(agreement, members),
        "if_honest": _on_air(agreement, members, experiment.public_seed().child("run")),
        "noise_multiplier": _three(noise) if any(noise) else None,
        "parameters": layout.size,
        "bytes_up_per_client": _bytes_up(agreement),
        "bytes_down_per_client": len(start)
        + sum(4 * stage.basis_size(layout) for stage in _subspaces(agreement)),
    }


def _subspaces(agreement: Agreement) -> list[PublicSubspace]:
    return [stage for stage in agreement.strategy.stages if isinstance(stage, PublicSubspace)]


def _bytes_up(agreement: Agreement) -> int:
    """A round's upload, averaged over clients; PFA+ in the rounds that have a subspace."""
    numbers = float(getattr(_channel(agreement), "numbers", None) or agreement.layout.size)
    for stage in _subspaces(agreement):
        public = len(agreement.terms.public) / agreement.terms.population
        numbers = public * numbers + (1 - public) * stage.coordinates(agreement.layout)
    return math.ceil(4 * numbers) + FRAME_BYTES


def _planned(
    agreement: Agreement, members: dict[str, Member], observer: Observer
) -> dict[str, Any]:
    """Spread of the price of the clients' plans, as the ledger will state it: of all rounds, or as
    many as fit a budget.
    """
    epsilons, accountants, early = [], set(), 0
    for member in members.values():
        cost = agreement.cost(observer, member.participant)
        delta = member.budget.delta if member.budget else 1e-5
        # What sampling amplifies is charged every round to everyone, drawn or not.
        amplified = agreement.strategy.amplifies(observer)
        times = agreement.terms.rounds if amplified else agreement.terms.participations
        history = [event.times(event.steps * times) for event in cost.events]
        spent = spend(history, delta, adjacency=cost.adjacency)
        granted = (member.budget.observer if member.budget else None) or agreement.strategy.observer
        enforced = member.budget and granted in (observer, Observer.SERVER)
        limit = (
            member.budget.epsilon
            if member.budget and enforced and not agreement.strategy.local.hypothetical
            else None
        )
        early += limit is not None and spent.epsilon > limit
        worst = spend(
            [e.times(e.steps * agreement.terms.rounds) for e in cost.events],
            delta,
            adjacency=cost.adjacency,
        )
        epsilons.append(worst.epsilon if limit is None else min(worst.epsilon, limit))
        accountants.add(spent.accountant)
    return {**_three(epsilons), "accountant": sorted(accountants), "clients_that_run_out": early}


def _published(agreement: Agreement, members: dict[str, Member]) -> dict[str, Any] | None:
    """What the method's paper would print for the whole run: the moments accountant over sampled
    clients.
    """
    strategy, terms = agreement.strategy, agreement.terms
    sampling = strategy.selection.sampling
    if strategy.unit is not Unit.CLIENT or strategy.noise_multiplier is None or sampling == "none":
        return None
    # FedCEO's paper reads its fixed-size cohorts as Poisson samples; DP-Fed-LS has a column for
    # each.
    read = sampling if strategy.central_noise is not None else "poisson"
    delta = min(member.budget.delta if member.budget else 1e-5 for member in members.values())
    rate = strategy.selection.rate(terms.population)
    value = classic_epsilon(strategy.noise_multiplier, rate, terms.rounds, delta, read)
    remark = {("poisson", "poisson"): POISSON_REMARK, ("uniform", "uniform"): UNIFORM_REMARK}.get(
        (sampling, read)
    )
    if not strategy.amplifies(strategy.observer):
        remark = UNAMPLIFIED_REMARK
    return {"epsilon": value, "remark": remark or MISREAD_REMARK}


ASSUMED: dict[str, Any] = {
    "all clients are honest": 1.0,
    "half of the others are": 0.5,
    "own and receiver's noise": "own_and_receiver",
    "own noise only": "own",
}


def _channel(agreement: Agreement) -> Channel:
    """The channel itself, not what loses some of its messages."""
    channel = agreement.strategy.channel
    return channel.through if isinstance(channel, Dropout) else channel


def _on_air(
    agreement: Agreement, members: dict[str, Member], public: PublicSeed
) -> dict[str, Any] | None:
    """Epsilon of all rounds over this run's own channel, by whose noise is counted on; Gaussians
    compose exactly.
    """
    channel, terms, ids = _channel(agreement), agreement.terms, sorted(members)
    if not isinstance(channel, OverTheAir) or agreement.strategy.selection.sampling != "none":
        return None
    numbers = channel.numbers or agreement.layout.size
    assumed = dict(ASSUMED)
    if channel.honest not in assumed.values():
        assumed[f"{100 * float(channel.honest):g} % of the others are"] = channel.honest
    losses: dict[str, dict[str, float]] = {name: dict.fromkeys(ids, 0.0) for name in assumed}
    for round_ in range(terms.rounds):
        seed = public.child("round", round_).child("channel")
        heard = [client for client in ids if channel.reachable(client, round_, seed)]
        for name, honest in assumed.items():
            multipliers = channel.multipliers(heard, numbers, seed, honest) if heard else []
            for client, multiplier in zip(heard, multipliers, strict=True):
                losses[name][client] += math.inf if multiplier < 1e-6 else multiplier**-2
    delta = min(member.budget.delta if member.budget else 1e-5 for member in members.values())
    return {
        name: _composed(_three(list(found.values())), delta, agreement)
        for name, found in losses.items()
    }


def _composed(losses: dict[str, Any], delta: float, agreement: Agreement) -> dict[str, Any]:
    """Epsilons of the smallest, median and largest loss; bounds that may fail take their part of
    delta.
    """
    strategy, terms = agreement.strategy, agreement.terms
    sent = strategy.exposure(
        Observer.SERVER, strategy.local.exposure((), 1, terms.parameters), terms
    )
    stretch = sent.bound / getattr(_channel(agreement), "clip", sent.bound)
    found: dict[str, Any] = {}
    for name, loss in losses.items():
        if loss in (0.0, "infinite"):
            found[name] = loss
            continue
        event = Event(
            noise_multiplier=loss**-0.5 / stretch, failure=min(1.0, sent.failure * terms.rounds)
        )
        value = spend([event], delta, adjacency=strategy.adjacency).epsilon
        found[name] = "infinite" if math.isinf(value) else value
    return found


def _three(values: list[float]) -> dict[str, Any]:
    numbers = {"smallest": min(values), "median": statistics.median(values), "largest": max(values)}
    return {key: "infinite" if value == float("inf") else value for key, value in numbers.items()}


def show(description: dict[str, Any]) -> None:
    """Print it for people."""
    pipeline = table("step", "piece", left=2, title=f"{description['method']}: one round")
    for step, piece in description["pipeline"]:
        pipeline.add_row(step, piece)
    out.print(pipeline)
    out.print()
    promise = "nobody is protected" if description["observer"] == "nobody" else (
        f"hides a {description['unit']} from the {description['observer']} ({description['adjacency']} adjacency)"
    )  # fmt: skip
    out.print(f"Promise: {promise}")
    for assumption in description["assumptions"]:
        out.print(f"  - {assumption}")
    out.print()
    prices = table("planned epsilon", "smallest", "median", "largest", "accountant")
    for observer, spread in description["epsilon"].items():
        prices.add_row(
            f"against the {observer}", *three_text(spread), ", ".join(spread["accountant"])
        )
    published = description["as_published"]
    if published:
        prices.add_row("as published", "", "", f"{published['epsilon']:.2f}", "display only")
    out.print(prices)
    if published:
        out.print(f"as published: {published['remark']}")
    if description["if_honest"]:
        assumed = table("over this run's channel, if", "smallest", "median", "largest")
        for name, spread in description["if_honest"].items():
            assumed.add_row(name, *three_text(spread))
        out.print(assumed)
    early = max(spread["clients_that_run_out"] for spread in description["epsilon"].values())
    if early:
        out.print(
            f"{early} client(s) will run out of budget before their planned participations, and leave"
        )
    noise = description["noise_multiplier"]
    if noise:
        spread = " / ".join(f"{noise[key]:.3g}" for key in ("smallest", "median", "largest"))
        out.print(f"noise multiplier (std / clip): {spread}  (smallest / median / largest)")
    out.print(
        f"{description['rounds']} rounds, {description['clients']} clients, about {description['cohort']:g} a round, "
        f"{description['participations']} planned participations each"
    )
    out.print(
        f"{description['parameters']} parameters; per client and round {bytes_text(description['bytes_up_per_client'])} up, "
        f"{bytes_text(description['bytes_down_per_client'])} down"
    )
