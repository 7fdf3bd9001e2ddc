"""A site under the terms of a study: what it would agree to, and commit to.

Nothing of it is remembered. Every request states study and terms anew, and is checked against the
site's own file.
"""

from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PeerError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Terms
from dpfl.deploy.commitment import Commitment
from dpfl.deploy.policy import check_plan
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.requests import SumRequest, TrainingRequest, UnderTerms
from dpfl.deploy.site_sum import SiteSum
from dpfl.models.preconditioning import split_features
from dpfl.privacy.site_ledger import PlannedUnits, SiteLedger
from dpfl.rounds import Agreement, Workshop, buffer_shapes, client_round
from dpfl.rounds.codec import decode_download
from dpfl.rounds.enrol import secret_for
from dpfl.rounds.measure import measured_upload
from dpfl.rounds.members import true_claims
from dpfl.runs.deployment import Offer
from dpfl.strategy import Strategy


def planned_strategy(study: Offer, model: nn.Module, terms: Terms) -> Strategy:
    """The strategy of a study with what the server has planned; without a plan, none may be sent.

    Numbers that cannot be are refused. Whatever they are, the site is charged for what it does.
    """
    strategy = study.strategy().for_model(model)
    if strategy.recipe is None:
        check(not terms.recipe, "terms", "plan what this study fixes", "enrol again", PeerError)
        return strategy
    return strategy.recipe.apply(strategy, dict(terms.recipe))


class BoundSite(LoadedSite):
    """A site that checks a study's terms, and knows what it commits to under them."""

    def agreement(self, request: UnderTerms, planned: PlannedUnits) -> Agreement:
        """Plan the study under the server's terms, with the numbers of units it is planned for.

        Terms that this study cannot have are refused. Records are not read.
        """
        study = request.study
        terms = request.terms
        model = study.build_model()
        strategy = planned_strategy(study, model, terms)
        layout = Layout.of_module(model)
        shapes = buffer_shapes(model, strategy.releases)
        own = tuple((one.share, one.numbers(shapes[one.into])) for one in strategy.releases)
        releases = (*study.measurements(), *own)
        check(
            terms.rounds == (study.run.rounds or dict(terms.recipe).get("rounds"))
            and 1 <= terms.population <= len(study.study.sites)
            and 0 < terms.expected_cohort <= terms.population
            and 1 <= terms.participations <= terms.rounds
            and terms.parameters == layout.size
            and terms.releases == releases
            and terms.measured == len(releases) - len(own)
            and len(terms.release_noise) == (len(releases) if strategy.secure else 0),
            "terms",
            "do not belong to this study",
            "enrol again",
            PeerError,
        )
        strategy.weights.check_terms(terms, self.id)
        return Agreement(
            strategy=strategy.resolve(terms),
            terms=terms,
            layout=layout,
            claims={self.id: true_claims(self.file.study_budget(), planned.trained)},
            buffer_shapes=shapes,
        )

    def commitment(self, request: UnderTerms) -> Commitment:
        """Check study and terms, and return what the site commits to if it accepts them.

        A plan outside the site's policy is refused.
        """
        self.check_study(request.study)
        apart = self.file.budget is not None and self.file.budget.per_study is not None
        member = self.member(request.study.learned())
        if (metric := request.study.accounted_metric()) is not None:
            metric.measure(member.task)  # of persons, where the site's schema has them
        agreement = self.agreement(request, self.planned_units())
        check_plan(self.file, agreement, member)
        return Commitment(agreement=agreement, member=member, per_study=apart)

    def part_of_sum(
        self, ledger: SiteLedger, request: TrainingRequest | SumRequest, agreement: Agreement
    ) -> SiteSum | None:
        """This site's part of a round's secure sum; None where the server sees every upload."""
        if agreement.strategy.channel.sees_rows:
            return None
        missing = isinstance(request, TrainingRequest) and request.sum is None
        check(
            not missing,
            "server",
            "asks for an upload that is not masked",
            "ask in a session",
            PeerError,
        )
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
        if request.round in agreement.measurements:
            return self._measure(request, agreement, seed), private
        task = self.federation(study.learned()).task  # of persons, where the site's schema has them
        features, model = split_features(study.build_model(), task)
        workshop = Workshop(
            agreement=agreement,
            run=request.run,
            engine=self.engine,
            model=model,
            secret=lambda round_, site: secret_for(seed, "client", round_, site),
        )
        downloads = {self.id: request.payload}
        members = {self.id: self.featured_member(study, features)}
        (uplink,) = client_round(workshop, downloads, members, private)
        assert uplink.payload is not None
        return uplink.payload, private

    def _measure(
        self, request: TrainingRequest, agreement: Agreement, seed: PublicSeed | None
    ) -> bytes:
        """Measure the model in the download on this site's test records, with noise."""
        study = request.study
        number = request.round - agreement.measurement(0)
        metric = study.accounted_metric()
        assert metric is not None
        return measured_upload(
            metric,
            agreement,
            self.member(study.learned()),
            decode_download(request.payload, agreement.layout.size),
            study.build_model(),
            request.run,
            secret_for(seed, "measured", number, self.id),
        )
