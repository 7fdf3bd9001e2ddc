"""The simulator: a federation in one process (or a few), through the same three functions a
deployment calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpfl.core.errors import LedgerError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Budget, Observer, Record, State, Unit
from dpfl.core.version import __version__
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation
from dpfl.engine.stacked import arithmetic_assumptions
from dpfl.models import check_model
from dpfl.plugs.local_work import noise_variance
from dpfl.plugs.weights import TRUE_NOISE
from dpfl.privacy.costs import Bill
from dpfl.privacy.statement import Statement, statement
from dpfl.rounds import (
    Agreement,
    Run,
    Uplink,
    admit,
    affords,
    blocks_of,
    close_round,
    covered,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.members import Member, check_budget, false_claims, honest_members
from dpfl.runs.folder import SUMMARY_FORMAT, RunFolder
from dpfl.sim.clock import Clock
from dpfl.sim.ray_workers import RayWorkers
from dpfl.sim.summary import silence, spread
from dpfl.sim.workers import Bench, Workers
from dpfl.strategy import Strategy

Progress = Callable[[int, int, dict[str, Any]], None]

SEEDED = (
    "NOT PRIVATE: SEEDED (anyone who knows the seed can subtract the noise; for simulations only)"
)
UNPROTECTED = "NOT PRIVATE: this method protects nobody"
HYPOTHETICAL = "HYPOTHETICAL: every client was granted the largest budget, whatever it asked for"
UNACCOUNTED = "UNACCOUNTED: accuracy and loss are measured on the clients' test records, which only a simulation may see"
PUBLIC = (SEEDED, UNPROTECTED, HYPOTHETICAL)
"""Warnings that follow from the method and the experiment alone: all that a published model may
carry.
"""

_COMMON = "the common model, on all clients' test records"
_PERSONAL = "each client's own model, on its own test records"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulation ends with."""

    state: State
    history: list[dict[str, Any]]
    statements: dict[str, Statement]
    summary: dict[str, Any]


