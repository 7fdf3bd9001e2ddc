"""The plan of private preconditioning: rounds, shares, clip and learning rate from the claims.

With mu_i the Gaussian-DP parameter that client i's budget allows, and n_i its records, all that
matters is the signal ::

    S = sqrt(sum (mu_i n_i)^2)                    every client's own noise
    S = sum(mu_i sqrt(h) n_i) / sqrt(k)           k clients over a secure sum that count on h shares

What private preconditioning plans from the signal S, for images, tables, text and whole clients.

The constants were chosen once, on other seeds of public data sets, and are not tuned per run.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import nn

from dpfl.core.checks import check, one_of
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency, Claims, Observer, Unit
from dpfl.models.features import Kind
from dpfl.models.preconditioning import CENTRE, CONSTANTS, STANDARDISE, WHITEN, OnFeatures
from dpfl.plugs.base import claiming
from dpfl.plugs.preconditioning import Standardising, UnitMean, Whitening
from dpfl.plugs.releases import Release
from dpfl.plugs.selection import Selection
from dpfl.plugs.step import LearningRate, ServerSgd
from dpfl.privacy.unsampled import unsampled_multiplier
from dpfl.strategy.recipe import Numbers, Recipe, checked_numbers
from dpfl.strategy.slots import Slots

MOST_WHITENED = 4096
"""With more features a Gram matrix takes too much memory and upload: there is no whitening."""

COHERENCE = 4.0
"""How much more the signal of whole clients counts, for images and tables: their mean gradients
agree, and nearly all of them are as long as the clip, where those of single records point apart."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What follows from the signal S, for ``size`` features and so many ``classes``."""

    kind: Kind
    size: int
    classes: int
    whole: bool = False  # whole clients are protected
    summed: bool = False  # over a secure sum

    @property
    def reach(self) -> float:
        """sqrt(K d), less for whole clients: the signal that is as strong as the noise."""
        parameters = self.classes * (self.size + (self.kind in CONSTANTS))
        return math.sqrt(parameters) / self.coherence

    @property
    def coherence(self) -> float:
        """How much more the signal of whole clients counts; 1 for records."""
        return COHERENCE if self.whole and self.kind != "text" else 1.0

    def plan(self, signal: float) -> dict[str, float]:
        """Plan rounds, clip, learning rate and the shares of the releases."""
        rules = {"images": self._images, "tables": self._tables, "text": self._text}
        rule = self._whole if self.whole else rules[self.kind]
        return {"signal": signal, "reach": signal / self.reach, **rule(signal)}

    def _whole(self, signal: float) -> dict[str, float]:
        rate = min(30.0 if self.kind == "images" else 1.5, signal / 50)
        second = 0.0 if self.kind == "images" and self.size > MOST_WHITENED else 0.15
        return _numbers(rounds=32, clip=0.03, lr=rate, mean=0.15, second=second)

    def _images(self, signal: float) -> dict[str, float]:
        constant = 0.04 if signal < 2_000 else 0.045
        rate = constant * self.classes * signal**0.7
        if signal < 32 * math.sqrt(self.size) or self.size > MOST_WHITENED:
            return _numbers(rounds=16, clip=0.3, lr=rate, mean=0.08, second=0.0)
        rounds = 32 if signal >= 10_000 and self.summed else 16
        return _numbers(rounds=rounds, clip=0.3, lr=rate, mean=0.05, second=0.10)

    def _tables(self, signal: float) -> dict[str, float]:
        rounds = min(32, max(8, round(signal / 40)))
        clip = 1.0 if signal >= 1_000 else 0.5
        return _numbers(rounds=rounds, clip=clip, lr=10.0, mean=0.06, second=0.04)

    def _text(self, signal: float) -> dict[str, float]:
        clip = 1.0 if signal >= 3_000 else 0.5
        rate = min(100.0, max(15.0, signal / 45))
        return _numbers(rounds=8, clip=clip, lr=rate, mean=0.06, second=0.04)


def _numbers(
    *, rounds: int, clip: float, lr: float, mean: float, second: float
) -> dict[str, float]:
    shares = {"mean_share": mean, "second_share": second}
    return {"rounds": float(rounds), "clip": clip, "lr": lr, **shares}


LEAST_REACH, GOOD_REACH = 1.0, 4.0
"""Below the first, r = S / sqrt(K d) predicts noise only; below the second, a loss in accuracy."""

MOST_CLAIMED = 10**12
"""Records that anybody may claim to have: a larger number could not be calculated with."""

PUBLIC = "features are public: their map was not made from the records of any client"
WHOLE_CLIENTS = (
    "neighbouring federations differ in one client, whose contributions are replaced by nothing"
)
_NAMES = ("rounds", "clip", "lr", "mean_share", "second_share", "signal", "reach")
S = TypeVar("S", bound=Slots)


