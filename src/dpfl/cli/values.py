"""From the options of a command to the plain values of an experiment.

:data:`FIELDS` is the one table that says which option sets which field. Options win over the file.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpfl.core.checks import check
from dpfl.core.types import Plain

Values = Plain
ROUNDS = 30
MOST_SEEDS = 10_000
LIGHT_DEFAULTS: Values = {"lr": 0.1, "batch_size": 16, "local_steps": 10}
"""Settings without a file; what decides privacy has no default."""

FIELDS: dict[str, tuple[str, Any, str]] = {
    "label": ("data.label", str, "Label column of files in a folder (default: the last)."),
    "schema": ("data.schema", str, "TOML file that says what the columns of those files hold."),
    "budgets": ("budgets.epsilon", str, "Distribution, number, list or file of epsilons."),
    "delta": ("budgets.delta", float, "Delta of every client."),
    "clip": ("method.clip", float, "Largest norm of one record's gradient, or client's update."),
    "noise_multiplier": ("method.noise_multiplier", float, "Noise of client-level methods / clip."),
    "partition": ("partition.kind", str, "natural, iid, shards, classes, dirichlet or unequal."),
    "clients": ("partition.clients", int, "Number of clients."),
    "records": ("partition.records", int, "Training records per client."),
    "alpha": ("partition.alpha", float, "Setting of the dirichlet and unequal partitions."),
    "model": ("model.name", str, "Model."),
    "task": ("task.name", str, "What is learned (dpfl tasks; default: the data set's own)."),
    "metric": ("task.metric", str, "The metric that ranks (default: the task's)."),
    "lr": ("method.lr", float, "Learning rate of local work."),
    "batch_size": ("method.batch_size", int, "Expected records per local step."),
    "local_steps": ("method.local_steps", int, "Local steps per round."),
    "local_epochs": ("method.local_epochs", int, "Local epochs per round, instead of steps."),
    "spending": ("method.spending", str, "heterogeneous or uniform."),
    "rounds": ("run.rounds", int, "Rounds."),
    "cohort": ("run.cohort", str, "Clients per round: a number, or a fraction such as 0.8."),
    "sampling": ("run.sampling", str, "How the cohort is drawn: uniform or poisson."),
    "least_willing": ("run.least_willing", int, "Willing clients below which a plan ends."),
    "dropout": ("run.dropout", float, "Share of uploads that get lost, to see the effect."),
    "engine": ("run.engine", str, "stacked, one_by_one, or ray (a cluster; RAY_ADDRESS names it)."),
    "device": ("run.device", str, "Where local work is computed: cpu, or cuda where torch has it."),
    "personal_finish": ("run.personal_finish", bool, "Compare with each client's own records."),
    "method": ("method.name", str, "Method."),
    "workers": ("run.workers", int, "Worker processes; they never change a result."),
    "seed": ("run.seed", int, "Seed; the run is repeatable, and NOT PRIVATE."),
}
"""Options that set one field each: the field, the kind of value, and the help."""


def lay_over(values: Values, options: Values) -> Values:
    """Lay options over the values of a file.

    Most options set one field (:data:`FIELDS`). ``--set`` takes a setting of the method, or any
    dotted field; a new number of local steps or epochs replaces the old one, whichever it was.
    """
    from dpfl.experiments.study import set_fields

    given = {name: value for name, value in options.items() if value is not None}
    fields: Values = {FIELDS[name][0]: own for name, own in given.items() if name in FIELDS}
    if "cohort" in given:
        fields["run.cohort"] = cohort = number(given["cohort"])
        check(
            not isinstance(cohort, str),
            "--cohort",
            f"'{cohort}' is not a number",
            "give a number of clients or a fraction",
        )
    for pair in given.get("set", ()):
        key, equals, text = pair.partition("=")
        check(
            bool(equals) and all(part.strip() for part in key.split(".")),
            "--set",
            f"'{pair}' is not KEY=VALUE",
            "write for instance --set k=1",
        )
        fields[key if "." in key else f"method.{key}"] = number(text)
    if claims := given.get("misreport"):
        before = values.get("run", {}).get("misreports", {})
        fields["run.misreports"] = {**before, **dict(map(_misreport, claims))}
    lengths = {"local_steps", "local_epochs"}
    if lengths & given.keys() and "method" in values:
        kept = {name: own for name, own in values["method"].items() if name not in lengths}
        values = {**values, "method": kept}
    if given.get("secure_sum"):
        values = {**values, "secure_sum": values.get("secure_sum", {})}
    if "dataset" in given:
        values = {**values, "data": data_values(given["dataset"])}
    return set_fields(values, fields)


def _misreport(text: str) -> tuple[str, float]:
    """Read which client claims how many times its epsilon, written as ID:FACTOR."""
    client, _, word = text.rpartition(":")
    factor = number(word)
    check(
        bool(client) and isinstance(factor, int | float),
        "--misreport",
        f"'{text}' is not ID:FACTOR",
        "write for instance 12:100",
    )
    return client, factor


def wanted(method: Values, setting: str) -> bool:
    """Whether a method needs a setting; one that is not named yet may need anything.

    ``method`` is the method's section so far. Local steps are not needed beside local epochs.
    """
    from dpfl.methods import METHODS

    if setting == "local_steps" and "local_epochs" in method:
        return False
    known = METHODS.get(method.get("name", ""))
    own = known and known.settings.get(setting)
    needed = own and (own.default is own.empty or setting == "local_steps")
    return known is None or bool(needed)


def with_light_defaults(values: Values) -> Values:
    """Fill in light settings that do not decide privacy, and that the method does not plan."""
    method = values.setdefault("method", {})
    for name, value in LIGHT_DEFAULTS.items():
        if wanted(method, name):
            method.setdefault(name, value)
    if not plans_itself(method):
        values.setdefault("run", {}).setdefault("rounds", ROUNDS)
    return values


def plans_itself(method: Values) -> bool:
    """Whether a method brings its own model, and plans its own rounds."""
    from dpfl.methods import METHODS

    known = METHODS.get(method.get("name", ""))
    return known is not None and known.model is not None


def data_values(name: str) -> Values:
    """Return the data section for a data set by name, or for a folder."""
    from dpfl.datasets.named import DATASETS

    if name and name not in DATASETS and (Path(name).is_dir() or "/" in name):
        return {"folder": str(Path(name).absolute())}
    return {"name": name}


def number(text: str) -> Any:
    """Read a number, true or false, or leave a word a word.

    >>> number("3"), number("0.5"), number("true"), number("poisson")
    (3, 0.5, True, 'poisson')
    """
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def seeds_of(text: str) -> list[int]:
    """Read a number of seeds, or a list.

    >>> seeds_of("3"), seeds_of("5,2")
    ([0, 1, 2], [5, 2])
    """
    seeds = [number(word) for word in text.split(",")]
    whole = all(type(one) is int and one >= 0 for one in seeds)
    if whole and "," not in text:
        check(
            seeds[0] <= MOST_SEEDS,
            "--seeds",
            f"{text} is the number of seeds",
            f"give at most {MOST_SEEDS}, or a list",
        )
        seeds = list(range(seeds[0]))
    check(
        whole and 0 < len(seeds) == len(set(seeds)),
        "--seeds",
        f"'{text}' is not a number, or a list of different numbers",
        "give 3, or 0,1,2",
    )
    return seeds


def lists_of(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Read FIELD=VALUE,VALUE,... as a list per dotted field.

    >>> lists_of(["method.lr=0.1,0.3", "budgets.epsilon=mixgauss1,gauss"])
    {'method.lr': [0.1, 0.3], 'budgets.epsilon': ['mixgauss1', 'gauss']}
    """
    lists: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        check(
            "." in name and bool(words),
            "--over",
            f"'{text}' is not FIELD=VALUE,VALUE,...",
            "write for instance --over method.lr=0.1,0.3",
        )
        check(
            name not in ("run.seed", "method.name"),
            "--over",
            f"'{name}' has an option of its own",
            "use --seeds, or --methods",
        )
        check(name not in lists, "--over", f"'{name}' was given twice", "give each field one list")
        lists[name] = [number(word) for word in words]
    return lists


def check_complete(values: Values, method: str | None, *, any_method: bool = False) -> None:
    """Name what is missing in the words of the command line.

    With ``any_method``, the methods are not known yet, and only the data set is asked for.
    """
    from dpfl.methods import find

    check(
        bool(values.get("data")),
        "options",
        "no data set was named",
        "give --dataset, or an experiment file; dpfl datasets lists them",
    )
    if any_method:
        return
    check(
        bool(method),
        "options",
        "no method was named",
        "give --method, or an experiment file; dpfl methods lists them",
    )
    clips = "clip" in find(str(method)).settings
    if clips:
        check(
            "clip" in values["method"],
            "options",
            "no clip was given, and it has no default",
            "give --clip: the largest norm of a gradient",
        )
    if clips or plans_itself(values["method"]):
        check(
            "epsilon" in values.get("budgets", {}),
            "options",
            "no budgets were given, and they have no default",
            "give --budgets and --delta; dpfl budgets lists distributions",
        )
