"""From rows or a sum to the next model: clean, weigh, central noise, denoise, step."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dpfl.core.types import Aggregate, Metrics, PlugOutput, Rows, State, Total
from dpfl.plugs.weights import checked
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

    def act(slot: str, plug: Callable[..., PlugOutput], *given: object) -> Tensor:
        result, plugs[slot], metrics[slot] = plug(plugs[slot], *given)
        return result

    for number, stage in enumerate(strategy.stages):
        plugs[f"stage{number}"] = stage.learn(plugs[f"stage{number}"], received)
    # ---- clean
    starts: dict[str, Tensor] = {}
    if strategy.clean is not None and isinstance(received, Rows):
        received = replace(received, matrix=act("clean", strategy.clean, received, t))
        if strategy.clean.personal_starts(t):  # everyone else starts from the common model
            own = received.origin + received.matrix
            starts = {client: own[i].clone() for i, client in enumerate(received.cohort.ids)}
    # ---- weigh, central noise
    weights = act("weights", strategy.weights, received, t)
    weights = checked(strategy.weights, weights, len(received.cohort))
    noise: Tensor | None = None
    if isinstance(received, Rows):
        vector = weights @ received.matrix
    else:
        weight = float(weights[0]) if len(weights) else 0.0  # the mean's
        if strategy.weights.constant:  # what the cost rests on, whoever arrived
            weight = strategy.weights.value(agreement.terms)
        noisy = total = received.vector.to(torch.float64)
        if strategy.central_noise is not None:
            bound, secret = strategy.contribution_bound(agreement.terms), run.secret("central", t)
            noisy = act("noise", strategy.central_noise.add, total, bound, secret)
            norms = {k: v for k, v in metrics["noise"].items() if isinstance(v, int | float)}
            metrics["noise"] = {name: weight * norm for name, norm in norms.items()}
            noise = (weight * (noisy - total)).to(torch.float32)
        vector = (weight * noisy).to(torch.float32)
    # ---- denoise, step
    place = Aggregate(vector=vector, model=state.model, layout=agreement.layout, round=t)
    for number, denoise in enumerate(strategy.denoise):
        slot = f"denoise{number}"
        if noise is not None and denoise.linear:  # what smoothing leaves of the noise
            noise = denoise(plugs[slot], replace(place, vector=noise))[0]
            metrics["noise"]["norm_after"] = float(torch.linalg.vector_norm(noise))
        place = replace(place, vector=act(slot, denoise, place))
    model = act("step", strategy.step, place)
    record = replace(
        record,
        weights=dict(zip(received.cohort.ids, weights.tolist(), strict=True)),
        update_norm=float(torch.linalg.vector_norm(place.vector)),
        metrics={**record.metrics, **{slot: own for slot, own in metrics.items() if own}},
    )
    return replace(state, round=t + 1, model=model, starts=starts, plugs=plugs), record
