"""Rounds over a secure sum: what too few uploads leave, and sums that were added up elsewhere."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.by_hand import play_clients, train_with_losses
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, PeerError, PrivacyRefusal
from dpfl.core.grid_noise import LARGEST
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer, Shared
from dpfl.deploy.summary import effective_noise
from dpfl.engine.stacked import Stacked
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.stages import Clip
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run, SumOfUploads, Uplink, close_round, enrol, first_state, open_round
from dpfl.rounds.codec import decode_integers
from dpfl.rounds.members import honest_members
from dpfl.strategy import Strategy

WORK = {"lr": 0.2, "clip": 0.5, "batch_size": 4, "local_steps": 2, "noise_multiplier": 1.0}
SECURE = {"tolerated_dropouts": 1, "colluders": 1}


def federation(clients: int, features: int = 6, epsilon: float = 50.0) -> dpfl.Federation:
    generator = np.random.default_rng(1)
    arrays = {
        f"c{i:02d}": (generator.normal(size=(20, features)), generator.integers(0, 3, 20))
        for i in range(clients)
    }
    budgets = {client: dpfl.Budget(epsilon=epsilon, delta=1e-3) for client in arrays}
    return dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=3)


class Round:
    """One opened round of a strategy, with the uploads of everyone drawn."""

    def __init__(self, strategy: Strategy, features: int = 6, seed: int = 0) -> None:
        members = honest_members(federation(6, features))
        self.model = nn.Linear(features, 3)
        layout = Layout.of_module(self.model)
        claims = {client: member.claims for client, member in members.items()}
        self.agreement = enrol(strategy, claims, 4, layout)
        self.state = first_state(self.agreement, torch.zeros(layout.size))
        self.ledger = Ledger.create(":memory:", "test")
        self.ledger.register("run", seeded=True, title="test")
        self.run = Run(name="run", ledger=self.ledger, seed=PublicSeed(seed), public=PublicSeed(5))
        self.plan = open_round(self.agreement, self.state, self.run, lambda client: True)
        drawn = {client: members[client] for client in self.plan.cohort.ids}
        known = (self.agreement, self.run, self.plan, drawn, Stacked(), self.model)
        self.uplinks = play_clients(*known)

    def close(self, uplinks, total=None):  # type: ignore[no-untyped-def]
        known = (self.agreement, self.state, self.plan, uplinks, self.run)
        return close_round(*known, total=total)

    def total(self, uplinks: list[Uplink]) -> SumOfUploads:
        """What the protocol would leave of some uploads: their integers, added up."""
        read = [decode_integers(u.payload or b"", None, "run", 0, u.client) for u in uplinks]
        ids = tuple(uplink.client for uplink in uplinks)
        return SumOfUploads(integers=np.sum(read, axis=0), ids=ids)


def over(name: str = "udp_fedavg", **settings: object) -> Strategy:
    method = {"udp_fedavg": dpfl.udp_fedavg, "dp_fed": dpfl.dp_fed}[name]
    return dpfl.with_secure_sum(method(**{**WORK, **settings}), **SECURE)


STRATEGIES = {
    "everyone": over(),
    "no trusted server": over("dp_fed"),
    "an adaptive clip": over(target_quantile=0.5, noise_multiplier=2.0),
    "a cohort": over(selection=dpfl.FixedCohort(size=4)),
}


# ---- too few uploads -----------------------------------------------------------------------------


def test_a_round_with_too_few_uploads_is_lost_and_charged() -> None:
    one = Round(STRATEGIES["everyone"])
    left = one.uplinks[2:]
    state, record = one.close(left)
    assert torch.equal(state.model, one.state.model)
    assert (state.round, record.published, record.arrived) == (1, False, ())
    assert record.missing["c00"] == "no answer"
    reason = "never unmasked: 4 of 6 uploads came, and the secure sum needs 5"
    assert {record.missing[uplink.client] for uplink in left} == {reason}
    for client in one.plan.cohort.ids:
        assert len(one.ledger.history(client, Observer.SERVER)) == 1
    state, record = one.close(one.uplinks[1:])
    assert record.published
    assert len(record.arrived) == 5
    assert not torch.equal(state.model, one.state.model)


def test_where_the_draw_is_counted_on_a_lost_sum_is_published_as_noise() -> None:
    """Outsiders learn nothing of who answered: what is left is what stand-ins make of no answer."""
    one = Round(STRATEGIES["a cohort"])
    assert one.agreement.amplified
    nothing, record = one.close([])
    assert (record.published, record.arrived) == (True, ())
    few, record = one.close(one.uplinks[:2])
    assert torch.equal(few.model, nothing.model)
    assert "never unmasked: 2 of 4" in record.missing[one.uplinks[0].client]
    enough, record = one.close(one.uplinks[:3])
    assert len(record.arrived) == 3
    assert not torch.equal(enough.model, nothing.model)


def test_the_published_noise_is_that_of_all_who_sent() -> None:
    """6 drawn, h = 4: five shares carry sqrt(5 / 4) of what is charged. 1,089 numbers: to 2 %."""
    found = []
    for seed in range(3):
        one = Round(over(lr=1e-9), features=120, seed=seed)
        state, _ = one.close(one.uplinks[1:])
        found.append((state.model - one.state.model) * 6 / 0.5)
    assert float(torch.cat(found).std()) == pytest.approx(math.sqrt(5 / 4), rel=0.06)


def test_the_noise_that_is_told_to_the_operator_is_that_of_the_honest_shares_and_more() -> None:
    one = Round(STRATEGIES["everyone"])
    for sent in (6, 5):
        _, record = one.close(one.uplinks[6 - sent :])
        told = effective_noise(one.agreement, one.plan, record)
        assert told.noise_multiplier == pytest.approx(math.sqrt(sent / 4))


def test_a_run_with_losses_goes_on() -> None:
    result = train_with_losses(
        nn.Linear(6, 3), federation(8), STRATEGIES["everyone"], rounds=6, dropout=0.2
    )
    published = [record.published for record in result.history]
    assert True in published
    assert False in published
    for record in result.history:
        assert record.published == (len(record.arrived) >= 7)
    told = result.spent["c00"]
    assert told.observer == "server"


# ---- a sum that was added up elsewhere -----------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("missing", [0, 1])
def test_equal_integers_make_equal_models(name: str, missing: int) -> None:
    one = Round(STRATEGIES[name])
    here = one.uplinks[missing:]
    gone = [replace(uplink, payload=None, reason="off") for uplink in one.uplinks[:missing]]
    summed, told = one.close([*gone, *here])
    brought, record = one.close([*gone, *here], one.total(here))
    assert torch.equal(summed.model, brought.model)
    for slot, state in summed.plugs.items():
        assert all(torch.equal(state[key], brought.plugs[slot][key]) for key in state)
    assert record == told
    assert len(record.missing) == missing
    alone, _ = one.close([], one.total(here))
    assert torch.equal(alone.model, summed.model)


def test_another_integer_makes_another_model() -> None:
    one = Round(STRATEGIES["everyone"])
    total = one.total(one.uplinks)
    moved = total.integers.copy()
    moved[3] += 1 << 10
    models = [one.close([], replace(total, integers=i))[0].model for i in (total.integers, moved)]
    assert (models[0] != models[1]).nonzero().tolist() == [[3]]


def test_a_sum_that_cannot_be_is_refused() -> None:
    one = Round(STRATEGIES["everyone"])
    total, huge = one.total(one.uplinks), np.full(21, 1 << 40)
    for wrong, said in (
        ({"ids": total.ids[:4]}, "of 4 clients, where at least 5 of 6"),
        ({"ids": (*total.ids[:5], "stranger")}, "of 6 clients"),
        ({"ids": (*total.ids[:5], total.ids[0])}, "of 6 clients"),
        ({"integers": total.integers[:20]}, "20 integers"),
        ({"integers": huge}, f"up to {1 << 40}"),
    ):
        with pytest.raises(PeerError, match=said) as refused:
            one.close([], replace(total, **wrong))
        assert refused.value.exit_code == 7
    digital = Round(dpfl.udp_fedavg(**WORK))
    with pytest.raises(ConfigurationError, match="Digital is no secure sum"):
        digital.close([], total)


# ---- the plan of a sum ---------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    clip=st.floats(0.01, 100),
    multiplier=st.floats(0.05, 20),
    clients=st.integers(4, 12),
    quantile=st.none() | st.just(0.5),
)
def test_the_plan_bounds_every_integer(
    clip: float, multiplier: float, clients: int, quantile: float | None
) -> None:
    work = {**WORK, "clip": clip, "noise_multiplier": multiplier, "target_quantile": quantile}
    strategy = dpfl.with_secure_sum(dpfl.udp_fedavg(**work), **SECURE)
    claims = {f"c{i}": dpfl.Claims(epsilon=1.0, delta=1e-3, examples=9) for i in range(12)}
    layout = Layout.of_module(nn.Linear(6, 3))
    plan = enrol(strategy, claims, 4, layout).sum_plan(0, clients)
    sent = clip if quantile is None else 1.0
    assert plan.step == pytest.approx(multiplier * sent / math.sqrt(clients - 2) / 2**20)
    assert plan.numbers == 21 + (quantile is not None)
    assert plan.group == SecureSum(**SECURE).group(clients)
    exact = math.ceil(sent / plan.step) + LARGEST + 1
    assert exact <= plan.largest <= exact + math.sqrt(22) + 1


class Unclipped(Clip):
    """Promises a clip that it does not enforce."""

    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        return rows * 1e4


def test_an_upload_beyond_the_plan_never_leaves_its_client() -> None:
    strategy = STRATEGIES["everyone"]
    broken = replace(strategy, stages=(Unclipped(clip=0.5), strategy.stages[1]))
    with pytest.raises(PeerError, match="in absolute value; send 21 of up to"):
        Round(broken)


def test_groups_that_hide_nobody_are_refused_before_anyone_is_charged() -> None:
    layout = Layout.of_module(nn.Linear(6, 3))
    claims = {f"c{i}": dpfl.Claims(epsilon=1.0, delta=1e-3, examples=9) for i in range(3)}
    with pytest.raises(PrivacyRefusal, match="3 members of whom 1 may collude") as refused:
        enrol(STRATEGIES["everyone"], claims, 4, layout)
    assert refused.value.exit_code == 4
    floats = replace(dpfl.dp_fed(**WORK), channel=SecureSum())
    with pytest.raises(ConfigurationError, match="whole multiples of one step"):
        enrol(floats, claims, 4, layout)


def test_a_plan_ends_when_too_many_have_left() -> None:
    one = Round(STRATEGIES["everyone"])
    with closing(one.ledger):
        for staying, over_ in ((4, False), (3, True)):
            willing = sorted(one.agreement.claims)[:staying]
            state = replace(one.state, round=1)
            plan = open_round(one.agreement, state, one.run, lambda c, kept=willing: c in kept)
            assert bool(plan.over) == over_
            assert not over_ or "3 members of whom 1" in plan.over
