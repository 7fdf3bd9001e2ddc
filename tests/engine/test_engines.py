from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.grid_noise import SCALE
from dpfl.core.layout import Layout
from dpfl.core.phases import CLIPPINGS, Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.engine import make_engine, one_by_one, stacked
from dpfl.engine.base import Engine, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.plugs.sampling import PoissonBatches, sampler

TOLERANCE = 5e-5  # relative error of the update
FEATURES, CLASSES = 6, 3
ENGINES = pytest.mark.parametrize("engine", [OneByOne(), Stacked()], ids=["one_by_one", "stacked"])


def rng(seed: int) -> SecretRng:
    return SecretRng.simulated(PublicSeed(seed))


def phase(**fields: object) -> Phase:
    """DP-SGD without noise, unless told otherwise."""
    values: dict[str, object] = {
        "steps": 5,
        "batch_size": 8,
        "sampling": "poisson",
        "lr": 0.3,
        "clip": 1.0,
    }
    return Phase(**(values | fields))  # type: ignore[arg-type]


def plain(**fields: object) -> Phase:
    return phase(**{"sampling": "shuffle", "clip": None, **fields})


def job(
    model: nn.Module,
    *phases: Phase,
    seed: int = 0,
    records: int = 30,
    shape: tuple[int, ...] = (FEATURES,),
    features: Tensor | None = None,
    labels: Tensor | None = None,
) -> Job:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, *shape, generator=generator)
    y = torch.randint(0, CLASSES, (records,), generator=generator)
    return Job(
        client=f"client-{seed}",
        start=Layout.of_module(model).read(model),
        phases=phases,
        features=x if features is None else features,
        labels=y if labels is None else labels,
        rng=rng(seed),
    )


def updates(engine: Engine, model: nn.Module, jobs: Sequence[Job]) -> list[Tensor]:
    after = engine.run(model, Layout.of_module(model), jobs)
    return [vector - job.start for vector, job in zip(after, jobs, strict=True)]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


def worst_error(model: nn.Module, jobs: Sequence[Job]) -> float:
    """Of the stacked engine against the oracle, over the clients."""
    pairs = zip(updates(Stacked(), model, jobs), updates(OneByOne(), model, jobs), strict=True)
    return max(relative_error(got, wanted) for got, wanted in pairs)


def mlp(*activations: nn.Module, bias: bool = True, width: int = 7) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    size = FEATURES
    for activation in activations:
        layers += [nn.Linear(size, width, bias=bias), activation]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, CLASSES, bias=bias))


def logistic(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES, bias=bias))


@pytest.fixture(autouse=True)
def reproducible_models() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "logistic": logistic,
    "logistic without bias": lambda: logistic(bias=False),
    "a bare linear layer": lambda: nn.Linear(FEATURES, CLASSES),
    "two layers, relu": lambda: mlp(nn.ReLU()),
    "two layers, tanh, without bias": lambda: mlp(nn.Tanh(), bias=False),
    "three layers, gelu and sigmoid": lambda: mlp(nn.GELU(), nn.Sigmoid()),
    "four layers, elu, silu, softplus": lambda: mlp(nn.ELU(), nn.SiLU(), nn.Softplus()),
    "five layers, without bias": lambda: mlp(
        nn.LeakyReLU(0.2), nn.Tanh(), nn.Identity(), nn.LeakyReLU(0.1), bias=False
    ),
    "mixed biases": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.Linear(4, CLASSES, bias=False),
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(FEATURES, 5), nn.Sequential(nn.Tanh())), nn.Linear(5, CLASSES)
    ),
    "activation first": lambda: nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, CLASSES)),
}


# ---- the two engines agree -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    "work",
    [
        phase(),
        phase(clip=0.05),
        phase(clip=100.0),
        plain(),
        plain(weight_decay=0.1),
        plain(ball=0.2),
        plain(momentum=0.9, proximal=0.5, weight_decay=0.1),
        phase(momentum=0.9, proximal=0.5, weight_decay=0.1, noise_multiplier=0.5),
        phase(clip=0.3, clipping="per_layer"),
        phase(clip=0.3, clipping="normalised"),
    ],
    ids=[
        *("dp-sgd", "small clip", "large clip", "sgd", "weight decay", "ball", "momentum"),
        *("noisy momentum", "per layer", "normalised"),
    ],
)
def test_stacked_agrees_with_the_oracle_on_every_chain(name: str, work: Phase) -> None:
    model = CHAINS[name]()
    assert worst_error(model, [job(model, work, seed=seed) for seed in range(3)]) < TOLERANCE


