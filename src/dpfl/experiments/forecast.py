"""Before any training: how much noise each method would leave in its aggregate, by closed forms,
and which to prefer.

The ratio compares the norm of the noise in one round's aggregate with the longest that the
aggregate's signal can be (every step of every client at its clip, all in one direction). Real
signals are shorter, by about the same factor for all methods of a federation, so the ratio ranks
methods; it does not predict accuracy.

Record level    noise^2 = sum_i w_i^2 v_i,  v_i = steps x lr^2 x d x (clip z_i / b)^2 (Robust-HDP,
Eq. 3 and 7)
                Robust-HDP: w_i goes with 1 / v_i, as if every estimate were exact; PFA: of a
                private client's noise k of each tensor's directions stay, and its signal counts as
                lost (our studies found about 1e-4 of it kept)
Client level    noise = z clip sqrt(d) / cohort; z clip sqrt(d / cohort) where every client adds all
of it; shares are made
                for those who are not tolerated to drop out. After Laplacian smoothing the root of
                its gain times that
Over the air    z is what arrives, of all clients and the receiver, over one client's signal, as the
channel of the first
                rounds has it; projecting onto r directions adds sqrt((d - 1) / r) times the signal
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, Observer, Rows, Unit
from dpfl.methods.dp_fed_ls import LaplacianSmoothing
from dpfl.methods.dprp import RandomProjection
from dpfl.methods.pfa import PublicProjection, PublicSubspace
from dpfl.methods.robust_hdp import NoiseAwareWeights
from dpfl.plugs.channels import Dropout
from dpfl.plugs.local_work import noise_variance
from dpfl.plugs.over_the_air import OverTheAir
from dpfl.plugs.stages import GaussianNoise
from dpfl.rounds import Agreement
from dpfl.rounds.members import Member

CHANNEL_ROUNDS = 200  # over which a fading channel is averaged
_ANY = PublicSeed(0)
ALIKE = 1.05  # ratios closer than this are one: the simpler method is preferred
DROWNED = 3.0  # noise so much longer than the longest signal leaves little to learn
SIMPLEST_FIRST = (
    "fedavg_dp", "dpfedavg", "weiavg", "robust_hdp", "pfa", "pfa_plus", "minimum", "dp_fed", "udp_fedavg", "dp_fed_ls",
    "fedceo", "centaur", "ppsgd", "airsgd", "dprp",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NoiseForecast:
    """One method on one federation, before anything is run. ``noise_to_signal`` is None where no
    closed form is known.
    """

    method: str
    unit: Unit
    observer: Observer
    adjacency: str
    noise_to_signal: float | None
    hypothetical: bool = False

    @property
    def promise(self) -> tuple[str, str, str]:
        """What may be compared with what."""
        return str(self.unit), self.adjacency, str(self.observer)


def outlook(
    agreement: Agreement, members: Mapping[str, Member], public: PublicSeed = _ANY
) -> NoiseForecast:
    """Work out one method's ratio; ``public`` is the run's seed, from which a simulated channel has
    its gains.
    """
    strategy = agreement.strategy
    if strategy.observer is Observer.NOBODY:
        ratio: float | None = 0.0
    elif strategy.unit is Unit.RECORD:
        ratio = _record_level(agreement, members)
    else:
        ratio = _client_level(agreement, sorted(members), public)
    return NoiseForecast(
        method=strategy.name,
        unit=strategy.unit,
        observer=strategy.observer,
        adjacency=str(strategy.adjacency),
        noise_to_signal=ratio,
        hypothetical=strategy.local.hypothetical,
    )


def _record_level(agreement: Agreement, members: Mapping[str, Member]) -> float:
    size, ids = agreement.layout.size, sorted(members)
    noise, signal = {}, {}
    for client in ids:
        participant = members[client].participant
        phases = agreement.phases(participant)
        noise[client] = noise_variance(phases, participant.examples, size)
        signal[client] = sum(phase.steps * phase.lr * (phase.clip or 0.0) for phase in phases)
    weights = _weights(agreement, members, noise)
    clean = agreement.strategy.clean
    stages = [stage for stage in agreement.strategy.stages if isinstance(stage, PublicSubspace)]
    k = clean.k if isinstance(clean, PublicProjection) else stages[0].k if stages else None
    if k is not None:
        kept = sum(min(k, block.size) for block in agreement.layout) / size
        for client in set(ids) - set(agreement.terms.public):
            noise[client] *= kept
            signal[client] = 0.0
    heard = sum(weights[client] * signal[client] for client in ids)
    left = math.sqrt(sum(weights[client] ** 2 * noise[client] for client in ids))
    # A cohort that is part of the population averages fewer updates.
    return (
        left / heard * math.sqrt(len(ids) / agreement.terms.expected_cohort)
        if heard > 0
        else math.inf
    )


def _weights(
    agreement: Agreement, members: Mapping[str, Member], noise: Mapping[str, float]
) -> dict[str, float]:
    ids = sorted(members)
    if isinstance(agreement.strategy.weights, NoiseAwareWeights):
        inverse = {client: 1 / noise[client] if noise[client] > 0 else math.inf for client in ids}
        total = sum(inverse.values())
        return {client: value / total for client, value in inverse.items()}
    cohort = Cohort.of({client: members[client].claims for client in ids})
    nothing = torch.zeros(1).expand(
        len(ids), agreement.layout.size
    )  # these weights look at claims only
    rows = Rows(matrix=nothing, origin=nothing[0], cohort=cohort, layout=agreement.layout)
    found, _, _ = agreement.strategy.weights({}, rows, 0)
    return dict(zip(cohort.ids, found.tolist(), strict=True))


def _client_level(agreement: Agreement, ids: Sequence[str], public: PublicSeed) -> float | None:
    strategy, size = agreement.strategy, agreement.layout.size
    multiplier = _multiplier_of_the_sum(agreement, ids, public)
    if multiplier is None:
        return None
    ratio = multiplier * math.sqrt(size) / max(1.0, agreement.terms.expected_cohort)
    for denoiser in strategy.denoise:
        if isinstance(denoiser, LaplacianSmoothing):
            ratio *= math.sqrt(denoiser.gain(agreement.layout))
    for stage in strategy.stages:
        if isinstance(stage, RandomProjection) and stage.dimension < size:
            ratio = math.hypot(ratio, math.sqrt((size - 1) / stage.dimension))
    return ratio


def _multiplier_of_the_sum(
    agreement: Agreement, ids: Sequence[str], public: PublicSeed
) -> float | None:
    """Noise in the sum of a round's uploads over one client's clip, of all who make it."""
    strategy, cohort = agreement.strategy, max(1, round(agreement.terms.expected_cohort))
    for stage in strategy.stages:
        if isinstance(stage, GaussianNoise):
            return stage.std(cohort) * math.sqrt(cohort) / stage.clip
    channel = (
        strategy.channel.through if isinstance(strategy.channel, Dropout) else strategy.channel
    )
    if isinstance(channel, OverTheAir):
        found = []
        for round_ in range(min(agreement.terms.rounds, CHANNEL_ROUNDS)):
            seed = public.child("run").child("round", round_).child("channel")
            heard = [client for client in ids if channel.reachable(client, round_, seed)]
            if heard:
                split = channel.split(heard, channel.numbers or agreement.layout.size, seed)
                found.append(split.noise / split.signal)
        return math.sqrt(sum(found) / len(found)) if found else None
    return strategy.noise_multiplier


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Which method to try first, of those that promise the same, and why."""

    method: str
    promise: tuple[str, str, str]
    reason: str