class Simulation:
    """A prepared federation: members, agreement, ledger grants. :meth:`run` plays the rounds."""

    def __init__(
        self,
        *,
        model: nn.Module,
        federation: Federation,
        strategy: Strategy,
        rounds: int,
        run: Run,
        engine: str = "stacked",
        device: str = "cpu",
        workers: int = 1,
        evaluate_every: int = 1,
        liars: Mapping[str, float] | None = None,
        folder: RunFolder | None = None,
        digest: str = "",
    ) -> None:
        check_model(model, federation.feature_shape, federation.classes, federation.inputs)
        if (
            run.ledger.filter == "renyi"
        ):  # plan with the curve that the ledger will hold the run against
            federation = replace(federation, budgets=_planned_by(federation.budgets, "renyi"))
        self.members = honest_members(federation, false_claims(federation, liars or {}))
        self.liars = dict(liars or {})
        if strategy.local.hypothetical:
            self.members = _all_granted_the_largest(self.members)
        for member in self.members.values():
            check_budget(member, unit=strategy.unit, observer=strategy.observer)
            if member.budget is None and strategy.observer is not Observer.NOBODY:
                raise PrivacyRefusal(
                    f"client '{member.id}'",
                    "has no budget",
                    "give every client a Budget(epsilon, delta), or use fedavg",
                )
        self.layout = Layout.of_module(model)
        self.model = model
        self.strategy = strategy
        self.run_ = run
        self.engine = engine
        self.device = device
        self.workers = workers
        self.evaluate_every = evaluate_every
        self.folder = folder
        self.digest = digest
        self._covered: set[str] = set()  # whose plans cover all rounds
        self._costs: dict[str, list[tuple[Bill, frozenset[Observer]]]] = {}
        self.timings: list[dict[str, float]] = []
        self.agreement: Agreement = enrol(
            strategy, {c: m.claims for c, m in self.members.items()}, rounds, self.layout
        )
        self.strategy = strategy = self.agreement.strategy  # with nothing left open
        self.private: dict[str, Tensor] = {}  # what stays at clients, by client
        self.evaluation = Evaluation(
            model=model, layout=self.layout, federation=federation, device=device
        )
        if strategy.observer is not Observer.NOBODY:
            budgets = {
                client: member.budget
                for client, member in self.members.items()
                if member.budget is not None
            }
            run.ledger.grant(budgets, unit=strategy.unit, observer=strategy.observer)

    # -- the loop ----------------------------------------------------------------------------------

    def start(self) -> State:
        """Return the state before the first round; in a folder, it is the first checkpoint."""
        state = first_state(self.agreement, self.layout.read(self.model))
        if self.folder is not None:
            self.folder.save_state(state, self.run_.name, self.digest)
        return state

    def run(
        self,
        state: State,
        history: list[dict[str, Any]],
        progress: Progress | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Play the rounds that are left; or halt at round ``until``, to go on another time."""
        began = time.perf_counter()
        rounds = self.agreement.terms.rounds
        bench = Bench(
            agreement=self.agreement,
            members=self.members,
            model=self.model,
            engine=self.engine,
            device=self.device,
            run=self.run_.name,
            seed=self.run_.seed,
        )
        ended_early, left_at_the_end = None, []
        halt = min(until or rounds, rounds)
        with self._workers(bench) as workers:
            while state.round < halt:
                clock = Clock()
                plan = open_round(self.agreement, state, self.run_, self._willing(state.round))
                if plan.over:
                    left_at_the_end = list(plan.unwilling)
                    ended_early = f"after {state.round} of {rounds} rounds: {plan.over}"
                    break
                clock.lap("open")
                # ---- clients: each charges its own account, then works --------------------------------------------------
                members = {client: self.members[client] for client in plan.cohort.ids}
                abstaining = admit(self.agreement, self.run_, state.round, members)
                active = {
                    client: member for client, member in members.items() if client not in abstaining
                }
                blocks = blocks_of(self.agreement, active, workers.engine)
                uplinks = workers.run(state.round, plan.downloads, blocks, self.private)
                uplinks += [
                    Uplink(client=c, payload=None, reason=why)
                    for c, why in sorted(abstaining.items())
                ]
                clock.lap("clients")
                # ---- server: aggregate, evaluate, write down -------------------------------------------------------------
                noise = {client: self._true_noise(client) for client in active}
                if self.strategy.weights.asks_for_the_truth:
                    state = _told(state, noise)
                state, record = close_round(self.agreement, state, plan, uplinks, self.run_)
                clock.lap("close")
                line: dict[str, Any] = {
                    "round": record.round,
                    **record.operator,
                    **self._truth(record, noise),
                }
                if state.round % self.evaluate_every == 0 or state.round == rounds:
                    line |= self.evaluate(state.model)
                clock.lap("evaluate")
                history.append(line)
                self._keep(state, line, clock)
                if progress is not None:
                    progress(state.round, rounds, line)
        if halt < rounds and ended_early is None:
            return self._halted(state, history)
        return self._outcome(
            state, history, ended_early, left_at_the_end, time.perf_counter() - began
        )

    def _workers(self, bench: Bench) -> Workers | RayWorkers:
        return (
            RayWorkers(bench, self.workers)
            if self.engine == "ray"
            else Workers(bench, self.workers)
        )

    def _halted(self, state: State, history: list[dict[str, Any]]) -> Outcome:
        rounds = {"planned": self.agreement.terms.rounds, "done": state.round, "ended_early": None}
        so_far = {"method": self.strategy.name, "rounds": rounds, **self.evaluate(state.model)}
        if self.folder is not None:
            self.folder.append(self.folder.halts, so_far)
        return Outcome(state=state, history=history, statements={}, summary=so_far)

    def _keep(self, state: State, line: dict[str, Any], clock: Clock) -> None:
        timing = {"round": line["round"], "seconds": sum(clock.laps.values()), **clock.laps}
        self.timings.append(timing)
        if self.folder is None:
            return
        self.folder.append(self.folder.rounds, line)
        self.folder.append(self.folder.timings, timing)
        self.folder.save_state(state, self.run_.name, self.digest, self.private)

    def _true_noise(self, client: str) -> float:
        """Variance of the noise in a client's update: known to a simulator, who planned it."""
        if not self.strategy.local.private:
            return 0.0
        participant = self.members[client].participant
        return noise_variance(
            self.agreement.phases(participant), participant.examples, self.layout.size
        )

    def _truth(self, record: Record, noise: Mapping[str, float]) -> dict[str, Any]:
        """The noise in the round's aggregate beside the least there could be (Robust-HDP, Eq. 8): a
        simulator's knowledge.
        """
        weights: Any = record.operator.get("weights")
        if (
            not isinstance(weights, dict)
            or not weights
            or min(noise.get(c, 0.0) for c in weights) <= 0
        ):
            return {}
        inverse = {client: 1 / noise[client] for client in weights}
        least = 1 / sum(inverse.values())
        truth: dict[str, Any] = {
            "noise_variance": {client: noise[client] for client in weights},
            "oracle_weights": {client: value * least for client, value in inverse.items()},
            "least_noise_variance": least,
        }
        if (
            self.strategy.clean is None and not self.strategy.stages
        ):  # otherwise rows are not what was sent
            truth["aggregate_noise_variance"] = sum(
                w**2 * noise[client] for client, w in weights.items()
            )
        return {"simulated_truth": truth}

    def _willing(self, round_: int) -> Callable[[str], bool]:
        """Ask a member whether its own ledger covers this round."""

        def willing(client: str) -> bool:
            if client in self._covered:
                return True
            if client not in self._costs:
                self._costs[client] = self.agreement.bills(self.members[client].participant)
            costs = self._costs[client]
            if covered(self.agreement, self.run_, client, costs):
                self._covered.add(client)
                return True
            return all(
                affords(self.agreement, self.run_, round_, client, bill, seen_by)
                for bill, seen_by in costs
            )

        return willing

    def evaluate(self, vector: Tensor) -> dict[str, float]:
        """Accuracy and loss on test records: a simulator's privilege, not covered by any bill."""
        return self.evaluation(vector, self.strategy.personal, self.private)

    # -- going on after an interruption ------------------------------------------------------------

    def resume(
        self, state: State, private: Mapping[str, Tensor]
    ) -> tuple[State, list[dict[str, Any]]]:
        """Check that ledger, record and checkpoint belong together, and say from where to go on.

        Seeded: a round that was charged but not checkpointed is repeated, bit for bit, without a
        new charge. Otherwise its noise is gone: the round is lost, its number and its charge are
        not.
        """
        assert self.folder is not None
        self.private = dict(private)
        charged = self.run_.ledger.last_round(self.run_.name)
        if (-1 if charged is None else charged) < state.round - 1:
            raise LedgerError(
                str(self.folder.ledger),
                f"ends at round {charged}, the checkpoint at {state.round - 1}",
                "restore the newest ledger",
            )
        history = self.folder.cut_back(state.round)
        charged_to = self.run_.ledger.charged(self.run_.name)
        for line in history:
            unpaid = [
                client
                for client in line.get("arrived", [])
                if (line["round"], client) not in charged_to
            ]
            if unpaid:
                raise LedgerError(
                    str(self.folder.ledger),
                    f"does not hold round {line['round']}'s charge to '{unpaid[0]}', who took part",
                    "restore the ledger this run has written",
                )
        if self.run_.seed is None and charged is not None:
            while state.round <= charged:
                line = {
                    "round": state.round,
                    "lost": "charged, but interrupted before it was published",
                }
                self.folder.append(self.folder.rounds, line)
                history.append(line)
                state = replace(state, round=state.round + 1)
                self.folder.save_state(state, self.run_.name, self.digest, self.private)
        return state, history

    # -- the end -----------------------------------------------------------------------------------

    def _outcome(
        self,
        state: State,
        history: list[dict[str, Any]],
        ended_early: str | None,
        left: list[str],
        seconds: float,
    ) -> Outcome:
        lines: dict[str, Statement] = {}
        for client in self.members:
            line = statement(self.run_.ledger, client, self._billed(client))
            if line is not None:
                lines[client] = line
        if not any("accuracy" in line for line in history[-1:]):
            last = self.evaluate(state.model)
        else:
            last = {
                key: history[-1][key]
                for key in ("accuracy", "loss", "common_accuracy")
                if key in history[-1]
            }
        stamps = [*self.stamps(), *silence(history)]
        summary = {
            "format": SUMMARY_FORMAT,
            "dpfl": __version__,
            "method": self.strategy.name,
            "run": self.run_.name,
            "unit": str(self.strategy.unit),
            "observer": str(self.strategy.observer),
            "adjacency": str(self.strategy.adjacency),
            "stamps": stamps,
            "assumptions": [*self.strategy.assumptions, *self._arithmetic()],
            "clients": len(self.members),
            "parameters": self.layout.size,
            "rounds": {
                "planned": self.agreement.terms.rounds,
                "done": state.round,
                "ended_early": ended_early,
            },
            **last,
            "tested": _COMMON if self.strategy.personal is None else _PERSONAL,
            "epsilon": spread(lines),
            "epsilon_by_observer": self._by_observer(lines),
            "clients_left": sorted(
                {*left, *(client for line in history for client in line.get("left", []))}
            ),
            "bytes_up": sum(line.get("bytes_up", 0) for line in history),
            "payload_bytes_up": sum(line.get("payload_bytes_up", 0) for line in history),
            "bytes_down": sum(line.get("bytes_down", 0) for line in history),
            "statements": [line.to_dict() for line in lines.values()],
            "seconds": round(seconds, 3),
        }
        if self.folder is not None:
            # The model file is meant for the world: no count of rounds, no client's name, nothing
            # that was measured.
            self.folder.save_model(
                state.model, self.layout, "; ".join(s for s in stamps if s in PUBLIC)
            )
            self.folder.save_summary(summary)
        return Outcome(state=state, history=history, statements=lines, summary=summary)

    def _by_observer(self, known: Mapping[str, Statement]) -> dict[str, Any]:
        """What was spent against each who was billed apart: of a client-level method, the server
        and the world.
        """
        if not self.agreement.bills_world:
            return {}
        found = {}
        for observer in (Observer.SERVER, Observer.WORLD):
            lines = dict(known)
            for client in self.members:
                if client not in lines or lines[client].observer != observer:
                    line = statement(self.run_.ledger, client, observer)
                    lines.pop(client, None)
                    if line is not None:
                        lines[client] = line
            found[str(observer)] = spread(lines)
        return found

    def _arithmetic(self) -> tuple[str, ...]:
        private = self.strategy.local.private
        return arithmetic_assumptions(self.model, self.layout, self.device) if private else ()

    def _grants(self) -> bool:
        return self.strategy.observer is not Observer.NOBODY

    def _billed(self, client: str) -> Observer:
        """Against whom a client's spend is stated: its own budget's observer, else the strategy's."""
        budget = self.members[client].budget
        if not self._grants():
            return Observer.SERVER
        return (budget.observer if budget else None) or self.strategy.observer

    def stamps(self) -> list[str]:
        """Return what must stand on everything this run leaves behind."""
        stamps = [UNACCOUNTED]
        budgets = {
            client: member.budget for client, member in self.members.items() if member.budget
        }
        by_client = self.strategy.unit is Unit.CLIENT
        hidden = {
            c: len(self.members) if by_client else self.members[c].shard.examples for c in budgets
        }
        weak = [c for c, b in budgets.items() if b.delta * hidden[c] >= 1 and self._grants()]
        if weak:
            many = "clients" if by_client else "records"
            stamps.insert(
                0,
                f"WEAK: delta is at or above 1 / {many} for {len(weak)} client(s), '{weak[0]}' among them",
            )
        if self.liars:
            told = ", ".join(
                f"{client} (x {factor:g})" for client, factor in sorted(self.liars.items())
            )
            stamps.insert(
                0, f"FALSE CLAIMS: these clients claim a multiple of their epsilon: {told}"
            )
        if self.strategy.local.hypothetical:
            stamps.insert(0, HYPOTHETICAL)
        if not self._grants():
            stamps.insert(0, UNPROTECTED)
        if self.run_.ledger.seeded_runs():  # this run, or an earlier one from the same accounts
            stamps.insert(0, SEEDED)
        return stamps


def _planned_by(budgets: Mapping[str, Budget], accountant: Literal["renyi"]) -> dict[str, Budget]:
    return {client: replace(budget, accountant=accountant) for client, budget in budgets.items()}


def _told(state: State, noise: Mapping[str, float]) -> State:
    """Tell the weights what only a simulator knows."""
    told = {
        f"{TRUE_NOISE}{client}": torch.tensor([value], dtype=torch.float64)
        for client, value in noise.items()
    }
    return replace(
        state, plugs={**state.plugs, "weights": {**state.plugs.get("weights", {}), **told}}
    )


def _all_granted_the_largest(members: Mapping[str, Member]) -> dict[str, Member]:
    largest = max(
        (member.budget.epsilon for member in members.values() if member.budget), default=None
    )
    if largest is None:
        return dict(members)
    return {
        client: replace(
            member, budget=replace(member.budget, epsilon=largest) if member.budget else None
        )
        for client, member in members.items()
    }