@pytest.mark.parametrize("work", [phase(), plain()], ids=["dp-sgd", "sgd"])
def test_an_activation_used_twice_acts_twice(work: Phase) -> None:
    """Modules list a child once, however often it is called."""
    tanh = nn.Tanh()
    model = mlp(tanh, tanh)
    assert worst_error(model, [job(model, work, seed=seed) for seed in range(2)]) < TOLERANCE


@pytest.mark.parametrize("work", [phase(), plain()], ids=["dp-sgd", "sgd"])
@pytest.mark.parametrize(
    "activations",
    [
        [nn.ReLU(inplace=True)],
        [nn.Tanh(), nn.ReLU(inplace=True)],
        [nn.Tanh(), nn.ELU(inplace=True), nn.SiLU(inplace=True)],
    ],
    ids=["first", "second", "later"],
)
def test_activations_in_place_are_the_same_functions(
    activations: list[nn.Module], work: Phase
) -> None:
    model = mlp(*activations)
    assert worst_error(model, [job(model, work, seed=seed) for seed in range(2)]) < TOLERANCE


def test_stacked_agrees_with_the_oracle_on_images() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    assert (
        worst_error(model, [job(model, phase(), seed=seed, shape=(1, 4, 4)) for seed in range(3)])
        < TOLERANCE
    )


def test_stacked_agrees_with_the_oracle_where_a_linear_layer_acts_on_the_last_axis_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, CLASSES))
    assert (
        worst_error(model, [job(model, phase(), seed=seed, shape=(2, 3)) for seed in range(2)])
        < TOLERANCE
    )


