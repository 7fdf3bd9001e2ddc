"""PPSGD and CENTAUR: a part of the model that stays at its client."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from tests.by_hand import play_clients
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import dpfl
import dpfl.sim.loop
from dpfl import testing
from dpfl.core.errors import ConfigurationError
from dpfl.core.grid_noise import SCALE
from dpfl.core.layout import Layout
from dpfl.core.threads import one_thread
from dpfl.core.types import Aggregate, ClientSettings, Observer, Phase, Terms
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.methods.centaur import HeadThenBody, PersonalHead, SharedBody
from dpfl.methods.ppsgd import PersonalSum
from dpfl.models import make_model
from dpfl.plugs.base import Participant
from dpfl.plugs.local_work import Sgd
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Plan,
    Run,
    Uplink,
    close_round,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.codec import decode_upload
from dpfl.rounds.members import honest_members
from dpfl.runs import result as results
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment

HABITS = {"lr": 0.3, "clip": 0.02, "batch_size": 8, "local_steps": 3, "noise_multiplier": 20.0}
# Whole batches, and a clip that cuts nothing
UNCUT = {"lr": 0.2, "clip": 2.0, "batch_size": 100, "local_steps": 3, "noise_multiplier": 0.01}
TERMS = Terms(
    rounds=5,
    population=8,
    expected_cohort=4.0,
    participations=3,
    smallest_epsilon=1,
    largest_epsilon=1,
    parameters=10,
)

LAYOUT = Layout.of(
    {"0.weight": torch.zeros(4, 5), "0.bias": torch.zeros(4), "2.weight": torch.zeros(3, 4)}
)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Small matrices: threads would only wait for each other."""
    with one_thread():
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=dpfl.PublicSeed(seed).generator())


def tanh_model() -> nn.Module:
    """No kinks, so that two ways of computing it stay close."""
    hidden = make_model("mlp", (64,), 10, dpfl.PublicSeed(0), hidden=6)
    assert isinstance(hidden, nn.Sequential)
    return nn.Sequential(hidden[0], hidden[1], nn.Tanh(), hidden[3])


@functools.cache
def digits() -> dpfl.Federation:
    federation = dpfl.Federation.from_dataset(
        load_dataset("digits"), Partition(records=30), 6, dpfl.PublicSeed(0)
    )
    return federation.with_budgets(
        {client: dpfl.Budget(epsilon=50.0, delta=1e-3) for client in federation.ids}
    )


def opened(strategy: dpfl.Strategy, model: nn.Module | None = None) -> SimpleNamespace:
    """Everything a round needs; ``private`` is what stays at clients."""
    model = tanh_model() if model is None else model
    members, layout = honest_members(digits()), Layout.of_module(model)
    agreement = enrol(strategy, {c: m.claims for c, m in members.items()}, 4, layout)
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=True, title="test")
    run = Run(name="run", ledger=ledger, seed=dpfl.PublicSeed(3), public=dpfl.PublicSeed(5))
    state = first_state(agreement, layout.read(model))
    return SimpleNamespace(
        members=members,
        model=model,
        layout=layout,
        agreement=agreement,
        run=run,
        state=state,
        private={},
    )


def play(setting: SimpleNamespace, engine: str = "stacked") -> tuple[Plan, list[Uplink]]:
    """One round; the setting's state and private parts move on."""
    plan = open_round(setting.agreement, setting.state, setting.run, lambda client: True)
    members = {client: setting.members[client] for client in plan.cohort.ids}
    uplinks = play_clients(
        setting.agreement,
        setting.run,
        plan,
        members,
        make_engine(engine),
        setting.model,
        setting.private,
    )
    setting.state, _ = close_round(setting.agreement, setting.state, plan, uplinks, setting.run)
    return plan, uplinks


def gradient(setting: SimpleNamespace, client: str, vector: Tensor) -> Tensor:
    """Of the mean loss over all of a client's records, by plain autograd."""
    shard = setting.members[client].shard
    leaf = vector.clone().requires_grad_()
    scores = functional_call(setting.model, setting.layout.unflatten(leaf), (shard.features,))
    (found,) = torch.autograd.grad(F.cross_entropy(scores, shard.labels), leaf)
    return found


