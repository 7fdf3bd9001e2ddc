"""What a round leaves behind: the operator's record, with names, and for the server's eyes only.

Nothing of it may reach an adversary against whom sampling amplifies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpfl.core.types import Metrics, Plain
from dpfl.engine.evaluation import Scores
from dpfl.plugs.measures import Estimate


@dataclass(frozen=True, kw_only=True)
class TrueNoise:
    """The noise in a round's updates, which only a simulator knows, beside the least there could
    be.

    ``weights`` would leave the least noise in the aggregate (Robust-HDP, Eq. 8); ``aggregate`` is
    what was left of it, None where rows are not what was sent.
    """

    variances: Mapping[str, float]
    weights: Mapping[str, float]
    least: float
    aggregate: float | None = None

    @property
    def ratio(self) -> float | None:
        """Noise variance of the aggregate over the least possible one."""
        return None if self.aggregate is None or self.least <= 0 else self.aggregate / self.least


@dataclass(frozen=True, kw_only=True)
class EffectiveNoise:
    """How much noise a published sum really carries, given who answered.

    ``made_by`` says whose noise it is. ``noise_multiplier`` is relative to the bound of one
    client's contribution, and None where every site adds noise within its own budget.
    """

    made_by: str
    arrived: int
    drawn: int
    noise_multiplier: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round. ``metrics`` holds what each slot reports, by the slot's name.

    ``lost`` says why a round that was charged has no result; ``published`` is False where too few
    uploads arrived, and the model stayed as it was. ``measured`` is the accounted metric, where it
    was the round's turn; between sites, a measurement has a record of its own.
    """

    round: int
    cohort: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    bytes_up: int = 0
    payload_bytes_up: int = 0
    bytes_down: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)
    update_norm: float | None = None
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    published: bool = True
    lost: str = ""
    scores: Scores | None = None
    true_noise: TrueNoise | None = None
    effective_noise: EffectiveNoise | None = None
    measured: Estimate | None = None

    @property
    def silent(self) -> bool:
        """Whether the round was planned and charged, and nothing came of it."""
        return not self.lost and (not self.published or not self.arrived)

    def to_dict(self) -> Plain:
        """Return plain values, as they are written to ``rounds.jsonl``.

        Parts that the round does not have are left out. Metrics of a slot stand under its name with
        ``_metrics`` behind it.
        """
        if self.lost:
            return {"round": self.round, "lost": self.lost}
        told: Plain = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in _PARTS
        }
        if not self.published:
            del told["weights"], told["update_norm"]
            told["published"] = "nothing: too few uploads arrived"
        told |= {f"{slot}_metrics": own for slot, own in self.metrics.items()}
        if self.true_noise is not None:
            truth = _without_none(self.true_noise)
            told["simulated_truth"] = {_TRUTH[name]: value for name, value in truth.items()}
        if self.scores is not None:
            told |= self.scores.to_dict()
        if self.effective_noise is not None:
            told["effective_noise"] = _without_none(self.effective_noise)
        if self.measured is not None:
            told["measured"] = dict(vars(self.measured))
        return told

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Read back what :meth:`to_dict` wrote."""
        if "lost" in values:
            return cls(round=values["round"], lost=str(values["lost"]))
        told = values.get("simulated_truth")
        noise = values.get("effective_noise")
        truth = {name: told[key] for name, key in _TRUTH.items() if key in told} if told else None
        slots = {k.removesuffix("_metrics"): v for k, v in values.items() if k.endswith("_metrics")}
        plain: Plain = {
            name: tuple(value) if isinstance(value, list) else value
            for name in {f.name for f in fields(cls)}.difference(_PARTS)
            if (value := values.get(name)) is not None
        }
        return cls(
            **plain,
            metrics=slots,
            published="published" not in values,
            scores=Scores.from_dict(values),
            true_noise=TrueNoise(**truth) if truth else None,
            effective_noise=EffectiveNoise(**noise) if noise else None,
            measured=Estimate(**values["measured"]) if "measured" in values else None,
        )


_PARTS = ("metrics", "published", "lost", "scores", "true_noise", "effective_noise", "measured")
_TRUTH = {
    "variances": "noise_variance",
    "weights": "oracle_weights",
    "least": "least_noise_variance",
    "aggregate": "aggregate_noise_variance",
}


def _without_none(values: TrueNoise | EffectiveNoise) -> Plain:
    return {name: value for name, value in vars(values).items() if value is not None}
