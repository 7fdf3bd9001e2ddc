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
from dpfl.privacy.accountant import shown, spend
from dpfl.privacy.budget_check import largest_that_fits
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan, written
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.privacy.statement import statement
from dpfl.rounds import Agreement
from dpfl.rounds.measure import records_of
from dpfl.rounds.members import Member

_REMEDY = "plan fewer rounds or more noise, or set per_study at the site to what is left there"
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
            if found[observer] < needed:
                what = "a round" if needed == 1 else f"{needed} rounds"
                raise self._refusal(ledger, f"its budget does not cover {what} of this study")
        return found

    def _refusal(self, ledger: SiteLedger, problem: str) -> PrivacyRefusal:
        """Refuse for lack of budget; how much is left is a note, for the site's own log."""
        error = PrivacyRefusal(self._where, problem, _REMEDY)
        error.add_note(self.shortfall(ledger))
        return error

    def shortfall(self, ledger: SiteLedger) -> str:
        """Say what is left of the site's budget, and what a round takes: for the site alone."""
        for observer, cost, _ in reversed(self.plans()):
            spent = statement(ledger, self.member.id, observer)
            if spent is not None and spent.budget is not None:
                left = spent.budget - float(shown(spent.epsilon))
                text = f"epsilon {left:.6g} of {spent.budget:g} is left, delta {spent.delta:g} is"
                return f"{text} taken, and a round takes epsilon {shown(self._price(cost, 1))}"
        return ""

    def _price(self, cost: PrivacyCost, rounds: int) -> float:
        """The epsilon of so many rounds alone, at the delta of one study."""
        budget = self.member.budget
        assert budget is not None
        history = cost.times(rounds)
        accountant = budget.accountant
        spent = spend(history, budget.delta, adjacency=cost.adjacency, accountant=accountant)
        return spent.epsilon

    def _within_study(self, cost: PrivacyCost, rounds: int) -> int:
        """Find how many rounds the part of epsilon for one study covers.

        The ledger enforces the whole budget; this keeps one study from using more than its part.
        """
        budget = self.member.budget
        if budget is None:
            return rounds
        return largest_that_fits(lambda count: self._price(cost, count) <= budget.epsilon, rounds)

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
            if ledger.commit(run, plans):
                raise self._refusal(ledger, "its budget does not cover this study")
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
            if (round_, charge.account) not in paid and ledger.charge(run, round_, [charge]):
                raise self._refusal(ledger, "its budget ran out")

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
            check(
                all(written(one) == written(cost) for one in own),
                self._where,
                "its records or settings are not those that its plan was made for",
                "put back what was there when the study began",
                PeerError,
            )

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