def noise_of(setting: SimpleNamespace, client: str, round_: int, drawn: int) -> Tensor:
    """What a client of a seeded run adds to its update: whole multiples of the grid's step."""
    rng = setting.run.secret("client", round_, client).child("stage", 1)
    std = setting.agreement.strategy.stages[1].std(drawn)
    return (std / SCALE) * rng.grid_noise_(torch.empty(setting.layout.size)).double()


def sent_by(setting: SimpleNamespace, uplink: Uplink, round_: int, drawn: int) -> Tensor:
    """The multiples that travelled, in double precision."""
    grid = setting.agreement.strategy.upload_grid(drawn)
    return decode_upload(
        uplink.payload or b"", setting.layout.size, "run", round_, uplink.client, grid
    )


# ---- PPSGD: shared + personal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
@pytest.mark.parametrize("personal_lr", [None, 0.5, 0.05])
def test_two_weights_that_step_apart_are_one_that_is_parted_afterwards(
    engine: str, personal_lr: float | None
) -> None:
    """Two rounds against a loop that keeps the two weights apart, and adds the very noise that was
    drawn.
    """
    setting = opened(dpfl.ppsgd(**UNCUT, personal_lr=personal_lr))
    shared = setting.state.model.clone()
    personal = {client: torch.zeros_like(shared) for client in setting.members}
    own = 0.2 if personal_lr is None else personal_lr
    for round_ in range(2):
        play(setting, engine)
        updates = []
        for client in setting.members:
            here, mine = shared.clone(), personal[client]
            for _ in range(3):
                slope = gradient(setting, client, here + mine)
                here, mine = here - 0.2 * slope, mine - own * slope
            assert float((here - shared).norm()) < 2.0  # nothing is clipped
            updates.append(here - shared + noise_of(setting, client, round_, 6).float())
            personal[client] = mine
        shared = shared + torch.stack(updates).mean(dim=0)
    start = setting.layout.read(setting.model)
    assert float((setting.state.model - shared).norm() / (shared - start).norm()) < 1e-4
    assert sorted(setting.private) == sorted(setting.members)
    for client, mine in personal.items():
        assert float((setting.private[client] - mine).norm() / mine.norm()) < 1e-4


def test_without_a_rate_of_their_own_personal_weights_stay_zero_and_it_is_udp_fedavg() -> None:
    habits = {**HABITS, "lr_decay": 0.9, "selection": dpfl.FixedCohort(size=4)}
    setting, plain = (
        opened(dpfl.ppsgd(**habits, personal_lr=0.0)),
        opened(dpfl.udp_fedavg(**habits)),
    )  # type: ignore[arg-type]
    for _ in range(3):
        play(setting)
        play(plain)
    assert not any(bool(part.any()) for part in setting.private.values())
    assert torch.allclose(setting.state.model, plain.state.model, atol=1e-6)


@given(st.floats(1e-3, 1.0), st.integers(0, 99))
def test_the_way_is_parted_by_the_rates_and_nothing_of_it_is_lost(
    shared_part: float, seed: int
) -> None:
    rule = PersonalSum(shared_part=shared_part)
    shared, private, moved = (normal(LAYOUT.size, seed=seed + i).double() for i in range(3))
    assert torch.equal(rule.merge(shared, None, LAYOUT), shared)
    before = rule.merge(shared, private, LAYOUT)
    assert torch.allclose(before, shared + private)
    common, kept = rule.split(shared, before, before + moved, LAYOUT)
    assert torch.allclose(common - shared, shared_part * moved)
    assert torch.allclose(kept - private, (1 - shared_part) * moved)
    assert torch.allclose(rule.merge(common, kept, LAYOUT), before + moved)


@pytest.mark.parametrize("rule", [PersonalSum(shared_part=0.5), PersonalHead()])
def test_what_is_no_number_is_not_kept(rule: Any) -> None:
    shared = normal(LAYOUT.size)
    after = shared + 1
    after[0] = after[-1] = float("nan")
    after[-2] = float("inf")
    common, kept = rule.split(shared, shared, after, LAYOUT)
    assert bool(torch.isfinite(kept).all())
    assert not bool(torch.isfinite(common).all())  # the clip drops the whole update
    assert bool(torch.isfinite(rule.merge(shared, kept, LAYOUT)).all())


