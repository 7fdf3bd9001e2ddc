"""What compare, sweep and tune share: from options to a study, runs kept by content, tables, and
the files they leave.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import bytes_text, err, mean_and_spread, out, progress_bar, table, three_text
from dpfl.core.errors import ConfigurationError, DataError, DpflError, Interrupted, unknown_name
from dpfl.core.files import write_safely
from dpfl.experiments.ranking import Standing, grouped, remarks
from dpfl.experiments.study import Study
from dpfl.experiments.tuning import Told
from dpfl.methods import METHODS, families
from dpfl.report.page import write_report
from dpfl.report.reading import of_results
from dpfl.runs.experiment import for_method
from dpfl.runs.folder import free_name
from dpfl.sim.train import rehearse

Methods = Annotated[str, typer.Option(help="Methods, separated by commas; or all.")]
Family = Annotated[
    str | None, typer.Option(help="Instead: heterogeneous, client or wireless.", show_default=False)
]
Seeds = Annotated[str, typer.Option(help="How many seeds, or a list such as 0,1,2.")]
Workers = Annotated[int, typer.Option(help="Runs at a time, one process each.", min=1)]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder of the results (default: a new one in runs/).")
]
Kept = Annotated[
    Path, typer.Option(help="Where runs are kept by content; what is there is not run again.")
]
KEPT = Path("runs/kept")

Runner = Callable[[Study, Path, Path | None, int, Told], dict[str, Any]]


def seeds_of(text: str) -> list[int]:
    """Read a number of seeds, or a list."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            "--seeds", f"'{text}' is no number and no list of numbers", "give 3, or 0,1,2"
        ) from None
    seeds = list(range(numbers[0])) if "," not in text else numbers
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigurationError(
            "--seeds", f"'{text}' names no seed, or one twice", "give 3, or 0,1,2"
        )
    return seeds


def lists_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read FIELD=VALUE,VALUE,... as a list per dotted field.

    >>> lists_of(["method.lr=0.1,0.3", "budgets.epsilon=mixgauss1,unibetween"])
    {'method.lr': [0.1, 0.3], 'budgets.epsilon': ['mixgauss1', 'unibetween']}
    """
    lists: dict[str, list[Any]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if not equals or "." not in field or not words:
            raise ConfigurationError(
                "--over",
                f"'{text}' is no FIELD=VALUE,VALUE,...",
                "write for instance --over budgets.scale=0.5,1,2",
            )
        if field in ("run.seed", "method.name"):
            raise ConfigurationError(
                "--over", f"'{field}' is set by the command itself", "use --seeds, or --methods"
            )
        if field in lists:
            raise ConfigurationError(
                "--over", f"'{field}' was given twice", "give each field one list"
            )
        lists[field] = [o.number(word, None) for word in words]
    return lists


def with_settings(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The same values with some settings of the method."""
    return {**values, "method": {**values.get("method", {}), **settings}}


def chosen_methods(
    methods: str,
    family: str | None,
    values: dict[str, Any],
    file: Path | None,
    data: Path | None,
    tuned: dict[str, dict[str, Any]] | None = None,
) -> list[str]:
    """Read the methods asked for; of ``all`` or a family, those that this federation cannot run are
    named and left out.
    """
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    if family is not None and family not in families():
        raise unknown_name("--family", "family", family, families())
    if family is None and names != ["all"]:
        if not names:
            raise ConfigurationError(
                "--methods",
                "names no method",
                "give for instance --methods fedavg_dp,weiavg, all, or a --family",
            )
        return names
    if family is not None and names:
        raise ConfigurationError("--family", "--methods was given as well", "give one of the two")
    fitting = []
    for name in families()[family] if family else METHODS:
        try:
            rehearse(
                o.build(file, for_method(with_settings(values, (tuned or {}).get(name, {})), name)),
                data,
            )
            fitting.append(name)
        except DataError:  # no method will do better
            raise
        except DpflError as error:
            err.print(f"left out: {name} ({error})", soft_wrap=True)
    if not fitting:
        raise ConfigurationError(
            "--methods", "none of the methods fits this federation", "see why above"
        )
    return fitting


