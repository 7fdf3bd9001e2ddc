"""Who is inverted, under which method, and what of it an adversary sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpfl.attacks.inversion import Seen
from dpfl.attacks.observation import Observation, observe
from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, PrivacyRefusal, unknown_name
from dpfl.core.promise import Promise
from dpfl.core.types import Budget, ClientSettings, Observer, Plain, Rows
from dpfl.data.federation import Federation
from dpfl.data.inputs import Pixels, Tokens
from dpfl.data.records import Shard
from dpfl.datasets.named import load_dataset
from dpfl.methods import METHODS, find
from dpfl.privacy.accountant import spend
from dpfl.privacy.flags import Flag
from dpfl.rounds import write_buffers
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.experiment import setup_of

NO_PRIVACY = math.inf


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The client whose upload is inverted, and the federation around it.

    ``originals`` are its records between 0 and 1, ``low`` and ``high`` the ends of the range as the
    model takes them, ``picture`` the shape in which a record is an image.
    """

    client: str
    federation: Federation
    originals: Tensor
    labels: Tensor
    low: Tensor
    high: Tensor
    picture: tuple[int, ...]
    model_name: str
    data_folder: Path | None

    @classmethod
    def of(
        cls,
        values: Plain,
        method: str,
        records: Sequence[int],
        client: str | None,
        data_folder: Path | None,
    ) -> Victim:
        """Take these records, from the data set or from the client's own file."""
        experiment = Experiment.from_dict(for_method(values, method))
        federation = experiment.federation(data_folder)
        _check_task(federation)
        name = federation.ids[0] if client is None else client
        if name not in federation.ids:
            raise unknown_name("inversion", "client", name, federation.ids)
        own = federation.shards[name]
        features, labels = own.features, own.labels
        if experiment.data.name is not None:
            dataset = load_dataset(experiment.data.name, data_folder).as_task(federation.task)
            features, labels = dataset.features, dataset.labels
        most = len(labels)
        problem, remedy = f"there is no record {max(records)}", f"name some of 0 to {most - 1}"
        check(max(records) < most, "inversion", problem, remedy, DataError)
        chosen = torch.tensor(list(records))
        target = features[chosen], labels[chosen]
        low, high = _range(federation, features)
        taken = federation.inputs(target[0]).float()
        span = (high - low).clamp_min(1e-12)
        return cls(
            client=name,
            federation=_small(federation, name, *target),
            originals=((taken - low) / span).clamp(0, 1),
            labels=target[1],
            low=low,
            high=high,
            picture=_picture(federation),
            model_name=experiment.model.name,
            data_folder=data_folder,
        )


def _check_task(federation: Federation) -> None:
    """Refuse what has no gradient in its records, or no classes."""
    remedy = "use a data set of numbers or images"
    tokens = isinstance(federation.inputs, Tokens)
    check(not tokens, "inversion", "records are tokens, which no gradient moves", remedy)
    good = federation.task.softmax and federation.task.plain
    problem, remedy = f"the task is {federation.task.name}", "use a classification of records"
    check(good, "inversion", problem, remedy)


def _range(federation: Federation, features: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the range of a record's values, which are public: bytes, or as in the data."""
    one = features[:1]
    if isinstance(federation.inputs, Pixels):
        ends = torch.zeros_like(one), torch.full_like(one, 255)
    else:
        finite = features[:10_000].flatten(1)
        shape = one.shape
        if _picture(federation):  # all pixels have one range
            ends = tuple(torch.full_like(one, float(end)) for end in torch.aminmax(finite))
        else:
            ends = finite.min(dim=0).values.view(shape), finite.max(dim=0).values.view(shape)
    low, high = (federation.inputs(end)[0].float() for end in ends)
    return low, high


def _picture(federation: Federation) -> tuple[int, ...]:
    shape = federation.record_shape
    if len(shape) == 3:
        return shape
    return tuple(getattr(federation.inputs, "picture", ()))


def _small(federation: Federation, client: str, features: Tensor, labels: Tensor) -> Federation:
    """The federation in which everyone holds as many records as the victim."""
    count, shards = len(labels), {}
    for name, own in federation.shards.items():
        x, y = (features, labels) if name == client else (own.features[:count], own.labels[:count])
        shards[name] = Shard.of(x.clone(), y.clone(), own.test_features, own.test_labels)
    settings = ClientSettings(batch_size=count, local_steps=1)
    return replace(federation, shards=shards, client_settings=dict.fromkeys(shards, settings))


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
        why = next((one for one in left_out if one.startswith(f"{name}, ")), "")
        there = any(case.method == name for case in found)
        check(there, "inversion", why, "name other methods or views")
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
    experiment = Experiment.from_dict(own)
    setup = setup_of(experiment, victim.data_folder)
    federation, strategy = victim.federation, setup.strategy
    if find(name).model is not None:  # it plans its own work
        federation = replace(federation, client_settings={})
    alone = Flag.ALONE in strategy.flags or strategy.local.pooled
    where, problem = f"method '{name}'", "no gradient leaves its clients"
    check(not alone, where, problem, "invert another method")
    rows = strategy.channel.sees_rows
    problem = "its server sees no single row"
    check(rows or view not in ("row", "cleaned"), where, problem, "ask for the view 'sum'")
    cleans = strategy.clean is not None
    check(cleans or view != "cleaned", where, "it does not clean rows", "ask for the view 'row'")
    delta = _delta(experiment)
    budgets = {client: Budget(epsilon=min(epsilon, 25.0), delta=delta) for client in federation.ids}
    last = federation.ids[-1]  # some methods need claims that differ
    budgets[last] = replace(budgets[last], epsilon=1.1 * budgets[last].epsilon)
    setup = replace(setup, federation=federation.with_budgets(budgets), rounds=setup.rounds)
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


def _delta(experiment: Experiment) -> float:
    """The experiment's delta, where it is one for all."""
    given = experiment.budgets.delta
    return float(given) if isinstance(given, int | float) else 1e-5


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
    observation, own = case.observation, case.observation.simulation
    first = observation.training[0]
    view, clients = observation.server_view(first), len(first.plan.cohort)
    if case.view == "sum":
        update, clients = observation.world_view()[1] - first.state.model, clients
    elif isinstance(view, Rows):
        matrix, clients = view.matrix, 1
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
