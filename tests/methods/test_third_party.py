"""A stranger's package brings methods along: nothing in dpfl names them, and everything works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODULE = '''
"""Two methods that dpfl has never heard of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, Metrics, PlugState, Rows, Terms, Total
from dpfl.plugs.step import Step
from dpfl.plugs.weights import UniformWeights, Weights, shares
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level


@dataclass(frozen=True, kw_only=True)
class PowerWeights(Weights):
    """A power of the claimed epsilon."""

    power: float = 1.0
    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        """Return weights that sum to one; false claims weigh nothing."""
        equal = shares([received.cohort.claims[c].epsilon for c in received.cohort.ids])
        weights = equal.double() ** self.power
        return (weights / weights.sum()).float(), state, {"power": self.power}


@method(
    family="heterogeneous",
    simplicity=35,
    search={"power": (0.5, 2.0)},
    remark="it believes what clients claim",
)
def power_avg(work: RecordWork, *, power: float = 1.0) -> Strategy:
    """FedAvg over DP-SGD clients, weighted by a power of the claimed epsilon."""
    return record_level("power_avg", work, PowerWeights(power=power))


@dataclass(frozen=True, kw_only=True)
class SignMomentum(Step):
    """Lion: move by the sign of an interpolated momentum."""

    lr: float = 0.05
    beta: float = 0.9

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return an empty momentum."""
        return {"momentum": torch.zeros(layout.size)}

    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        """Move every coordinate by the rate."""
        momentum = self.beta * state["momentum"] + (1 - self.beta) * aggregate.vector
        way = self.lr * torch.sign(momentum)
        return aggregate.model + way, {**state, "momentum": momentum}, {"moved": float(way.norm())}


@method(family="optimisers", simplicity=10)
def fed_lion(work: RecordWork, *, server_lr: float = 0.05) -> Strategy:
    """FedAvg over DP-SGD clients whose server moves by signs."""
    plain = record_level("fed_lion", work, UniformWeights())
    return replace(plain, step=SignMomentum(lr=server_lr))
'''

FIRST_LINES = """\
import json, warnings
import dpfl
warnings.simplefilter('error')
warnings.simplefilter('ignore', dpfl.NotPrivateWarning)
"""
WORK = {"lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 2}


def installed(folder: Path, module: str, entries: str, name: str = "stranger") -> Path:
    """A package as pip leaves it: its module, and a dist-info with entry points."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dpfl.methods]\n" + textwrap.dedent(entries))
    return folder


