"""What only a simulator knows: the noise that was really added, and budgets that were raised."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dpfl.core.types import State
from dpfl.plugs.update_noise import noise_variance
from dpfl.plugs.weights import TRUE_NOISE
from dpfl.rounds import Agreement, Run, Uplink
from dpfl.rounds.members import Member
from dpfl.rounds.record import RoundRecord, TrueNoise


def true_noise(agreement: Agreement, members: Mapping[str, Member]) -> dict[str, float]:
    """Variance of the noise in each client's update, summed over coordinates.

    Zero where the local work adds no noise. A server cannot know this: it follows from each
    client's own budget.
    """
    if not agreement.strategy.local.private:
        return dict.fromkeys(members, 0.0)
    found = {}
    share = partial(agreement.strategy.local.in_cohort, drawn=len(members))
    for client, member in members.items():
        own = member.participant
        phases = share(agreement.phases(own))
        found[client] = noise_variance(phases, own.examples, agreement.layout.size)
    return found


def with_true_noise(state: State, noise: Mapping[str, float]) -> State:
    """Tell the weights, for comparison, what no real server knows.

    Only weights that ask for it (``needs_true_noise``) look at it. A run with such weights is a
    reference for others, not a method that could be deployed.
    """
    known = {
        f"{TRUE_NOISE}{client}": torch.tensor([value], dtype=torch.float64)
        for client, value in noise.items()
    }
    weights = {**state.plugs.get("weights", {}), **known}
    return replace(state, plugs={**state.plugs, "weights": weights})


def compared(agreement: Agreement, record: RoundRecord, noise: Mapping[str, float]) -> RoundRecord:
    """Add to a record how much noise its aggregate carries beside the least it could.

    Weights that go with the inverse of the noise leave the least (Robust-HDP, Eq. 8). How much the
    round's own weights leave is known only where rows are what clients sent.
    """
    weights = record.weights
    if not weights or min(noise.get(client, 0.0) for client in weights) <= 0:
        return record
    inverse = {client: 1 / noise[client] for client in weights}
    least = 1 / sum(inverse.values())
    strategy = agreement.strategy
    as_sent = strategy.clean is None and not strategy.stages and not strategy.local.pooled
    as_sent = as_sent and not strategy.local.own_noise  # there, nothing like a row exists
    left = sum(w**2 * noise[client] for client, w in weights.items()) if as_sent else None
    return replace(
        record,
        true_noise=TrueNoise(
            variances={client: noise[client] for client in weights},
            weights={client: value * least for client, value in inverse.items()},
            least=least,
            aggregate=left,
        ),
    )


def lost_on_the_way(uplinks: Sequence[Uplink], rate: float, run: Run, round_: int) -> list[Uplink]:
    """Lose each upload with probability ``rate``: for studying what a method does without some of
    its cohort.
    """
    seed = run.public.child("round", round_, "channel").child("dropout")
    coins = (torch.rand(len(uplinks), generator=seed.generator()) < rate).tolist()
    pairs = zip(sorted(uplinks, key=lambda uplink: uplink.client), coins, strict=True)
    return [
        replace(uplink, payload=None, reason="lost on the way") if gone else uplink
        for uplink, gone in pairs
    ]


def with_largest_budget(members: Mapping[str, Member]) -> dict[str, Member]:
    """Give everyone the largest budget anyone has: a hypothetical federation, flagged as one.

    It shows what a federation of generous clients would reach; no real site's ledger allows it.
    """
    largest = max((m.budget.epsilon for m in members.values() if m.budget), default=0)
    raised = {}
    for client, member in members.items():
        own = replace(member.budget, epsilon=largest) if member.budget else None
        raised[client] = replace(member, budget=own)
    return raised
