"""Laws of what clients do: stages, selection, local work, releases, engines.

Each raises AssertionError with the counterexample that Hypothesis found. They test by behaviour
only what a docstring promises.
"""

import math
from collections import Counter
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.phases import CLIPPINGS, Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Budget, ClientSettings, Unit
from dpfl.engine.base import Engine, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.plugs.base import Participant
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.releases import Release, Shape
from dpfl.plugs.sampling import sampler
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import Stage
from dpfl.privacy.exposure import Exposure
from dpfl.testing.fixtures import (
    CLIENT,
    LAYOUT,
    SEED,
    TERMS,
    VECTOR,
    always,
    cohort,
    has_std,
    well_formed,
)


def check_stage(stage: Stage) -> None:
    """Check a stage.

    Both halves together keep the length that the layout says. What the client half sends stays
    within the bound that ``exposure`` promises, for any input, infinities and NaN among them. Noise
    comes from the generator that is handed in, with the std that ``exposure`` promises, within 2 %.
    With ``linear`` the server half of a sum is the sum of the server halves. Many rows at once give
    the result of one by one.

    >>> from dpfl.plugs.stages import GaussianNoise
    >>> check_stage(GaussianNoise(noise_multiplier=1.3, clip=2.0))
    """
    shared = stage.open(stage.start(TERMS, LAYOUT), 0, cohort(4), PublicSeed(0))
    anything = Exposure(unit=Unit.CLIENT, numbers=LAYOUT.size)
    bound = stage.exposure(anything, 4).bound
    # Noise on what is not bounded protects nobody, and is not promised.
    std = stage.exposure(anything.clipped(1.0), 4).noise

    def sent(x: Tensor, seed: PublicSeed) -> Tensor:
        return stage.client(x, dict(shared), CLIENT, SecretRng.simulated(seed))

    def undone(y: Tensor) -> Tensor:
        return stage.server(y, dict(shared), CLIENT)

    @always(VECTOR, SEED)
    def bounded_and_right_length(x: Tensor, seed: PublicSeed) -> None:
        y = sent(x, seed)
        assert undone(y).shape == x.shape, f"{stage} changed the length"
        norm = torch.linalg.vector_norm(y.double())
        kept = std > 0 or math.isinf(bound) or norm <= bound  # a norm that is no number is not
        assert kept, f"{stage} promised norms up to {bound}, sent {norm}"

    @always(SEED)
    def noise_is_the_generators(seed: PublicSeed) -> None:
        once = sent(torch.ones(LAYOUT.size), seed)
        torch.manual_seed(1)
        again = sent(torch.ones(LAYOUT.size), seed)
        assert torch.equal(once, again), f"{stage} draws from somewhere else than its generator"

    @always(SEED)
    def rows_and_sums(seed: PublicSeed) -> None:
        rows = torch.randn(3, LAYOUT.size, generator=seed.generator())
        if stage.acts_on_rows:
            together = stage.client_rows(rows, dict(shared))
            alone = torch.stack([sent(row, seed) for row in rows])
            same = torch.allclose(together, alone, atol=1e-5)
            assert same, f"{stage} acts otherwise on many rows at once"
        if stage.linear:
            ys = torch.stack([sent(row, seed.child(i)) for i, row in enumerate(rows)])
            whole = stage.server(ys.sum(0), dict(shared), None)
            parts = torch.stack([undone(y) for y in ys]).sum(0)
            same = torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)
            assert same, f"{stage} says linear, but is not"

    if std > 0:
        rng = SecretRng.simulated(PublicSeed(7))
        zero = torch.zeros(LAYOUT.size)
        draws = range(200_000 // LAYOUT.size)
        noise = [stage.client(zero, dict(shared), CLIENT, rng) for _ in draws]
        has_std(stage, torch.stack(noise), std)


def check_selection(selection: Selection) -> None:
    """Check a selection.

    Only candidates are drawn, none twice, by the seed alone. Over 4,000 draws every candidate takes
    part as often as ``rate`` says, within five standard errors: amplification is charged by it.

    >>> from dpfl.plugs.selection import PoissonCohort
    >>> check_selection(PoissonCohort(sampling_rate=0.4))
    """
    candidates = [f"c{i}" for i in range(8)]

    @always(SEED)
    def valid(seed: PublicSeed) -> None:
        drawn = selection.order(candidates, seed)
        assert len(set(drawn)) == len(drawn), f"{selection} draws someone twice"
        assert set(drawn) <= set(candidates), f"{selection} draws a stranger"
        same = drawn == selection.order(candidates, seed)
        assert same, f"{selection} depends on something else than its seed"

    size = selection.cohort_size(8)
    rate = selection.rate(8)
    rounds = 4000
    draws = (selection.order(candidates, PublicSeed(i))[:size] for i in range(rounds))
    counts = Counter(client for drawn in draws for client in drawn)
    tolerance = 5 * math.sqrt(max(rate * (1 - rate), 1e-12) * rounds) + 1e-9
    worst = max(candidates, key=lambda client: abs(counts[client] - rate * rounds))
    problem = f"draws {worst} of {candidates} in {counts[worst] / rounds:.3f} of the rounds"
    off = abs(counts[worst] - rate * rounds)
    assert off <= tolerance, f"{selection} {problem} with seeds 0 to {rounds - 1}, not in {rate}"


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
    budget = Budget(epsilon=2.0, delta=1e-3)
    settings = ClientSettings()
    participants = [
        Participant(examples=examples, client_settings=settings, budget=budget)
        for examples in (5, 40)
    ]

    @always(st.sampled_from(participants))
    def charges_what_it_does(participant: Participant) -> None:
        examples = participant.examples
        phases = local.phases(TERMS, participant)
        assert phases == local.phases(TERMS, participant), f"{local} plans differently each time"
        assert all(phase.steps >= 1 for phase in phases), f"{local} plans a phase of no steps"
        exposure = local.exposure(phases, examples, LAYOUT.size)
        assert exposure.unit is local.unit, f"{local} exposes another unit than it states"
        private = exposure.finite == local.private
        assert private, f"{local} says private = {local.private}, its exposure says otherwise"
        written = tuple(
            sampler(phase, examples).event(phase.noise_multiplier, phase.steps, LAYOUT.size)
            for phase in (phases if exposure.paid else ())
        )
        assert exposure.paid == written, f"{local} charges something else than it does"


def check_personal(personal: Personal) -> None:
    """Check a personal part.

    The shared model keeps its length. Parting what came of local work into a shared and a private
    part, and merging the two again, gives back what local work ended with: nothing is lost, and
    nothing is counted twice.
    """

    @always(SEED)
    def parts_and_merges(seed: PublicSeed) -> None:
        shared, moved = torch.randn(2, LAYOUT.size, generator=seed.generator())
        first = personal.merge(shared, None, LAYOUT)
        well_formed(personal, first, shared.shape)
        after = first + moved
        common, private = personal.split(shared, first, after, LAYOUT)
        well_formed(personal, common, shared.shape)
        again = personal.merge(common, private, LAYOUT)
        assert torch.allclose(again, after, atol=1e-4), f"{personal} loses some of the work"


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

    @always(st.integers(2, 6), SEED)
    def record_by_record(records: int, seed: PublicSeed) -> None:
        x = torch.randn(records, inputs, generator=seed.generator())
        labels = torch.randint(0, 2, (records,), generator=seed.generator())
        rows = release.statistic(x, labels, shape)
        assert rows.shape == (records, numbers), f"{release} gives {tuple(rows.shape)}"
        for own in (torch.roll(torch.arange(records), 1), torch.arange(1)):
            same = torch.equal(release.statistic(x[own], labels[own], shape), rows[own])
            assert same, f"{release} mixes records"

    @always(SEED, st.sampled_from([1e-3, 1.0, 1e6]))
    def any_mean_gives_a_buffer(seed: PublicSeed, scale: float) -> None:
        mean = scale * torch.randn(numbers, generator=seed.generator()).double()
        well_formed(release, release.result(mean, shape, 0.1), shape)


def check_engine(engine: Engine, *, tolerance: float = 5e-5) -> None:
    """Check an engine against ``one_by_one``, the slow reference.

    With the same secret generators the two agree in the relative error of every client's update,
    up to ``tolerance``; clients differ in every setting of a phase. The blocks into which the
    engine cuts a cohort cover everyone exactly once.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    start = (layout := Layout.of_module(model)).read(model)
    work = [(4, 3, 0.1), (4, 3, 0.5), (7, 2, 0.3), (50, 3, 0.2)]

    def job(i: int, batch: int, steps: int, lr: float) -> Job:
        generator = PublicSeed(i).generator()
        rng = SecretRng.simulated(PublicSeed(100 + i))
        phase = Phase(steps=steps, batch_size=batch, sampling="poisson", lr=lr, clip=0.5 + 0.1 * i)
        phase = replace(phase, noise_multiplier=0.1 * i, momentum=0.3 * i, proximal=0.2 * i)
        own = (replace(phase, clipping=CLIPPINGS[i % 3], weight_decay=0.01 * i),)
        x = torch.randn(20, 6, generator=generator)
        y = torch.arange(20) % 3
        return Job(client=str(i), start=start, phases=own, features=x, labels=y, rng=rng)

    mine, theirs = ([job(i, *how) for i, how in enumerate(work)] for _ in range(2))
    blocks = engine.blocks([own.phases for own in mine])
    whole = sorted(i for block in blocks for i in block) == list(range(len(work)))
    assert whole, f"{engine} leaves someone out, or takes someone twice"
    found = engine.run(model, layout, mine)
    oracle = OneByOne().run(model, layout, theirs)
    for task, own, right in zip(mine, found, oracle, strict=True):
        error = float((own - right).norm() / (right - start).norm())
        assert error < tolerance, f"{engine} is {error:.2e} off; counterexample: {task.phases}"