def run_shown(
    runner: Runner, study: Study, kept: Path, data: Path | None, workers: int, quiet: bool
) -> dict[str, Any]:
    """Run a study behind a progress bar."""
    with progress_bar() as bar:
        bar.disable = bar.disable or quiet
        shown = bar.add_task(study.title, total=None, note="")

        def told(stage: str, done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total, note=stage)

        try:
            return runner(study, kept, data, workers, told)
        except KeyboardInterrupt:
            raise Interrupted(
                str(kept), "stopped by you", "repeat the command: it goes on where it was"
            ) from None


def new_folder(given: Path | None, stem: str) -> Path:
    """Where results go."""
    return given or free_name(Path("runs"), stem)


def keep(results: dict[str, Any], folder: Path, kept: Path) -> Path:
    """Write the results and, where there are runs to show, their page; say where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safely(
        folder / "results.json",
        (json.dumps({**results, "kept": str(kept.absolute())}, indent=1) + "\n").encode(),
    )
    if any(cell["runs"] for cell in results["cells"]):
        write_report(of_results(results, kept), folder / "report.html")
    return folder


def show_standings(lines: Sequence[Standing], title: str = "outcome") -> None:
    """Print outcome and privacy, one pair of tables a unit; methods of different units are never
    ranked together.
    """
    for unit, mine in grouped(lines).items():
        seeds = len(mine[0].runs)
        outcome = table(
            "method",
            "accuracy %",
            "behind",
            "p",
            "left",
            "up",
            "down",
            title=f"Protecting a {unit}: {title} over {seeds} seed(s)",
        )
        for one in mine:
            outcome.add_row(
                one.label,
                mean_and_spread(one.accuracies),
                _behind(one),
                "-" if one.p_value is None else f"{one.p_value:.2g}",
                f"{statistics.mean(r['clients_left'] for r in one.runs):g}/{one.runs[0]['clients']}",
                bytes_text(statistics.mean(r["bytes_up"] for r in one.runs)),
                bytes_text(statistics.mean(r["bytes_down"] for r in one.runs)),
            )
        headings = ("spent: min", "median", "max", "granted: min", "median", "max")
        privacy = table("method", *headings, title="Epsilon over clients (averaged over seeds)")
        for one in mine:
            privacy.add_row(
                one.label,
                *_averaged([r["epsilon"].get("spent") for r in one.runs]),
                *_averaged([r["epsilon"].get("budget") for r in one.runs]),
            )
        out.print(outcome)
        out.print()
        out.print(privacy)
        for meaning in sorted({_meaning(one) for one in mine if one.promise[2] != "nobody"}):
            out.print(meaning)
        out.print(
            "accuracy: mean ± standard deviation on all clients' test records; behind: points below the best of those that "
            "promise the same; p: paired t-test against it, Holm's adjustment; left: clients whose budget ran out early"
        )
        for remark in remarks(mine):
            out.print(remark)
        out.print(
            "Each run is billed alone: publishing more than one of them on the same data adds up."
        )
        out.print()
    _show_stamps(lines)


def _behind(one: Standing) -> str:
    if one.reference:
        return "reference"
    if one.behind is None:
        return "-"
    return (
        "best"
        if one.best
        else "alone"
        if one.behind == 0 and one.p_value is None
        else f"{100 * one.behind:.1f}"
    )


def _show_stamps(lines: Sequence[Standing]) -> None:
    stamps = sorted(
        {s for one in lines for r in one.runs for s in r["stamps"] if s.startswith(("NOT", "HYPO"))}
    )
    for stamp in stamps:
        who = [one.label for one in lines if stamp in one.runs[0]["stamps"]]
        err.print(f"{stamp} [{', '.join(dict.fromkeys(who))}]", style="yellow", markup=False)


def _averaged(spreads: list[dict[str, Any] | None]) -> list[str]:
    present = [spread for spread in spreads if spread]
    if not present:
        return three_text(None)
    keys = ("smallest", "median", "largest")
    if any(spread[key] == "infinite" for spread in present for key in keys):
        return ["infinite"] * 3
    return three_text({key: statistics.mean(spread[key] for spread in present) for key in keys})


def _meaning(one: Standing) -> str:
    unit, adjacency, observer = one.promise
    accountants = ", ".join(one.runs[0]["epsilon"]["accountant"])
    return f"epsilon: per {unit}, {adjacency} adjacency, against the {observer}, by {accountants}; rounded up"
