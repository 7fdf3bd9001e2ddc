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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from dpfl.core.checks import check, not_negative, one_of, positive
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Cohort, Metrics, PlugState, Shared, Terms, Who
from dpfl.plugs.base import FigureSpec, NoiseMaker, by_round
from dpfl.plugs.channels import Channel, Summed
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


class Split(NamedTuple):
    """How a round's power is used: strength of the signal, level of artificial noise, and the noise
    that arrives.
    """

    signal: float
    level: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class OverTheAir(Channel, NoiseMaker):
    """A Gaussian multiple-access channel with Rayleigh fading. Simulated: there is no antenna here.

    ``honest``: whose noise the privacy cost counts on, a fraction of the other clients' beside
    one's own and the receiver's, ``"own_and_receiver"`` or ``"own"`` alone. ``min_gain``: who is
    heard less well is not drawn in that round. ``numbers``: how long a message is, where that is
    not the size of the model.
    """

    clip: float
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

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "over the air"
        honest = self.honest
        positive(where, clip=self.clip, power=self.power)
        not_negative(where, receiver_noise=self.receiver_noise, min_gain=self.min_gain)
        not_negative(where, tolerated_dropouts=self.tolerated_dropouts)
        one_of(where, ("block", "static"), fading=self.fading)
        if isinstance(honest, str):
            one_of(where, ("own_and_receiver", "own"), honest=honest)
        else:
            check(0 <= honest <= 1, where, f"honest = {honest}", "give a fraction between 0 and 1")

    @property
    def shares_noise(self) -> bool:
        """Where others' noise is counted on, they must have sent it."""
        return not isinstance(self.honest, str) and self.honest > 0

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Remember how long a message is."""
        remedy = "say honest = 'own'"
        check(
            terms.population >= 2 or not self.shares_noise,
            "over the air",
            "one client has nobody to hide among",
            f"{remedy} or 'own_and_receiver'",
        )
        return {"numbers": torch.tensor([self.numbers or layout.size])}

    # -- the channel's state of a round ------------------------------------------------------------

    def gain(self, client: str, seed: PublicSeed) -> float:
        """|h| of a client, h ~ CN(0, 1): redrawn each round, or once and for all."""
        if self.fading == "static":
            seed = PublicSeed(self.gain_seed).child("static gains")
        uniform = (seed.child("gain", client).value + 0.5) / 2**128
        return math.sqrt(-math.log(uniform))

    def reachable(self, client: str, round_: int, seed: PublicSeed) -> bool:
        """Whether the client is above the cut-off for deep fades."""
        return self.min_gain == 0 or self.gain(client, seed) >= self.min_gain

    def strengths(self, ids: Sequence[str], seed: PublicSeed) -> list[float]:
        """kappa_i = P |h_i|^2."""
        return [self.power * self.gain(client, seed) ** 2 for client in ids]

    def split_power(self, strengths: Sequence[float], numbers: int) -> Split:
        """Choose the strongest signal with which the noise that is counted on is enough.

        Counted are the receiver's noise (unless ``honest`` is ``"own"``) and the artificial noise
        of the clients assumed honest, the weakest ones, less the dropouts that are tolerated.
        """
        kappas = sorted(strengths)
        needed = self.planned_noise**2
        weakest = kappas[0]
        counted = kappas[: self.counted_clients(len(kappas), self.honest)]
        receiver = 0.0 if self.honest == "own" else self.receiver_noise
        spare = math.fsum(k - weakest for k in counted) / numbers
        if receiver >= needed * weakest:
            signal = weakest
            level = 0.0
        elif receiver + spare >= needed * weakest and spare > 0:
            signal = weakest
            level = (needed * weakest - receiver) / spare
        else:
            heard = receiver + math.fsum(counted) / numbers
            signal = heard / (needed + len(counted) / numbers)
            level = 1.0
        signal = signal * _SLACK
        noise = self.receiver_noise + level * math.fsum(k - signal for k in kappas) / numbers
        return Split(signal, min(level, 1.0), noise)

    def counted_clients(self, clients: int, honest: Honest) -> int:
        """On how many clients' artificial noise a cost counts, the client's own included."""
        others = 0 if isinstance(honest, str) else math.floor(honest * (clients - 1))
        return max(1, 1 + others - self.tolerated_dropouts)  # the missing may be among the honest

    def open(self, state: PlugState, round_: int, cohort: Cohort, seed: PublicSeed) -> Shared:
        """Tell everyone the round's gains and power."""
        if not len(cohort):
            return {}
        numbers = int(state["numbers"])
        kappas = self.strengths(cohort.ids, seed)
        weakest = math.sqrt(min(kappas) / self.power)
        power = [*self.split_power(kappas, numbers), weakest, numbers]
        return {"seed": seed.to_tensor(), "power": torch.tensor(power, dtype=torch.float64)}

    # -- one round ---------------------------------------------------------------------------------

    def send(self, message: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        """Scale the message to the common strength; spare power goes into noise in the air."""
        length = message.numel()
        planned = int(shared["power"][4])
        check(
            length == planned,
            "over the air",
            f"a message of {length} numbers, noise was planned for {planned}",
            "make numbers and the length agree",
        )
        gain = self.gain(who.id, PublicSeed.from_tensor(shared["seed"]))
        return message * (math.sqrt(float(shared["power"][0])) / (gain * self.clip))

    def artificial_noise(self, gain: float, shared: Shared) -> float:
        """Variance of the noise that a client adds, with the power that its signal leaves."""
        signal, level, _, _, numbers = shared["power"].tolist()
        spare = max(0.0, 1 - signal / (self.power * gain**2))
        return float(level * spare * self.power / max(1.0, numbers))

    def deliver(
        self, messages: Mapping[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> dict[str, Tensor] | Summed:
        """What the receiver hears, over the strength at which one message arrives."""
        ids = tuple(sorted(messages))
        gains = PublicSeed.from_tensor(shared["seed"])
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
        return exposure.noised(self.planned_noise * self.clip, summands=drawn)

    def metrics(self, shared: Shared) -> Metrics:
        """Signal, artificial noise, all noise over one contribution, weakest gain, channel uses."""
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
        """For each client: noise over its own contribution, if only these are counted on."""
        kappas = self.strengths(ids, seed)
        split = self.split_power(kappas, numbers)
        own = [split.level * (k - split.signal) / numbers for k in kappas]
        receiver = 0.0 if honest == "own" else self.receiver_noise
        others = self.counted_clients(len(ids), honest) - 1
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

    def _rounds(
        self, ids: Sequence[str], rounds: int, seed: PublicSeed
    ) -> Iterator[tuple[list[str], PublicSeed]]:
        """Who is heard in each round, and the seed of its channel; silent rounds are left out."""
        for round_ in range(rounds):
            own = seed.child("round", round_).child("channel")
            if heard := [client for client in ids if self.reachable(client, round_, own)]:
                yield heard, own

    def noise_in_sum(self, ids: tuple[str, ...], terms: Terms, seed: PublicSeed) -> float | None:
        """Return the noise over one client's signal, averaged over the first rounds."""
        numbers = self.numbers or terms.parameters
        rounds = min(terms.rounds, _FORECAST_ROUNDS)
        strengths = [self.strengths(*heard) for heard in self._rounds(ids, rounds, seed)]
        splits = [self.split_power(kappas, numbers) for kappas in strengths]
        total = sum(split.noise / split.signal for split in splits)
        return math.sqrt(total / len(splits)) if splits else None

    def losses_by_assumption(
        self, ids: tuple[str, ...], terms: Terms, layout: Layout, seed: PublicSeed
    ) -> dict[str, list[float]]:
        """Sum 1 / z^2 over this run's own channel, which Gaussians compose to exactly."""
        assumed = dict(_ASSUMED)
        numbers = self.numbers or layout.size
        if self.honest not in assumed.values():
            assumed[f"{100 * float(self.honest):g} % of the others are"] = self.honest
        losses = {name: dict.fromkeys(ids, 0.0) for name in assumed}
        for heard, own in self._rounds(ids, terms.rounds, seed):
            for name, honest in assumed.items():
                found = self.multipliers(heard, numbers, own, honest)
                for client, multiplier in zip(heard, found, strict=True):
                    losses[name][client] += math.inf if multiplier < 1e-6 else multiplier**-2
        return {name: list(found.values()) for name, found in losses.items()}

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the noise that arrived and the weakest gain."""
        metrics = {"noise_multiplier_of_all": "noise over signal", "weakest_gain": "weakest gain"}
        caption = "Noise of all clients and the receiver over one client's signal; weakest gain."
        return (by_round("channel", "the channel", "ratio", metrics, caption),)
