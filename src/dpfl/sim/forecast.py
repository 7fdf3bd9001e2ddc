"""Before any training: how much noise a method would leave in its aggregate, by closed forms.

The ratio compares the norm of the noise in one round's aggregate with the longest that the
aggregate's signal can be (every step of every client at its clip, all in one direction). Real
signals are shorter, by about the same factor for all methods of a federation, so the ratio ranks
methods; it does not predict accuracy. ``describe``, ``plan`` and ``run`` all use it.

Record level    noise^2 = sum_i w_i^2 v_i, v_i = steps x lr^2 x d x (clip z_i / b)^2 (Robust-HDP,
                Eq. 3 and 7), with the weights and gains that the plugs expect; momentum and pulls
                filter noise and signal (:func:`dpfl.plugs.update_noise.step_responses`)
Client level    noise = z clip sqrt(d) / cohort with z the noise in the sum over one client's clip,
                times the gains of the plugs behind it
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer, Promise
from dpfl.plugs.base import Gain
from dpfl.plugs.sampling import PoissonBatches, sampler
from dpfl.plugs.update_noise import noise_variance, step_responses
from dpfl.rounds import Agreement
from dpfl.rounds.members import Member

DROWNED = 3.0
"""Noise so many times as long as the longest signal leaves little to learn."""

REMEDY = "raise the budgets, ask more clients, or train a smaller model for fewer rounds"


@dataclass(frozen=True, kw_only=True)
class NoiseForecast:
    """One method on one federation, before anything is run.

    ``noise_to_signal`` is None where no closed form is known. ``reference`` methods are shown
    beside others, and never recommended. Of a method that plans itself, ``reach`` is how many times
    its signal exceeds the noise on all parameters, ``planned`` what follows from it, and ``said``
    its own warning.
    """

    method: str
    promise: Promise
    noise_to_signal: float | None
    reference: bool = False
    reach: float | None = None
    planned: tuple[tuple[str, str], ...] = ()
    said: str = ""

    @property
    def drowned(self) -> bool:
        """Whether the noise of a round exceeds by far what could be learned in it."""
        return self.noise_to_signal is not None and self.noise_to_signal > DROWNED

    @property
    def warning(self) -> str:
        """What to say where the noise drowns the signal, and what would help; empty elsewhere."""
        if self.reach is not None:
            return f"{self.said}; {REMEDY}" if self.said else ""
        if not self.drowned:
            return ""
        times = f"{self.noise_to_signal:.3g} times the longest possible signal"
        return f"the noise of a round is {times}, so expect to learn little: {REMEDY}"


def forecast(
    agreement: Agreement, members: Mapping[str, Member], public: PublicSeed | None = None
) -> NoiseForecast:
    """Work out a method's ratio of noise to signal.

    ``public`` is the run's seed, from which a simulated channel has its gains.
    """
    strategy = agreement.strategy
    seed = (public or PublicSeed(0)).child("run")
    if strategy.observer is Observer.NOBODY:
        ratio: float | None = 0.0
    elif strategy.unit.of_data or strategy.local.private:
        ratio = _records(agreement, members)
    else:
        ratio = _clients(agreement, members, seed)
    recipe = strategy.recipe
    numbers = dict(agreement.terms.recipe)
    return NoiseForecast(
        method=strategy.name,
        promise=strategy.promise,
        noise_to_signal=ratio,
        reference=any(flag.reference for flag in strategy.flags),
        reach=None if recipe is None else recipe.reach(numbers),
        planned=() if recipe is None else tuple(recipe.words(numbers)),
        said="" if recipe is None else recipe.warning(numbers),
    )


def _shared(agreement: Agreement, members: Mapping[str, Member]) -> float:
    """The ratio over a secure sum where budgets scale what clients add: of one noise for all,
    sqrt(D k / h) / sum of (records of a step / z_i).
    """
    signal = 0.0
    for member in members.values():
        (phase,) = agreement.phases(member.participant)
        batches = sampler(phase, member.participant.examples)
        assert isinstance(batches, PoissonBatches)
        signal += batches.expected_size / phase.noise_multiplier
    group = agreement.strategy.channel.group(agreement.terms.population)
    counted = 1.0 if group is None else group.members / group.honest
    # A few clients may stand for all of them.
    signal *= agreement.terms.population / max(1, len(members))
    return math.sqrt(agreement.layout.size * counted) / signal


def _records(agreement: Agreement, members: Mapping[str, Member]) -> float:
    """The ratio where each client adds noise to its own records' gradients."""
    strategy = agreement.strategy
    layout = agreement.layout
    terms = agreement.terms
    if strategy.local.own_noise:
        return _shared(agreement, members)
    ids = sorted(members)
    noise = {}
    signal = {}
    for client in ids:
        participant = members[client].participant
        phases = agreement.phases(participant)
        phases = strategy.local.in_cohort(phases, max(1, round(terms.expected_cohort)))
        noise[client] = noise_variance(phases, participant.examples, layout.size)
        signal[client] = sum(
            phase.lr * (phase.clip or 0.0) * sum(map(abs, step_responses(phase)[0]))
            for phase in phases
        )
    claims = {client: members[client].claims for client in ids}
    weights = strategy.weights.expected_weights(claims, noise, layout)
    heard = left = 0.0
    for client in ids:
        gain = _gain(agreement, client)
        heard += weights[client] * signal[client] * gain.signal
        left += weights[client] ** 2 * noise[client] * gain.noise
    # A cohort that is part of the population averages fewer updates.
    fewer = math.sqrt(len(ids) / terms.expected_cohort)
    return math.sqrt(left) / heard * fewer if heard > 0 else math.inf


def _clients(agreement: Agreement, members: Mapping[str, Member], seed: PublicSeed) -> float | None:
    """The ratio where noise on the sum hides a client; None where no closed form is known."""
    ids = tuple(sorted(members))
    terms = agreement.terms
    found = [maker.noise_in_sum(ids, terms, seed) for maker in agreement.strategy.noise_makers()]
    if not found or found[0] is None:
        return None
    gain = _gain(agreement, None)
    cohort = max(1.0, terms.expected_cohort)
    ratio = found[0] * math.sqrt(agreement.layout.size) / cohort * math.sqrt(gain.noise)
    return math.hypot(ratio, gain.error) / gain.signal


def _gain(agreement: Agreement, client: str | None) -> Gain:
    """What all plugs do to noise and signal together."""
    plugs = [plug for _, plug in agreement.strategy.slots()]
    gains = [plug.noise_gain(agreement.terms, agreement.layout, client) for plug in plugs]
    return Gain(
        noise=math.prod(gain.noise for gain in gains),
        signal=math.prod(gain.signal for gain in gains),
        error=math.hypot(*(gain.error for gain in gains)),
    )