def asked(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own that finds the package; the last line it prints is JSON."""
    paths = [str(folder), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-c", FIRST_LINES + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=folder,
    )


def answer(folder: Path, code: str) -> dict[str, object]:
    done = asked(folder, code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Both methods: one by itself, one as what its module declares."""
    return installed(tmp_path, MODULE, "power_avg = stranger:power_avg\nall = stranger\n")


def test_methods_of_another_package_are_methods_like_ours(package: Path) -> None:
    found = answer(
        package,
        f"""
        import dpfl
        from dpfl.methods import METHODS, families, find, make_strategy

        strategy = make_strategy("power_avg", {{**{WORK}, "power": 2.0}})
        refused = []
        for wrong in ({{"powr": 1.0}}, {{"power": "much"}}):
            try:
                dpfl.power_avg(**{WORK}, **wrong)
            except dpfl.DpflError as error:
                refused.append(str(error))
        print(json.dumps({{
            "methods": list(METHODS),
            "families": {{name: list(all_) for name, all_ in families().items()}},
            "settings": list(find("power_avg").settings),
            "about": find("power_avg").about,
            "search": {{k: list(v) for k, v in find("power_avg").search.items()}},
            "public": dpfl.power_avg is METHODS["power_avg"] and "fed_lion" in dir(dpfl),
            "weigh": dict(strategy.describe())["weigh"],
            "step": dict(dpfl.fed_lion(**{WORK}).describe())["step"],
            "refused": refused,
        }}))
        """,
    )
    methods, families = found["methods"], found["families"]
    assert isinstance(methods, list)
    assert isinstance(families, dict)
    assert {"power_avg", "fed_lion", "weiavg", "fedavg"} <= set(methods)
    assert methods == sorted(methods)
    ours = families["heterogeneous"]
    assert ours.index("weiavg") < ours.index("power_avg") < ours.index("robust_hdp")
    assert families["optimisers"] == ["fedavg", "fed_lion"]
    assert set(found["settings"][:3]) == {"lr", "clip", "batch_size"}  # type: ignore[index]
    assert "power" in found["settings"]  # type: ignore[operator]
    assert found["about"] == (
        "FedAvg over DP-SGD clients, weighted by a power of the claimed epsilon."
    )
    assert found["search"] == {"power": [0.5, 2.0]}
    assert found["public"] is True
    assert found["weigh"] == "PowerWeights(power=2.0)"
    assert found["step"] == "SignMomentum(lr=0.05, beta=0.9)"
    misspelt, wrong = found["refused"]  # type: ignore[misc]
    assert "power_avg" in misspelt
    assert "'power'" in misspelt
    assert "power = 'much'" in wrong


def test_they_train_spend_within_budgets_and_report_like_ours(package: Path) -> None:
    found = answer(
        package,
        f"""
        import numpy as np, torch
        import dpfl

        rng = np.random.default_rng(0)
        centres = 2 * rng.normal(size=(3, 5))
        labels = [rng.integers(0, 3, 40) for _ in range(4)]
        arrays = {{
            f"c{{i}}": (centres[y] + rng.normal(size=(40, 5)), y) for i, y in enumerate(labels)
        }}
        budgets = {{
            c: dpfl.Budget(epsilon=2.0 * (i + 1), delta=1e-3) for i, c in enumerate(arrays)
        }}
        federation = dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=3)
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)

        def run(strategy):
            result = dpfl.train(model, federation, strategy, rounds=6)
            return {{
                "weight": result.model.weight.flatten().tolist(),
                "weights": dict(result.history[0].weights),
                "metrics": {{slot: dict(own) for slot, own in result.history[-1].metrics.items()}},
                "accuracy": result.accuracy,
                "spent": {{c: line.epsilon for c, line in result.spent.items()}},
                "method": result.summary.method,
            }}

        work = {WORK}
        print(json.dumps({{
            "one": run(dpfl.power_avg(**work)),
            "two": run(dpfl.power_avg(**work, power=2.0)),
            "weiavg": run(dpfl.weiavg(**work)),
            "lion": run(dpfl.fed_lion(**work)),
            "budgets": {{c: b.epsilon for c, b in budgets.items()}},
            "start": model.weight.flatten().tolist(),
        }}))
        """,
    )
    one, two, weiavg, lion = (found[name] for name in ("one", "two", "weiavg", "lion"))
    assert one["weight"] == pytest.approx(weiavg["weight"], abs=1e-5)  # type: ignore[index]
    assert two["weights"] == pytest.approx(  # type: ignore[index]
        {f"c{i}": (i + 1) ** 2 / 30 for i in range(4)}, abs=1e-6
    )
    assert two["metrics"]["weights"] == {"power": 2.0}  # type: ignore[index]
    assert lion["metrics"]["step"]["moved"] == pytest.approx(0.05 * 18**0.5)  # type: ignore[index]
    moved = [a - b for a, b in zip(lion["weight"], found["start"], strict=True)]  # type: ignore
    assert all(abs(way) <= 6 * 0.05 + 1e-5 for way in moved)
    for result in (one, two, lion):
        assert result["accuracy"] > 0.6  # type: ignore[index]
        for client, epsilon in result["spent"].items():  # type: ignore[index]
            assert 0 < epsilon <= found["budgets"][client]  # type: ignore[index]
    assert (one["method"], lion["method"]) == ("power_avg", "fed_lion")  # type: ignore[index]


def test_they_pass_the_public_laws(package: Path) -> None:
    found = answer(
        package,
        f"""
        from stranger import PowerWeights, SignMomentum, fed_lion, power_avg
        from dpfl import testing

        testing.check_weights(PowerWeights(power=0.5))
        testing.check_step(SignMomentum())
        testing.check_method(power_avg, **{WORK}, power=2.0)
        testing.check_method(fed_lion, **{WORK})
        print(json.dumps({{"passed": True}}))
        """,
    )
    assert found == {"passed": True}


BROKEN = {
    "lost = nowhere_at_all:lost": "nowhere_at_all",
    "absent = stranger:absent": "absent",
    "weights = stranger:PowerWeights": "stranger:PowerWeights",
    "empty = json": "json",
    "failing = failing": "no GPU today",
}
"""Entry points that bring no method, and what the warning must name."""


def test_broken_entry_points_are_warned_about_and_left_out_and_the_others_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "failing.py").write_text("raise RuntimeError('no GPU today')\n")
    installed(tmp_path, MODULE, "\n".join([*BROKEN, "fed_lion = stranger:fed_lion"]))
    found = answer(
        tmp_path,
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from dpfl.methods import METHODS
            names = list(METHODS)
        said = [str(one.message) for one in caught if "left out" in str(one.message)]
        print(json.dumps({"names": names, "said": said}))
        """,
    )
    said, names = found["said"], found["names"]
    assert isinstance(said, list)
    assert isinstance(names, list)
    assert len(said) == len(BROKEN)
    for entry, named in BROKEN.items():
        name = entry.split(" = ")[0]
        (warning,) = [line for line in said if f"'{name}'" in line]
        assert named in warning
        assert name not in names
    assert {"fed_lion", "weiavg"} <= set(names)
    assert "power_avg" not in names


def test_a_name_that_exists_already_is_refused(tmp_path: Path) -> None:
    """Neither of the two may win silently: an experiment file would mean something else."""
    installed(tmp_path, MODULE.replace("power_avg", "weiavg"), "weiavg = stranger:weiavg\n")
    found = answer(
        tmp_path,
        """
        import dpfl
        from dpfl.core.errors import ConfigurationError
        from dpfl.methods import METHODS, find

        said = []
        for ask in (lambda: find("weiavg"), lambda: list(METHODS), lambda: dpfl.weiavg):
            try:
                ask()
            except ConfigurationError as error:
                said.append(str(error))
        print(json.dumps({"said": said}))
        """,
    )
    assert len(found["said"]) == 3  # type: ignore[arg-type]
    for said in found["said"]:  # type: ignore[union-attr]
        assert "'weiavg'" in said
        assert "stranger:weiavg" in said


def test_two_packages_with_one_name_are_refused(package: Path) -> None:
    other = MODULE.split("@dataclass(frozen=True, kw_only=True)\nclass SignMomentum")[0]
    installed(package, other, "power_avg = other:power_avg\n", name="other")
    done = asked(package, "from dpfl.methods import METHODS\nprint(len(METHODS))\n")
    assert done.returncode != 0
    assert "ConfigurationError" in done.stderr
    assert "'power_avg'" in done.stderr
