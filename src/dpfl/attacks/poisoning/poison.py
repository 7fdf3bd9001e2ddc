"""Poisoning: what one dishonest client can do to the model, and to the others' privacy.

Every method is simulated with every defence under every attack, over paired seeds: the same
federation, first model, draws and noise. Only what the dishonest client does differs.

What can be run is planned with the first seed, before anything is: a method whose clients upload
nothing, a defence that a method cannot have and an attack that the data do not allow are left out,
each with a sentence. A method that the federation cannot run is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from dpfl.attacks.poisoning.case import Case
from dpfl.attacks.poisoning.defences import DEFENCES, check_defence, defended, reliance
from dpfl.attacks.poisoning.dishonest import ATTACKS, Attack, make_attack
from dpfl.attacks.poisoning.results import AttackedMethod, Cell, PoisonedRun, Poisoning
from dpfl.core.checks import check
from dpfl.core.errors import DpflError
from dpfl.core.types import Plain
from dpfl.experiments.study import set_fields
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.experiment import setup_of
from dpfl.sim.opening import Setup, in_memory
from dpfl.strategy import Strategy

Progress = Callable[[int, int, str], None]
"""Called after every round with how many are done, how many there are, and what is running."""

LARGEST = "the one with the largest budget, which counts most where budgets are weights"
MOST_RECORDS = "the one with the most records, since nobody has a budget"
NAMED = "the one that was named"


def poison(
    base: Plain,
    methods: Sequence[str],
    *,
    attacks: Sequence[str] = tuple(ATTACKS),
    defences: Sequence[str] = DEFENCES,
    client: str | None = None,
    factor: float = 10.0,
    seeds: Sequence[int] = (0, 1, 2),
    data_folder: Path | None = None,
    progress: Progress | None = None,
) -> Poisoning:
    """Compare ``methods`` of the experiment ``base`` under attacks of one dishonest client.

    Args:
        base: An experiment as plain values, as :func:`dpfl.experiments.compare.compare` takes it.
        methods: Names of methods. One whose clients upload nothing is left out, with a sentence.
        attacks: Names of :data:`.dishonest.ATTACKS`. "none" is always run: the others are measured
            against it.
        defences: Names of :data:`.defences.DEFENCES`. One that a method cannot have is left out for
            it, with a sentence.
        client: The dishonest client; left out, the one with the largest budget of each seed.
        factor: By what updates are multiplied (negated for a sign flip), and claims of epsilon.
        seeds: Seeds of the runs, paired over everything else.
        data_folder: Where data sets lie that do not ship with dpfl.
        progress: Called after every round.

    ::

        found = dpfl.attacks.poison(values, ["weiavg", "robust_hdp"], attacks=["sign_flip"])
        for cell in found.cells:
            print(cell.method, cell.defence, cell.attack, cell.scores, found.drops(cell))
    """
    chosen = [make_attack(name, factor) for name in dict.fromkeys(("none", *attacks))]
    asked = tuple(dict.fromkeys(defences))
    for name in asked:
        check_defence(name)
    check(bool(asked), "defences", "names no defence", "name some, or none")

    def case_of(method: str, seed: int) -> Case:
        return Case.of(_setup(base, method, seed, data_folder), client)

    plans = []
    left_out = list[str]()
    for method in methods:
        plan, refused = _planned(case_of(method, seeds[0]), method, chosen, asked)
        plans += [plan] if plan else []
        left_out += refused
    check(
        bool(plans),
        "poisoning",
        "there is nothing to compare: " + "; ".join(left_out),
        "name other methods or defences",
    )
    return _compared(plans, seeds, case_of, progress, left_out, client is not None)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is run of a ``method``, each with so many ``rounds``."""

    method: str
    attacks: tuple[Attack, ...]
    defences: tuple[str, ...]
    rounds: int


def _setup(base: Plain, method: str, seed: int, data_folder: Path | None) -> Setup:
    """What is simulated of a method, with one seed."""
    values = for_method(set_fields(base, {"run.seed": seed}), method)
    return setup_of(Experiment.from_options(values), data_folder)