clients = st.lists(
    st.fixed_dictionaries(
        {
            "records": st.integers(1, 40),
            "batch_size": st.integers(1, 30),
            "steps": st.integers(1, 6),
            "lr": st.floats(0.01, 1.0),
            "clip": st.floats(0.01, 3.0),
            "weight_decay": st.sampled_from([0.0, 0.05]),
            "momentum": st.sampled_from([0.0, 0.5, 0.9]),
            "proximal": st.sampled_from([0.0, 0.3]),
            "clipping": st.sampled_from(CLIPPINGS),
            "ball": st.sampled_from([None, 0.3]),
            "sampling": st.sampled_from(["poisson", "shuffle"]),
            "clipped": st.booleans(),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(plans=clients, bias=st.booleans())
def test_stacked_agrees_with_the_oracle_for_clients_of_every_habit(
    plans: list[dict[str, object]], bias: bool
) -> None:
    """An update of exactly zero (nobody was drawn) has no relative error: there they are equal but
    for the rounding of the weights themselves.
    """
    model = mlp(nn.Tanh(), bias=bias)
    rounding = 2**-23 * float(Layout.of_module(model).read(model).norm())
    jobs = []
    for seed, plan in enumerate(plans):
        fields = {key: value for key, value in plan.items() if key not in ("records", "clipped")}
        plainly = {**fields, "clip": None, "clipping": "flat"}
        work = phase(**(fields if plan["clipped"] else plainly))
        jobs.append(job(model, work, seed=seed, records=int(plan["records"])))  # type: ignore[call-overload]
    for got, wanted in zip(
        updates(Stacked(), model, jobs), updates(OneByOne(), model, jobs), strict=True
    ):
        assert bool(torch.isfinite(wanted).all())
        assert float((got - wanted).norm()) <= TOLERANCE * float(wanted.norm()) + rounding


def test_stacked_agrees_with_the_oracle_over_several_phases() -> None:
    model = mlp(nn.Tanh())
    one, two = (
        (phase(), plain(steps=3)),
        (phase(steps=2, batch_size=3), phase(clip=0.1), plain(ball=0.5)),
    )
    jobs = [job(model, *(one if seed % 2 else two), seed=seed) for seed in range(5)]
    assert worst_error(model, jobs) < TOLERANCE


def test_stacked_agrees_with_the_oracle_with_noise_because_both_draw_from_the_same_streams() -> (
    None
):
    model = mlp(nn.Tanh())
    jobs = [
        job(
            model,
            phase(noise_multiplier=0.5 + seed, clip=0.2),
            phase(noise_multiplier=1.0),
            seed=seed,
        )
        for seed in range(4)
    ]
    assert worst_error(model, jobs) < TOLERANCE


def test_clients_of_one_block_keep_their_own_rate_clip_noise_decay_and_ball() -> None:
    model = logistic()
    habits = [
        {"lr": 0.1, "clip": 1.0, "noise_multiplier": 0.0, "weight_decay": 0.0, "ball": 0.5},
        {"lr": 0.9, "clip": 0.1, "noise_multiplier": 2.0, "weight_decay": 0.1, "ball": 0.1},
        {"lr": 0.3, "clip": 5.0, "noise_multiplier": 0.3, "weight_decay": 0.0, "ball": 9.0},
    ]
    jobs = [job(model, phase(**fields), seed=seed) for seed, fields in enumerate(habits)]
    assert Stacked().blocks([job.phases for job in jobs]) == [[0], [1, 2]]
    assert worst_error(model, jobs) < TOLERANCE


@pytest.mark.parametrize(
    "work", [phase(), plain(), phase(noise_multiplier=1.0)], ids=["dp-sgd", "sgd", "noisy"]
)
def test_a_client_alone_gets_what_it_gets_among_others_in_any_order(work: Phase) -> None:
    model = mlp(nn.Tanh())
    jobs = [job(model, work, seed=seed, records=10 + 5 * seed) for seed in range(6)]
    together = updates(Stacked(), model, jobs)
    backwards = updates(Stacked(), model, jobs[::-1])[::-1]
    for i, one in enumerate(jobs):
        (alone,) = updates(Stacked(), model, [one])
        assert relative_error(together[i], alone) < TOLERANCE
        assert relative_error(backwards[i], alone) < TOLERANCE


def test_working_in_small_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(nn.Tanh())
    jobs = [job(model, phase(batch_size=20), seed=seed) for seed in range(3)]
    whole = [updates(engine, model, jobs) for engine in (Stacked(), OneByOne())]
    monkeypatch.setattr(stacked, "_MOST_NUMBERS", 1)
    monkeypatch.setattr(one_by_one, "_MOST_NUMBERS", 3 * Layout.of_module(model).size)
    pieces = [updates(engine, model, jobs) for engine in (Stacked(), OneByOne())]
    for before, after in zip(whole, pieces, strict=True):
        assert max(relative_error(b, a) for b, a in zip(after, before, strict=True)) < TOLERANCE


# ---- against code that shares nothing with either ------------------------------------------------


def by_hand(one: Job, work: Phase) -> tuple[np.ndarray, list[float]]:
    """DP-SGD for logistic regression, written out record by record; also the norms before clipping."""
    assert work.clip is not None
    x, y = one.features.double().numpy(), one.labels.numpy()
    theta = one.start.double().numpy().copy()
    noise = one.rng.child("noise", 0)
    norms = []
    for batch in PoissonBatches(len(y), work.batch_size).draw(
        one.rng.child("records", 0), work.steps
    ):
        weight = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
        bias = theta[CLASSES * FEATURES :]
        total = np.zeros_like(theta)
        for record in batch.tolist():
            scores = weight @ x[record] + bias
            probabilities = np.exp(scores - scores.max())
            probabilities /= probabilities.sum()
            probabilities[y[record]] -= 1
            gradient = np.concatenate([np.outer(probabilities, x[record]).ravel(), probabilities])
            norm = float(np.linalg.norm(gradient))
            norms.append(norm)
            total += gradient * min(1.0, work.clip / norm)
        if work.noise_multiplier > 0:
            drawn = noise.grid_noise_(torch.empty(len(theta))).double().numpy() / SCALE
            total += work.noise_multiplier * work.clip * drawn
        theta -= work.lr * total / work.batch_size
    return theta - one.start.double().numpy(), norms


@ENGINES
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.7])
@pytest.mark.parametrize("steps", [1, 8])
def test_dp_sgd_is_what_a_hand_written_loop_over_records_computes(
    engine: Engine, noise_multiplier: float, steps: int
) -> None:
    model = logistic()
    work = phase(steps=steps, clip=1.5, noise_multiplier=noise_multiplier)
    jobs = [job(model, work, seed=seed) for seed in range(4)]
    seen: list[float] = []
    for got, one in zip(updates(engine, model, jobs), jobs, strict=True):
        wanted, norms = by_hand(one, work)
        seen += norms
        assert relative_error(got.double(), torch.from_numpy(wanted)) < TOLERANCE
    assert min(seen) < 1.5 < max(seen), "some records must be clipped, some not"


@ENGINES
@pytest.mark.parametrize("proximal", [0.0, 0.7])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
def test_plain_sgd_is_what_torch_computes(
    engine: Engine, weight_decay: float, momentum: float, proximal: float
) -> None:
    model = mlp(nn.Tanh())
    layout = Layout.of_module(model)
    how = {"weight_decay": weight_decay, "momentum": momentum}
    work = plain(steps=9, proximal=proximal, **how)
    one = job(model, work)
    (got,) = updates(engine, model, [one])
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr, **how)
    for batch in sampler(work, 30).draw(one.rng.child("records", 0), work.steps):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(one.features[batch]), one.labels[batch])
        pairs = zip(model.parameters(), start, strict=True)
        (loss + proximal / 2 * sum((w - w0).square().sum() for w, w0 in pairs)).backward()
        optimiser.step()
    assert relative_error(got, layout.read(model) - one.start) < TOLERANCE


