"""Which methods and views of a victim are inverted, and what an adversary sees in each."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dpfl.attacks.inverting.optimisation import Seen
from dpfl.attacks.inverting.victim import Victim
from dpfl.attacks.observation import Observation, observe
from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.promise import Promise
from dpfl.core.types import Budget, Observer, Plain, Rows
from dpfl.methods import METHODS, find
from dpfl.privacy.accountant import spend
from dpfl.privacy.flags import Flag
from dpfl.rounds import write_buffers
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.experiment import setup_of

NO_PRIVACY = math.inf


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to invert: a method at an epsilon, seen in one way."""

    method: str
    view: str
    epsilon: float
    delta: float
    promise: Promise
    observation: Observation


def cases_of(
    victim: Victim,
    values: Plain,
    methods: Sequence[str],
    epsilons: Sequence[float],
    views: Sequence[str],
    reference: bool,
) -> tuple[list[Case], list[str]]:
    """Play every method at every epsilon; returns what there is to invert, and why other views are
    not there.
    """
    found: list[Case] = []
    left_out: list[str] = []
    asked = [(name, epsilon) for name in methods for epsilon in epsilons]
    asked = [*((name, NO_PRIVACY) for name in _unprotected() if reference), *asked]
    for name, epsilon in asked:
        for view in views:
            try:
                found.append(_case(victim, values, name, epsilon, view))
            except (ConfigurationError, PrivacyRefusal) as refusal:
                sentence = f"{name}, {view}: {refusal}"
                left_out += [sentence] * (sentence not in left_out)
    for name in methods:  # said before the work starts
        check(
            any(case.method == name for case in found),
            "inversion",
            next((one for one in left_out if one.startswith(f"{name}, ")), ""),
            "name other methods or views",
        )
    return found, left_out


def _unprotected() -> Iterator[str]:
    """The reference method that protects nobody."""
    known = {"lr": 1.0, "clip": 1.0, "batch_size": 1, "local_steps": 1}
    for name, method in METHODS.items():
        own = {setting: value for setting, value in known.items() if setting in method.settings}
        if method.reference and method.build(own).observer is Observer.NOBODY:
            yield name
            return


def _case(victim: Victim, values: Plain, name: str, epsilon: float, view: str) -> Case:
    """Play one method; a view that it does not have is refused."""
    secure = view == "secure sum"
    own = {**values, "secure_sum": values.get("secure_sum", {})} if secure else values
    own = for_method(own, name, compared=False)
    if "force" in find(name).settings:  # so few records would be refused as hopeless
        own = {**own, "method": {**own["method"], "force": True}}
    experiment = Experiment.from_options(own)
    setup = setup_of(experiment, victim.data_folder)
    federation = victim.federation
    strategy = setup.strategy
    if find(name).model is not None:  # it plans its own work
        federation = replace(federation, client_settings={})
    alone = Flag.ALONE in strategy.flags or strategy.local.pooled
    where = f"method '{name}'"
    check(not alone, where, "no gradient leaves its clients", "invert another method")
    rows = strategy.channel.sees_rows
    check(
        rows or view not in ("row", "cleaned"),
        where,
        "its server sees no single row",
        "ask for the view 'sum'",
    )
    cleans = strategy.clean is not None
    check(cleans or view != "cleaned", where, "it does not clean rows", "ask for the view 'row'")
    given = experiment.budgets.delta
    delta = float(given) if isinstance(given, int | float) else 1e-5
    budgets = {client: Budget(epsilon=min(epsilon, 25.0), delta=delta) for client in federation.ids}
    last = federation.ids[-1]  # some methods need claims that differ
    budgets[last] = replace(budgets[last], epsilon=1.1 * budgets[last].epsilon)
    setup = replace(setup, federation=federation.with_budgets(budgets))
    observation = observe(replace(setup, settings={**setup.settings, "evaluate_every": 10**6}))
    spent, promise = _claimed(observation, victim.client, view, delta)
    return Case(
        method=name,
        view=view,
        epsilon=spent,
        delta=delta,
        promise=promise,
        observation=observation,
    )


def _claimed(
    observation: Observation, client: str, view: str, delta: float
) -> tuple[float, Promise]:
    """What the client is charged for what the adversary of a view sees."""
    own = observation.simulation
    observer = Observer.WORLD if view == "sum" else Observer.SERVER
    promise = replace(own.strategy.promise, observer=observer)
    if own.strategy.observer is Observer.NOBODY:
        return math.inf, own.strategy.promise
    history = observation.history(client, observer)
    adjacency = own.strategy.adjacency
    return spend(history, delta, adjacency=adjacency).epsilon, promise


def seen_by(victim: Victim, case: Case) -> Seen:
    """What the adversary of a case has: the start, and the gradient that it sees there."""
    observation = case.observation
    own = case.observation.simulation
    first = observation.training[0]
    view = observation.server_view(first)
    clients = len(first.plan.cohort)
    if case.view == "sum":
        update = observation.world_view()[1] - first.state.model
    elif isinstance(view, Rows):
        matrix = view.matrix
        clients = 1
        if case.view == "cleaned":
            assert own.strategy.clean is not None
            matrix = own.strategy.clean(dict(first.state.plugs.get("clean", {})), view, 0)[0]
        update = matrix[view.cohort.ids.index(victim.client)]
    else:
        update = view.vector.float()
    phases = own.agreement.phases(own.members[victim.client].participant)
    step = sum(phase.lr * phase.steps for phase in phases) or 1.0
    model: nn.Module = copy.deepcopy(own.model)
    write_buffers(model, first.state.buffers)
    clipped = any(phase.clip is not None for phase in phases) or bool(own.strategy.stages)
    return Seen(
        model=model,
        weights=first.state.model.clone(),
        gradient=-update / step,
        layout=own.layout,
        records=len(victim.labels) * clients,
        classes=victim.federation.task.width,
        low=victim.low,
        high=victim.high,
        clipped=clipped or case.view in ("sum", "secure sum"),
    )
