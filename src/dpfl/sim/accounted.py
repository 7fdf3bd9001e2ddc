"""Evaluation and selection on private test records, accounted for like training.

:func:`evaluate` measures one model, :func:`select` chooses among several. Each client adds noise to
a bounded statistic of its own test records, and its account is charged before anything is computed.

*Formal guarantees.* Per test record, zero-out adjacency (the number of test records is public),
against the server, which sees each client's noisy sums, or over a secure sum nothing but their sum
under the noise of all honest clients. The models are taken as public. Test and
training records of one client are charged to the same account: together they cost the sum, also
where they are different records, because one person may have several.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from dpfl.core.checks import check
from dpfl.core.types import Promise
from dpfl.data.federation import Federation
from dpfl.plugs.channels import Digital
from dpfl.plugs.measures import Estimate, Measure, make_measure
from dpfl.plugs.secure_sum import SecureSum
from dpfl.privacy.accountant import Spend, shown
from dpfl.privacy.filters import FilterName
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import open_ledger
from dpfl.privacy.statement import Statement
from dpfl.rounds.measure import pooled
from dpfl.sim.noisy_sums import NoiseLevel, noisy_sums


@dataclass(frozen=True, kw_only=True)
class Accounted:
    """What an accounted release of test statistics cost.

    ``about`` says what the epsilons promise. ``metric`` names what was measured, on ``records``
    test records in all. ``costs`` is the epsilon of this release alone, by client; ``spent`` is
    what each account has spent in the ledger, this release included. ``flags`` are facts that limit
    the guarantee.
    """

    metric: str
    records: int
    costs: Mapping[str, Spend]
    spent: Mapping[str, Statement] = field(repr=False)
    flags: tuple[Flag, ...]
    about: Promise

    @property
    def seeded(self) -> bool:
        """Whether the noise can be repeated, so that nothing is private."""
        return Flag.SEEDED in self.flags

    @property
    def epsilon(self) -> float:
        """The largest epsilon that this release costs any client."""
        return max(cost.epsilon for cost in self.costs.values())

    @property
    def promise(self) -> str:
        """Epsilon, delta, unit, adjacency and adversary in one clause."""
        delta = max(cost.delta for cost in self.costs.values())
        said = f"epsilon at most {shown(self.epsilon)} at delta {delta:g} {self.about}"
        return "; ".join([said, *(flag.about for flag in self.flags)])

    def _of_whom(self) -> str:
        return f"{self.records} test {self.about.unit}s of {len(self.costs)} clients"


@dataclass(frozen=True, kw_only=True)
class AccountedEvaluation(Accounted):
    """A noisy metric on private test records.

    ``value`` is the metric over all test records, ``standard_error`` that of the noise.
    ``by_client`` has each client's own noisy value, which the server can see too; it is empty over
    a secure sum, where nobody sees one.
    """

    value: float
    standard_error: float
    by_client: Mapping[str, Estimate]

    def __str__(self) -> str:
        found = Estimate(value=self.value, standard_error=self.standard_error)
        return f"{self.metric} {found} (noise), {self._of_whom()}; {self.promise}"


@dataclass(frozen=True, kw_only=True)
class AccountedSelection(Accounted):
    """The candidate with the best noisy metric, ``chosen``; ``scores`` has the metric of each."""

    chosen: str
    scores: Mapping[str, Estimate]

    def __str__(self) -> str:
        best = f"'{self.chosen}' of {len(self.scores)}: {self.metric} {self.scores[self.chosen]}"
        return f"{best} (noise), {self._of_whom()}; {self.promise}"


def evaluate(
    model: nn.Module,
    federation: Federation,
    *,
    metric: str | Measure = "accuracy",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    bound: float | None = None,
    bins: int = 16,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as in train
    seed: int | None = None,
    secure_sum: SecureSum | None = None,
) -> AccountedEvaluation:
    """Measure a model on the clients' private test records, with noise, and charge their accounts.

    A client whose budget does not cover it is named, and nothing is computed.

    Args:
        model: The model, which is taken as public.
        federation: The clients with their test records and budgets.
        metric: "accuracy", "loss", "auc" (two classes), or a
            :class:`dpfl.plugs.measures.Measure`.
        epsilon: What it may cost each client; or give ``noise_multiplier``.
        noise_multiplier: The noise relative to the largest contribution of a record.
        delta: Left out, it is that of each client's budget.
        bound: For "loss", the largest loss of a record: a public number.
        bins: For "auc", how many bins of equal width scores fall into.
        ledger: A file that spans runs, as in :func:`dpfl.train`: what was spent there adds up.
            Without a file, this is accounted for alone.
        new_ledger: Make the file: this is its first use.
        filter: How runs add up in a new ledger file (:mod:`dpfl.privacy.filters`).
        seed: Makes the noise repeatable, and NOT PRIVATE.
        secure_sum: Clients add shares of one noise, and nobody sees a single client's sums; left
            out, everyone adds all of it.
    """
    measure = make_measure(metric, federation.task, bound, bins)
    level = NoiseLevel(
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        seed=seed,
        channel=secure_sum or Digital(),
    )
    with closing(open_ledger(ledger, new_ledger, filter)) as book:
        found = noisy_sums([model], federation, measure, level, book)
    rows = {client: answer[0] for client, answer in found.answers.items()}
    whole = pooled(measure, rows, found.stds, found.records)
    own = {
        client: measure.estimate(row, found.stds[client] ** 2, found.counts[client])
        for client, row in rows.items()
        if found.rows
    }
    return AccountedEvaluation(**found.shared(measure), **vars(whole), by_client=own)


def select(
    models: Mapping[str, nn.Module],
    federation: Federation,
    *,
    metric: str | Measure = "accuracy",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    bound: float | None = None,
    bins: int = 16,
    ledger: Path | str | None = None,
    new_ledger: bool = False,
    filter: FilterName = "renyi",  # noqa: A002 - as in train
    seed: int | None = None,
    secure_sum: SecureSum | None = None,
) -> AccountedSelection:
    """Choose the best of several models by a noisy metric on the clients' private test records.

    Every client sends the noisy statistics of all candidates, charged as one Gaussian mechanism:
    for k candidates the same epsilon needs sqrt(k) times the noise of one evaluation. The best
    noisy value is then post-processing, and so are all values.

    Args:
        models: The candidates by name, each of which is taken as public.
        federation: The clients with their test records and budgets.
        metric: "accuracy", "loss", "auc" (two classes), or a
            :class:`dpfl.plugs.measures.Measure`.
        epsilon: What it may cost each client; or give ``noise_multiplier``.
        noise_multiplier: The noise relative to the largest contribution of a record.
        delta: Left out, it is that of each client's budget.
        bound: For "loss", the largest loss of a record: a public number.
        bins: For "auc", how many bins of equal width scores fall into.
        ledger: A file that spans runs, as in :func:`dpfl.train`: what was spent there adds up.
            Without a file, this is accounted for alone.
        new_ledger: Make the file: this is its first use.
        filter: How runs add up in a new ledger file (:mod:`dpfl.privacy.filters`).
        seed: Makes the noise repeatable, and NOT PRIVATE.
        secure_sum: Clients add shares of one noise, and nobody sees a single client's sums; left
            out, everyone adds all of it.
    """
    check(
        isinstance(models, Mapping) and bool(models),
        "select",
        "was given no candidates",
        "give candidates as {name: model}",
    )
    measure = make_measure(metric, federation.task, bound, bins)
    level = NoiseLevel(
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        seed=seed,
        channel=secure_sum or Digital(),
    )
    names = sorted(models)
    with closing(open_ledger(ledger, new_ledger, filter)) as book:
        found = noisy_sums([models[name] for name in names], federation, measure, level, book)
    scores = {}
    for i, name in enumerate(names):
        rows = {client: answer[i] for client, answer in found.answers.items()}
        scores[name] = pooled(measure, rows, found.stds, found.records)
    sign = 1.0 if measure.higher_is_better else -1.0
    best = max(names, key=lambda name: sign * scores[name].value)
    return AccountedSelection(**found.shared(measure), chosen=best, scores=scores)