@ENGINES
def test_each_record_is_clipped_on_its_own(engine: Engine) -> None:
    """Ten copies of a record with a large gradient: a sum of ten clips, not one clip of a sum."""
    model = logistic()
    x = 50 * torch.ones(10, FEATURES)
    wrong = model(x)[0].argmin()
    one = job(
        model, phase(steps=1, batch_size=10, lr=1.0, clip=0.5), features=x, labels=wrong.repeat(10)
    )
    (update,) = updates(engine, model, [one])
    assert float(update.norm()) == pytest.approx(0.5, rel=1e-4)


@ENGINES
@given(
    seed=st.integers(0, 2**32),
    clip=st.floats(1e-3, 10.0),
    scale=st.one_of(
        st.floats(0.1, 100.0), st.sampled_from([1e6, 1e18, 1e19, 1e20, 1e30, 1e38, math.inf])
    ),
)
def test_one_record_moves_a_step_by_at_most_the_clip_over_the_expected_batch(
    engine: Engine, seed: int, clip: float, scale: float
) -> None:
    """The sensitivity that is billed: a record replaced by nothing (zero, in a model without
    biases).
    """
    torch.manual_seed(seed % 1000)
    model = mlp(nn.Tanh(), bias=False)
    work = phase(steps=1, batch_size=12, lr=1.0, clip=clip)
    one = job(model, work, seed=seed, records=12)  # rate one: the record takes part
    features = one.features.clone()
    features[3] *= scale
    with_it = replace(one, features=features)
    without = replace(one, features=features.index_fill(0, torch.tensor([3]), 0.0))
    (a,), (b,) = (updates(engine, model, [each]) for each in (with_it, without))
    assert float((a - b).double().norm()) <= clip / 12 * (1 + 1e-6) + 3e-7


# ---- noise ---------------------------------------------------------------------------------------


def accepted(sample: Tensor, std: float) -> bool:
    """The law of SAFETY.md: 10^5 draws, ratio of standard deviations within [0.9926, 1.0074]."""
    return 0.9926 <= float(sample.double().square().mean().sqrt()) / std <= 1.0074


