"""DP-SGD on all clients' records together, by a curator whom all of them trust.

For comparison: it shows what the same budgets would reach without a federation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import effective_multiplier, multiplier_for
from dpfl.core.layout import Layout
from dpfl.core.phases import Phase
from dpfl.core.types import Budget, Claims, ClientSettings, Terms
from dpfl.plugs.base import Gain, Participant
from dpfl.plugs.local_work import DpSgd
from dpfl.plugs.sampling import RatedBatches, steps_per_epoch
from dpfl.privacy.accountant import gaussian_mu
from dpfl.privacy.calibrate import largest_rate, rung, search_rungs

_STRIDE = 16  # rungs between noise levels that are compared, of a ratio of about 1.08


@dataclass(frozen=True, kw_only=True)
class PooledDpSgd(DpSgd):
    """DP-SGD on the pooled records: one noise level, and for each client's records the sampling
    rate that uses up its own budget.

    A step takes the ``batch_size`` of all clients together, on average; fewer where the rates of
    large budgets have reached 1, so that more would take more noise than they are worth. A round
    has as many steps as a client of mean size takes elsewhere: the ``local_steps``, or those of its
    ``local_epochs``.

    *Formal guarantees.* With noise multiplier z for all, client i's records join a step with the
    largest rate q_i of a ladder for which all planned steps cost at most its own (epsilon, delta)
    under zero-out adjacency; z is such that sum_i n_i q_i is the batch size (Boenisch, Muhl,
    Dziedzic, Rinberg, Papernot: *Have it your way: Individualized Privacy Assignment for DP-SGD*,
    NeurIPS 2023). z follows from claims, q_i from the budget that the client enforces: a false
    claim changes the size of batches, never what is charged. Only the published models are
    protected: the curator has the records.
    """

    pooled: ClassVar[bool] = True

    def resolve_terms(self, terms: Terms, claims: Mapping[str, Claims]) -> Terms:
        """Find the one noise level at which the claimed budgets fill the batches."""
        usable = [claims[client] for client in sorted(claims) if claims[client].usable]
        check(
            bool(usable),
            "pooled dp-sgd",
            "no client claims a usable (epsilon, delta)",
            "give budgets",
            PrivacyRefusal,
        )
        terms = replace(terms, records=sum(claim.examples for claim in usable))
        largest = min(terms.records, self._size(terms))

        def planned(index: int, size: int) -> Terms:
            noise = multiplier_for(rung(index), terms.parameters, _parts(size))
            return replace(terms, batch=size).with_noise(noise)

        def expected(known: Terms, rough: bool = False) -> float:
            return math.fsum(one.examples * self._rate(one, known, rough) for one in usable)

        def filled(index: int) -> float:
            return max(expected(planned(index, largest), True), 1e-300) / largest

        # In the Gaussian limit sum_i n_i mu_i / sqrt(steps (exp(z^-2) - 1)) is the batch size.
        pull = sum(claim.examples * gaussian_mu(claim.epsilon, claim.delta) for claim in usable)
        steps = self._steps(terms) * terms.participations
        guess = -0.5 * math.log(math.log1p(max(pull / largest, 1e-100) ** 2 / steps))
        start = math.ceil(guess / math.log(rung(1)))
        index = search_rungs(lambda one: 1 / filled(one), 1.0, start)
        while rung(index - _STRIDE) / filled(index - _STRIDE) < rung(index) / filled(index):
            index -= _STRIDE
        size = 1
        while (found := expected(known := planned(index, size))) > size:
            size = math.ceil(found)
        return known

    def phases(self, terms: Terms, participant: Participant) -> tuple[Phase, ...]:
        """Plan one phase for this participant's records, with the rate of its own budget."""
        budget, epsilon = self._target(terms, participant)
        size = self._size(terms)
        kept = {"clip": self.clip, "clipping": self.clipping}
        rate = self._rate(replace(budget, epsilon=epsilon), terms)
        anybody = replace(participant, client_settings=ClientSettings())
        phase = replace(
            self._phase(anybody, sampling="poisson", **kept),
            steps=self._steps(terms),
            batch_size=size,
            noise_multiplier=terms.noise_multiplier or 0.0,
            rates=((participant.examples, min(rate, size / participant.examples)),),
        )
        return (phase,)

    def _size(self, terms: Terms) -> int:
        """Expected records of a step: as planned, else those of all clients together."""
        return terms.batch or terms.population * (self.client_settings.batch_size or 1)

    def _steps(self, terms: Terms) -> int:
        """How many steps a round has: as many as a client with the mean number of records takes."""
        whole = self.client_settings
        mean = math.ceil(max(1, terms.records) / terms.population)
        an_epoch = steps_per_epoch(mean, whole.batch_size or 1)
        return whole.local_steps or (whole.local_epochs or 0) * an_epoch

    def _rate(self, budget: Budget | Claims, terms: Terms, rough: bool = False) -> float:
        """The largest rate with which all planned steps stay within a budget, or one near it."""
        parts = _parts(self._size(terms))
        numbers = terms.parameters
        return largest_rate(
            budget.epsilon,
            budget.delta,
            effective_multiplier(terms.noise_multiplier or 0.0, numbers, parts),
            self._steps(terms) * terms.participations,
            accountant=budget.accountant,
            numbers=numbers,
            rough=rough,
        )

    def noise_gain(self, terms: Terms, layout: Layout, client: str | None = None) -> Gain:
        """All rows are one and the same: averaging them leaves all of the noise."""
        return Gain(noise=terms.expected_cohort)


def _parts(size: int) -> int:
    """In how many parts the sum of a batch of this expected size is rounded."""
    return RatedBatches(size, size, ((size, 0.0),)).parts
