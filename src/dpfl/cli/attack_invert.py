"""``dpfl attack invert``: reconstruct records from what leaves a client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl.cli import console as c, options as o
from dpfl.cli.attack_results import OUT, check_own_files, finish
from dpfl.core.checks import check

if TYPE_CHECKING:
    from dpfl.attacks.inverting.result import InversionResult

CLIENTS = 4
"""Clients of a data set that is shared out, unless they are counted."""


@o.takes_experiment(o.MANY)
def invert(
    asked: o.Asked,
    targets: str = o.opt("Records of the victim, by number, separated by commas.", "0,1,2,3"),
    client: str | None = o.opt("The victim (default: the first client)."),
    epsilons: str = o.opt("Budgets that are tried, after no privacy.", "20,5,1"),
    views: str = o.opt("row, cleaned, sum or secure sum, separated by commas.", "row"),
    algorithms: str = o.opt("dlg, idlg or cosine, separated by commas.", "cosine"),
    iterations: int = o.opt("Steps of the optimiser.", 300, min=1),
    restarts: int = o.opt("Starts; the best one counts.", 1, min=1),
    seed: int = o.opt("Seed of the attack.", 0),
    out: Path | None = OUT,
    quiet: bool = o.QUIET,
) -> None:
    """Invert gradients: reconstruct records from what leaves a client.

    The victim holds the named records alone, and takes one local step on all of them. Every method
    is tried without privacy and at every epsilon. The report shows originals and reconstructions.

    For instance: dpfl attack invert --dataset digits --model mlp --methods weiavg,udp_fedavg
    --delta 1e-5 --clip 1
    """
    from dpfl.attacks.inverting.invert import Inversion, invert as run
    from dpfl.report.inversion_page import inversion_page

    values = with_attack_defaults(asked.values())
    check_own_files(values)
    names, _ = asked.candidates()
    how = Inversion(
        records=numbers_of("--targets", targets, int),
        client=client,
        epsilons=numbers_of("--epsilons", epsilons, float),
        views=_words(views),
        algorithms=_words(algorithms),  # type: ignore[arg-type]
        iterations=iterations,
        restarts=restarts,
        seed=seed,
    )
    stop = c.interruptible(out or Path("runs"), lambda: "run it again: attacks are not resumed")
    with stop, c.progress_bar("invert", "", None, quiet) as update:
        found = run(
            values,
            names,
            how,
            data_folder=asked.data,
            announce=lambda seconds: c.note(f"at most about {c.duration(seconds)}"),
            progress=lambda stage, done, total: update(completed=done, total=total, note=stage),
        )
    finish(
        found,
        inversion_page(found),
        lambda: show_inversion(found),
        stem="attack-invert",
        folder=out,
        as_json=asked.json,
    )
    for sentence in found.left_out:
        c.note(f"left out: {sentence}")


def with_attack_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in a budget, and a small federation, where an attack is told nothing of them."""
    data = values.get("data", {})
    check(
        bool(data),
        "options",
        "no data set was named",
        "give --dataset, or an experiment file; dpfl datasets lists them",
    )
    budgets = {"epsilon": 1.0, "delta": 1e-5, **values.get("budgets", {})}
    values = {**values, "budgets": budgets, "run": {**values.get("run", {}), "rounds": 1}}
    if "name" in data and not values.get("partition"):
        values["partition"] = {"clients": CLIENTS, "kind": "iid"}
    return values


def numbers_of(option: str, text: str, kind: type) -> list[Any]:
    """Read numbers, separated by commas."""
    try:
        found = [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    check(
        bool(found) and all(math.isfinite(one) and one >= 0 for one in found),
        option,
        f"'{text}' is not a list of numbers",
        "write for instance 0,1,2",
    )
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def show_inversion(found: InversionResult) -> None:
    """Print a row a case: how alike originals and reconstructions are."""
    rows = [
        [
            case.method,
            case.view,
            case.algorithm,
            c.epsilon_text(case.epsilon, 2),
            f"{case.mean_psnr:.1f}",
            c.number_text(case.mean_ssim, ".2f"),
            f"{100 * case.labels_right:.0f} %",
        ]
        for case in found.cases
    ]
    headings = ("method", "view", "by", "epsilon", "PSNR dB", "SSIM", "labels")
    title = f"Reconstructing {len(found.originals)} records of {found.client}"
    c.print_table(headings, rows, title=title, left=3)
    c.print_lines(
        "epsilon: of all rounds, against the server (row, cleaned, secure sum) or the world (sum);"
        " PSNR, SSIM: higher is a better reconstruction"
    )