def noise_only(engine: Engine, *phases: Phase, count: int = 13, records: int = 40) -> list[Tensor]:
    """Updates of clients whose records are not numbers, so that only noise is left; zero start, to
    keep every bit.
    """
    model = nn.Linear(784, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    broken = torch.full((records, 784), math.nan)
    return updates(
        engine,
        model,
        [job(model, *phases, seed=seed, features=broken, records=records) for seed in range(count)],
    )


@ENGINES
def test_the_noise_of_dp_sgd_has_the_std_that_is_billed_and_the_test_would_see_three_percent(
    engine: Engine,
) -> None:
    lr, z, clip, steps, batch = 0.5, 1.7, 0.3, 4, 8
    sample = torch.cat(
        noise_only(
            engine, phase(steps=steps, batch_size=batch, lr=lr, clip=clip, noise_multiplier=z)
        )
    )
    std = lr * z * clip * math.sqrt(steps) / batch
    assert len(sample) > 100_000
    assert accepted(sample, std)
    assert not accepted(0.97 * sample, std)
    assert not accepted(1.03 * sample, std)


@ENGINES
def test_the_denominator_is_the_expected_batch_even_where_it_exceeds_the_data(
    engine: Engine,
) -> None:
    """A batch of 100 of 40 records: all 40 take part, and 40 is what the noisy sum is divided by."""
    sample = torch.cat(
        noise_only(engine, phase(steps=1, batch_size=100, lr=1.0, clip=1.0, noise_multiplier=2.0))
    )
    assert accepted(sample, 2.0 / 40)


@ENGINES
def test_noise_is_independent_between_clients_steps_phases_and_layers(engine: Engine) -> None:
    one_step = phase(steps=1, lr=1.0, noise_multiplier=8.0)
    first = noise_only(engine, one_step, count=4)
    both_phases = noise_only(engine, one_step, one_step, count=4)
    both_steps = noise_only(engine, replace(one_step, steps=2), count=4)
    for i in range(4):
        others = [
            first[(i + 1) % 4],  # another client
            both_phases[i] - first[i],  # the second phase of the same
            both_steps[i] - first[i],  # the second step of the same
            first[i].roll(785),  # another class, another pixel
            first[i].roll(1),
        ]
        for other in others:
            correlation = torch.corrcoef(torch.stack([first[i], other]))[0, 1]
            assert abs(float(correlation)) < 4 / math.sqrt(len(other))


@ENGINES
def test_noise_of_the_operating_system_never_repeats(engine: Engine) -> None:
    model = logistic()
    one = replace(job(model, phase(noise_multiplier=1.0)), rng=SecretRng.from_system())
    torch.manual_seed(0)
    (first,) = updates(engine, model, [one])
    torch.manual_seed(0)
    (second,) = updates(engine, model, [one])
    assert not torch.equal(first, second)


def seed_of_an_empty_batch() -> int:
    law = PoissonBatches(30, 2)
    return next(
        seed for seed in range(100) if len(*law.draw(rng(seed).child("records", 0), 1)) == 0
    )


@ENGINES
def test_an_empty_poisson_batch_is_a_noise_only_step(engine: Engine) -> None:
    model, seed = mlp(nn.Tanh()), seed_of_an_empty_batch()
    one = job(
        model, phase(steps=1, batch_size=2, lr=0.4, clip=0.5, noise_multiplier=3.0), seed=seed
    )
    drawn = rng(seed).child("noise", 0).grid_noise_(torch.empty(len(one.start))) / SCALE
    (update,) = updates(engine, model, [one])
    assert relative_error(update, -0.4 * 3.0 * 0.5 * drawn / 2) < TOLERANCE


@ENGINES
@pytest.mark.parametrize("clip", [0.5, None])
def test_an_empty_poisson_batch_without_noise_changes_nothing(
    engine: Engine, clip: float | None
) -> None:
    model = mlp(nn.Tanh())
    one = job(model, phase(steps=1, batch_size=2, clip=clip), seed=seed_of_an_empty_batch())
    (update,) = updates(engine, model, [one])
    assert bool((update == 0).all())


@ENGINES
def test_a_clients_empty_batch_leaves_its_neighbours_in_the_block_alone(engine: Engine) -> None:
    model = mlp(nn.Tanh())
    work = phase(steps=1, batch_size=2, noise_multiplier=1.0)
    jobs = [
        job(model, work, seed=seed_of_an_empty_batch()),
        *(job(model, work, seed=seed) for seed in range(50, 53)),
    ]
    for got, one in zip(updates(engine, model, jobs), jobs, strict=True):
        assert relative_error(got, updates(OneByOne(), model, [one])[0]) < TOLERANCE


# ---- records that are not numbers ----------------------------------------------------------------

NOT_NUMBERS = [math.nan, math.inf, -math.inf]
POISONS = [*NOT_NUMBERS, 1e30, -3e38]


def poisoned(one: Job, poison: float, records: Sequence[int] = (2, 5, 11)) -> Job:
    return replace(one, features=one.features.index_fill(0, torch.tensor(records), poison))


@ENGINES
@pytest.mark.parametrize("poison", NOT_NUMBERS)
@pytest.mark.parametrize(
    "work", [phase(steps=6, clip=0.4), phase(noise_multiplier=1.0)], ids=["silent", "noisy"]
)
def test_a_record_that_is_no_number_contributes_zero(
    engine: Engine, poison: float, work: Phase
) -> None:
    """In a model without biases a record of zeros has no gradient: poison must do exactly as
    little.
    """
    model = mlp(nn.Tanh(), bias=False)
    one = job(model, work)
    (got,) = updates(engine, model, [poisoned(one, poison)])
    (wanted,) = updates(engine, model, [poisoned(one, 0.0)])
    assert bool(torch.isfinite(got).all())
    assert relative_error(got, wanted) < TOLERANCE


@ENGINES
@pytest.mark.parametrize("poison", NOT_NUMBERS)
def test_one_feature_that_is_no_number_silences_its_record_and_no_other(
    engine: Engine, poison: float
) -> None:
    model = mlp(nn.Tanh(), bias=False)
    one = job(model, phase(steps=1, batch_size=30, lr=1.0))
    features = one.features.clone()
    features[4, 1] = poison
    (got,) = updates(engine, model, [replace(one, features=features)])
    (wanted,) = updates(engine, model, [poisoned(one, 0.0, [4])])
    assert relative_error(got, wanted) < TOLERANCE


@ENGINES
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "work", [phase(), phase(noise_multiplier=1.0), plain()], ids=["silent", "noisy", "sgd"]
)
def test_a_poisoned_client_changes_no_other_client_by_a_single_bit(
    engine: Engine, poison: float, work: Phase
) -> None:
    model = mlp(nn.ReLU())
    jobs = [job(model, work, seed=seed) for seed in range(4)]
    clean = updates(engine, model, jobs)
    dirty = updates(engine, model, [jobs[0], poisoned(jobs[1], poison, range(30)), *jobs[2:]])
    for i in (0, 2, 3):
        assert torch.equal(dirty[i], clean[i])


