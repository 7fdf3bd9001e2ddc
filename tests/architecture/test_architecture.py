"""The shape of the project: stacked rooms, sorted names, documented codes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpfl
from dpfl.core import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "dpfl").rglob("*.py"))


def test_the_import_contracts_hold() -> None:
    command = [
        str(Path(sys.executable).parent / "lint-imports"),
        "--config",
        str(ROOT / ".importlinter"),
        "--no-cache",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_public_names_are_sorted_and_exist() -> None:
    assert dpfl.__all__ == sorted(dpfl.__all__)
    assert all(hasattr(dpfl, name) for name in dpfl.__all__)


def test_importing_dpfl_brings_no_command_line_and_no_deployment() -> None:
    outer = "{'typer', 'rich', 'flwr', 'ray', 'plotly'}"
    code = f"import sys, dpfl; bad = {outer} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_file_outgrows_one_sitting_or_hides_in_utils(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 430
    assert path.stem not in {"utils", "helpers", "common", "misc"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src/dpfl/algorithms").glob("*.py")), ids=lambda p: p.stem
)
def test_a_paper_s_file_states_what_it_must(path: Path) -> None:
    if path.stem in {"__init__", "registry", "record_level", "noisy_updates"}:
        return
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    for heading in ("Paper", "In one sentence", "Equations", "Formal guarantees", "Departures"):
        assert re.search(rf"^{heading}$", docstring, re.M), f"{path.name} lacks '{heading}'"


def test_noise_is_drawn_in_one_place_only() -> None:
    """Noise is integers on a grid: nothing calls a normal sampler, and only the grid and the engine
    draw noise at all.
    """
    normal = re.compile(
        r"\b(randn|randn_like|normal_|np\.random\.normal|torch\.normal|standard_normal)\("
    )
    drawing = re.compile(r"\b(grid_noise_|fill_grid_noise)\(")
    for path in SOURCES:
        text = path.read_text()
        if path.parent.name == "testing":
            continue
        public = path.name == "projection.py"  # projections are public randomness, not noise
        assert public or not normal.search(text), path
        drawn_here = path.name in {"random.py", "grid.py", "private_stacks.py"}
        assert drawn_here or not drawing.search(text), path


def test_nothing_is_ever_unpickled() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            assert not {"pickle", "joblib", "marshal", "shelve", "dill"} & set(names), path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in {"torch.load", "eval", "exec", "np.load"}, path


def test_every_error_has_a_documented_exit_code() -> None:
    documented = {0, 1, 2, 3, 4, 5, 6, 7, 130}
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DpflError)
    ]
    assert len(kinds) >= 11
    assert {kind.exit_code for kind in kinds} <= documented
    readme = (ROOT / "README.md").read_text()
    assert all(re.search(rf"\b{code}\b", readme) for code in documented)
