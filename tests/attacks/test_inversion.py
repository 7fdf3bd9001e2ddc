"""Gradient inversion: it works where nothing protects, and not where something does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfl.attacks.inverting.invert import VIEWS, Inversion, invert
from dpfl.attacks.inverting.optimisation import (
    ALGORITHMS,
    Algorithm,
    Seen,
    bytes_of_a_step,
    invert_gradient,
    mismatch,
    recovered_labels,
)
from dpfl.attacks.inverting.similarity import matched, psnr, ssim
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.layout import Layout
from dpfl.core.types import Plain

VALUES: Plain = {
    "data": {"name": "digits"},
    "partition": {"clients": 3, "kind": "iid"},
    "model": {"name": "mlp", "hidden": 32},
    "budgets": {"epsilon": 1.0, "delta": 1e-5},
    "method": {"lr": 0.1, "clip": 1.0, "batch_size": 1, "local_steps": 1},
    "run": {"rounds": 1},
}
QUICK = Inversion(records=[3], epsilons=[1.0], algorithms=["idlg"], iterations=60)


def network(smooth: bool = True) -> nn.Module:
    torch.manual_seed(0)
    rule: nn.Module = nn.Sigmoid() if smooth else nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), rule, nn.Linear(24, 5))


def seen(x: Tensor, labels: list[int], model: nn.Module | None = None, clip: float = 0.0) -> Seen:
    """What an adversary sees of the mean gradient of records with these labels."""
    own = model or network()
    layout = Layout.of_module(own)
    shape = tuple(x.shape[1:])
    empty = Seen(
        model=own,
        weights=layout.read(own),
        gradient=torch.zeros(layout.size),
        layout=layout,
        records=len(x),
        classes=5,
        low=torch.zeros(shape),
        high=torch.ones(shape),
        clipped=clip > 0,
    )
    gradient = empty.gradient_of(x, torch.eye(5)[labels]).detach()
    if clip > 0:
        gradient = gradient * (clip / gradient.norm())
    return replace(empty, gradient=gradient)


def image(seed: int = 1, count: int = 1) -> Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


# ---- the algorithms ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_bare_gradient_gives_the_record_away(algorithm: Algorithm, clip: float) -> None:
    """Also one that is clipped: its direction says enough."""
    x = image()
    given, generator = seen(x, [3], clip=clip), torch.Generator().manual_seed(0)
    tries = [
        invert_gradient(given, algorithm, iterations=400, generator=generator, tv=1e-4)
        for _ in range(3)
    ]
    best = min(tries, key=lambda one: one.loss)
    assert psnr(x, best.records) > 22
    assert best.labels.tolist() == [3]


def test_noise_that_is_larger_than_the_gradient_hides_the_record() -> None:
    x = image()
    given = seen(x, [3])
    generator = torch.Generator().manual_seed(0)
    noise = torch.normal(0, 1, given.gradient.shape, generator=generator)
    noise *= 3 * given.gradient.norm() / noise.norm()
    found = invert_gradient(
        replace(given, gradient=given.gradient + noise),
        "idlg",
        iterations=200,
        generator=generator,
    )
    assert psnr(x, found.records.clamp(0, 1)) < 12


@pytest.mark.parametrize("label", range(5))
def test_the_last_layer_tells_the_label(label: int) -> None:
    assert recovered_labels(seen(image(label), [label], network(False))).tolist() == [label]
    both = recovered_labels(seen(image(label, 2), [label, (label + 2) % 5], network(False)))
    assert sorted(both.tolist()) == sorted([label, (label + 2) % 5])


def test_gradients_are_those_of_autograd() -> None:
    model, x = network(), image(4, 2)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([1, 4]))
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    given = seen(x, [1, 4], model)
    assert torch.allclose(given.gradient, torch.cat([g.reshape(-1) for g in wanted]), atol=1e-6)
    assert float(mismatch(given, given.gradient)) == 0
    assert float(mismatch(given, 2 * given.gradient)) == pytest.approx(1.0)
    clipped = replace(given, clipped=True)  # the scale is fitted
    assert float(mismatch(clipped, 2 * given.gradient)) == pytest.approx(0.0, abs=1e-10)


# ---- how alike things are ------------------------------------------------------------------------


def test_ssim_agrees_with_an_independent_implementation() -> None:
    """scikit-image 0.25, gaussian_weights, data_range 1: the mean of its whole map."""
    places = np.arange(256).reshape(1, 16, 16)
    x = (np.sin(places * 0.37) + 1) / 2
    y = np.clip(x + 0.2 * np.cos(places * 1.3), 0, 1)
    assert ssim(torch.tensor(x), torch.tensor(y)) == pytest.approx(0.8359552183222723, rel=1e-9)
    assert ssim(torch.tensor(x), torch.tensor(x)) == pytest.approx(1.0)


def test_psnr_is_its_formula() -> None:
    assert psnr(torch.zeros(10), torch.ones(10)) == pytest.approx(0.0)
    assert psnr(torch.zeros(10), torch.full((10,), 2.55), span=255) == pytest.approx(40.0)
    assert psnr(torch.ones(3), torch.ones(3)) == math.inf


def test_reconstructions_are_matched_whatever_their_order() -> None:
    x = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    order = [3, 1, 4, 0, 2]
    assert [order[i] for i in matched(x, x[order])] == [0, 1, 2, 3, 4]


# ---- whole experiments ---------------------------------------------------------------------------


def test_privacy_is_what_stops_the_attack() -> None:
    found = invert(VALUES, ["weiavg"], QUICK)
    bare, private = found.cases
    assert (bare.method, private.method) == ("fedavg", "weiavg")
    assert bare.mean_psnr > 30 > 12 > private.mean_psnr
    assert bare.mean_ssim is not None and bare.mean_ssim > 0.95
    assert math.isinf(bare.epsilon)
    assert 0.9 < private.epsilon <= 1.0
    assert str(private.promise.observer) == "server"
    assert found.originals.shape == (1, 64)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["cases"][0]["epsilon"] == "infinite"


def test_a_sum_hides_a_record_among_those_of_others() -> None:
    """Without noise the sum of three clients is harder to invert than a row."""
    how = replace(QUICK, epsilons=[20.0], views=["row", "sum"], iterations=40)
    found = invert(VALUES, ["weiavg"], how)
    psnrs = {(case.method, case.view): case.mean_psnr for case in found.cases}
    assert psnrs["fedavg", "row"] > psnrs["fedavg", "sum"]
    assert {case.view for case in found.cases} == {"row", "sum"}


def test_views_that_a_method_has_not_are_named() -> None:
    values = {**VALUES, "method": {**VALUES["method"], "interval": 1, "personal_starts": True}}
    how = replace(QUICK, views=VIEWS, iterations=2, reference=False)
    found = invert(values, ["fedceo"], how)
    assert {case.view for case in found.cases} == {"row", "cleaned", "sum"}
    assert any("secure sum" in sentence for sentence in found.left_out)
    rows = {case.view: case.found for case in found.cases}
    assert not torch.equal(rows["row"], rows["cleaned"])  # smoothing changes what is inverted


def test_every_method_that_sends_something_can_be_inverted() -> None:
    from dpfl.methods import METHODS

    values = {**VALUES, "method": {**VALUES["method"], "dimension": 20}}
    quiet = {"fedavg", "local_only", "pooled_dp"}
    names = [name for name in METHODS if name not in quiet]
    how = replace(QUICK, views=["row", "sum"], iterations=1, reference=False, epsilons=[20.0])
    found = invert(values, names, how)
    assert {case.method for case in found.cases} == set(names)
    assert all(math.isfinite(case.mean_psnr) for case in found.cases)


# ---- bad input -----------------------------------------------------------------------------------


def test_what_cannot_be_inverted_is_refused_before_the_work_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="no gradient leaves its clients"):
        invert(VALUES, ["local_only"], QUICK)
    with pytest.raises(DataError, match="no record 5000"):
        invert(VALUES, ["weiavg"], replace(QUICK, records=[5000]))
    with pytest.raises(ConfigurationError, match="client"):
        invert(VALUES, ["weiavg"], replace(QUICK, client="nobody"))
    regression = {**VALUES, "data": {"name": "diabetes"}, "model": {"name": "logistic"}}
    with pytest.raises(ConfigurationError, match="regression"):
        invert(regression, ["weiavg"], QUICK)
    monkeypatch.setattr("dpfl.attacks.inverting.invert._free_bytes", lambda: 1000.0)
    with pytest.raises(ConfigurationError, match="GiB"):
        invert(VALUES, ["weiavg"], QUICK)
    assert bytes_of_a_step(nn.Linear(10, 10), (10,), 1) > 4 * 110


@pytest.mark.parametrize("wrong", [{"records": []}, {"views": ["rows"]}, {"iterations": 0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Inversion(**wrong)


def test_the_time_is_told_before_the_work_starts() -> None:
    told: list[float] = []
    invert(VALUES, ["weiavg"], replace(QUICK, iterations=1), announce=told.append)
    assert len(told) == 1
    assert told[0] > 0


COMMAND = ["attack", "invert", "--dataset", "digits", "--model", "mlp", "--clip", "1"]


def test_the_command_leaves_results_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    more = ["--methods", "weiavg", "--targets", "1,2", "--iterations", "5", "--out", str(out)]
    assert run_command([*COMMAND, *more, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["records"] == 2
    assert len(printed["cases"]) == 4
    page = (out / "report.html").read_text()
    assert page.count("<img src=") == 2 + 2 * 4
    assert "epsilon 1.00" in page and "https://" not in page.partition("<script")[0]


def test_attacks_keep_away_from_deployments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's own folder is not data to attack: copies are."""
    (tmp_path / "site.toml").write_text("")
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n")
    command = ["attack", "invert", "--dataset", str(tmp_path), "--methods", "weiavg", "--clip", "1"]
    assert run_command(command) == 3
    assert "is the folder of a deployment" in capsys.readouterr().err
    assert run_command([*COMMAND, "--methods", "weiavg", "--targets", "one"]) == 2
    assert "'one' is not a list of numbers" in capsys.readouterr().err
