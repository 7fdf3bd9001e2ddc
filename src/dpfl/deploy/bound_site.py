"""A site under the terms of a study: what it would agree to, and commit to.

Nothing of it is remembered. Every request states study and terms anew, and is checked against the
site's own file.
"""

from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.deploy.commitment import Commitment
from dpfl.deploy.policy import check_plan
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.requests import SumRequest, TrainingRequest, UnderTerms
from dpfl.deploy.site_sum import SiteSum
from dpfl.engine import make_engine
from dpfl.privacy.site_ledger import SiteLedger
from dpfl.rounds import Agreement, Workshop, buffer_shapes, client_round
from dpfl.rounds.enrol import secret_for


class BoundSite(LoadedSite):
    """A site that checks a study's terms, and knows what it commits to under them."""

    def agreement(self, request: UnderTerms) -> Agreement:
        """Plan the study under the server's terms, with this site's own budget and settings.

        Terms that this study cannot have are refused; so is a plan outside the site's policy.
        """
        study, terms = request.study, request.terms
        member = self.member(study.learned())
        strategy, model = study.strategy(), study.build_model()
        layout, shapes = Layout.of_module(model), buffer_shapes(model, strategy.releases)
        releases = tuple((one.share, one.numbers(shapes[one.into])) for one in strategy.releases)
        fitting = (
            terms.rounds == study.run.rounds
            and 1 <= terms.population <= len(study.study.sites)
            and 0 < terms.expected_cohort <= terms.population
            and 1 <= terms.participations <= terms.rounds
            and terms.parameters == layout.size
            and terms.releases == releases
            and len(terms.release_noise) == (len(releases) if strategy.secure else 0)
        )
        check(fitting, "terms", "do not belong to this study", "enrol again", PeerError)
        strategy.weights.check_terms(terms, self.id)
        agreement = Agreement(
            strategy=strategy.resolve(terms),
            terms=terms,
            layout=layout,
            claims={self.id: member.claims},
            buffer_shapes=shapes,
        )
        check_plan(self.file, agreement, member)
        return agreement

    def commitment(self, request: UnderTerms) -> Commitment:
        """Check study and terms, and return what the site commits to if it accepts them."""
        self.check_study(request.study)
        apart = self.file.budget is not None and self.file.budget.per_study is not None
        agreement = self.agreement(request)
        member = self.member(request.study.learned())
        return Commitment(agreement=agreement, member=member, per_study=apart)

    def part_of_sum(
        self, ledger: SiteLedger, request: TrainingRequest | SumRequest, agreement: Agreement
    ) -> SiteSum | None:
        """This site's part of a round's secure sum; None where the server sees every upload."""
        if agreement.strategy.channel.sees_rows:
            return None
        missing = isinstance(request, TrainingRequest) and request.sum is None
        problem, remedy = "asks for an upload that is not masked", "ask in a session"
        check(not missing, "server", problem, remedy, PeerError)
        return SiteSum(
            site=self.id,
            ledger=ledger,
            agreement=agreement,
            request=request,
            identity=self.identity(),
            trust=self.file.trust(),
        )

    def work(
        self, request: TrainingRequest, agreement: Agreement, private: dict[str, Tensor]
    ) -> tuple[bytes, dict[str, Tensor]]:
        """Do the local work of a round, as a simulated client does it.

        ``private`` is the part of the model that stays at the site. Returns the upload, and that
        part as it is after the round.
        """
        study = request.study
        seed = PublicSeed(study.run.seed).child("secret") if study.seeded else None
        workshop = Workshop(
            agreement=agreement,
            run=request.run,
            engine=make_engine("stacked"),
            model=study.build_model(),
            secret=lambda round_, site: secret_for(seed, "client", round_, site),
        )
        downloads = {self.id: request.payload}
        members = {self.id: self.member(study.learned())}
        (uplink,) = client_round(workshop, downloads, members, private)
        assert uplink.payload is not None
        return uplink.payload, private