@pytest.mark.parametrize("size", [1e6, 1e12, 1e17, 1e18, 1e19, 1e20, 1e25, 1e38])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=["relu", "tanh"])
def test_the_engines_agree_on_records_of_any_size(size: float, activation: nn.Module) -> None:
    """A gradient is clipped or, where it is not finite, zero; squares that overflow on the way must
    not decide.
    """
    for model in (logistic(), mlp(activation), mlp(activation, bias=False)):
        jobs = [job(model, phase(steps=1, batch_size=30), seed=seed) for seed in range(4)]
        assert worst_error(model, [poisoned(one, size) for one in jobs]) < TOLERANCE


# ---- ball ----------------------------------------------------------------------------------------


@ENGINES
@given(
    seed=st.integers(0, 2**32),
    ball=st.floats(0.01, 10.0),
    lr=st.floats(0.1, 100.0),
    clipped=st.booleans(),
)
def test_a_ball_holds_the_model_near_its_start(
    engine: Engine, seed: int, ball: float, lr: float, clipped: bool
) -> None:
    model = mlp(nn.Tanh())
    one = job(model, phase(ball=ball, lr=lr) if clipped else plain(ball=ball, lr=lr), seed=seed)
    (update,) = updates(engine, model, [one])
    assert float(update.double().norm()) <= ball


@ENGINES
@pytest.mark.parametrize(("scale", "ball"), [(1.0, 1.0), (1.0, 1e-3), (100.0, 0.01)])
def test_a_ball_is_kept_up_to_the_rounding_of_the_start(
    engine: Engine, scale: float, ball: float
) -> None:
    """Nobody bills the radius (that takes a Clip stage): float32 around a large start cannot keep
    it exactly.
    """
    model = nn.Linear(784, 10)
    start = scale * torch.randn(7850, generator=torch.Generator().manual_seed(0))
    jobs = [
        replace(job(model, plain(lr=1.0, ball=ball), seed=seed, shape=(784,)), start=start)
        for seed in range(10)
    ]
    rounding = float(torch.finfo(torch.float32).eps * start.double().norm())
    assert (
        max(float(update.double().norm()) for update in updates(engine, model, jobs))
        <= ball + rounding
    )


@ENGINES
def test_a_ball_acts_after_every_step_and_around_the_start_of_its_phase(engine: Engine) -> None:
    model = logistic()
    work = plain(steps=1, lr=2.0, ball=0.1, batch_size=30)
    layout = Layout.of_module(model)
    one = job(model, work, work)
    (first,) = engine.run(model, layout, [replace(one, phases=(work,))])
    (both,) = engine.run(model, layout, [one])
    assert float((first - one.start).norm()) == pytest.approx(0.1, rel=1e-3)
    assert float((both - first).norm()) == pytest.approx(0.1, rel=1e-3)
    (two_steps,) = engine.run(model, layout, [replace(one, phases=(replace(work, steps=2),))])
    assert float((two_steps - one.start).norm()) <= 0.1


# ---- blocks --------------------------------------------------------------------------------------

shapes = st.builds(
    phase,
    steps=st.integers(1, 3),
    batch_size=st.sampled_from([4, 8]),
    lr=st.sampled_from([0.1, 0.2]),
    clip=st.sampled_from([None, 1.0, 2.0]),
    ball=st.sampled_from([None, 1.0]),
)
plans_ = st.lists(st.lists(shapes, min_size=1, max_size=2).map(tuple), min_size=0, max_size=90)