def test_what_ppsgd_sends_is_the_shared_part_s_way_clipped_and_noised() -> None:
    """From uploads and noise of the second round: the private part is in them only through the
    gradients.
    """
    habits = {**HABITS, "batch_size": 100, "personal_lr": 0.9}
    setting = opened(dpfl.ppsgd(**habits))  # type: ignore[arg-type]
    play(setting)
    shared, private = setting.state.model, dict(setting.private)
    _, uplinks = play(setting)
    for uplink in uplinks:
        here, mine = shared.clone(), private[uplink.client]
        for _ in range(3):
            slope = gradient(setting, uplink.client, here + mine)
            here, mine = here - 0.3 * slope, mine - 0.9 * slope
        way = here - shared
        assert float(way.norm()) > 0.02
        clear = sent_by(setting, uplink, 1, 6) - noise_of(setting, uplink.client, 1, 6)
        assert torch.allclose(clear, (0.02 * way / way.norm()).double(), rtol=0, atol=1e-6)


# ---- CENTAUR: head, then body ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("examples", "head_steps"), [(40, 15), (41, 18), (3, 3)])
def test_a_round_s_work_is_the_head_for_its_epochs_and_then_the_body(
    examples: int, head_steps: int
) -> None:
    body = Sgd(
        client_settings=ClientSettings(lr=0.1, batch_size=8, local_steps=7),
        weight_decay=0.01,
        lr_decay=0.5,
    )
    participant = Participant(
        examples=examples, client_settings=ClientSettings(lr=0.2), budget=None
    )
    first, second = HeadThenBody(**vars(body), head_epochs=3).phases(TERMS, participant)
    common = {
        "batch_size": 8,
        "sampling": "shuffle",
        "lr": 0.2,
        "weight_decay": 0.01,
        "lr_decay": 0.5,
    }
    assert first == Phase(steps=head_steps, part="head", **common)  # type: ignore[arg-type]
    assert second == Phase(steps=7, part="body", **common)  # type: ignore[arg-type]


def small_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if name == "tanh":
        return tanh_model(), (64,)
    shape = (1, 16, 16) if name == "cnn_small" else (64,)
    return make_model(name, shape, 10, dpfl.PublicSeed(0), hidden=6), shape


def jobs_of(
    shape: tuple[int, ...], start: Tensor, phases: tuple[Phase, ...], clients: int = 2
) -> list[Job]:
    return [
        Job(
            client=f"c{i}",
            start=start,
            phases=phases,
            features=normal(12 + i, *shape, seed=i),
            labels=torch.arange(12 + i) % 10,
            rng=dpfl.SecretRng.simulated(dpfl.PublicSeed(100 + i)),
        )
        for i in range(clients)
    ]


