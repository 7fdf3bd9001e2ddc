"""What a site commits to when it accepts a study's terms: its plan, before it releases anything."""

from __future__ import annotations

from dataclasses import dataclass

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.privacy.accountant import spend
from dpfl.privacy.budget_check import largest_that_fits
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import Agreement
from dpfl.rounds.members import Member


@dataclass(frozen=True, kw_only=True)
class Commitment:
    """A site's privacy costs under an agreement. ``per_study``: its budget sets a part of epsilon
    aside for each study.
    """

    site: str
    agreement: Agreement
    member: Member
    per_study: bool

    def costs(self) -> list[tuple[Observer, PrivacyCost, frozenset[Observer]]]:
        """A round's costs, the world's first: against whom, and who else sees what they pay for."""
        found = []
        for cost, seen in self.agreement.costs(self.member.participant):
            found.append(
                (Observer.SERVER if Observer.SERVER in seen else Observer.WORLD, cost, seen)
            )
        return sorted(found, key=lambda cost: cost[0] is Observer.SERVER)

    def _amplified(self, observer: Observer) -> bool:
        return observer is Observer.WORLD and self.agreement.amplified

    def _rounds(self, observer: Observer) -> int:
        """For how many rounds a cost is planned: a study's part of epsilon covers the
        participations planned.
        """
        terms = self.agreement.terms
        return (
            terms.participations
            if self.per_study and not self._amplified(observer)
            else terms.rounds
        )

    @property
    def _share(self) -> float | None:
        return None if self.member.budget is None else self.member.budget.delta

    def check(self, ledger: SiteLedger) -> dict[Observer, int]:
        """How many rounds a plan could contain, against each adversary; refuse a study it cannot
        take part in.
        """
        found = {}
        for observer, cost, seen in self.costs():
            rounds = self._rounds(observer)
            rounds = min(rounds, self._within_study(cost, rounds)) if self.per_study else rounds
            found[observer] = ledger.affordable_releases(
                self.site, cost, seen, rounds, delta=self._share
            )
            needed = self._rounds(observer) if self._amplified(observer) else 1
            if found[observer] < needed:
                raise PrivacyRefusal(
                    f"site '{self.site}'",
                    f"its budget does not cover {'a round' if needed == 1 else f'{needed} rounds'} of this study",
                    "raise the budget, or plan fewer rounds",
                )
        return found

    def _within_study(self, cost: PrivacyCost, rounds: int) -> int:
        """How many rounds the part of epsilon for one study covers, whatever noise the terms name."""
        budget = self.member.budget
        if budget is None:
            return rounds

        def fits(count: int) -> bool:
            spent = spend(
                cost.times(count),
                budget.delta,
                adjacency=cost.adjacency,
                accountant=budget.accountant,
            )
            return spent.epsilon <= budget.epsilon

        return rounds if fits(rounds) else largest_that_fits(fits, rounds)

    def make(self, ledger: SiteLedger, run: str) -> None:
        """Commit to the plan, once.

        Where sampling amplifies, what the world will see of all rounds is charged now, drawn or
        not: a site cannot see the rounds that it is not drawn for.
        """
        if not ledger.planned(run, Observer.SERVER):
            releases = self.check(ledger)
            plans = [
                PrivacyPlan(
                    account=self.site,
                    observer=observer,
                    cost=cost,
                    releases=releases[observer],
                    delta=self._share,
                )
                for observer, cost, _ in self.costs()
            ]
            if ledger.commit(run, plans):
                raise PrivacyRefusal(
                    f"site '{self.site}'",
                    "its budget does not cover this study",
                    "raise the budget",
                )
        if self.agreement.amplified:
            self._charge_world(ledger, run)

    def _charge_world(self, ledger: SiteLedger, run: str) -> None:
        cost = self.agreement.cost(Observer.WORLD, self.member.participant)
        paid = {
            round_
            for round_, account in ledger.charged(run, Observer.WORLD)
            if account == self.site
        }
        for round_ in range(self.agreement.terms.rounds):
            charge = Charge(account=self.site, observer=Observer.WORLD, cost=cost)
            if round_ not in paid and ledger.charge(run, round_, [charge]):
                raise PrivacyRefusal(
                    f"site '{self.site}'", "its budget ran out", "raise it, or plan fewer rounds"
                )

    def charges(self) -> list[Charge]:
        """What a round is charged, but for what was charged when the terms were accepted."""
        return [
            Charge(account=self.site, observer=observer, cost=cost)
            for observer, cost, _ in self.costs()
            if not self._amplified(observer)
        ]

    def covers(self, ledger: SiteLedger, run: str, round_: int) -> bool:
        """Whether the plan covers this round."""
        return all(
            ledger.can_release(run, round_, self.site, observer, cost)
            for observer, cost, _ in self.costs()
            if not self._amplified(observer)
        )
