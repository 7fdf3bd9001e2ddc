"""The laws themselves: each function raises AssertionError with the counterexample Hypothesis
found.

They test what a protocol's docstring promises, by behaviour only, so that a stranger's piece can be
checked without knowing how it works.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Budget, ClientSettings, Phase, Unit
from dpfl.engine.base import Engine, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.plugs.base import Participant
from dpfl.plugs.channels import Channel, Summed
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.releases import Release, Shape
from dpfl.plugs.sampling import sampler
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import Stage
from dpfl.privacy.exposure import Exposure
from dpfl.testing.fixtures import (
    LAYOUT,
    SEED,
    TERMS,
    VECTOR,
    a_client,
    always,
    cohort_of,
    std_ratio,
)


def check_stage(stage: Stage) -> None:
    """Check a stage.

    The client half and the server half together keep the length that the layout says. What the
    client half sends stays within the bound that ``exposure`` promises, for any input: ordinary
    vectors, zeros, denormal and huge numbers, infinities and NaN. Noise comes from the generator
    that is handed in, and has the standard deviation that ``exposure`` promises, within 2 %. With
    ``linear`` the server half of a sum is the sum of the server halves. Where many rows can be
    handled at once, the result is that of handling them one by one.

    >>> from dpfl.plugs.stages import GaussianNoise
    >>> check_stage(GaussianNoise(noise_multiplier=1.3, clip=2.0))
    """
    shared = stage.open(stage.start(TERMS, LAYOUT), 0, cohort_of(4), PublicSeed(0))
    promised = stage.exposure(Exposure(unit=Unit.CLIENT, numbers=LAYOUT.size), 4)
    bounded = stage.exposure(Exposure(unit=Unit.CLIENT, bound=1.0, numbers=LAYOUT.size), 4)
    adds_noise = (
        bounded.noise > 0
    )  # noise on what is not bounded protects nobody, and is not promised

    @given(VECTOR, SEED)
    def bounded_and_right_length(x: Tensor, seed: PublicSeed) -> None:
        y = stage.client(x, dict(shared), a_client(), SecretRng.simulated(seed))
        if not adds_noise and math.isfinite(promised.bound):
            norm = torch.linalg.vector_norm(y.double())
            assert torch.isfinite(norm), f"{stage} let a non-finite value through"
            assert norm <= promised.bound, (
                f"{stage} promised norms up to {promised.bound}, sent {norm}"
            )
        assert stage.server(y, dict(shared), a_client()).shape == (LAYOUT.size,), (
            f"{stage} changed the length"
        )

    @given(SEED)
    def noise_is_the_generator_s(seed: PublicSeed) -> None:
        x = torch.ones(LAYOUT.size)
        once = stage.client(x, dict(shared), a_client(), SecretRng.simulated(seed))
        torch.manual_seed(1)
        again = stage.client(x, dict(shared), a_client(), SecretRng.simulated(seed))
        assert torch.equal(once, again), f"{stage} draws from somewhere else than its generator"

    @given(SEED)
    def linear_server_half(seed: PublicSeed) -> None:
        draws = [torch.randn(LAYOUT.size, generator=seed.child(i).generator()) for i in range(2)]
        sent = [
            stage.client(d, dict(shared), a_client(), SecretRng.simulated(seed.child("s", i)))
            for i, d in enumerate(draws)
        ]
        whole = stage.server(sent[0] + sent[1], dict(shared), None)
        parts = sum(
            (stage.server(s, dict(shared), a_client()) for s in sent), torch.zeros(LAYOUT.size)
        )
        assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-5), (
            f"{stage} says linear, but is not"
        )

    @given(SEED)
    def many_at_once_as_one_by_one(seed: PublicSeed) -> None:
        rows = torch.randn(3, LAYOUT.size, generator=seed.generator())
        together = stage.client_rows(rows, dict(shared))
        alone = [
            stage.client(row, dict(shared), a_client(), SecretRng.simulated(seed)) for row in rows
        ]
        assert torch.allclose(together, torch.stack(alone), atol=1e-5), (
            f"{stage} acts otherwise on many rows at once"
        )

    always(bounded_and_right_length)
    if stage.acts_on_rows:
        always(many_at_once_as_one_by_one)
    always(noise_is_the_generator_s)
    if stage.linear:
        always(linear_server_half)
    if adds_noise:
        _check_noise_scale(stage, dict(shared), bounded)


def _check_noise_scale(stage: Stage, shared: dict[str, Tensor], promised: Exposure) -> None:
    """At zero input, what is sent has the std the exposure promises, within 2 %, over some 200,000
    numbers.
    """
    rounds = 200_000 // LAYOUT.size
    rng, zero = SecretRng.simulated(PublicSeed(7)), torch.zeros(LAYOUT.size)
    sent = torch.stack([stage.client(zero, shared, a_client(), rng) for _ in range(rounds)])
    std_ratio(stage, sent, promised.noise)


def check_channel(channel: Channel) -> None:
    """Check a channel that adds no noise of its own.

    A channel that ``sees_rows`` delivers each message as it was sent. Any other delivers the sum of
    the messages that it says are in it, and nothing else.

    >>> from dpfl.plugs.channels import Digital
    >>> check_channel(Digital())
    """

    @given(st.integers(1, 6), SEED)
    def delivers(size: int, seed: PublicSeed) -> None:
        messages = {
            f"c{i}": torch.randn(5, generator=seed.child(i).generator()) for i in range(size)
        }
        arrived = channel.deliver(messages, {}, seed, SecretRng.simulated(seed))
        if channel.sees_rows:
            assert isinstance(arrived, dict)
            assert all(torch.equal(arrived[c], messages[c]) for c in arrived), (
                f"{channel} changed a message"
            )
        else:
            assert isinstance(arrived, Summed), f"{channel} says it delivers sums only"
            total = sum((messages[c] for c in arrived.ids), torch.zeros(5))
            assert torch.allclose(arrived.vector.to(total.dtype), total, atol=1e-5), (
                f"{channel} delivers something else than the sum"
            )

    always(delivers)


def check_selection(selection: Selection) -> None:
    """Check a selection.

    Only candidates are drawn, and none twice. The draw depends on the seed alone. Over 4,000 draws
    every candidate takes part as often as ``rate`` says, within five standard errors: a rate that
    is stated too small would understate what amplification is charged at.

    >>> from dpfl.plugs.selection import PoissonCohort
    >>> check_selection(PoissonCohort(sampling_rate=0.4))
    """
    candidates = [f"c{i}" for i in range(8)]

    @given(SEED)
    def valid(seed: PublicSeed) -> None:
        drawn = selection.order(candidates, seed)
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(candidates)
        assert drawn == selection.order(candidates, seed), (
            f"{selection} depends on something else than its seed"
        )

    always(valid)
    size, rounds = selection.cohort_size(8), 4000
    counts = dict.fromkeys(candidates, 0)
    for i in range(rounds):
        for client in selection.order(candidates, PublicSeed(i))[: 8 if size is None else size]:
            counts[client] += 1
    rate = selection.rate(8)
    tolerance = 5 * math.sqrt(max(rate * (1 - rate), 1e-12) * rounds) + 1e-9
    worst = max(abs(count - rate * rounds) for count in counts.values())
    assert worst <= tolerance, (
        f"{selection} draws someone {worst / rounds:.3f} more or less often than {rate}"
    )


def check_local_work(local: LocalWork) -> None:
    """Check local work.

    Planning is pure: the same participant gets the same phases. The exposure is about the unit that
    the work states, and finite exactly where the work says that it is private. What it charges is
    what the sampler of its own phases says they release, so a work that draws one way and charges
    another is caught.

    >>> from dpfl.core.types import ClientSettings
    >>> from dpfl.plugs.local_work import DpSgd
    >>> settings = ClientSettings(batch_size=4, local_steps=2, lr=0.1)
    >>> check_local_work(DpSgd(client_settings=settings, clip=1.0))
    """
    for examples in (5, 40):
        participant = Participant(
            examples=examples,
            client_settings=ClientSettings(),
            budget=Budget(epsilon=2.0, delta=1e-3),
        )
        phases = local.phases(TERMS, participant)
        assert phases == local.phases(TERMS, participant), f"{local} plans differently each time"
        assert all(phase.steps >= 1 for phase in phases)
        exposure = local.exposure(phases, examples, LAYOUT.size)
        assert exposure.unit is local.unit
        assert exposure.finite == local.private, (
            f"{local} says private = {local.private}, its exposure says otherwise"
        )
        if exposure.paid:
            written = tuple(
                sampler(p, examples).event(p.noise_multiplier, p.steps, LAYOUT.size) for p in phases
            )
            assert exposure.paid == written, f"{local} charges something else than it does"


def check_personal(personal: Personal) -> None:
    """Check a personal part.

    The shared model keeps its length. Parting what came of local work into a shared and a private
    part, and merging the two again, gives back what local work ended with: nothing is lost, and
    nothing is counted twice.
    """

    @given(SEED)
    def parts_and_merges(seed: PublicSeed) -> None:
        shared, moved = torch.randn(2, LAYOUT.size, generator=seed.generator())
        first = personal.merge(shared, None, LAYOUT)
        assert first.shape == shared.shape, f"{personal} changed the length"
        after = first + moved
        common, private = personal.split(shared, first, after, LAYOUT)
        assert common.shape == shared.shape, f"{personal} shares something else than a model"
        again = personal.merge(common, private, LAYOUT)
        assert torch.allclose(again, after, atol=1e-4), f"{personal} loses some of the work"

    always(parts_and_merges)


def check_release(release: Release, inputs: int, shape: Shape) -> None:
    """Check a release before round one.

    A record's row depends on that record alone: it is the same bit for bit whatever other records
    are there, and in whatever order. A statistic that mixes records has no bounded sensitivity.
    The result is a finite buffer of the right shape, for any finite mean that noise may produce.

    ``inputs`` is how many numbers a record has, ``shape`` the shape of the buffer.

    >>> from dpfl.plugs.releases import Mean
    >>> check_release(Mean(into="0.mean", share=0.1), 4, (4,))
    """
    numbers = release.numbers(shape)

    @given(st.integers(2, 6), SEED)
    def record_by_record(records: int, seed: PublicSeed) -> None:
        x = torch.randn(records, inputs, generator=seed.generator())
        labels = torch.randint(0, 2, (records,), generator=seed.generator())
        rows = release.statistic(x, labels, shape)
        assert rows.shape == (records, numbers), f"{release} gives {tuple(rows.shape)}"
        turn = torch.roll(torch.arange(records), 1)
        turned = release.statistic(x[turn], labels[turn], shape)
        assert torch.equal(turned, rows[turn]), f"{release} mixes records"
        alone = release.statistic(x[:1], labels[:1], shape)
        assert torch.equal(alone, rows[:1]), f"{release} mixes records"

    @given(SEED, st.sampled_from([1e-3, 1.0, 1e6]))
    def any_mean_gives_a_buffer(seed: PublicSeed, scale: float) -> None:
        mean = scale * torch.randn(numbers, generator=seed.generator()).double()
        result = release.result(mean, shape)
        assert tuple(result.shape) == shape, f"{release} gives a buffer of {tuple(result.shape)}"
        assert bool(torch.isfinite(result).all()), f"{release} gives a buffer that is not finite"

    always(record_by_record)
    always(any_mean_gives_a_buffer)


def check_engine(engine: Engine, *, tolerance: float = 5e-5) -> None:
    """Check an engine against ``one_by_one``, the slow reference.

    With the same secret generators the two agree in the relative error of every client's update,
    up to ``tolerance``; clients differ in batch size, steps, learning rate, clip and noise. The
    blocks into which the engine cuts a cohort cover everyone exactly once.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    layout = Layout.of_module(model)
    start = layout.read(model)

    def jobs() -> list[Job]:
        made = []
        for i, (batch, steps, lr) in enumerate(
            [(4, 3, 0.1), (4, 3, 0.5), (7, 2, 0.3), (50, 3, 0.2)]
        ):
            generator = PublicSeed(i).generator()
            phase = Phase(
                steps=steps,
                batch_size=batch,
                sampling="poisson",
                lr=lr,
                clip=0.5 + 0.1 * i,
                noise_multiplier=0.1 * i,
            )
            made.append(
                Job(
                    client=f"c{i}",
                    start=start,
                    phases=(phase,),
                    features=torch.randn(20, 6, generator=generator),
                    labels=torch.randint(0, 3, (20,), generator=generator),
                    rng=SecretRng.simulated(PublicSeed(100 + i)),
                )
            )
        return made

    plans = [job.phases for job in jobs()]
    covered = sorted(i for block in engine.blocks(plans) for i in block)
    assert covered == list(range(len(plans))), (
        f"{engine} leaves someone out, or takes someone twice"
    )
    for mine, oracle in zip(
        engine.run(model, layout, jobs()), OneByOne().run(model, layout, jobs()), strict=True
    ):
        error = float((mine - oracle).norm() / (oracle - start).norm())
        assert error < tolerance, f"{engine} is {error:.2e} off"
