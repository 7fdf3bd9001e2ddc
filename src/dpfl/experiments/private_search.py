"""Tuning on private records with a privacy cost: the best of a random number of runs.

A run draws a candidate at random, trains with it on four fifths of every client's training records,
and scores the model on the rest by an accounted metric that is part of the run's plan. The best run
is kept, its model included; nothing else is. Papernot and Steinke (ICLR 2022) bound what that
costs (:mod:`dpfl.privacy.selection`).

*Formal guarantees.* Two, because two adversaries see different things.

- **The world** sees what is published: settings, model and score of the best run. Its epsilon is
  that of the search. The number of runs must stay secret: it is in no public part of the result.
- **The server** sees every run. Its epsilon is that of all runs composed.

The budgets of the experiment are those of one run.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import NotPrivateWarning, PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Adjacency
from dpfl.data.federation import Federation
from dpfl.experiments.compare import check_settings
from dpfl.experiments.search_result import OperatorPart, SearchResult
from dpfl.experiments.study import Sweep, Values
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.measures import Estimate
from dpfl.privacy.accountant import Spend, shown, spend
from dpfl.privacy.events import History
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.selection import RandomRuns, search_spend_of
from dpfl.rounds.enrol import Run, secret_for
from dpfl.runs.experiment import Experiment
from dpfl.sim.loop import Simulation
from dpfl.sim.noisy_sums import raised
from dpfl.sim.train import train

Histories = Mapping[str, History]
"""What one run releases of each client at most."""


def private_search(
    base: Values,
    method: str,
    over: Mapping[str, list[object]],
    *,
    runs: RandomRuns,
    metric: AccountedMetric,
    most_epsilon: float | None = None,
    data_folder: Path | None = None,
) -> SearchResult:
    """Tune a method on the clients' own records, at a stated privacy cost.

    ``base`` is an experiment as plain values, ``over`` lists the values of the settings that are
    searched; candidates are drawn from all combinations, with replacement. ``runs`` is the law of
    the number of runs. ``metric`` is measured once, at the end of each run. The search is refused
    before anything runs where it would cost a client more than ``most_epsilon`` against the world.
    Noise, the number of runs and the candidates come from the operating system, unless the
    experiment's noise is seeded. ``data_folder`` is where data sets lie that do not ship with dpfl.
    """
    for name in over:
        check(
            name.startswith("method."),
            "search",
            f"'{name}' is not a setting of a method",
            "search method.lr, method.clip",
        )
    check(
        "accounted" not in base,
        "search",
        "[accounted] is a metric of a single run",
        "leave it out: runs are scored",
    )
    check_settings(over, [method])
    study = Sweep.from_dict(
        {
            "title": f"{method} tuned with a privacy cost",
            "base": dict(base),
            "methods": {method: {}},
            "seeds": [0],
            "tune": {"over": dict(over), "seeds": [1]},
        }
    )
    options = study.tunable(method)
    first = int(base.get("run", {}).get("seed", 0))
    experiments = [study.rehearsal({}, method, values, first, ()) for values in options]
    federation = experiments[0].federation(data_folder)
    once = replace(metric, every=experiments[0].rounds)
    histories = [_planned(experiment, federation, once) for experiment in experiments]
    cost = _search_cost(histories, federation, runs, most_epsilon)
    seeded = experiments[0].run.noise == "seeded"
    seed = experiments[0].public_seed().child("search") if seeded else None
    rng = secret_for(seed, "draws")
    count = runs.drawn(rng.secret_seed().value)
    drawn = [rng.integer() % len(options) for _ in range(count)]
    best: tuple[int, Estimate, nn.Module] | None = None
    for number, place in enumerate(drawn):
        own = None if seed is None else seed.child("run", number).value % 2**31
        score, model = _one_run(experiments[place], federation, once, own)
        if best is None or _better(score, best[1], once):
            best = place, score, model
    flags = raised(federation, seeded=seeded)
    together = [histories[place] for place in drawn]
    return SearchResult(
        metric=once.measure(federation.task).name,
        chosen=options[best[0]] if best else None,
        score=best and best[1],
        model=best and best[2],
        experiment=study.experiment({}, method, options[best[0]], first) if best else None,
        epsilon=cost,
        flags=flags,
        operator=OperatorPart(
            runs=count,
            epsilon=_composed(together, federation),
            flags=flags,
            unit=federation.unit,
        ),
    )


def _planned(experiment: Experiment, federation: Federation, metric: AccountedMetric) -> Histories:
    """What one run with these settings releases of each client at most, its score included."""
    strategy = experiment.strategy(len(federation.ids))
    with closing(Ledger.create(":memory:", "plan")) as ledger:
        ledger.register("plan", seeded=False, title="plan")
        simulation = Simulation(
            model=experiment.build_model(federation),
            federation=federation,
            strategy=strategy,
            rounds=experiment.run.rounds,
            run=Run(name="plan", ledger=ledger, seed=None, public=PublicSeed(0)),
            misreports=experiment.run.misreports,
            accounted=metric,
        )
        found = {}
        for client, member in simulation.members.items():
            cost, seen_by = simulation.agreement.plans(member.participant)[0]
            delta = None if member.budget is None else member.budget.delta
            most = ledger.affordable_releases(
                client, cost, seen_by, simulation.planned, delta=delta
            )
            found[client] = cost.times(most) if most else ()
        return found


def _search_cost(
    histories: Sequence[Histories],
    federation: Federation,
    runs: RandomRuns,
    most_epsilon: float | None,
) -> dict[str, Spend]:
    """The epsilon of a search against the world, by client; refused where it is too much."""
    found = {}
    for client in federation.ids:
        delta = federation.budgets[client].delta
        own = [history[client] for history in histories]
        found[client] = search_spend_of(own, delta, adjacency=Adjacency.ZERO_OUT, runs=runs)
        value = found[client].epsilon
        check(
            most_epsilon is None or value <= most_epsilon,
            "search",
            f"would cost '{client}' an epsilon of {shown(value)}, more than {most_epsilon}",
            "search with fewer runs on average, or with smaller budgets for each run",
            PrivacyRefusal,
        )
    return found


def _composed(together: Sequence[Histories], federation: Federation) -> dict[str, Spend]:
    """The epsilon of all runs against the server, by client."""
    found = {}
    for client in federation.ids if together else ():
        events = [event for history in together for event in history[client]]
        delta = federation.budgets[client].delta
        found[client] = spend(events, delta, adjacency=Adjacency.ZERO_OUT)
    return found


def _one_run(
    experiment: Experiment, federation: Federation, metric: AccountedMetric, seed: int | None
) -> tuple[Estimate, nn.Module]:
    """Train once; return the score that was measured at the end, and the model."""
    own = experiment.run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)  # the search is flagged as a whole
        result = train(
            experiment.build_model(federation),
            federation,
            experiment.strategy(len(federation.ids)),
            rounds=own.rounds,
            seed=seed,
            engine=own.engine,
            device=own.device,
            workers=own.workers,
            evaluate_every=experiment.rounds,
            misreports=own.misreports,
            accounted=metric,
        )
    score = result.history[-1].measured if result.history else None
    # A run that nobody could pay to measure is the worst of all.
    worst = -1e9 if metric.higher_is_better else 1e9
    return score or Estimate(value=worst, standard_error=0.0), result.model


def _better(one: Estimate, other: Estimate, metric: AccountedMetric) -> bool:
    """Whether one score is better than another; of equals, the earlier one stays."""
    sign = 1 if metric.higher_is_better else -1
    return sign * one.value > sign * other.value