def _planned(
    case: Case, method: str, attacks: Sequence[Attack], defences: Sequence[str]
) -> tuple[_Plan | None, list[str]]:
    """What can be run of a method, None if nothing can, and sentences about the rest.

    Defences that are refused for the same reason share a sentence.
    """
    strategy = case.setup.strategy
    if why := _uploads_nothing(strategy):
        return None, [f"{method}: {why}"]
    kept = []
    refused = [f"{method} under {a.name}: {why}" for a in attacks if (why := _lacks(case, a))]
    case.setup.rehearse()
    why_not: dict[str, tuple[list[str], str]] = {}  # by what would help
    for name in defences:
        try:
            replace(case.setup, strategy=defended(strategy, name)).rehearse()
            kept.append(name)
        except DpflError as error:
            why_not.setdefault(error.remedy, ([], error.problem))[0].append(name)
    refused += [f"{method} with {', '.join(own)}: {why}" for own, why in why_not.values()]
    if not kept:
        return None, refused
    able = tuple(attack for attack in attacks if not _lacks(case, attack))
    with in_memory(case.setup) as simulation:
        rounds = simulation.planned
    return _Plan(method=method, attacks=able, defences=tuple(kept), rounds=rounds), refused


def _uploads_nothing(strategy: Strategy) -> str:
    """Why nobody can poison a method; empty if somebody can."""
    if strategy.local.pooled:
        return "a curator pools the records, and clients upload no updates"
    alone = strategy.personal is not None and strategy.personal.whole
    return "its clients train alone, and upload nothing" if alone else ""


def _lacks(case: Case, attack: Attack) -> str:
    """What an attack needs and does not find; empty if it can be run."""
    federation = case.setup.federation
    if attack.needs_classes and case.marked is None:
        return f"{federation.task} has no classes"
    unbudgeted = attack.claim != 1 and case.client not in federation.budgets
    return f"'{case.client}' has no budget to claim" if unbudgeted else ""


@dataclass(kw_only=True, eq=False)
class _Count:
    """Counts rounds over all runs, of which there are ``total``, and tells ``progress``.

    ``before`` are the rounds of the runs that came before the present one.
    """

    total: int
    progress: Progress | None
    before: int = 0

    def during(self, plan: _Plan, note: str) -> Callable[[int], None]:
        """What counts the rounds of the next run, which false claims may make longer."""
        before = self.before
        self.before = self.before + plan.rounds

        def report(rounds: int) -> None:
            if self.progress is not None:
                self.progress(before + min(rounds, plan.rounds), self.total, note)

        return report


def _compared(
    plans: Sequence[_Plan],
    seeds: Sequence[int],
    case_of: Callable[[str, int], Case],
    progress: Progress | None,
    left_out: Sequence[str],
    named: bool,
) -> Poisoning:
    """Run everything that was planned, and put the results together.

    Of every method, defence and seed the run without an attack comes first: the others are compared
    with its epsilons.
    """
    runs = [len(plan.attacks) * len(plan.defences) * plan.rounds for plan in plans]
    count = _Count(total=len(seeds) * sum(runs), progress=progress)
    cells: dict[tuple[str, str, str], list[PoisonedRun]] = {}
    clients = {}
    facts = dict[str, AttackedMethod]()
    for plan, seed in product(plans, seeds):
        case = case_of(plan.method, seed)
        clients[seed] = case.about(seed)
        for defence in plan.defences:
            strategy = defended(case.setup.strategy, defence)
            plain = None
            for attack in plan.attacks:
                note = f"{plan.method}, {defence}, {attack.name}, seed {seed}"
                played = case.play(strategy, attack, count.during(plan, note))
                plain = played.epsilons if plain is None else plain
                run = case.measured(played, plain, seed)
                cells.setdefault((plan.method, defence, attack.name), []).append(run)
                if plan.method not in facts:
                    promise = str(played.summary.promise)
                    rests = reliance(played.simulation, case.client)
                    own = AttackedMethod(name=plan.method, promise=promise, reliance=rests)
                    facts[plan.method] = own
    task = case.setup.federation.task
    budgets = case.setup.federation.budgets
    return Poisoning(
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        chosen=NAMED if named else LARGEST if budgets else MOST_RECORDS,
        attacks={attack.name: attack.about for plan in plans for attack in plan.attacks},
        trigger=case.trigger.about if case.marked is not None else "",
        clients=tuple(clients.values()),
        methods=tuple(facts.values()),
        cells=tuple(
            Cell(method=method, defence=defence, attack=attack, runs=tuple(own))
            for (method, defence, attack), own in cells.items()
        ),
        left_out=tuple(left_out),
        seeded=case.setup.seeded,
    )
