"""What a private search gives: what may be published, and what stays with the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dpfl.core.types import Observer, Plain, Promise, Unit
from dpfl.experiments.study import Values
from dpfl.plugs.measures import Estimate
from dpfl.privacy.accountant import Spend, shown
from dpfl.privacy.flags import Flag
from dpfl.runs.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class OperatorPart:
    """What the server knows of a search. Published, it would void the epsilon of the search.

    ``runs`` is how many there were, ``epsilon`` what all of them together cost each client against
    the server, per ``unit``; ``flags`` are facts that limit the guarantee.
    """

    runs: int
    epsilon: Mapping[str, Spend]
    flags: tuple[Flag, ...]
    unit: Unit = Unit.RECORD

    def __str__(self) -> str:
        told = (
            _promise(self.epsilon, self.unit, Observer.SERVER, self.flags)
            if self.epsilon
            else "no cost"
        )
        return f"{self.runs} runs; all of them together: {told}"

    def to_dict(self) -> Plain:
        """Return plain values, for the server's own file."""
        spent = {client: own.epsilon for client, own in self.epsilon.items()}
        return {"runs": self.runs, "epsilon_against_server": spent}


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best run of a private search.

    ``chosen`` are its settings (None if no run was drawn, which only the Poisson law allows),
    ``score`` is its noisy ``metric`` on validation records, ``model`` its model; ``experiment`` has
    the chosen settings. ``epsilon`` is by client, against the world; ``flags`` are facts that limit
    the guarantee. ``operator`` is for the server alone.
    """

    metric: str
    chosen: Values | None
    score: Estimate | None
    model: nn.Module | None = field(repr=False)
    experiment: Experiment | None = field(repr=False)
    epsilon: Mapping[str, Spend]
    flags: tuple[Flag, ...]
    operator: OperatorPart = field(repr=False)

    @property
    def promise(self) -> str:
        """The largest epsilon of the search, with everything that is needed to read it."""
        return _promise(self.epsilon, self.operator.unit, Observer.WORLD, self.flags)

    def to_dict(self) -> Plain:
        """Return plain values that may be published: nothing of the other runs."""
        return {
            "metric": self.metric,
            "chosen": self.chosen,
            "score": dict(vars(self.score)) if self.score else None,
            "epsilon": {client: own.epsilon for client, own in self.epsilon.items()},
            "delta": {client: own.delta for client, own in self.epsilon.items()},
            "promise": self.promise,
            "flags": [str(flag) for flag in self.flags],
        }

    def __str__(self) -> str:
        if self.chosen is None or self.score is None:
            return f"no run was drawn, so nothing was chosen; {self.promise}"
        settings = ", ".join(f"{k.removeprefix('method.')} = {v}" for k, v in self.chosen.items())
        return f"{settings}: {self.metric} {self.score} (noise); {self.promise}"


def _promise(
    costs: Mapping[str, Spend], unit: Unit, observer: Observer, flags: Sequence[Flag]
) -> str:
    """The largest epsilon in words."""
    most = max(costs.values(), key=lambda cost: cost.epsilon)
    promise = Promise(unit=unit, adjacency=most.adjacency, observer=observer)
    said = f"epsilon at most {shown(most.epsilon)} at delta {most.delta:g} {promise}"
    return "; ".join([said, *(flag.about for flag in flags)])