def recommend(outlooks: Sequence[NoiseForecast]) -> list[Recommendation]:
    """One per promise: the least noise, and of those that are alike the simplest."""
    found = []
    real = [one for one in outlooks if one.observer is not Observer.NOBODY and not one.hypothetical]
    for promise in sorted({one.promise for one in real}):
        mine = [one for one in real if one.promise == promise and one.noise_to_signal is not None]
        mine = [one for one in mine if math.isfinite(one.noise_to_signal or 0.0)]
        if not mine:
            continue
        least = min(one.noise_to_signal or 0.0 for one in mine)
        alike = [one for one in mine if (one.noise_to_signal or 0.0) <= ALIKE * least]
        best = min(alike, key=lambda one: SIMPLEST_FIRST.index(one.method))
        found.append(
            Recommendation(method=best.method, promise=promise, reason=_reason(best, mine, alike))
        )
    return found


def _reason(
    best: NoiseForecast, mine: Sequence[NoiseForecast], alike: Sequence[NoiseForecast]
) -> str:
    ratio = best.noise_to_signal or 0.0
    others = [one for one in mine if one not in alike]
    said = f"its aggregate carries {'about the' if len(alike) > 1 else 'the'} least noise, {ratio:.3g} of the longest "
    said += "possible signal"
    if len(alike) > 1:
        rest = [one for one in alike if one is not best]
        names, values = (
            ", ".join(one.method for one in rest),
            ", ".join(f"{one.noise_to_signal:.3g}" for one in rest),
        )
        said += (
            f"; {names} would leave about as much ({values}), and {best.method} is the simpler one"
        )
    if others:
        worst = max(others, key=lambda one: one.noise_to_signal or 0.0)
        said += f"; {worst.method} would carry {worst.noise_to_signal:.3g}"
    if best.method == "dp_fed_ls":
        said += "; smoothing takes some of the signal as well, so compare it with dp_fed"
    if best.method == "weiavg":
        said += "; it believes what clients claim, robust_hdp does not"
    if ratio > DROWNED:
        said += "; expect to learn little: grant more, ask more clients, or train a smaller model for fewer rounds"
    return said
