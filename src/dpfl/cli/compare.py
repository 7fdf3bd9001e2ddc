"""``dpfl compare``: several methods on the same federations, seeds and first models.

Seeds are paired: all methods see the same federation, the same first model and the same draws.
Runs are kept by content, so that repeating the command goes on where it was, and adding a method
runs only that method. Tables go to stdout, progress and flags to stderr.
"""

from pathlib import Path

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.values import Values, seeds_of
from dpfl.core.checks import check


@o.takes_experiment(o.MANY, o.STORE)
def compare(
    asked: o.Asked,
    seeds: str = o.SEEDS,
    tuned: Path | None = o.opt("Results of dpfl tune: every method with its best settings."),
) -> None:
    """Compare methods over paired seeds: one table per privacy unit, spread beside every mean.

    Every method meets the same federations, seeds and first models. Only methods that promise the
    same are ranked. Runs are kept by content: repeating the command, or adding a method, runs only
    what is missing.

    For instance: dpfl compare --dataset digits --clients 20 --budgets mixgauss1 --delta 1e-3
    --clip 1 --methods fedavg_dp,weiavg,robust_hdp
    """
    from dpfl.experiments import compare as library
    from dpfl.experiments.ranking import standings

    values, settings = asked.values(), _settings(tuned) if tuned else {}
    names, numbers = asked.method_names(values, settings), seeds_of(seeds)
    for name in names if tuned else ():
        remedy = "tune it as well, or leave it out"
        check(name in settings, "--tuned", f"{tuned} does not hold '{name}'", remedy)
    with r.open_store(asked, "compare") as store:
        result = library.compare(values, names, seeds=numbers, settings=settings, store=store)
    r.finish(result, asked, "compare", lambda found: r.show_standings(standings(found.cells)))


def _settings(path: Path) -> dict[str, Values]:
    """What a search chose, by method."""
    from dpfl.experiments.results import StudyResult

    result = StudyResult.read(path, remedy := "name the folder of a dpfl tune")
    check(bool(result.tuning), "--tuned", f"{path} holds no search", remedy)
    return result.settings()
