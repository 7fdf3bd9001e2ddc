"""What a site accepts, by its own file, whatever a server offers.

The checks are made for every message, not only when the site enrols: a server may send anything at
any time. The section [policy] of ``site.toml`` holds the limits. A refusal names the limit and what
was offered, and is told to the server; nothing in it depends on the site's records.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from dpfl.core.checks import check
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.plugs.sampling import PoissonBatches
from dpfl.rounds import Agreement
from dpfl.rounds.codec import decode_download
from dpfl.rounds.members import Member, check_budget
from dpfl.runs.deployment import Offer
from dpfl.runs.site_file import SiteFile
from dpfl.strategy import Strategy


def _accept(file: SiteFile, good: bool, problem: str, remedy: str) -> None:
    """Refuse in the name of the site unless ``good``."""
    check(good, f"site '{file.site.id}'", problem, remedy, PrivacyRefusal)


def check_offer(file: SiteFile, study: Offer, member: Member) -> Strategy:
    """Check a study as a whole: its sites, method, number of rounds and promise.

    ``file`` is the site's own, ``study`` what is offered, ``member`` the site with its budget.
    Returns the study's strategy. Raises :class:`~dpfl.core.errors.PrivacyRefusal` with the first
    thing that the policy forbids.
    """
    policy = file.policy
    method = study.method.name
    sites = study.study.sites

    accept = partial(_accept, file)

    accept(
        file.site.id in sites,
        f"is not named in the study '{study.study.name}'",
        "ask the server to name it",
    )
    accept(
        policy.methods is None or method in policy.methods,
        f"its policy does not allow {method}",
        "change one of the two",
    )
    _check_rounds(file, study.run.rounds)
    accept(
        len(sites) >= policy.least_sites,
        f"{len(sites)} sites are fewer than its policy's {policy.least_sites}",
        "ask more sites",
    )
    unseeded = not study.seeded
    accept(
        unseeded or policy.allow_seeded,
        "the study's noise is seeded, which protects nobody",
        'use noise = "system"',
    )
    strategy = study.strategy()
    if strategy.observer is Observer.NOBODY:
        accept(
            policy.allow_unprotected and file.budget is None,
            f"{method} protects nobody",
            "choose a method that protects against the server",
        )
    else:
        accept(file.budget is not None, "has no budget", "give it a [budget]")
        accept(
            strategy.observer is Observer.SERVER or policy.trust_server,
            f"{method} protects against the {strategy.observer} only, and its policy trusts no "
            "server",
            "use a method that protects against the server, or set trust_server = true at the site",
        )
    if not strategy.channel.sees_rows:
        _check_secure_sum(file, strategy, sites)
    if member.budget is not None and member.budget.unit is not None:
        own = member.budget.unit
        unit = strategy.unit
        accept(
            own is unit or not (own.of_data and unit.of_data),
            f"the study protects a {unit}, and this site a {own}",
            "agree on one unit: person_word in the sites' schema, and [study] unit",
        )
    check_budget(member, unit=strategy.unit, observer=strategy.observer)
    return strategy


def _check_rounds(file: SiteFile, rounds: int | None) -> None:
    """Check the number of rounds, where it is known: a method may plan it at enrolment."""
    most = file.policy.most_rounds
    _accept(
        file,
        most is None or rounds is None or rounds <= most,
        f"{rounds} rounds exceed its policy's {most}",
        "plan fewer",
    )


def _check_secure_sum(file: SiteFile, strategy: Strategy, sites: Sequence[str]) -> None:
    """Check that enough of a study's sites may be counted on, as far as their names tell.

    Their keys are checked in every sum.
    """
    trust = file.trust()
    channel = strategy.channel
    unknown = sorted({*sites} - {file.site.id} - trust.pinned.keys())
    found = trust.colluders_among({site: trust.pinned.get(site, "") for site in sites})
    stated = f" ({', '.join(unknown)} not pinned)" if unknown else ""
    _accept(
        file,
        found <= channel.colluders,
        f"{found} of the study's sites may collude{stated}, and it plans for {channel.colluders}",
        "pin their identity keys in [secure_sum] members, or plan for more colluders",
    )


def check_identities(file: SiteFile, own: str, identities: Mapping[str, str]) -> None:
    """Check the keys that a study's sites have for secure sums, before anything is charged.

    ``own`` is this site's, ``identities`` what the server says that all have. They are checked
    again in every sum, where members prove that they have them.
    """
    taken: dict[str, str] = {}
    for name, key in sorted({**identities, file.site.id: own}.items()):
        other = taken.setdefault(key, name)
        _accept(
            file,
            other == name,
            f"'{other}' and '{name}' have one identity key",
            "make one of them anew: dpfl site init",
        )
    file.trust().colluders_among(identities)  # a pinned site with another key is refused


def _check_honest(file: SiteFile, agreement: Agreement) -> None:
    """Check that as many honest sites are in every sum as the policy asks for."""
    strategy = agreement.strategy
    least = file.trust().least_honest
    drawn = strategy.selection.cohort_size(agreement.terms.population) or 1
    group = strategy.channel.group(drawn)
    honest = 1 if group is None else group.honest
    _accept(
        file,
        honest >= least,
        f"{honest} honest sites are in every sum, and its policy asks for {least}",
        "ask more sites, or tolerate fewer dropouts",
    )


def check_plan(file: SiteFile, agreement: Agreement, member: Member) -> None:
    """Check clip, noise and sampling of the plan that the terms lead to at this site.

    Where local work is private, they are those of every phase of it; a release before round one,
    and a measurement, needs the same noise. Elsewhere they are those of the pieces that clip and
    add noise to whole updates.
    """
    policy = file.policy
    strategy = agreement.strategy

    accept = partial(_accept, file)

    _check_rounds(file, agreement.terms.rounds)
    if not strategy.channel.sees_rows:
        _check_honest(file, agreement)
    if strategy.local.private:
        phases = agreement.phases(member.participant)
        noise = [phase.noise_multiplier for phase in phases]
        releases = range(-len(agreement.terms.releases), 0)
        noise += [agreement.release_noise(one, member.participant) for one in releases]
        clips = [phase.clip for phase in phases]
        examples = member.shard.examples
        limit = policy.largest_sampling_rate
        drawn = [one for one in phases if one.sampling == "poisson"]
        rate = max((PoissonBatches(examples, one.batch_size).rate for one in drawn), default=0.0)
        records = strategy.unit.reworded("records")
        accept(
            rate <= limit,
            f"sampling {rate:.3g} of its {records} a step exceeds its policy's {limit:g}",
            "use smaller batches",
        )
    else:
        noise = [strategy.noise_multiplier or 0.0]
        pieces = (*strategy.stages, strategy.central_noise)
        clips = [getattr(p, "largest_clip", getattr(p, "clip", None)) for p in pieces]
    least = min(noise, default=0.0)
    limit = policy.least_noise_multiplier
    accept(
        least >= limit or strategy.observer is Observer.NOBODY,
        f"noise of {least:.3g} x clip is below its policy's {limit:g}",
        "lower the budget or plan more rounds, or lower least_noise_multiplier at the site",
    )
    largest = max((clip for clip in clips if clip is not None), default=None)
    allowed = policy.largest_clip
    accept(
        allowed is None or (largest is not None and largest <= allowed),
        f"a clip of {largest} exceeds its policy's {allowed}",
        "clip lower, or allow more",
    )


def check_download(agreement: Agreement, round_: int, payload: bytes) -> None:
    """Refuse a download of another round than the one that is charged, and a larger cohort.

    Work follows the download; more who are drawn would make each share of the noise smaller.
    """
    download = decode_download(payload, agreement.layout.size)
    check(
        download.round == round_,
        "download",
        f"is of round {download.round}, and round {round_} was asked for",
        "ask for what is charged",
        PeerError,
    )
    largest = agreement.most_drawn(round_)
    remedy = f"draw at most {largest}"
    check(
        1 <= download.drawn <= largest,
        "download",
        f"says that {download.drawn} sites were drawn",
        f"{remedy}, as agreed",
        PeerError,
    )
