"""What a site accepts, by its own file, whatever a server offers: the study as a whole, and the
plan it comes down to.
"""

from __future__ import annotations

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Observer, Phase
from dpfl.plugs.sampling import PoissonBatches
from dpfl.rounds import Agreement
from dpfl.rounds.members import Member, check_budget
from dpfl.runs.deployment import SiteFile, StudyFile


def check_offer(file: SiteFile, study: StudyFile, member: Member) -> None:
    """Check names, method, length, company and promise of a study."""
    policy, here = file.policy, f"site '{file.site.id}'"
    strategy = study.strategy()
    if file.site.id not in study.study.sites:
        raise PrivacyRefusal(
            here, f"is not named in the study '{study.study.name}'", "ask the server to name it"
        )
    if policy.methods is not None and study.method.name not in policy.methods:
        raise PrivacyRefusal(
            here, f"its policy does not allow {study.method.name}", "change one of the two"
        )
    if policy.most_rounds is not None and study.run.rounds > policy.most_rounds:
        raise PrivacyRefusal(
            here,
            f"{study.run.rounds} rounds exceed its policy's {policy.most_rounds}",
            "plan fewer",
        )
    if len(study.study.sites) < policy.least_sites:
        raise PrivacyRefusal(
            here,
            f"{len(study.study.sites)} sites are fewer than its policy's {policy.least_sites}",
            "ask more sites",
        )
    if study.run.noise == "seeded" and not policy.allow_seeded:
        raise PrivacyRefusal(
            here, "the study's noise is seeded, which protects nobody", 'use noise = "system"'
        )
    if strategy.observer is Observer.NOBODY:
        if not policy.allow_unprotected or file.budget is not None:
            raise PrivacyRefusal(
                here,
                f"{study.method.name} protects nobody",
                "choose a method that protects against the server",
            )
    elif file.budget is None:
        raise PrivacyRefusal(here, "has granted nothing", "give it a [budget]")
    elif strategy.observer is not Observer.SERVER and not policy.trust_server:
        raise PrivacyRefusal(
            here,
            f"{study.method.name} protects against the {strategy.observer} only, and its policy trusts no server",
            "use a method that protects against the server, or say trust_server = true at the site",
        )
    check_budget(member, unit=strategy.unit, observer=strategy.observer)


def check_plan(file: SiteFile, agreement: Agreement, member: Member) -> None:
    """Check clip, noise and sampling of the very plan that the terms make."""
    policy, here, strategy = file.policy, f"site '{file.site.id}'", agreement.strategy
    noise: list[float] = []
    clips: list[float | None] = []
    if strategy.local.private:
        for phase in agreement.phases(member.participant):
            noise.append(phase.noise_multiplier)
            clips.append(phase.clip)
            _check_sampling(file, phase, member)
    else:
        noise.append(strategy.noise_multiplier or 0.0)
        clips += [
            clip
            for piece in (*strategy.stages, strategy.central_noise)
            if (clip := getattr(piece, "clip", None))
        ]
    least, unprotected = min(noise, default=0.0), strategy.observer is Observer.NOBODY
    if least < policy.least_noise_multiplier and not unprotected:
        raise PrivacyRefusal(
            here,
            f"noise of {least:.3g} x clip is below its policy's {policy.least_noise_multiplier:g}",
            "grant less, or plan more rounds; or lower least_noise_multiplier at the site",
        )
    largest = max((clip for clip in clips if clip is not None), default=None)
    if policy.largest_clip is not None and (largest is None or largest > policy.largest_clip):
        raise PrivacyRefusal(
            here,
            f"a clip of {largest} exceeds its policy's {policy.largest_clip:g}",
            "clip lower, or allow more",
        )


def _check_sampling(file: SiteFile, phase: Phase, member: Member) -> None:
    rate = PoissonBatches(member.shard.examples, phase.batch_size).rate
    if rate > file.policy.largest_sampling_rate:
        raise PrivacyRefusal(
            f"site '{file.site.id}'",
            f"sampling {rate:.3g} of its records a step exceeds its policy's {file.policy.largest_sampling_rate:g}",
            "use smaller batches",
        )
