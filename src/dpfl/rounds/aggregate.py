"""From rows or a sum to the next model: clean, weigh, central noise, denoise, step."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from dpfl.core.types import Aggregate, Metrics, Rows, State, Total
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.record import RoundRecord


def aggregate(
    agreement: Agreement, state: State, received: Rows | Total, run: Run, record: RoundRecord
) -> tuple[State, RoundRecord]:
    """Fold the server's slots over what arrived.

    ``received`` are rows, one a client, or their sum where a channel or the weights allow no more.
    ``run`` makes the secret generator of central noise. Returned are the next state and the record
    with weights, the norm of the update and the metrics of every slot that reports any.
    """
    strategy, t = agreement.strategy, state.round
    plugs = {slot: dict(state.plugs.get(slot, {})) for slot, _ in strategy.slots()}
    metrics: defaultdict[str, Metrics] = defaultdict(dict)
    for number, stage in enumerate(strategy.stages):
        plugs[f"stage{number}"] = stage.learn(plugs[f"stage{number}"], received)
    # ---- clean
    starts: dict[str, Tensor] = {}
    if strategy.clean is not None and isinstance(received, Rows):
        cleaned = strategy.clean(plugs["clean"], received, t)
        received = replace(received, matrix=cleaned[0])
        _, plugs["clean"], metrics["clean"] = cleaned
        if strategy.clean.personal_starts(t):  # everyone else starts from the common model
            own = received.origin + received.matrix
            starts = {client: own[i].clone() for i, client in enumerate(received.cohort.ids)}
    # ---- weigh, central noise
    weighed = strategy.weights(plugs["weights"], received, t)
    weights, plugs["weights"], metrics["weights"] = weighed
    noise: Tensor | None = None
    if isinstance(received, Rows):
        vector = weights @ received.matrix
    else:
        weight, total = _weight_of_sum(agreement, weights), received.vector.to(torch.float64)
        noisy = total
        if strategy.central_noise is not None:
            bound, secret = strategy.contribution_bound(agreement.terms), run.secret("central", t)
            noised = strategy.central_noise.add(plugs["noise"], total, bound, secret)
            noisy, plugs["noise"], found = noised
            norms = {name: v for name, v in found.items() if isinstance(v, int | float)}
            metrics["noise"] = {name: weight * value for name, value in norms.items()}
            noise = (weight * (noisy - total)).to(torch.float32)
        vector = (weight * noisy).to(torch.float32)
    # ---- denoise, step
    place = Aggregate(vector=vector, model=state.model, layout=agreement.layout, round=t)
    for slot, denoise in ((f"denoise{n}", d) for n, d in enumerate(strategy.denoise)):
        if noise is not None and denoise.linear:  # what smoothing leaves of the noise
            noise = denoise(plugs[slot], replace(place, vector=noise))[0]
            metrics["noise"]["norm_after"] = float(torch.linalg.vector_norm(noise))
        vector, plugs[slot], metrics[slot] = denoise(plugs[slot], place)
        place = replace(place, vector=vector)
    model, plugs["step"], metrics["step"] = strategy.step(plugs["step"], place)
    record = replace(
        record,
        weights=dict(zip(received.cohort.ids, weights.tolist(), strict=True)),
        update_norm=float(torch.linalg.vector_norm(place.vector)),
        metrics={**record.metrics, **{slot: own for slot, own in metrics.items() if own}},
    )
    return replace(state, round=t + 1, model=model, starts=starts, plugs=plugs), record


def _weight_of_sum(agreement: Agreement, weights: Tensor) -> float:
    """The one weight of a sum: a constant that the cost rests on, or the mean's."""
    if agreement.strategy.weights.constant:
        return agreement.strategy.weights.value(agreement.terms)
    return float(weights[0]) if len(weights) else 0.0
