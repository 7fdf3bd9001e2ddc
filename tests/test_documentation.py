"""What the documents say is true: their Python runs, their files parse, their commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from dpfl.cli.main import app
from dpfl.runs.experiment import Experiment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S):
            found.append((page.name, block))
    return found


def _programs() -> dict[str, list[str]]:
    """The Python of each page, block by block; later blocks use the names of earlier ones."""
    found: dict[str, list[str]] = {}
    for page, code in _blocks("python"):
        found.setdefault(page, []).append(code)
    return found


@pytest.mark.parametrize(("page", "blocks"), _programs().items(), ids=list(_programs()))
def test_python_in_the_documents_runs(
    page: str,
    blocks: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # some keep runs
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks:
        exec(compile(code, page, "exec", dont_inherit=True), names)
    if page == "python.md":  # what is printed there is true
        assert names["result"].accuracy > 0.7
        x, y, public = names["x"], names["y"], names["public"]
        assert (names["predictor"].predict(x[public]) == y[public]).mean() > 0.7
        assert names["stopped"].summary.rounds.done == 3
        assert names["early"].summary.rounds.done > 2


def test_the_documented_experiment_file_is_complete_and_valid() -> None:
    (block,) = [code for page, code in _blocks("toml") if page == "experiment-file.md"]
    import tomllib

    values = tomllib.loads(block)
    experiment = Experiment.from_dict(values)
    experiment.check()
    # A secure sum has no rows for robust aggregation: it has examples of its own.
    blocks = [code for page, code in _blocks("text") if page == "experiment-file.md"]
    sums = [tomllib.loads(code) for code in blocks if "[secure_sum]" in code]
    kept = {name: own for name, own in values.items() if name not in ("server", "accounted")}
    for summed in sums:
        Experiment.from_dict({**kept, **summed}).check()
    assert sums
    assert set(values) | {"secure_sum"} == set(Experiment.model_fields)
    for section in ("partition", "budgets", "model", "run"):
        assert set(values[section]) == set(type(getattr(experiment, section)).model_fields)


def test_every_example_is_valid() -> None:
    examples = sorted((ROOT / "examples").glob("*.toml"))
    assert examples
    for path in examples:
        Experiment.from_file(path).check()


def test_every_command_and_option_in_the_documents_exists() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    context = click.Context(group)
    seen = 0
    for _, block in _blocks("console"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith("dpfl ") or "|" in line:
                continue
            words = shlex.split(line.split("#")[0])
            _, command, rest = group.resolve_command(context, words[1:])
            assert command is not None, line
            if isinstance(command, click.Group):
                command, rest = command.commands[words[2]], words[3:]
            known = {option for parameter in command.params for option in parameter.opts}
            for word in rest:
                if word.startswith("--"):
                    assert word in known, line
            seen += 1
    assert seen >= 6


def test_links_between_documents_lead_somewhere() -> None:
    seen = 0
    for page in [*PAGES, *sorted((ROOT / "studies").rglob("*.md")), ROOT / "bench" / "README.md"]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" not in target:
                leads_to = page.parent / target if target else page
                assert leads_to.exists(), f"{page.name}: {target}"
                if anchor:
                    assert anchor in _anchors(leads_to), f"{page.name}: {target}#{anchor}"
                seen += 1
    assert seen > 40


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}
