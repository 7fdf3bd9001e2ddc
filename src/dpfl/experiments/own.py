"""Compare strategies on a federation and a model of the caller's own: every run is a call of
:func:`dpfl.train`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from dpfl.core.checks import check, whole_number
from dpfl.core.errors import NotPrivateWarning
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.experiments.results import CellResult, StudyResult
from dpfl.experiments.scoring import result_of, score_of
from dpfl.experiments.tuning import RunStore
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import RunFolder
from dpfl.runs.training import Training
from dpfl.sim.train import train
from dpfl.strategy import Strategy

Build = Callable[[int], nn.Module]
"""Builds the first model of a seed."""


@dataclass(frozen=True, kw_only=True)
class OwnComparison:
    """Strategies by label, each trained with every seed.

    ``federation``, ``strategies``, ``rounds`` and ``workers`` are those of :func:`dpfl.train`.
    ``model`` is the first model of every run, or a function that builds one from a seed; ``seeds``
    are paired over strategies.
    """

    federation: Federation
    model: nn.Module | Build
    strategies: Mapping[str, Strategy]
    rounds: int
    seeds: Sequence[int]
    workers: int = 1

    def __post_init__(self) -> None:
        whole_number("compare", "rounds", self.rounds)
        check(
            isinstance(self.strategies, Mapping) and bool(self.strategies),
            "compare",
            f"strategies = {self.strategies!r:.60}",
            "give a dict of strategies by label",
        )
        for label, strategy in self.strategies.items():
            check(
                isinstance(strategy, Strategy),
                f"strategy '{label}'",
                f"{strategy!r} is not a strategy",
                "build a method with its settings",
            )
        check(isinstance(self.federation, Federation), "compare", "federation is none", "build one")

    @property
    def base(self) -> Plain:
        """What all runs share, by which a folder is recognised."""
        first = self._training(next(iter(self.strategies.values())), 0)
        return {"data": first.data, "rounds": self.rounds}

    def run(self, store: RunStore) -> StudyResult:
        """Train what the ``store`` does not hold, and return all results."""
        cells: list[CellResult] = []
        for label, strategy in self.strategies.items():
            before = len(cells) * len(self.seeds)
            runs = [
                self._run(label, strategy, seed, store, (before + number) * self.rounds)
                for number, seed in enumerate(self.seeds)
            ]
            scores = tuple(score_of(run, seed) for run, seed in zip(runs, self.seeds, strict=True))
            cells.append(CellResult(label=label, method=strategy.name, runs=scores))
        told = {"base": self.base, "seeds": list(self.seeds)}
        return result_of(f"{len(cells)} methods compared", cells, study=told)

    def _run(
        self, label: str, strategy: Strategy, seed: int, store: RunStore, before: int
    ) -> RunFolder:
        """Train one strategy with one seed, ``before`` so many rounds of the comparison."""
        total = len(self.strategies) * len(self.seeds) * self.rounds

        def show(done: int, _: int, record: RoundRecord) -> None:
            store.progress(label, before + done, total)

        folder = store.kept / f"{strategy.name}-{self._training(strategy, seed).digest[:20]}"
        run = partial(train, self._start(seed), self.federation, strategy, rounds=self.rounds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotPrivateWarning)  # the results are flagged
            run(seed=seed, folder=folder, resume=True, progress=show, workers=self.workers)
        return RunFolder(folder)

    def _training(self, strategy: Strategy, seed: int) -> Training:
        model = self._start(seed)
        return Training.of(model, self.federation, strategy, rounds=self.rounds, seed=seed)

    def _start(self, seed: int) -> nn.Module:
        """The first model of a seed."""
        found = self.model if isinstance(self.model, nn.Module) else self.model(seed)
        check(
            isinstance(found, nn.Module),
            "compare",
            f"model gives {found!r}, which is not a module",
            "give a module, or a function of a seed",
        )
        return found
