"""The shape of the project: layers, names, and who may know what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpfl
from dpfl.core import errors
from dpfl.methods import METHODS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "dpfl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAPERS = sorted(path for path in (PACKAGE / "methods").glob("*.py") if path.stem != "__init__")


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def test_no_line_is_wide_and_no_file_is_a_drawer() -> None:
    wide = [
        path for path in SOURCES if any(len(line) > 100 for line in path.read_text().splitlines())
    ]
    assert not wide
    assert not {path.stem for path in SOURCES} & {"utils", "helpers", "common", "misc"}


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    config = ["--config", str(ROOT / ".importlinter")]
    done = subprocess.run([*command, *config], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_paper_is_one_file_that_states_what_it_must(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    for heading in ("Paper", "In one sentence", "Equations", "Formal guarantees", "Departures"):
        assert re.search(rf"^{heading}$", docstring, re.M), f"{path.name} lacks '{heading}'"


# The last four are aggregations as well, which any method may be given.
ORDINARY_WORDS = {
    *("minimum", "maximum", "median"),
    *("krum", "trimmed_mean", "geometric_median"),
}


def test_no_file_but_its_own_names_a_method() -> None:
    """In code; documentation may give an example."""
    names = set(METHODS) - ORDINARY_WORDS
    for path in SOURCES:
        if room(path) == "methods":
            continue
        tree = ast.parse(path.read_text())
        spoken = {id(expression.value) for expression in docstrings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = (
                    names & set(re.findall(r"\w+", node.value)) if id(node) not in spoken else ()
                )
                assert not found, f"{path}:{node.lineno} names {found}"
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("dpfl.methods."), f"{path}:{node.lineno}"


# ---- names and words -----------------------------------------------------------------------------


def test_public_names_are_sorted_and_exist() -> None:
    names = dpfl.__all__
    assert names == sorted(names)
    assert all(hasattr(dpfl, name) for name in names)
    assert set(METHODS) <= set(names)


def test_importing_dpfl_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'typer', 'rich', 'flwr', 'ray', 'plotly', 'pydantic'}"
    code = f"import sys, dpfl; bad = {heavy} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_docstrings_are_not_riddles() -> None:
    """A docstring says what a thing is: two words do not."""
    for path in SOURCES:
        for expression in docstrings(ast.parse(path.read_text())):
            text = ast.literal_eval(expression.value)
            assert len(text.split()) >= 2, f"{path}:{expression.lineno}: {text!r}"


# ---- safety --------------------------------------------------------------------------------------


def test_noise_is_drawn_in_one_place_only() -> None:
    """Noise is integers on a grid: nothing calls a normal sampler, and only the grid and the engine
    draw noise at all.
    """
    names = r"randn|randn_like|normal_|torch\.normal|standard_normal|torch\.special\.ndtri"
    normal = re.compile(rf"\b({names})\(")
    drawing = re.compile(r"\b(grid_noise_|fill_grid_noise)\(")
    for path in SOURCES:
        text = path.read_text()
        if room(path) == "testing":
            continue
        # Projections and the filters of features are public randomness, not noise.
        public = path.name in {"projections.py", "image_features.py"}
        assert public or not normal.search(text), path
        drawn_here = path.name in {"random.py", "grid.py", "private_stacks.py"}
        assert drawn_here or not drawing.search(text), path


def test_nothing_is_ever_unpickled() -> None:
    unsafe = {"pickle", "joblib", "marshal", "shelve", "dill"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not unsafe & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "eval", "exec", "np.load"}, path


def test_every_error_has_a_documented_exit_code() -> None:
    documented = {0, 1, 2, 3, 4, 5, 6, 7, 130}
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in found if issubclass(kind, errors.DpflError)]
    assert len(kinds) >= 11
    assert {kind.exit_code for kind in kinds} <= documented
    readme = (ROOT / "README.md").read_text()
    assert all(re.search(rf"\b{code}\b", readme) for code in documented)
