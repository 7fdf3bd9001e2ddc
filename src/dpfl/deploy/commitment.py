"""What a site commits to when it accepts a study's terms: its plan, before it releases anything.

A plan is the cost of the releases before round one and of one round, repeated as often as the
budget allows and the study may ask for. It is fixed by the terms and by the site's own budget, and
written to the site's ledger before anything leaves the site. A round that the plan does not cover
is not answered.
"""

from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.privacy.accountant import spend
from dpfl.privacy.budget_check import largest_that_fits
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan, written
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import Agreement
from dpfl.rounds.measure import records_of
from dpfl.rounds.members import Member

NOTHING_TO_MEASURE = "it has no test records to measure a metric on"


@dataclass(frozen=True, kw_only=True)
class Commitment:
    """A site's privacy costs under an agreement.

    ``agreement``: the study under its terms.
    ``member``: the site, with the budget that noise is planned for in one study.
    ``per_study``: the site's budget sets a part of epsilon aside for each study.
    """

    agreement: Agreement
    member: Member
    per_study: bool

    @property
    def _where(self) -> str:
        """The site, as messages name it."""
        return f"site '{self.member.id}'"

    @property
    def _delta(self) -> float | None:
        """The share of delta that a plan is priced at."""
        return None if self.member.budget is None else self.member.budget.delta

    def plans(self) -> list[tuple[Observer, PrivacyCost, frozenset[Observer]]]:
        """Return what is planned, the world's part first: against whom, and who else sees it."""
        found = [
            (Observer.SERVER if Observer.SERVER in seen else Observer.WORLD, cost, seen)
            for cost, seen in self.agreement.plans(self.member.participant)
        ]
        return sorted(found, key=lambda cost: cost[0] is Observer.SERVER)

    def _amplified(self, observer: Observer) -> bool:
        """Whether a cost counts on the secrecy of the draw."""
        return observer is Observer.WORLD and self.agreement.amplified

    def _rounds(self, observer: Observer) -> int:
        """For how many rounds a cost is planned; a part for each study covers participations."""
        terms = self.agreement.terms
        apart = self.per_study and not self._amplified(observer)
        return terms.participations if apart else terms.rounds

    def check(self, ledger: SiteLedger) -> dict[Observer, int]:
        """Find how many rounds a plan could contain against each adversary.

        Where sampling amplifies, the budget must cover all rounds; elsewhere it must cover one.
        Otherwise the study is refused.
        """
        found = {}
        for observer, cost, seen in self.plans():
            planned = self._rounds(observer)
            rounds = min(planned, self._within_study(cost, planned)) if self.per_study else planned
            found[observer] = ledger.affordable_releases(
                self.member.id, cost, seen, rounds, delta=self._delta
            )
            needed = planned if self._amplified(observer) else 1
            what = "a round" if needed == 1 else f"{needed} rounds"
            problem = f"its budget does not cover {what} of this study"
            remedy = "raise the budget, or plan fewer rounds"
            check(found[observer] >= needed, self._where, problem, remedy, PrivacyRefusal)
        return found

    def _within_study(self, cost: PrivacyCost, rounds: int) -> int:
        """Find how many rounds the part of epsilon for one study covers.

        The ledger enforces the whole budget; this keeps one study from using more than its part.
        """
        budget = self.member.budget
        if budget is None:
            return rounds

        def fits(count: int) -> bool:
            costs, accountant = cost.times(count), budget.accountant
            spent = spend(costs, budget.delta, adjacency=cost.adjacency, accountant=accountant)
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
                    account=self.member.id,
                    observer=observer,
                    cost=cost,
                    releases=releases[observer],
                    delta=self._delta,
                )
                for observer, cost, _ in self.plans()
            ]
            refused, problem = ledger.commit(run, plans), "its budget does not cover this study"
            check(not refused, self._where, problem, "raise the budget", PrivacyRefusal)
        if self.agreement.amplified:
            self._charge_world(ledger, run)

    def _charge(self, observer: Observer, round_: int) -> Charge:
        """Build the charge of a round, or of a release before round one."""
        cost = self.agreement.cost(observer, self.member.participant, round_)
        return Charge(account=self.member.id, observer=observer, cost=cost)

    def _charge_world(self, ledger: SiteLedger, run: str) -> None:
        """Charge what the world will see of all rounds; what is charged already stays."""
        paid = ledger.charged(run, Observer.WORLD)
        for round_ in range(self.agreement.first_round, self.agreement.terms.rounds):
            charge = self._charge(Observer.WORLD, round_)
            good = (round_, charge.account) in paid or not ledger.charge(run, round_, [charge])
            remedy = "raise it, or plan fewer rounds"
            check(good, self._where, "its budget ran out", remedy, PrivacyRefusal)

    def charges(self, round_: int) -> list[Charge]:
        """Return what a round, or a release before round one, is charged when it is answered.

        What was charged when the terms were accepted is not among it.
        """
        observers = [observer for observer, _, _ in self.plans() if not self._amplified(observer)]
        return [self._charge(observer, round_) for observer in observers]

    def check_unchanged(self, ledger: SiteLedger, run: str) -> None:
        """Refuse to go on with other records or settings than those that the plan was made for."""
        for observer, cost, _ in self.plans():
            made = ledger.committed(self.member.id, observer)
            own = [one.cost for one in made if (one.run, one.observer) == (run, observer)]
            problem = "its records or settings are not those that its plan was made for"
            remedy = "put back what was there when the study began"
            good = all(written(one) == written(cost) for one in own)
            check(good, self._where, problem, remedy, PeerError)

    def unplanned(self, round_: int) -> str:
        """Say why a round is not this site's to answer, by what is public; empty if it is."""
        terms = self.agreement.terms
        if not -len(terms.releases) <= round_ < terms.rounds:
            return f"round {round_} is not in the plan"
        measured = round_ in self.agreement.measurements
        return NOTHING_TO_MEASURE if measured and not records_of(self.member) else ""

    def covers(self, ledger: SiteLedger, run: str, round_: int) -> bool:
        """Whether the plan covers this round."""
        return all(
            ledger.can_release(run, round_, charge.account, charge.observer, charge.cost)
            for charge in self.charges(round_)
        )
