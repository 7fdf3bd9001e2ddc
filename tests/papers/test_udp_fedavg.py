"""UDP-FedAvg: noise by the clients, in shares or whole, and what each of the two hides from whom."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import optimize, special
from tests.by_hand import play_clients, train_with_losses
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Observer, Who
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.engine.stacked import Stacked
from dpfl.models import make_model
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import GaussianNoise
from dpfl.privacy import epsilon
from dpfl.privacy.accountant import spend
from dpfl.privacy.classic_rdp import MISREAD_REMARK
from dpfl.privacy.events import Event
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Agreement,
    Run,
    Uplink,
    close_round,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.codec import decode_upload
from dpfl.rounds.members import honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment

LAYOUT = Layout.of({"weight": torch.zeros(3, 6), "bias": torch.zeros(3)})
HABITS = {"lr": 0.1, "clip": 1.0, "batch_size": 16, "local_steps": 2}
STILL = {"lr": 1e-12, "clip": 0.7, "batch_size": 20, "local_steps": 1}
POISSON, FIXED = dpfl.PoissonCohort(sampling_rate=0.3), dpfl.FixedCohort(size=4)
MANY = 100_000


def claims_of(population: int, epsilon: float = 5.0) -> dict[str, Claims]:
    return {
        f"c{i:03d}": Claims(epsilon=epsilon, delta=1e-3, examples=10) for i in range(population)
    }


def agreed(strategy: dpfl.Strategy, population: int, rounds: int) -> Agreement:
    return enrol(strategy, claims_of(population), rounds, LAYOUT)


def event_against(observer: Observer, agreement: Agreement) -> Event:
    (event,) = agreement.strategy.cost(observer, (), 10, agreement.terms).events
    return event


def spread(noise: Tensor) -> float:
    return float(noise.double().square().mean().sqrt())


def charged(noise_multiplier: float, shares: int = 1, numbers: int = LAYOUT.size) -> float:
    """The noise of ``shares`` clients over one contribution, which rounding onto one share's grid
    widens.
    """
    return noise_multiplier / (
        1 + noise_multiplier / math.sqrt(shares) * math.sqrt(numbers) / 2**20
    )


# ---- a client's share ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "drawn", "tolerated", "std"),
    [
        ("distributed", 10, 0, 1.3 * 0.7 / math.sqrt(10)),
        ("distributed", 10, 3, 1.3 * 0.7 / math.sqrt(7)),
        ("distributed", 1, 0, 1.3 * 0.7),
        ("distributed", 2, 5, 1.3 * 0.7),
        ("local", 10, 0, 1.3 * 0.7),
        ("local", 10, 3, 1.3 * 0.7),
    ],
)
def test_a_client_adds_its_share_or_all_and_the_test_would_see_one_percent(
    noise: str, drawn: int, tolerated: int, std: float
) -> None:
    strategy = dpfl.udp_fedavg(
        **STILL, noise=noise, noise_multiplier=1.3, tolerated_dropouts=tolerated
    )  # type: ignore[arg-type]
    _, stage = strategy.stages
    who = Who(id="c", claims=claims_of(1)["c000"], drawn=drawn)
    added = stage.client(
        torch.zeros(MANY), {}, who, dpfl.SecretRng.simulated(dpfl.PublicSeed(drawn))
    )
    assert 4 / math.sqrt(2 * MANY) < 0.01
    assert spread(added) == pytest.approx(std, rel=0.01)
    assert abs(float(added.mean())) < 4 * std / math.sqrt(MANY)
    assert isinstance(stage, GaussianNoise)
    assert stage.std(drawn) == pytest.approx(std)


@given(st.floats(0.01, 50), st.floats(0.01, 50), st.integers(1, 500), st.integers(0, 500))
def test_the_shares_of_those_who_must_arrive_add_up_to_the_whole(
    z: float, clip: float, drawn: int, lost: int
) -> None:
    strategy = dpfl.udp_fedavg(
        **{**HABITS, "clip": clip}, noise_multiplier=z, tolerated_dropouts=lost
    )
    needed = strategy.shares_needed(agreed(strategy, 3, 1).terms, drawn)
    assert needed == max(1, drawn - lost)
    stage = strategy.stages[1]
    assert isinstance(stage, GaussianNoise)
    assert math.sqrt(needed) * stage.std(drawn) == pytest.approx(z * clip)


# ---- one round -------------------------------------------------------------------------------------------------------


def one_round(
    strategy: dpfl.Strategy,
    *,
    clients: int = 6,
    features: int = 6,
    lost: int = 0,
    clear: bool = False,
) -> tuple[Tensor, dict[str, Tensor], RoundRecord]:
    """Play one round from a zero model, losing some uploads; return the model, all uploads, and the
    record.

    ``clear``: uploads less the noise that their clients drew, which only a seeded run can repeat.
    """
    generator, records = np.random.default_rng(1), 20 if features < 100 else 2
    arrays = {
        f"c{i}": (generator.normal(size=(records, features)), generator.integers(0, 3, records))
        for i in range(clients)
    }
    members = honest_members(dpfl.Federation.from_arrays(arrays, classes=3))
    model = nn.Sequential(nn.Linear(features, 3))
    layout = Layout.of_module(model)
    agreement = enrol(
        strategy, {client: member.claims for client, member in members.items()}, 4, layout
    )
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=True, title="test")
    run = Run(name="run", ledger=ledger, seed=dpfl.PublicSeed(0), public=dpfl.PublicSeed(5))
    state = first_state(agreement, torch.zeros(layout.size))
    plan = open_round(agreement, state, run, lambda client: True)
    drawn = {client: members[client] for client in plan.cohort.ids}
    uplinks = play_clients(agreement, run, plan, drawn, Stacked(), model)
    grid = agreement.strategy.upload_grid(len(plan.cohort))
    assert grid is not None
    size = layout.size
    uploads = {
        u.client: decode_upload(u.payload or b"", size, "run", 0, u.client, grid) for u in uplinks
    }
    if clear:
        for client, upload in uploads.items():
            noise = (
                run.secret("client", 0, client)
                .child("stage", 1)
                .grid_noise_(torch.empty(layout.size))
            )
            uploads[client] = upload - grid.step * noise.double()
    gone = [Uplink(client=u.client, payload=None, reason="lost") for u in uplinks[:lost]]
    after, record = close_round(agreement, state, plan, [*gone, *uplinks[lost:]], run)
    ledger.close()
    return after.model, uploads, record


@pytest.mark.parametrize("tolerated", [0, 1, 2])
def test_the_published_sum_carries_what_was_billed_once_as_many_are_missing_as_may_be(
    tolerated: int,
) -> None:
    """Then its noise is exactly the promised one; with nobody missing there is more."""
    strategy = dpfl.udp_fedavg(**STILL, noise_multiplier=1.3, tolerated_dropouts=tolerated)
    billed = event_against(Observer.WORLD, agreed(strategy, 4, 4)).noise_multiplier
    assert billed == pytest.approx(charged(1.3, 4 - tolerated), rel=1e-9)
    assert 1.3 * (1 - 1e-4) < billed < 1.3
    std = 1.3 * 0.7 / 4
    fewest, _, record = one_round(strategy, clients=4, features=10_000, lost=tolerated)
    assert len(record.arrived) == 4 - tolerated  # type: ignore[arg-type]
    assert 4 / math.sqrt(2 * len(fewest)) < 0.02
    assert spread(fewest) == pytest.approx(std, rel=0.02)
    everyone, uploads, _ = one_round(strategy, clients=4, features=10_000)
    assert spread(everyone) == pytest.approx(std * math.sqrt(4 / (4 - tolerated)), rel=0.02)
    for upload in uploads.values():
        assert spread(upload) == pytest.approx(1.3 * 0.7 / math.sqrt(4 - tolerated), rel=0.02)


@pytest.mark.parametrize("tolerated", [0, 1, 2])
def test_where_the_draw_is_a_secret_the_noise_does_not_tell_how_many_are_missing(
    tolerated: int,
) -> None:
    """The server adds the shares that are missing: the same noise whether all, some or none of the
    drawn answer.
    """
    strategy = dpfl.udp_fedavg(
        **STILL, noise_multiplier=1.3, tolerated_dropouts=tolerated, selection=FIXED
    )
    assert event_against(Observer.WORLD, agreed(strategy, 6, 4)).noise_multiplier == pytest.approx(
        charged(1.3, 4 - tolerated), rel=1e-9
    )
    for lost in range(5):
        model, _, record = one_round(strategy, features=10_000, lost=lost)
        assert len(record.arrived) == 4 - lost  # type: ignore[arg-type]
        assert record.published
        assert spread(model) == pytest.approx(
            1.3 * 0.7 / 4 * math.sqrt(4 / (4 - tolerated)), rel=0.02
        )


def test_stand_ins_draw_noise_of_their_own() -> None:
    """Neither a client's own noise again, nor one another's: the sum of the shares would be too
    small, or known.
    """
    strategy = dpfl.udp_fedavg(**STILL, noise_multiplier=1.3, selection=FIXED)
    all_there, uploads, _ = one_round(strategy, features=10_000)
    one_less, _, _ = one_round(strategy, features=10_000, lost=1)
    first = next(iter(uploads.values()))
    stand_in = 4 * (one_less - all_there).double() + first
    assert spread(stand_in) == pytest.approx(1.3 * 0.7 / 2, rel=0.02)
    for upload in uploads.values():
        correlation = float(torch.corrcoef(torch.stack([stand_in, upload.double()]))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(len(stand_in))


def test_local_noise_is_averaged_over_who_arrived() -> None:
    strategy = dpfl.udp_fedavg(**STILL, noise="local", noise_multiplier=1.3, selection=FIXED)
    for lost in (0, 2):
        model, uploads, record = one_round(strategy, features=10_000, lost=lost)
        assert record.published
        assert spread(model) == pytest.approx(1.3 * 0.7 / math.sqrt(4 - lost), rel=0.02)
        assert all(
            spread(upload) == pytest.approx(1.3 * 0.7, rel=0.02) for upload in uploads.values()
        )


@pytest.mark.parametrize("noise", ["distributed", "local"])
def test_the_model_moves_by_the_mean_of_what_was_sent(noise: str) -> None:
    strategy = dpfl.udp_fedavg(**HABITS, noise=noise, noise_multiplier=1.0, selection=FIXED)  # type: ignore[arg-type]
    model, uploads, _ = one_round(strategy)
    if noise == "local":  # weighed by who arrived, row by row
        mean = torch.stack(list(uploads.values())).mean(dim=0)
        assert torch.allclose(model.double(), mean, rtol=0, atol=1e-6)
        return
    step = 1.0 / math.sqrt(4) / 2**20
    total = sum((upload / step).round() for upload in uploads.values())
    assert torch.equal(model, (total * step / 4).float())  # multiples of one step: the sum is exact


def test_what_is_sent_is_within_the_clip_but_for_its_noise() -> None:
    for lr in (0.01, 1e3):
        strategy = dpfl.udp_fedavg(
            lr=lr, clip=0.3, batch_size=4, local_epochs=2, noise_multiplier=0.1
        )
        norms = [float(upload.norm()) for upload in one_round(strategy, clear=True)[1].values()]
        assert max(norms) <= 0.3 * (1 + 1e-6)
        assert lr < 1 or min(norms) > 0.299


def test_noise_so_small_that_an_upload_s_integers_cannot_hold_the_update_is_refused() -> None:
    """32 bits hold 10 standard deviations beyond the clip, or it is refused before anyone pays."""
    for noise in (1e-9, 9.8e-4):
        with pytest.raises(PrivacyRefusal, match=r"noise of .* clip of 1\b"):
            agreed(dpfl.udp_fedavg(**HABITS, noise_multiplier=noise, selection=FIXED), 6, 4)
    one_round(dpfl.udp_fedavg(**HABITS, noise_multiplier=9.82e-4, selection=FIXED))


def test_with_more_missing_than_tolerated_nothing_is_published() -> None:
    for tolerated, lost in ((0, 1), (1, 2), (0, 4), (2, 3)):
        strategy = dpfl.udp_fedavg(**HABITS, noise_multiplier=1.0, tolerated_dropouts=tolerated)
        model, _, record = one_round(strategy, clients=4, lost=lost)
        assert not record.published
        assert record.update_norm is None
        assert not bool(model.any())
        model, _, record = one_round(strategy, clients=4, lost=tolerated)
        assert record.published
        assert bool(model.any())


# ---- in training -----------------------------------------------------------------------------------------------------


def trained(strategy: dpfl.Strategy, rounds: int = 5, dropout: float = 0.0) -> dpfl.Result:
    federation = dpfl.Federation.from_dataset(
        load_dataset("digits"), Partition(), 10, dpfl.PublicSeed(0)
    )
    budgets = dpfl.make_budgets(1000.0, 1e-3, federation.ids, dpfl.PublicSeed(1))
    model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
    federation = federation.with_budgets(budgets)
    return train_with_losses(model, federation, strategy, rounds=rounds, dropout=dropout)


@pytest.mark.parametrize("tolerated", [0, 1])
@pytest.mark.parametrize("selection", [FIXED, dpfl.Everyone()])
def test_lost_uploads_silence_a_round_unless_they_were_planned_for_or_would_tell_who_was_drawn(
    tolerated: int, selection: Selection
) -> None:
    strategy = dpfl.udp_fedavg(
        **HABITS, noise_multiplier=4.0, tolerated_dropouts=tolerated, selection=selection
    )
    result = trained(strategy, dropout=0.2)
    assert any(len(line.missing) > 0 for line in result.history)
    for line in result.history:
        silent = len(line.missing) > tolerated and selection is not FIXED
        assert (not line.published) is silent
        assert (line.update_norm is None) is silent
    assert result.summary.rounds.ended_early is None


@pytest.mark.parametrize(
    ("noise", "selection", "observer", "paid"),
    [
        ("distributed", FIXED, Observer.WORLD, 5),
        ("distributed", dpfl.Everyone(), Observer.WORLD, 5),
        ("local", FIXED, Observer.SERVER, 2),
        ("local", POISSON, Observer.SERVER, 2),
    ],
)
def test_noise_left_out_is_calibrated_to_the_smallest_claim(
    noise: str, selection: Selection, observer: Observer, paid: int
) -> None:
    """What sampling amplifies is paid every round; what it does not, in every planned
    participation.
    """
    claims = {**claims_of(9, 20.0), "least": Claims(epsilon=5.0, delta=1e-3, examples=10)}
    agreement = enrol(
        dpfl.udp_fedavg(**HABITS, noise=noise, selection=selection), claims, 5, LAYOUT
    )  # type: ignore[arg-type]
    assert agreement.strategy.observer is observer
    cost = agreement.strategy.cost(observer, (), 10, agreement.terms)
    spent = spend(
        [event.times(paid) for event in cost.events], 1e-3, adjacency=cost.adjacency
    ).epsilon
    assert 0.98 * 5 <= spent <= 5
    assert agreement.strategy.noise_multiplier == agreement.terms.noise_multiplier


def test_without_budgets_and_without_a_multiplier_nothing_is_planned() -> None:
    useless = {"a": Claims(epsilon=math.inf, delta=0.0, examples=10)}
    with pytest.raises(PrivacyRefusal, match="neither a noise_multiplier nor a usable budget"):
        enrol(dpfl.udp_fedavg(**HABITS), useless, 3, LAYOUT)


# ---- who pays what ---------------------------------------------------------------------------------------------------


def test_shares_over_a_cohort_of_random_size_are_refused() -> None:
    with pytest.raises(PrivacyRefusal, match="would tell who was drawn") as caught:
        dpfl.udp_fedavg(**HABITS, noise_multiplier=1.0, selection=POISSON)
    assert "noise = 'local'" in str(caught.value)
    assert "\n" not in str(caught.value)
    dpfl.udp_fedavg(**HABITS, noise_multiplier=1.0, noise="local", selection=POISSON)


@given(st.floats(0.1, 20), st.integers(1, 40), st.integers(0, 5))
def test_the_world_is_billed_the_whole_noise_and_the_server_one_share(
    z: float, cohort: int, tolerated: int
) -> None:
    selection = dpfl.FixedCohort(size=cohort)
    strategy = dpfl.udp_fedavg(
        **HABITS, noise_multiplier=z, tolerated_dropouts=tolerated, selection=selection
    )
    agreement = agreed(strategy, 40, 10)
    world, server = (
        event_against(observer, agreement) for observer in (Observer.WORLD, Observer.SERVER)
    )
    shares = max(1, cohort - tolerated)
    assert world.noise_multiplier == pytest.approx(charged(z, shares), rel=1e-9)
    assert z * (1 - 1e-3) < world.noise_multiplier < z
    assert (world.sampling, world.sampling_rate) == ("uniform", cohort / 40)
    assert server.noise_multiplier == pytest.approx(charged(z / math.sqrt(shares)), rel=1e-9)
    assert (server.sampling, server.sampling_rate) == ("none", 1.0)
    assert (world.numbers, server.numbers) == (shares * LAYOUT.size, LAYOUT.size)


@pytest.mark.parametrize(
    ("selection", "adjacency"), [(FIXED, "replace_one"), (POISSON, "zero_out")]
)
def test_local_noise_is_billed_alike_to_everyone_and_amplified_for_nobody(
    selection: Selection, adjacency: str
) -> None:
    strategy = dpfl.udp_fedavg(**HABITS, noise="local", noise_multiplier=1.7, selection=selection)
    assert (strategy.observer, strategy.adjacency) == ("server", adjacency)
    agreement = agreed(strategy, 10, 4)
    for observer in (Observer.SERVER, Observer.WORLD):
        event = event_against(observer, agreement)
        assert (event.noise_multiplier, event.sampling) == (
            pytest.approx(charged(1.7), rel=1e-9),
            "none",
        )
        assert event.noise_multiplier < 1.7


def test_training_is_billed_as_the_bill_says() -> None:
    result = trained(dpfl.udp_fedavg(**HABITS, noise_multiplier=4.0, selection=FIXED))
    ideal, price = (
        epsilon(multiplier, 0.4, 5, 1e-3, sampling="uniform", adjacency="replace_one")
        for multiplier in (4.0, charged(4.0, 4, 650))
    )
    for line in result.spent.values():
        assert (line.unit, line.observer, line.adjacency) == ("client", "world", "replace_one")
        assert (
            ideal < price < line.epsilon == pytest.approx(price, abs=2e-7)
        )  # the sampler's own 1e-7 on top
    # Each client has committed to all five rounds, however often it was drawn.
    most = max(sum(client in line.cohort for line in result.history) for client in result.spent)
    assert most < 5
    own = charged(4.0 / math.sqrt(4), 1, 650)
    share = epsilon(own, 1.0, 5, 1e-3, sampling="none", adjacency="replace_one")
    told = result.summary.epsilon_against[Observer.SERVER].spent
    assert told.largest == told.smallest == pytest.approx(share, rel=1e-6)


# ---- the figures of the FedCEO note ----------------------------------------------------------------------------------


def gaussian(multiplier: float, steps: int, delta: float, sensitivity: float) -> float:
    """Epsilon of composed Gaussians in closed form (Balle and Wang 2018): together they are one of
    mu.
    """
    mu = sensitivity * math.sqrt(steps) / multiplier

    def gap(target: float) -> float:
        second = math.exp(target + float(special.log_ndtr(-mu / 2 - target / mu)))
        return float(special.ndtr(mu / 2 - target / mu)) - second - delta

    return float(optimize.brentq(gap, 0, mu * mu + 20 * mu))


PAPER = [(1.0, 747.0, 223.0, 14.7), (1.5, 364.0, 115.0, 7.6), (2.0, 223.0, 74.0, 5.2)]


def papers_run(noise_multiplier: float) -> Agreement:
    selection = dpfl.FixedCohort(size=10)
    return agreed(
        dpfl.udp_fedavg(**HABITS, noise_multiplier=noise_multiplier, selection=selection), 100, 300
    )


@pytest.mark.parametrize(("noise", "replace_one", "zero_out", "classic"), PAPER)
def test_against_the_server_thirty_shares_cost_what_the_note_says(
    noise: float, replace_one: float, zero_out: float, classic: float
) -> None:
    """Thirty Gaussians are one with 1 / sqrt(30) of the multiplier, which is quicker to ask for."""
    agreement = papers_run(noise)
    assert agreement.terms.participations == 30
    server = event_against(Observer.SERVER, agreement)
    assert server.noise_multiplier == pytest.approx(charged(noise / math.sqrt(10)), rel=1e-9)
    together = server.noise_multiplier / math.sqrt(30)
    for adjacency, sensitivity, said in (
        ("replace_one", 2.0, replace_one),
        ("zero_out", 1.0, zero_out),
    ):
        found = epsilon(together, 1.0, 1, 1e-5, sampling="none", adjacency=adjacency)
        assert found == pytest.approx(said, abs=1)
        exact = gaussian(server.noise_multiplier, 30, 1e-5, sensitivity)
        assert exact <= found * (1 + 1e-9)
        assert (
            found < exact * 1.002
        )  # above 709 the accountant leaves out a term that a double cannot hold


def test_thirty_releases_are_one_of_them_all() -> None:
    thirty = epsilon(6.0, 1.0, 30, 1e-5, sampling="none", adjacency="zero_out")
    one = epsilon(6.0 / math.sqrt(30), 1.0, 1, 1e-5, sampling="none", adjacency="zero_out")
    exact = gaussian(6.0, 30, 1e-5, 1.0)
    assert thirty == pytest.approx(one, rel=1e-3)
    assert exact * (1 - 1e-9) <= thirty < exact * 1.001


@pytest.mark.parametrize(("noise", "replace_one", "zero_out", "classic"), PAPER)
def test_the_paper_s_reading_is_classic_rdp_of_poisson_samples_and_far_below_a_bound(
    noise: float, replace_one: float, zero_out: float, classic: float
) -> None:
    world = event_against(Observer.WORLD, papers_run(noise))
    assert (world.sampling, world.sampling_rate) == ("uniform", 0.1)
    assert world.noise_multiplier == pytest.approx(charged(noise, 10), rel=1e-9)
    read = epsilon(noise, 0.1, 300, 1e-5, accountant="classic-rdp")
    assert read == pytest.approx(classic, abs=0.1)
    assert epsilon(noise, 0.1, 300, 1e-5, sampling="uniform", adjacency="replace_one") > 2 * read


def test_a_description_states_both_costs_and_the_misreading() -> None:
    from dpfl.experiments.describe import describe

    described = describe(
        Experiment.from_dict(
            {
                "data": {"name": "digits"},
                "partition": {"clients": 10},
                "budgets": {"epsilon": 1000.0, "delta": 1e-3},
                "method": {"name": "udp_fedavg", **HABITS, "noise_multiplier": 4.0},
                "run": {"rounds": 5, "cohort": 4},
            }
        )
    )
    server = epsilon(
        4.0 / math.sqrt(4), 1.0, 5, 1e-3, sampling="none", adjacency="replace_one"
    )  # drawn every round
    world = epsilon(4.0, 0.4, 5, 1e-3, sampling="uniform", adjacency="replace_one")
    for observer, price in ((Observer.SERVER, server), (Observer.WORLD, world)):
        stated = described.epsilon[observer].spread
        assert price <= stated.smallest == stated.largest < price + 0.002
    assert described.published is not None
    classic = epsilon(4.0, 0.4, 5, 1e-3, accountant="classic-rdp")
    assert described.published.epsilon == pytest.approx(classic)
    assert described.published.remark == MISREAD_REMARK
    assert any("only that share counts" in line for line in described.assumptions)


# ---- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"clip": 0.0}, "clip = 0.0"),
        ({"clip": -1.0}, "clip = -1.0"),
        ({"clip": math.nan}, "clip = nan"),
        ({"noise": "x"}, "noise = 'x'"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier = nan"),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf"),
        ({"tolerated_dropouts": -1}, "tolerated_dropouts = -1"),
        ({"lr": -0.1}, "lr = -0.1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"local_epochs": 3}, "both given"),
        ({"lr_decay": 0.0}, "lr_decay = 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)) as caught:
        dpfl.udp_fedavg(**{**HABITS, **wrong})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, 5.0, math.nan])
def test_a_sampling_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="sampling_rate"):
        dpfl.udp_fedavg(
            **HABITS,
            noise="local",
            noise_multiplier=1.0,
            selection=dpfl.PoissonCohort(sampling_rate=rate),
        )


@pytest.mark.parametrize("noise", ["distributed", "local"])
def test_no_noise_at_all_is_no_promise(noise: str) -> None:
    with pytest.raises(PrivacyRefusal, match="nothing protects a client"):
        dpfl.udp_fedavg(**HABITS, noise=noise, noise_multiplier=0.0)  # type: ignore[arg-type]


def test_a_cohort_above_the_population_is_refused_at_enrolment() -> None:
    strategy = dpfl.udp_fedavg(**HABITS, noise_multiplier=1.0, selection=dpfl.FixedCohort(size=11))
    with pytest.raises(ConfigurationError, match=r"\b11\b.*\b10\b"):
        agreed(strategy, 10, 4)