@ENGINES
@given(plans=plans_)
def test_blocks_are_a_pure_function_and_hold_every_client_once(
    engine: Engine, plans: list[tuple[Phase, ...]]
) -> None:
    blocks = engine.blocks(plans)
    assert sorted(i for block in blocks for i in block) == list(range(len(plans)))
    assert all(block for block in blocks)
    torch.manual_seed(len(plans))
    assert engine.blocks(list(plans)) == blocks == type(engine)().blocks(plans)


@given(plans=plans_)
def test_stacked_clients_of_a_block_have_stacks_of_one_shape(
    plans: list[tuple[Phase, ...]],
) -> None:
    for block in Stacked().blocks(plans):
        kinds = {
            tuple((p.steps, p.batch_size, p.clip is None, p.ball is None) for p in plans[i])
            for i in block
        }
        assert len(kinds) == 1
        assert len(block) <= 64


@ENGINES
def test_running_block_by_block_gives_what_running_at_once_gives(engine: Engine) -> None:
    model = logistic()
    jobs = [
        job(model, phase(steps=1 + seed % 3, batch_size=4 + 4 * (seed % 2)), seed=seed)
        for seed in range(20)
    ]
    at_once = updates(engine, model, jobs)
    for block in engine.blocks([job.phases for job in jobs]):
        for i, update in zip(block, updates(engine, model, [jobs[i] for i in block]), strict=True):
            assert relative_error(update, at_once[i]) < TOLERANCE


def test_eight_alike_clients_are_shared_between_two_workers() -> None:
    much, little = (phase(steps=2000, batch_size=32),), (phase(steps=2, batch_size=32),)
    assert [len(block) for block in Stacked().blocks([much] * 8)] == [4, 4]
    assert [len(block) for block in Stacked().blocks([much] * 7)] == [7]
    assert [len(block) for block in Stacked().blocks([little] * 8)] == [
        8
    ]  # splitting would cost more than it gives


# ---- models that are no chain --------------------------------------------------------------------


class Skip(nn.Module):
    """Adds what came in to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + torch.tanh(self.inner(x)))


class Doubling(nn.Linear):
    """A linear layer that is not what its base class says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OddSequence(nn.Sequential):
    """A sequence that runs backwards in sign."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "skip connection": (Skip, (FEATURES,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)), (1, 4, 4),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)), (FEATURES,),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.5), nn.Linear(9, CLASSES)), (FEATURES,),
    ),
    "softmax in between": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Softmax(1), nn.Linear(4, CLASSES)), (FEATURES,),
    ),
    "own linear": (lambda: nn.Sequential(Doubling(FEATURES, CLASSES)), (FEATURES,)),
    "own sequence": (lambda: OddSequence(nn.Linear(FEATURES, CLASSES)), (FEATURES,)),
    "flatten in part": (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, CLASSES)), (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "work",
    [
        phase(),
        plain(momentum=0.9, proximal=0.1),
        phase(noise_multiplier=1.0),
        phase(clipping="per_layer", clip=0.2),
        phase(clipping="normalised"),
    ],
    ids=["dp-sgd", "sgd", "noisy", "per layer", "normalised"],
)
def test_a_model_that_is_no_chain_gives_what_one_by_one_gives(name: str, work: Phase) -> None:
    build, shape = OTHERS[name]
    model = build()
    jobs = [job(model, work, seed=seed, shape=shape) for seed in range(3)]
    for got, wanted in zip(
        updates(Stacked(), model, jobs), updates(OneByOne(), model, jobs), strict=True
    ):
        assert float(wanted.norm()) > 0
        assert float((got - wanted).norm()) < 5e-5 * float(wanted.norm())


def test_a_convolution_is_clipped_record_by_record_as_a_loop_over_records_would() -> None:
    build, shape = OTHERS["convolution"]
    model = build()
    one = job(model, records=12, shape=shape)
    rows = []
    for x, y in zip(one.features, one.labels, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        rows.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        )
    gradients = torch.stack(rows)
    norms = gradients.norm(dim=1, keepdim=True)
    clip = float(norms.median())
    wanted = -(gradients * (clip / norms).clamp_max(1.0)).sum(0) / 12
    work = phase(steps=1, batch_size=12, lr=1.0, clip=clip)
    (update,) = updates(OneByOne(), model, [replace(one, phases=(work,))])
    assert relative_error(update, wanted) < TOLERANCE


@ENGINES
def test_dropout_masks_differ_between_records_steps_and_clients(engine: Engine) -> None:
    """The first layer's bias gradient shows which units were kept."""
    model = nn.Sequential(nn.Linear(2, 40), nn.Dropout(0.5), nn.Linear(40, CLASSES))
    x, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    jobs = [
        job(model, phase(steps=1, batch_size=4, lr=1.0, clip=10.0), seed=seed, features=x, labels=y)
        for seed in range(2)
    ]
    first, second = updates(engine, model, jobs)
    assert not torch.equal(first, second)
    kept = (first[80:120] != 0).float().mean()
    assert (
        float(kept) > 0.8
    )  # one mask for all four records would leave about half of the units untouched


