"""Over the air: clients transmit at once, the receiver hears the sum of their signals and its own
noise.

y = sum_i |h_i| x_i + n, phases being corrected before sending. Client i sends its message at an
amplitude at which all arrive equally strong, and spends what power it has left on noise of its own:

    x_i = sqrt(signal) / (|h_i| clip) message_i + sqrt(level (1 - signal / kappa_i) P / r) m_i,
    kappa_i = P |h_i|^2,

so that E|x_i|^2 <= P. The noise of all antennas and of the receiver adds up in the air, and is
drawn there, once, on a grid: the physical noise of a channel is a model, and this is the model.

``signal`` is the weakest kappa, or less: in every round it is chosen so that the noise that is
counted on is ``noise_multiplier`` times what one client contributes. A round in which the channel
is bad costs accuracy, never privacy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from dpfl.core.checks import check, not_negative, one_of, positive
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Cohort, Metrics, PlugState, Shared, Terms, Who
from dpfl.plugs.base import chosen_noise
from dpfl.plugs.channels import Channel, Summed
from dpfl.plugs.figures import FigureSpec, by_round
from dpfl.privacy.exposure import Exposure

Honest = float | Literal["own_and_receiver", "own"]
_SLACK = 1 - 1e-9  # a signal so much weaker: rounding never takes noise below what is charged
_FORECAST_ROUNDS = 200  # over which a fading channel is averaged
_ASSUMED: dict[str, Honest] = {
    "all clients are honest": 1.0,
    "half of the others are": 0.5,
    "own and receiver's noise": "own_and_receiver",
    "own noise only": "own",
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a round's power is used: strength of the signal, level of artificial noise, and the noise
    that arrives.
    """

    signal: float
    level: float
    noise: float


def split_power(
    strengths: Sequence[float],
    noise_multiplier: float,
    numbers: int,
    receiver_noise: float,
    honest: Honest,
    missing: int,
) -> Split:
    """Choose the strongest signal with which the noise that is counted on is enough.

    Counted are the receiver's noise (unless ``honest`` is ``"own"``) and the artificial noise of
    the clients assumed honest, the weakest ones, less the ``missing`` tolerated.
    """
    kappas = sorted(strengths)
    counted = kappas[: counted_clients(len(kappas), honest, missing)]
    receiver = 0.0 if honest == "own" else receiver_noise
    needed = noise_multiplier**2
    spare = math.fsum(k - kappas[0] for k in counted) / numbers
    if receiver >= needed * kappas[0]:
        signal, level = kappas[0], 0.0
    elif receiver + spare >= needed * kappas[0] and spare > 0:
        signal, level = kappas[0], (needed * kappas[0] - receiver) / spare
    else:
        signal, level = (
            (receiver + math.fsum(counted) / numbers) / (needed + len(counted) / numbers),
            1.0,
        )
    signal = signal * _SLACK
    noise = receiver_noise + level * math.fsum(k - signal for k in kappas) / numbers
    return Split(signal=signal, level=min(level, 1.0), noise=noise)


def counted_clients(clients: int, honest: Honest, missing: int) -> int:
    """On how many clients' artificial noise a cost counts, the client's own included."""
    others = math.floor(honest * (clients - 1)) if isinstance(honest, int | float) else 0
    return max(1, 1 + others - missing)  # those missing may be among the honest


