"""One linear layer in the span of few records: the same models, a fraction of the work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.engine.phase_block import PhaseBlock
from dpfl.engine.row_span import fits_row_span, run_row_span
from dpfl.engine.stacks import Chain

FEATURES, CLASSES = 64, 4


def model(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES, bias=bias))


def job(number: int, records: int, phase: Phase, start: Tensor, scale: float = 1.0) -> Job:
    generator = torch.Generator().manual_seed(number)
    return Job(
        client=str(number),
        start=start + 0.1 * number * torch.randn(start.shape, generator=generator),
        phases=(phase,),
        features=scale * torch.randn(records, 1, 8, 8, generator=generator),
        labels=torch.randint(0, CLASSES, (records,), generator=generator),
        rng=SecretRng.simulated(PublicSeed(5).child(number)),
    )


def after(engine: str, network: nn.Module, jobs: list[Job]) -> list[Tensor]:
    return make_engine(engine).run(network, Layout.of_module(network), jobs)


def block_of(network: nn.Module, jobs: list[Job]) -> PhaseBlock:
    chain = Chain.of(network, Layout.of_module(network))
    assert chain is not None
    return PhaseBlock(chain, jobs, 0, torch.device("cpu"))


def in_row_span(network: nn.Module, jobs: list[Job]) -> bool:
    return fits_row_span(block_of(network, jobs))


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from(["shuffle", "poisson"]),
    st.sampled_from([None, 0.05, 0.5, 50.0]),
    st.sampled_from([0.0, 0.02]),
    st.booleans(),
)
def test_the_span_agrees_with_the_oracle(
    records: list[int], sampling: str, ball: float | None, decay: float, bias: bool
) -> None:
    network = model(bias)
    start = Layout.of_module(network).read(network)
    jobs = [
        job(
            i,
            n,
            Phase(
                steps=12,
                batch_size=3,
                sampling=sampling,
                lr=0.02 * (i + 1),
                ball=ball,
                weight_decay=decay,
            ),
            start,
        )  # type: ignore[arg-type]
        for i, n in enumerate(records)
    ]
    assert in_row_span(network, jobs)
    for one, slow, fast in zip(
        jobs, after("one_by_one", network, jobs), after("stacked", network, jobs), strict=True
    ):
        moved = torch.linalg.vector_norm(slow - one.start)
        assert torch.linalg.vector_norm(fast - slow) <= 5e-5 * moved + 1e-7
        if ball is not None:
            assert torch.linalg.vector_norm(fast - one.start) <= ball + 1e-6


@pytest.mark.parametrize(
    ("phase", "records"),
    [
        (Phase(steps=12, batch_size=3, sampling="poisson", lr=0.1, clip=1.0), 8),
        (
            Phase(
                steps=12, batch_size=3, sampling="poisson", lr=0.1, clip=1.0, noise_multiplier=1.0
            ),
            8,
        ),
        (Phase(steps=12, batch_size=3, sampling="shuffle", lr=0.1, part="head"), 8),
        (Phase(steps=12, batch_size=3, sampling="shuffle", lr=0.1), FEATURES // 4 + 1),
        (Phase(steps=1, batch_size=3, sampling="shuffle", lr=0.1), 8),
    ],
)
def test_what_the_span_cannot_do_or_would_not_gain_from_is_left_to_the_stacks(
    phase: Phase, records: int
) -> None:
    network = model()
    assert not in_row_span(
        network, [job(0, records, phase, Layout.of_module(network).read(network))]
    )


def test_two_layers_are_no_span() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))
    phase = Phase(steps=12, batch_size=3, sampling="shuffle", lr=0.1)
    assert not in_row_span(network, [job(0, 8, phase, Layout.of_module(network).read(network))])


def test_records_whose_products_overflow_go_the_long_way() -> None:
    network, phase = model(), Phase(steps=4, batch_size=8, sampling="shuffle", lr=1e-30)
    layout = Layout.of_module(network)
    jobs = [job(0, 8, phase, layout.read(network), scale=1e25)]
    assert run_row_span(block_of(network, jobs), jobs[0].start[None]) is None
    slow, fast = after("one_by_one", network, jobs)[0], after("stacked", network, jobs)[0]
    assert torch.allclose(fast, slow, rtol=1e-4)


def test_a_client_gets_the_same_among_others_and_alone() -> None:
    network = model()
    start = Layout.of_module(network).read(network)
    phase = Phase(steps=12, batch_size=3, sampling="shuffle", lr=0.05, ball=0.3)
    jobs = [job(i, 4 + i, phase, start) for i in range(4)]
    together = after("stacked", network, jobs)
    for one, among in zip(jobs, together, strict=True):
        alone = after("stacked", network, [one])[0]
        assert torch.linalg.vector_norm(alone - among) <= 1e-5 * torch.linalg.vector_norm(
            alone - one.start
        )
