"""From rows or a sum to the next model: clean, weigh, central noise, denoise, step."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpfl.core.types import Aggregate, Metrics, PlugOutput, PlugState, Rows, Shared, State, Total
from dpfl.plugs.weights import checked
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.record import RoundRecord


def aggregate(
    agreement: Agreement,
    state: State,
    received: Rows | Total,
    run: Run,
    record: RoundRecord,
    shared: Mapping[str, Shared],
) -> tuple[State, RoundRecord]:
    """Fold the server's slots over what arrived.

    ``received`` are rows, one a client, or their sum where a channel or the weights allow no more.
    ``run`` makes the secret generator of central noise; ``shared`` is what the round's plugs have
    sent to clients. Returned are the next state and the record with weights, the norm of the update
    and the metrics of every slot that reports any.
    """
    strategy = agreement.strategy
    t = state.round
    plugs = {slot: dict(state.plugs.get(slot, {})) for slot, _ in strategy.slots()}
    fold = _Fold(agreement, run, t, shared, plugs)
    metrics = fold.metrics
    for number, stage in enumerate(strategy.stages):
        plugs[f"stage{number}"] = stage.learn(plugs[f"stage{number}"], received)
    # ---- clean
    starts: dict[str, Tensor] = {}
    if strategy.clean is not None and isinstance(received, Rows):
        received = replace(received, matrix=fold.act("clean", strategy.clean, received, t))
        if strategy.clean.personal_starts(t):  # everyone else starts from the common model
            own = received.origin + received.matrix
            starts = {client: own[i].clone() for i, client in enumerate(received.cohort.ids)}
    # ---- weigh, central noise
    weights = fold.act("weights", strategy.weights, received, t)
    weights = checked(strategy.weights, weights, len(received.cohort))
    noise: Tensor | None = None
    if isinstance(received, Rows):
        vector = weights @ received.matrix
    else:
        weight = float(weights[0]) if len(weights) else 0.0  # the mean's
        if strategy.weights.constant:  # what the cost rests on, whoever arrived
            weight = strategy.weights.value(agreement.terms)
        vector, noise = fold.weighted_sum(received.vector, weight)
    # ---- denoise, step
    place = Aggregate(vector=vector, model=state.model, layout=agreement.layout, round=t)
    for number, denoise in enumerate(strategy.denoise):
        slot = f"denoise{number}"
        if noise is not None and denoise.linear:  # what smoothing leaves of the noise
            noise = denoise(plugs[slot], replace(place, vector=noise))[0]
            metrics["noise"]["norm_after"] = float(torch.linalg.vector_norm(noise))
        place = replace(place, vector=fold.act(slot, denoise, place))
    model = fold.act("step", strategy.step, place)
    weighed = dict(agreement.terms.weights)  # by which clients have weighed what they sent
    counted = zip(received.cohort.ids, weights.tolist(), strict=True)
    record = replace(
        record,
        weights={client: weight * weighed.get(client, 1.0) for client, weight in counted},
        update_norm=float(torch.linalg.vector_norm(place.vector)),
        metrics={**record.metrics, **{slot: own for slot, own in metrics.items() if own}},
    )
    return replace(state, round=t + 1, model=model, starts=starts, plugs=plugs), record


@dataclass
class _Fold:
    """One round's fold: the plugs' states, and what they report."""

    agreement: Agreement
    run: Run
    round: int
    shared: Mapping[str, Shared]
    plugs: dict[str, PlugState]
    metrics: defaultdict[str, Metrics] = field(default_factory=lambda: defaultdict(dict))

    def act(self, slot: str, plug: Callable[..., PlugOutput], *given: object) -> Tensor:
        """Let a plug act, and keep its state and metrics."""
        result, self.plugs[slot], self.metrics[slot] = plug(self.plugs[slot], *given)
        return result

    def weighted_sum(self, total: Tensor, weight: float) -> tuple[Tensor, Tensor | None]:
        """The sum with all of its noise, in the model's own units, and the central noise in it.

        The server halves of stages are linear, and act on a sum that carries its noise.
        """
        strategy = self.agreement.strategy
        noise = None
        if strategy.central_noise is not None:
            bound = strategy.contribution_bound(self.agreement.terms)
            secret = self.run.secret("central", self.round)
            exact = total.to(torch.float64)
            total = self.act("noise", strategy.central_noise.add, exact, bound, secret)
            noise = total - exact
            before = float(noise.norm()) or 1.0
        for number, stage in reversed(list(enumerate(strategy.stages))):
            slot = f"stage{number}"
            own = self.shared.get(slot, {})
            self.plugs[slot], told = stage.learn_sum(self.plugs[slot], total, weight)
            self.metrics[slot] = told
            total = stage.server(total, own, None)
            noise = None if noise is None else stage.server(noise, own, None)
        if noise is not None:
            scale = weight * (float(noise.norm()) / before)
            norms = {k: v for k, v in self.metrics["noise"].items() if isinstance(v, int | float)}
            self.metrics["noise"] = {name: scale * norm for name, norm in norms.items()}
            noise = (weight * noise).to(torch.float32)
        return (weight * total.to(torch.float64)).to(torch.float32), noise