# ---- what must not matter ------------------------------------------------------------------------

SOME_MODELS = {"chain": lambda: mlp(nn.Tanh()), "no chain": OTHERS["dropout"][0]}


@ENGINES
@pytest.mark.parametrize("name", SOME_MODELS)
def test_results_do_not_depend_on_the_global_generators(engine: Engine, name: str) -> None:
    model = SOME_MODELS[name]()
    jobs = [job(model, phase(noise_multiplier=1.0), plain(), seed=seed) for seed in range(3)]
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        results.append(torch.stack(updates(engine, model, jobs)))
    assert torch.equal(results[0], results[1])


@ENGINES
def test_results_do_not_depend_on_the_number_of_threads(engine: Engine) -> None:
    """Large enough that two threads would add up in another order, if they were let."""
    model = nn.Linear(784, 10)
    jobs = [
        job(
            model,
            plain(batch_size=200),
            phase(batch_size=200),
            seed=seed,
            records=400,
            shape=(784,),
        )
        for seed in range(2)
    ]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.stack(updates(engine, model, jobs)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@ENGINES
@pytest.mark.parametrize("name", SOME_MODELS)
def test_local_work_leaves_the_global_generators_alone(engine: Engine, name: str) -> None:
    model = SOME_MODELS[name]()
    one = job(model, phase(noise_multiplier=1.0), plain())
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    engine.run(model, Layout.of_module(model), [one])
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


@ENGINES
@pytest.mark.parametrize("name", SOME_MODELS)
def test_local_work_leaves_model_start_and_data_as_they_were(engine: Engine, name: str) -> None:
    model = SOME_MODELS[name]()
    layout = Layout.of_module(model)
    one = job(model, phase(noise_multiplier=1.0), plain(ball=0.1))
    kept = [layout.read(model), one.start.clone(), one.features.clone(), one.labels.clone()]
    (after,) = engine.run(model, layout, [one])
    now = [layout.read(model), one.start, one.features, one.labels]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert not torch.equal(after, one.start)
    assert not after.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@ENGINES
def test_local_work_writes_no_statistic_of_the_data_into_the_models_buffers(engine: Engine) -> None:
    """Plain SGD accepts BatchNorm. Running means of private records are no part of what is clipped,
    noised and sent; left in the shared module they would reach whoever gets the model.
    """
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    engine.run(model, Layout.of_module(model), [job(model, plain(batch_size=10))])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@ENGINES
def test_the_same_jobs_give_the_same_bits_twice(engine: Engine) -> None:
    model = mlp(nn.GELU())
    jobs = [job(model, phase(noise_multiplier=1.0), seed=seed) for seed in range(3)]
    first, second = (torch.stack(updates(engine, model, jobs)) for _ in range(2))
    assert torch.equal(first, second)


def test_a_phase_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="steps = 0"):
        phase(steps=0)


@ENGINES
def test_no_jobs_give_no_results(engine: Engine) -> None:
    model = logistic()
    assert engine.run(model, Layout.of_module(model), []) == []
    assert engine.blocks([]) == []


def test_the_oracle_names_the_client_and_the_phase_that_failed() -> None:
    model = logistic()
    good = job(model, phase())
    bad = job(model, plain(), phase(batch_size=30), seed=7)
    bad = replace(bad, labels=bad.labels.index_fill(0, torch.tensor([3]), CLASSES + 4))
    with pytest.raises(DpflError, match="client 'client-7', phase 0"):
        OneByOne().run(
            model, Layout.of_module(model), [good, replace(bad, phases=(plain(batch_size=30),))]
        )


def test_an_unknown_engine_suggests_the_nearest() -> None:
    assert isinstance(make_engine("stacked"), Stacked)
    with pytest.raises(ConfigurationError, match="did you mean 'stacked'"):
        make_engine("staked")