def signal_of(
    claims: Mapping[str, Claims], *, summed: float | None = None, whole: bool = False
) -> float:
    """The signal S of a federation: ``summed`` is the share of the noise in a secure sum that
    everyone counts on, h / k; None where everyone's own noise counts.

    ``whole`` clients count as one record each.

    >>> claims = {"a": Claims(epsilon=1.0, delta=1e-5, examples=1000)}
    >>> round(signal_of(claims))
    268
    """
    parts = []
    for who in claiming(claims):
        assert who.budget is not None
        budget = who.budget
        mu = 1 / unsampled_multiplier(budget.epsilon, budget.delta, budget.accountant)
        parts.append(mu * (1 if whole else min(who.examples, MOST_CLAIMED)))
    if summed is None:
        return math.hypot(*parts)
    return math.fsum(parts) * math.sqrt(summed)


def strategy_signal(strategy: Slots, claims: Mapping[str, Claims]) -> float:
    """The signal of a federation under a strategy: over a secure sum, clients share noise."""
    group = strategy.channel.group(len(claims))
    summed = None if group is None else group.honest / group.members
    return signal_of(claims, summed=summed, whole=not strategy.unit.of_data)


@dataclass(frozen=True, kw_only=True)
class Preconditioning(Recipe):
    """The recipe of private preconditioning.

    ``rules`` are known once the model is. What is given (``clip``, ``lr``, ``whiten``,
    ``mean_share``, ``second_share``) replaces what would be planned. ``force`` runs a plan that
    predicts noise only.
    """

    rules: Rules | None = None
    clip: float | None = None
    lr: float | None = None
    whiten: bool | None = None
    mean_share: float | None = None
    second_share: float | None = None
    force: bool = False

    def for_model(self, strategy: S, model: nn.Module) -> S:
        """Take the kind and the number of features from a model with a linear head."""
        buffers = dict(model.named_buffers())
        where = f"method '{strategy.name}'"
        check(
            isinstance(model, OnFeatures) and CENTRE in buffers,
            where,
            "trains a linear head on public features, and this model is another",
            "use the model 'linear_head', or a method for any model",
        )
        assert isinstance(model, OnFeatures)
        linear = model.linear
        constant = getattr(model, "constant", None)
        assert isinstance(linear, nn.Linear)
        kinds = {value: kind for kind, value in CONSTANTS.items()}
        kind: Kind = "images" if constant is None else kinds[constant.value]
        check(
            linear.out_features >= 2,
            where,
            f"its model gives {linear.out_features} number for a record, and no classes",
            "use a task with two classes or more",
        )
        rules = Rules(
            kind=kind,
            size=len(buffers[CENTRE]),
            classes=linear.out_features,
            whole=strategy.local.whole,
            summed=strategy.secure,
        )
        recipe = replace(self, rules=rules)
        return replace(strategy, recipe=recipe, releases=recipe.releases(0.05, 0.1))

    def releases(self, mean: float, second: float) -> tuple[Release, ...]:
        """What is released before round one, with these shares of every budget."""
        assert self.rules is not None
        found: list[Release] = []
        if mean > 0:
            found.append(UnitMean(into=CENTRE, share=mean))
        if second > 0 and self.rules.kind == "images":
            bound = 0.2 if self.rules.whole else 1.0  # a client's mean Gram matrix is shorter
            found.append(Whitening(into=WHITEN, share=second, bound=bound))
        elif second > 0:
            found.append(Standardising(into=STANDARDISE, share=second))
        return tuple(found)

    def plan(self, strategy: Slots, claims: Mapping[str, Claims], rounds: int | None) -> Numbers:
        """Plan from the signal; a plan that predicts noise only is refused unless forced."""
        if self.rules is None:
            raise ConfigurationError(
                f"method '{strategy.name}'", "does not know its model", "use for_model first"
            )
        signal = strategy_signal(strategy, claims)
        numbers = self.rules.plan(signal)
        if self.whiten is False and self.rules.kind == "images":
            numbers |= {"mean_share": max(0.08, numbers["mean_share"]), "second_share": 0.0}
        fits = self.rules.size <= MOST_WHITENED
        check(
            fits or not self.whiten,
            f"method '{strategy.name}'",
            f"a Gram matrix of {self.rules.size} features is too large to release",
            f"use a map of at most {MOST_WHITENED} features, or leave whiten out",
        )
        if self.whiten and numbers["second_share"] == 0:
            numbers |= {"mean_share": 0.05, "second_share": 0.10}
        asked = {name: getattr(self, name) for name in ("clip", "lr", "mean_share", "second_share")}
        numbers |= {name: value for name, value in asked.items() if value is not None}
        numbers["rounds"] = float(rounds or numbers["rounds"])
        check(
            numbers["reach"] >= LEAST_REACH or self.force,
            f"method '{strategy.name}'",
            f"the signal S = {signal:.3g} of these budgets and sizes is weaker than the noise on "
            f"all parameters, {self.rules.reach:.3g}: expect chance",
            "raise budgets, ask more or larger clients, use smaller features, or force = true",
            PrivacyRefusal,
        )
        return numbers

    def apply(self, strategy: S, numbers: Numbers) -> S:
        """Return the strategy with planned releases, clip and learning rate."""
        own = checked_numbers(numbers, _NAMES)
        releases = self.releases(own["mean_share"], own["second_share"])
        return replace(
            strategy,
            releases=releases,
            local=strategy.local.clipping_at(own["clip"]),
            step=ServerSgd(lr=LearningRate(rate=own["lr"])),
        )

    def reach(self, numbers: Numbers) -> float | None:
        """r = S / sqrt(K d)."""
        return numbers["reach"]

    def words(self, numbers: Numbers) -> list[tuple[str, str]]:
        """What was planned, and from what it follows."""
        assert self.rules is not None
        own = numbers
        rules = self.rules
        signal = "sum of mu_i sqrt(h) n_i / sqrt(k)" if rules.summed else "sqrt(sum (mu_i n_i)^2)"
        second = {"images": "whitening", "tables": "scales", "text": "scales"}[rules.kind]
        shares = f"mean {own['mean_share']:.3g}, {second} {own['second_share']:.3g}"
        sizes = f"K = {rules.classes}, d = {rules.size}"
        counted = "S" if rules.coherence == 1 else f"{rules.coherence:.3g} S (whole clients)"
        if rules.kind == "images" and own["second_share"] == 0:
            why = "too many features" if rules.size > MOST_WHITENED else "S < 32 sqrt(d)"
            why = "as asked" if self.whiten is False else why
            shares = f"mean {own['mean_share']:.3g}, no whitening ({why})"
        return [
            ("signal S", f"{own['signal']:.4g} = {signal}"),
            ("reach r", f"{own['reach']:.3g} = {counted} / sqrt(K d), {sizes}"),
            ("rounds", f"{own['rounds']:.0f}, full batch ({rules.kind})"),
            ("clip, learning rate", f"{own['clip']:.3g}, {own['lr']:.4g}"),
            ("shares of mu^2", f"{shares}, the rest for the rounds"),
        ]

    def warning(self, numbers: Numbers) -> str:
        """Say how far the forecast is from the plateau."""
        reach = numbers["reach"]
        if reach >= GOOD_REACH:
            return ""
        lost = (
            "chance is near" if reach < LEAST_REACH else f"about {50 / reach:.0f} points are lost"
        )
        return f"the signal is {reach:.2g} times the noise on all parameters: {lost} to noise"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Settings of the methods that plan themselves. All of them may be left out.

    ``unit`` is what is protected: each "record", or each "client" as a whole. ``gradient_clip``,
    ``step_size``, ``whiten``, ``mean_share`` and ``second_share`` replace what the plan would be,
    for studies of the method itself. ``force`` runs a plan that predicts noise only. Everyone takes
    part in every round: a ``selection`` that draws cohorts is refused.
    """

    unit: Literal["record", "client"] = "record"
    gradient_clip: float | None = None
    step_size: float | None = None
    whiten: bool | None = None
    mean_share: float | None = None
    second_share: float | None = None
    force: bool = False
    selection: Selection | None = None

    def slots(self, name: str) -> dict[str, Any]:
        """The slots that do not depend on how uploads reach the server."""
        one_of(name, ("record", "client"), unit=self.unit)
        check(
            self.selection is None or self.selection.sampling == "none",
            name,
            "every client takes part in every round: cohorts would buy nothing",
            "leave cohort out",
        )
        recipe = Preconditioning(
            clip=self.gradient_clip,
            lr=self.step_size,
            whiten=self.whiten,
            mean_share=self.mean_share,
            second_share=self.second_share,
            force=self.force,
        )
        return {
            "name": name,
            "unit": Unit(self.unit),
            "observer": Observer.SERVER,
            "adjacency": Adjacency.ZERO_OUT,
            "recipe": recipe,
        }

    def worded(self, assumptions: Iterable[str]) -> tuple[str, ...]:
        """Assumptions, as far as they are about what is protected."""
        if self.unit == "record":
            return (PUBLIC, *assumptions)
        kept = [text for text in assumptions if not text.startswith("neighbouring data sets")]
        return (PUBLIC, *kept, WHOLE_CLIENTS)