@dataclass(frozen=True, kw_only=True)
class OverTheAir(Channel):
    """A Gaussian multiple-access channel with Rayleigh fading. Simulated: there is no antenna here.

    ``honest``: whose noise the privacy cost counts on, a fraction of the other clients' beside
    one's own and the receiver's, ``"own_and_receiver"`` or ``"own"`` alone. ``min_gain``: who is
    heard less well is not drawn in that round.
    """

    clip: float
    noise_multiplier: float | None
    power: float = 1.0
    receiver_noise: float = 1.0
    fading: Literal["block", "static"] = "block"
    min_gain: float = 0.0
    gain_seed: int = 0
    honest: Honest = 1.0
    tolerated_dropouts: int = 0
    numbers: int | None = None
    sees_rows: ClassVar[bool] = False
    simulated: ClassVar[bool] = True
    makes_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        where = "over the air"
        positive(where, clip=self.clip, power=self.power)
        not_negative(
            where,
            receiver_noise=self.receiver_noise,
            min_gain=self.min_gain,
            tolerated_dropouts=self.tolerated_dropouts,
        )
        if self.noise_multiplier is not None:
            positive(where, noise_multiplier=self.noise_multiplier)
        one_of(where, ("block", "static"), fading=self.fading)
        if isinstance(self.honest, str):
            one_of(where, ("own_and_receiver", "own"), honest=self.honest)
        else:
            good = 0 <= self.honest <= 1
            check(good, where, f"honest = {self.honest}", "give a fraction between 0 and 1")

    @property
    def shares_noise(self) -> bool:
        """Where others' noise is counted on, they must have sent it."""
        return not isinstance(self.honest, str) and self.honest > 0

    def resolve(self, terms: Terms) -> Self:
        """Take the noise level of the terms."""
        open_ = self.noise_multiplier is None
        return replace(self, noise_multiplier=terms.noise_multiplier) if open_ else self

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember how long a message is."""
        check(
            terms.population >= 2 or not self.shares_noise,
            "over the air",
            "one client has nobody to hide among",
            'say honest = "own_and_receiver" or "own"',
        )
        return {"numbers": torch.tensor([self.numbers or layout.size])}

    # -- the channel's state of a round ------------------------------------------------------------

    def gain(self, client: str, seed: PublicSeed) -> float:
        """|h| of a client, h ~ CN(0, 1): redrawn each round, or once and for all."""
        source = (
            PublicSeed(self.gain_seed).child("static gains") if self.fading == "static" else seed
        )
        uniform = (source.child("gain", client).value + 0.5) / 2**128
        return math.sqrt(-math.log(uniform))

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """Whether the client is above the cut-off for deep fades."""
        return self.min_gain == 0 or self.gain(client, seed) >= self.min_gain

    def strengths(self, ids: Sequence[str], seed: PublicSeed) -> list[float]:
        """kappa_i = P |h_i|^2."""
        return [self.power * self.gain(client, seed) ** 2 for client in ids]

    def split(self, ids: Sequence[str], numbers: int, seed: PublicSeed) -> Split:
        """How this round's power is used."""
        return split_power(
            self.strengths(ids, seed),
            chosen_noise(self.noise_multiplier, "over the air"),
            numbers,
            self.receiver_noise,
            self.honest,
            self.tolerated_dropouts,
        )

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Tell everyone the round's gains and power."""
        if not len(cohort):
            return {}
        numbers = int(state["numbers"])
        split = self.split(cohort.ids, numbers, seed)
        weakest = math.sqrt(min(self.strengths(cohort.ids, seed)) / self.power)
        return {
            "seed": seed.to_tensor(),
            "power": torch.tensor(
                [split.signal, split.level, split.noise, weakest, numbers], dtype=torch.float64
            ),
        }

    # -- one round ---------------------------------------------------------------------------------

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Scale the message to the common strength at the receiver; spare power goes into noise,
        drawn in the air.
        """
        planned, length = int(shared["power"][4]), message.numel()
        problem = f"a message of {length} numbers, noise was planned for {planned}"
        check(length == planned, "over the air", problem, "make numbers and the length agree")
        gain = self.gain(who.id, PublicSeed.from_tensor(shared["seed"]))
        return message * (math.sqrt(float(shared["power"][0])) / (gain * self.clip))

    def artificial_noise(self, gain: float, shared: Shared) -> float:
        """Variance of the noise that a client adds to what it sends, with the power that its signal
        leaves.
        """
        signal, level, _, _, numbers = shared["power"].tolist()
        return float(
            level * max(0.0, 1 - signal / (self.power * gain**2)) * self.power / max(1.0, numbers)
        )

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """What the receiver hears, divided by the strength at which one client's message
        arrives.
        """
        ids, gains = tuple(sorted(messages)), PublicSeed.from_tensor(shared["seed"])
        heard = torch.zeros_like(messages[ids[0]], dtype=torch.float64)
        variance = self.receiver_noise
        for client in ids:
            gain = self.gain(client, gains)
            heard += gain * messages[client].to(torch.float64)
            variance += gain**2 * self.artificial_noise(gain, shared)
        strength = math.sqrt(float(shared["power"][0])) / self.clip
        total = heard / strength
        if variance > 0:
            total = Grid.of(math.sqrt(variance) / strength).noised(total, rng)
        return Summed(vector=total.to(torch.float32), ids=ids)

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        """The noise that is counted on, relative to the clip that the signal was scaled by."""
        multiplier = chosen_noise(self.noise_multiplier, "over the air")
        return exposure.noised(multiplier * self.clip, summands=drawn)

    def metrics(self, shared: Shared) -> Metrics:
        """Signal, artificial noise, what noise arrived per client's contribution, the weakest gain,
        channel uses.
        """
        signal, level, noise, weakest, numbers = shared["power"].tolist()
        return {
            "signal": signal,
            "artificial_level": level,
            "noise_multiplier_of_all": math.sqrt(noise / signal),
            "weakest_gain": weakest,
            "channel_uses": int(numbers),
        }

    def multipliers(
        self, ids: Sequence[str], numbers: int, seed: PublicSeed, honest: Honest
    ) -> list[float]:
        """For each client of a round: noise over one's own contribution, if only these are counted
        on.
        """
        split, kappas = self.split(ids, numbers, seed), self.strengths(ids, seed)
        own = [split.level * (k - split.signal) / numbers for k in kappas]
        receiver = 0.0 if honest == "own" else self.receiver_noise
        others = counted_clients(len(ids), honest, self.tolerated_dropouts) - 1
        ordered = sorted(own)
        found = []
        for value in own:
            rest = ordered.copy()
            rest.remove(value)
            found.append(math.sqrt((receiver + value + math.fsum(rest[:others])) / split.signal))
        return found

    # -- what planners and reports ask -------------------------------------------------------------

    def upload_size(self, numbers: float, terms: Terms, layout: Layout) -> float:
        """Return the length of a message."""
        return self.numbers or numbers

    def noise_in_sum(self, ids: tuple[str, ...], terms: Terms, seed: PublicSeed) -> float | None:
        """Return the noise that arrives over one client's signal, averaged over the first
        rounds.
        """
        found = []
        for round_ in range(min(terms.rounds, _FORECAST_ROUNDS)):
            if heard := self._heard(ids, round_, seed):
                split = self.split(heard, self.numbers or terms.parameters, _of_round(seed, round_))
                found.append(split.noise / split.signal)
        return math.sqrt(sum(found) / len(found)) if found else None

    def _heard(self, ids: Sequence[str], round_: int, seed: PublicSeed) -> list[str]:
        return [c for c in ids if self.reachable(c, round_, _of_round(seed, round_))]

    def losses_by_assumption(
        self, ids: tuple[str, ...], terms: Terms, layout: Layout, seed: PublicSeed
    ) -> dict[str, list[float]]:
        """Sum 1 / z^2 over this run's own channel, which Gaussians compose to exactly."""
        assumed = dict(_ASSUMED)
        if self.honest not in assumed.values():
            assumed[f"{100 * float(self.honest):g} % of the others are"] = self.honest
        losses = {name: dict.fromkeys(ids, 0.0) for name in assumed}
        numbers = self.numbers or layout.size
        for round_ in range(terms.rounds):
            heard = self._heard(ids, round_, seed)
            for name, honest in assumed.items() if heard else ():
                found = self.multipliers(heard, numbers, _of_round(seed, round_), honest)
                for client, multiplier in zip(heard, found, strict=True):
                    losses[name][client] += math.inf if multiplier < 1e-6 else multiplier**-2
        return {name: list(found.values()) for name, found in losses.items()}

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the noise that arrived and the weakest gain."""
        metrics = {"noise_multiplier_of_all": "noise over signal", "weakest_gain": "weakest gain"}
        caption = "Noise of all clients and the receiver over one client's signal; weakest gain."
        return (by_round("channel", "the channel", "ratio", metrics, caption),)


def _of_round(seed: PublicSeed, round_: int) -> PublicSeed:
    """The public seed of a round's channel, from that of the run."""
    return seed.child("round", round_).child("channel")