@pytest.mark.parametrize("name", ["tanh", "mlp", "cnn_small"])
@pytest.mark.parametrize("part", ["head", "body"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_phase_moves_its_part_and_leaves_the_other_bit_for_bit(
    name: str, part: str, decay: float
) -> None:
    model, shape = small_model(name)
    layout = Layout.of_module(model)
    start, head = layout.read(model), layout.head
    assert 0 < head.start < head.stop == layout.size
    assert head.stop - head.start == sum(p.numel() for p in list(model.parameters())[-2:])
    phase = Phase(steps=4, batch_size=5, sampling="shuffle", lr=0.1, weight_decay=decay, part=part)  # type: ignore[arg-type]
    body = slice(0, head.start)
    moving, still = (head, body) if part == "head" else (body, head)
    ends = {
        engine: make_engine(engine).run(model, layout, jobs_of(shape, start, (phase,)))
        for engine in ("stacked", "one_by_one")
    }
    for stacked, plain in zip(*ends.values(), strict=True):
        for end in (stacked, plain):
            assert torch.equal(end[still], start[still])
            for block in layout:
                inside = moving.start <= block.start < moving.stop
                assert torch.equal(end[block.slice], start[block.slice]) != inside
        assert float((stacked - plain).norm() / (plain - start).norm()) < 5e-5


@pytest.mark.parametrize("name", ["tanh", "cnn_small"])
def test_both_engines_agree_on_head_then_body(name: str) -> None:
    model, shape = small_model(name)
    layout = Layout.of_module(model)
    start = layout.read(model)
    phases = tuple(
        Phase(steps=3, batch_size=5, sampling="shuffle", lr=0.1, part=part)  # type: ignore[arg-type]
        for part in ("head", "body")
    )
    stacked, plain = (
        make_engine(engine).run(model, layout, jobs_of(shape, start, phases, 3))
        for engine in ("stacked", "one_by_one")
    )
    for mine, oracle in zip(stacked, plain, strict=True):
        assert float((mine - oracle).norm() / (oracle - start).norm()) < 5e-5


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_centaur_is_head_steps_then_body_steps_under_the_new_head(engine: str) -> None:
    """Two rounds against a loop written out, which adds the very noise that was drawn to the body."""
    setting = opened(dpfl.centaur(**UNCUT, head_epochs=2))
    start, head = setting.layout.read(setting.model), setting.layout.head
    shared, heads = start.clone(), {client: start[head].clone() for client in setting.members}
    for round_ in range(2):
        play(setting, engine)
        updates = []
        for client in setting.members:
            here = shared.clone()
            here[head] = heads[client]
            for _ in range(2):
                slope = gradient(setting, client, here)
                slope[: head.start] = 0
                here = here - 0.2 * slope
            for _ in range(3):
                slope = gradient(setting, client, here)
                slope[head] = 0
                here = here - 0.2 * slope
            heads[client] = here[head].clone()
            here[head] = shared[head]
            assert float((here - shared).norm()) < 2.0  # nothing is clipped
            noise = noise_of(setting, client, round_, 6).float()
            noise[head] = 0
            updates.append(here - shared + noise)
        shared = shared + torch.stack(updates).mean(dim=0)
    assert float((setting.state.model - shared).norm() / (shared - start).norm()) < 1e-4
    for client, mine in heads.items():
        assert float((setting.private[client] - mine).norm() / (mine - start[head]).norm()) < 1e-4


@given(st.integers(0, 99))
def test_the_body_is_shared_and_the_head_is_kept(seed: int) -> None:
    rule, head = PersonalHead(), LAYOUT.head
    assert (head.start, head.stop) == (24, 36)
    shared, private, after = (
        normal(36, seed=seed),
        normal(12, seed=seed + 1),
        normal(36, seed=seed + 2),
    )
    assert torch.equal(rule.merge(shared, None, LAYOUT), shared)
    before, untouched = rule.merge(shared, private, LAYOUT), shared.clone()
    assert torch.equal(before, torch.cat([shared[:24], private]))
    common, kept = rule.split(shared, before, after, LAYOUT)
    assert torch.equal(common, torch.cat([after[:24], shared[24:]]))
    assert torch.equal(kept, after[24:])
    assert torch.equal(shared, untouched)


def test_the_head_s_coordinates_of_an_upload_are_noise_alone_and_the_shared_head_never_changes() -> (
    None
):
    setting = opened(dpfl.centaur(**HABITS, selection=dpfl.FixedCohort(size=4)))
    start, head = setting.state.model.clone(), setting.layout.head
    for round_ in range(3):
        _, uplinks = play(setting)
        for uplink in uplinks:
            sent = sent_by(setting, uplink, round_, 4)
            noise = noise_of(setting, uplink.client, round_, 4)
            assert torch.equal(sent[head], noise[head])  # zero before it
            assert float((sent - noise)[: head.start].norm()) == pytest.approx(
                0.02, rel=1e-3
            )  # all of the clip
        assert torch.equal(setting.state.model[head], start[head])
        assert not torch.equal(setting.state.model[: head.start], start[: head.start])


def test_a_model_of_one_layer_is_refused_in_one_sentence_before_anything_is_charged(
    tmp_path: Path,
) -> None:
    model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
    with pytest.raises(ConfigurationError) as refused:
        dpfl.train(
            model,
            digits(),
            dpfl.centaur(**HABITS),
            rounds=1,
            ledger=tmp_path / "book",
            new_ledger=True,
        )
    assert (
        str(refused.value)
        == "centaur: the model has one layer, so there is no body to share; use a deeper one"
    )
    with pytest.raises(ConfigurationError, match="one layer"):
        run_experiment(experiment("centaur", model={"name": "logistic"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    book = Ledger.open(tmp_path / "book")
    assert not any(
        book.history(client, observer) for client in digits().ids for observer in Observer
    )
    book.close()


def linear_model() -> nn.Module:
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6, bias=False), nn.Linear(6, 9), nn.Linear(9, 10)
    )
    layout = Layout.of_module(layers)
    layout.write(0.3 * normal(layout.size), layers)
    return layers


def off_orthonormal(matrix: Tensor) -> float:
    """How far the shorter side's vectors are from orthonormal."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    return float((tall.T @ tall - torch.eye(tall.shape[1])).abs().max())


def test_a_linear_representation_is_orthonormal_after_every_round() -> None:
    settings = [
        opened(dpfl.centaur(**HABITS, linear_representation=kind), linear_model())
        for kind in (True, False)
    ]
    for _ in range(2):
        for setting in settings:
            play(setting)
        true, false = (s.layout.unflatten(s.state.model) for s in settings)
        for name in ("1.weight", "2.weight"):
            assert off_orthonormal(true[name]) < 1e-5
            assert off_orthonormal(false[name]) > 0.05
        start = settings[0].layout.unflatten(settings[0].layout.read(linear_model()))
        assert torch.equal(true["3.weight"], start["3.weight"])
        assert off_orthonormal(true["3.weight"]) > 0.05


def test_orthonormalising_keeps_the_span_and_the_biases_and_a_frame_that_is_one() -> None:
    model = linear_model()
    layout = Layout.of_module(model)
    start, step = layout.read(model), normal(layout.size, seed=1)
    plug = SharedBody(linear_representation=True)
    place = Aggregate(vector=step, model=start, layout=layout, round=0)
    update, _, _ = plug({}, place)
    wanted, found = layout.unflatten(start + step), layout.unflatten(start + update)
    for name in ("1.weight", "2.weight"):
        wide = wanted[name].shape[0] < wanted[name].shape[1]
        old, new = (m.T if wide else m for m in (wanted[name], found[name]))
        assert torch.allclose(new @ (new.T @ old), old, atol=1e-4)
    assert torch.allclose(found["2.bias"], wanted["2.bias"], atol=1e-6)
    assert torch.equal(found["3.weight"], layout.unflatten(start)["3.weight"])
    moved = Aggregate(vector=torch.zeros(layout.size), model=start + update, layout=layout, round=1)
    again, _, _ = plug({}, moved)
    assert float(again.abs().max()) < 1e-5
    plain, _, _ = SharedBody()({}, place)
    assert torch.allclose(plain[: layout.head.start], step[: layout.head.start], atol=1e-6)


def test_the_pieces_obey_the_laws() -> None:
    body = Sgd(client_settings=ClientSettings(lr=0.1, batch_size=8, local_epochs=2))
    testing.check_local_work(HeadThenBody(**vars(body), head_epochs=2))
    testing.check_denoiser(SharedBody())
    testing.check_denoiser(SharedBody(linear_representation=True))


# ---- what both keep to themselves ------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("method", ["ppsgd", "centaur"])
MAKE: dict[str, Callable[..., dpfl.Strategy]] = {"ppsgd": dpfl.ppsgd, "centaur": dpfl.centaur}


def experiment(name: str, /, **changes: dict[str, Any]) -> Experiment:
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"clients": 6, "records": 30},
        "budgets": {"epsilon": 50.0, "delta": 1e-3},
        "model": {"name": "mlp", "hidden": 6},
        "method": {"name": name, **HABITS},
        "run": {"rounds": 4, "cohort": 4, "seed": 3},
        "clients": {"client-2": {"batch_size": 4}},  # work of two shapes: two blocks
    }
    return Experiment.from_dict(
        {**values, **{name: {**values[name], **section} for name, section in changes.items()}}
    )


def checkpoint(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "checkpoint" / "state.safetensors")


def private_parts(folder: Path) -> dict[str, Tensor]:
    return {
        n.partition("/")[2]: part
        for n, part in checkpoint(folder).items()
        if n.startswith("private/")
    }


def assert_same(one: Path, other: Path) -> None:
    """Model and record to the byte, and what would be gone on from to the bit."""
    for name in ("model.safetensors", "rounds.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    mine, theirs = checkpoint(one), checkpoint(other)
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def numbers(value: object) -> Iterator[float]:
    """All numbers in a piece of JSON."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield float(value)


@BOTH
def test_private_parts_last_until_their_client_is_drawn_again(method: str) -> None:
    setting = opened(MAKE[method](**HABITS, selection=dpfl.FixedCohort(size=3)))
    seen: set[str] = set()
    size = {
        "ppsgd": setting.layout.size,
        "centaur": setting.layout.size - setting.layout.head.start,
    }[method]
    again = 0
    for _ in range(4):
        before = {client: part.clone() for client, part in setting.private.items()}
        plan, _ = play(setting)
        again += len(seen & set(plan.cohort.ids))
        seen |= set(plan.cohort.ids)
        assert set(setting.private) == seen
        for client, part in setting.private.items():
            assert part.shape == (size,)
            stayed = client in before and torch.equal(part, before[client])
            assert stayed == (client not in plan.cohort.ids)
    assert again >= 2


@BOTH
def test_a_client_goes_on_from_its_own_private_part(method: str) -> None:
    """Another private part makes another upload: the next one is built on it."""
    uploads = []
    for shift in (0.0, 0.5):
        setting = opened(MAKE[method](**{**HABITS, "clip": 2.0, "noise_multiplier": 0.01}))
        play(setting)
        setting.private["client-1"] = setting.private["client-1"] + shift
        uploads.append({uplink.client: uplink.payload for uplink in play(setting)[1]})
    assert [client for client in uploads[0] if uploads[0][client] != uploads[1][client]] == [
        "client-1"
    ]


@BOTH
def test_nothing_private_is_sent_or_written_down(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads: list[bytes] = []

    def listening(
        agreement: Any, state: Any, plan: Plan, uplinks: Sequence[Uplink], run: Run
    ) -> Any:
        payloads.extend(uplink.payload or b"" for uplink in uplinks)
        payloads.extend(plan.downloads.values())
        return close_round(agreement, state, plan, uplinks, run)

    kept: list[Tensor] = []

    def keeping(done: int, rounds: int, line: dict[str, Any]) -> None:
        kept.extend(private_parts(tmp_path / "run").values())

    monkeypatch.setattr(dpfl.sim.loop, "close_round", listening)
    run_experiment(experiment(method), tmp_path / "run", progress=keeping)
    assert len(payloads) == 4 * 2 * 4
    assert len(kept) > 10
    start = experiment(method).build_model(experiment(method).federation())
    everyone_s = {
        value for p in start.parameters() for value in p.flatten().tolist()
    }  # weights that never moved
    secrets = {value for part in kept for value in part.tolist()} - everyone_s - {0.0}
    assert len(secrets) > 100
    for part in kept:
        assert not any(part[-8:].numpy().tobytes() in payload for payload in payloads)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    ]
    assert secrets.isdisjoint(torch.tensor(list(numbers(lines)), dtype=torch.float32).tolist())
    assert not any("private" in json.dumps(line) for line in lines)
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert sorted(model) == ["1.bias", "1.weight", "3.bias", "3.weight"]
    assert secrets.isdisjoint(torch.cat([t.flatten() for t in model.values()]).tolist())


@BOTH
@pytest.mark.parametrize("noise", ["distributed", "local"])
def test_what_is_sent_is_billed_as_udp_fedavg_and_what_stays_is_not(
    method: str, noise: str
) -> None:
    """But for amplification: clients remember, and what one does later may tell that it was drawn."""
    habits = {**HABITS, "noise": noise, "selection": dpfl.FixedCohort(size=4)}
    setting, plain = opened(MAKE[method](**habits)), opened(dpfl.udp_fedavg(**habits))  # type: ignore[arg-type]
    member = setting.members["client-0"].participant
    server, world = (
        setting.agreement.cost(observer, member) for observer in (Observer.SERVER, Observer.WORLD)
    )
    assert server == plain.agreement.cost(Observer.SERVER, member)
    (paid,), (amplified,) = world.events, plain.agreement.cost(Observer.WORLD, member).events
    shares = 4 if noise == "distributed" else 1
    widened = (
        1 + 20.0 * math.sqrt(setting.layout.size / shares) / 2**20
    )  # by rounding onto a share's grid
    assert (
        paid.noise_multiplier
        == amplified.noise_multiplier
        == pytest.approx(20.0 / widened, rel=1e-9)
    )
    assert 20.0 * (1 - 1e-3) < paid.noise_multiplier < 20.0
    assert (paid.sampling, paid.sampling_rate) == ("none", 1.0)
    assert not setting.agreement.amplified
    assert any("stays at its client" in line for line in setting.agreement.strategy.assumptions)
    plan, _ = play(setting)
    for client in setting.members:  # who was not drawn has nothing to pay for
        tabs = [
            setting.run.ledger.history(client, observer)
            for observer in (Observer.SERVER, Observer.WORLD)
        ]
        assert all((tab != ()) == (client in plan.cohort.ids) for tab in tabs)


@BOTH
@pytest.mark.parametrize("done", [1, 3])
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    method: str, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_experiment(experiment(method), tmp_path / "whole")
    rounds = 0

    def struck(*arguments: Any) -> Any:
        nonlocal rounds
        if rounds == done:
            raise KeyboardInterrupt
        rounds += 1
        return close_round(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dpfl.sim.loop, "close_round", struck)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(experiment(method), tmp_path / "killed")
    assert len(private_parts(tmp_path / "killed")) >= 4
    run_experiment(experiment(method), tmp_path / "killed", resume=True)
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_private_parts_are_what_a_resumed_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has teeth: a resumed run that forgot them would end elsewhere."""
    run_experiment(experiment("ppsgd"), tmp_path / "whole")
    monkeypatch.setattr(
        dpfl.sim.loop.Workers,
        "run",
        lambda self, downloads, blocks, private, _run=dpfl.sim.loop.Workers.run: _run(
            self, downloads, blocks, {}
        ),
    )
    run_experiment(experiment("ppsgd"), tmp_path / "forgetful")
    whole, forgetful = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "forgetful")
    )
    assert whole != forgetful


def test_workers_never_change_a_bit(tmp_path: Path) -> None:
    for workers in (1, 2):
        run_experiment(experiment("centaur"), tmp_path / str(workers), workers=workers)
    assert_same(tmp_path / "1", tmp_path / "2")


# ---- which model is tested -------------------------------------------------------------------------------------------


@BOTH
def test_clients_own_models_are_tested_on_their_own_records_and_the_summary_says_so(
    method: str, tmp_path: Path
) -> None:
    described = experiment(method, method={"clip": 1.0, "local_steps": 20})
    result = run_experiment(described, tmp_path / "run")
    federation = described.federation()
    model = described.build_model(federation)
    layout = Layout.of_module(model)
    shared, kept = checkpoint(tmp_path / "run")["model"], private_parts(tmp_path / "run")
    personal = described.strategy(6).personal
    assert personal is not None

    def right(vector: Tensor, features: Tensor, labels: Tensor) -> int:
        scores = functional_call(model, layout.unflatten(vector), (features,))
        return int((scores.argmax(1) == labels).sum())

    shards = federation.shards
    tested = sum(len(shard.test_labels) for shard in shards.values())
    own = sum(
        right(
            personal.merge(shared, kept.get(client), layout), shard.test_features, shard.test_labels
        )
        for client, shard in shards.items()
    )
    common = sum(right(shared, shard.test_features, shard.test_labels) for shard in shards.values())
    assert own != common
    for told in (result.summary, result.history[-1]):
        assert told.scores is not None
        assert told.scores.accuracy == pytest.approx(own / tested, abs=1e-6)
        assert told.scores.common == pytest.approx(common / tested, abs=1e-6)
    assert result.summary.tested is results.ModelTested.PERSONAL
    assert json.loads((tmp_path / "run" / "summary.json").read_text())[
        "common_accuracy"
    ] == pytest.approx(common / tested, abs=1e-6)


def test_where_nothing_stays_at_clients_the_common_model_is_tested(tmp_path: Path) -> None:
    summary = run_experiment(experiment("udp_fedavg"), tmp_path / "run").summary
    assert summary.tested is results.ModelTested.COMMON
    assert summary.scores.common is None
    assert "common_accuracy" not in summary.to_dict()
    assert private_parts(tmp_path / "run") == {}


# ---- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"head_epochs": 0}, {"head_epochs": -1}, {"head_epochs": 1.5}, {"lr": 0.0}]
)
def test_centaur_s_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        dpfl.centaur(**{**HABITS, **wrong})


@pytest.mark.parametrize("rate", [-0.1, -1e-9, math.nan, math.inf])
def test_a_personal_rate_that_makes_no_sense_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="personal_lr"):
        dpfl.ppsgd(**HABITS, personal_lr=rate)


@BOTH
@pytest.mark.parametrize(
    "wrong", [{"noise": "central"}, {"clip": 0.0}, {"noise_multiplier": -1.0}, {"local_epochs": 2}]
)
def test_settings_of_both_that_make_no_sense_are_refused(
    method: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        MAKE[method](**{**HABITS, **wrong})


def test_a_phase_that_clips_records_moves_everything() -> None:
    whole = Phase(steps=1, batch_size=1, sampling="poisson", lr=0.1, clip=1.0)
    for part in ("head", "body"):
        with pytest.raises(ConfigurationError, match=f"only the {part} moves"):
            replace(whole, part=part)
