"""Where budgets come from (the papers' distributions, lists, files) and the ways to spend them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpfl.core.checks import check, positive
from dpfl.core.errors import ConfigurationError, read_problem, unknown_name
from dpfl.core.files import csv_records, parsed, text_of
from dpfl.core.seeds import PublicSeed
from dpfl.core.types import Budget, Terms

Spending = Literal["heterogeneous", "uniform", "smallest", "largest"]
SPENDINGS: dict[str, str] = {
    "heterogeneous": "noise from each client's own budget; all planned to run out together",
    "uniform": "one noise level for all, that of the median client; small budgets run out first",
    "smallest": "every client plans with the smallest claimed epsilon (Minimum)",
    "largest": "every client plans with the largest claimed epsilon (Maximum)",
}
# Normal (mean, std), uniform (low, high) and Pareto (shape, scale).
_LAWS: dict[str, Callable[[np.random.Generator, float, float], float]] = {
    "N": np.random.Generator.normal,
    "U": np.random.Generator.uniform,
    "Pareto": lambda generator, shape, scale: scale * (1 + generator.pareto(shape)),
}


@dataclass(frozen=True)
class Distribution:
    """A law for epsilon, or a mixture of them.

    ``parts`` are a share and the two parameters of the law each. Counts follow the shares exactly,
    and draws at or below ``floor`` are redrawn.
    """

    source: str
    law: Literal["N", "U", "Pareto"]
    parts: tuple[tuple[float, float, float], ...]
    floor: float = 0.0

    def draw(self, clients: int, seed: PublicSeed) -> list[float]:
        """Draw one epsilon per client, in shuffled order.

        >>> values = DISTRIBUTIONS["mixgauss1"].draw(20, PublicSeed(0))
        >>> sum(value > 5 for value in values)
        2
        """
        generator = seed.numpy()
        values: list[float] = []
        counts = _exact_counts([share for share, *_ in self.parts], clients)
        for (_, first, second), count in zip(self.parts, counts, strict=True):
            draw = functools.partial(_LAWS[self.law], generator, first, second)
            allowed = (value for value in iter(draw, None) if value > self.floor)
            values += itertools.islice(allowed, count)
        generator.shuffle(values)
        return values

    def __str__(self) -> str:
        texts = [f"{share:g} {self.law}({one:g}, {two:g})" for share, one, two in self.parts]
        return " + ".join(texts).removeprefix("1 ")


def _exact_counts(shares: Sequence[float], total: int) -> list[int]:
    """Share out ``total`` by largest remainder."""
    exact = [share * total for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


_PFA, _HDP = "PFA, Table 1", "Robust-HDP, Table 7"
DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution(_PFA, "U", ((1, 1, 10),)),
    "gauss": Distribution(_PFA, "N", ((1, 3, 1),)),
    "pareto": Distribution(f"{_PFA} (no shape there: 2, scale 1)", "Pareto", ((1, 2, 1),)),
    "mixgauss1": Distribution(_PFA, "N", ((0.9, 0.1, 0.01), (0.1, 10, 0.1))),
    "mixgauss2": Distribution(_PFA, "N", ((0.9, 0.5, 0.01), (0.1, 10, 0.1))),
    "mixgauss3": Distribution(_PFA, "N", ((0.9, 1, 0.1), (0.1, 10, 0.1))),
    "mixgauss4": Distribution(_PFA, "N", ((0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 1))),
    "dist1": Distribution(_HDP, "N", ((1, 2, 1),), 0.05),
    "dist2": Distribution(_HDP, "N", ((0.2, 0.2, 0.01), (0.6, 1, 0.1), (0.2, 5, 1)), 0.05),
    "dist3": Distribution(_HDP, "U", ((1, 0.2, 5),), 0.05),
    "dist4": Distribution(_HDP, "N", ((0.2, 0.2, 0.01), (0.6, 0.5, 0.1), (0.2, 2, 1)), 0.05),
    "dist5": Distribution(_HDP, "U", ((1, 0.2, 2),), 0.05),
    "dist6": Distribution(_HDP, "N", ((0.3, 0.2, 0.01), (0.5, 0.5, 0.1), (0.2, 1, 0.1)), 0.05),
    "dist7": Distribution(_HDP, "U", ((1, 0.2, 1),), 0.05),
    "dist8": Distribution(_HDP, "N", ((0.6, 0.2, 0.01), (0.4, 0.5, 0.1)), 0.05),
    "dist9": Distribution(_HDP, "U", ((1, 0.2, 0.5),), 0.05),
}


PerClient = float | Sequence[float] | Mapping[str, float]


def make_budgets(
    source: str | PerClient, delta: PerClient, ids: Sequence[str], seed: PublicSeed
) -> dict[str, Budget]:
    """Make one budget per client.

    ``source`` gives the epsilons: a distribution's name, a number for all, a list in the order of
    ``ids``, a mapping, or a file, which may hold deltas as well. ``delta`` is a number, a list or a
    mapping. ``seed`` is for distributions.

    >>> make_budgets("0.5, 2", 1e-5, ["a", "b"], PublicSeed(0))["b"].epsilon
    2.0
    """
    own_deltas: dict[str, float] = {}
    check(
        isinstance(ids, Sequence) and not isinstance(ids, str),
        "budgets",
        f"ids = {ids!r:.60}",
        "give a list of the clients' ids",
    )
    check(
        isinstance(seed, PublicSeed),
        "budgets",
        f"seed = {seed!r:.60}",
        "give dpfl.PublicSeed(0), for instance",
    )
    if isinstance(source, str):
        source, own_deltas = _read(source.strip(), len(ids), seed)
    epsilons = _per_client("epsilon", source, ids)
    deltas = _per_client("delta", delta, ids) | own_deltas
    budgets = {}
    for client in ids:
        try:
            budgets[client] = Budget(epsilon=epsilons[client], delta=deltas[client])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"budget of '{client}'", error.problem, error.remedy
            ) from error
    return budgets


def _read(text: str, clients: int, seed: PublicSeed) -> tuple[PerClient, dict[str, float]]:
    """The epsilons that a distribution, a file or numbers stand for, and the deltas of a file."""
    if text.lower() in DISTRIBUTIONS:
        return DISTRIBUTIONS[text.lower()].draw(clients, seed), {}
    if is_budget_file(text):
        return read_budget_file(Path(text))
    try:
        numbers = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        check(
            not Path(text).exists(),
            "budgets",
            f"'{text}' is neither .csv nor .json",
            "name the file so",
        )
        raise unknown_name("budgets", "distribution", text, DISTRIBUTIONS) from None
    return numbers[0] if len(numbers) == 1 else numbers, {}


def _per_client(what: str, value: PerClient, ids: Sequence[str]) -> dict[str, float]:
    where = f"budgets ({what})"
    if isinstance(value, int | float):
        return dict.fromkeys(ids, float(value))
    if not isinstance(value, Mapping):
        check(
            isinstance(value, Sequence | np.ndarray) and not isinstance(value, str),
            where,
            f"{value!r:.60} was given",
            "give a number, a list, or a table by client",
        )
        check(
            len(value) == len(ids),
            where,
            f"{len(value)} values for {len(ids)} clients",
            "give one value, or one for each client",
        )
        value = dict(zip(ids, value, strict=True))
    for client in sorted(set(ids) - set(value)):
        raise ConfigurationError(
            where, f"no value for client '{client}'", "give one for every client"
        )
    for client in sorted(set(value) - set(ids)):
        raise unknown_name(where, "client", client, ids)
    for client in ids:
        positive(f"budget of '{client}'", **{what: value[client]})
    return {client: float(value[client]) for client in ids}


def is_budget_file(text: str) -> bool:
    """Whether this names a file rather than a distribution or numbers."""
    return Path(text.strip()).suffix.lower() in {".csv", ".json"}


def read_budget_file(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Read epsilons, and deltas where there are any, by client; what is unclear is refused.

    A file is CSV (``id,epsilon[,delta]`` with a header) or JSON (``{id: epsilon}`` or ``{id:
    [epsilon, delta]}``).
    """
    where = f"budgets file {path}"
    epsilons: dict[str, float] = {}
    deltas: dict[str, float] = {}
    try:
        text = text_of(path)
        rows = _json_rows(text) if path.suffix.lower() == ".json" else _csv_rows(text)
        for client, epsilon, *delta in rows:
            if client in epsilons:
                raise ValueError(f"it names client '{client}' twice")
            epsilons[client] = _number(client, epsilon)
            deltas.update((client, _number(client, value)) for value in delta)
    except OSError as error:
        raise ConfigurationError(
            where, f"cannot be read ({error.strerror})", "check the path"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            where,
            f"is not as expected ({read_problem(error)})",
            "use columns id,epsilon[,delta], or JSON {id: epsilon} or {id: [epsilon, delta]}",
        ) from error
    return epsilons, deltas


def _number(client: str, value: Any) -> float:
    """Read a number of a client in a file."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"'{client}' has {value!r:.60} instead of a number") from None


def _json_rows(text: str) -> Iterator[list[Any]]:
    content = parsed(text, object_pairs_hook=list)  # a client that is named twice must show
    if not text.lstrip().startswith("{"):
        raise ValueError("it holds no object")
    for client, value in content:
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) not in (1, 2) or any(isinstance(number, bool) for number in numbers):
            raise ValueError(f"'{client}' has something else than epsilon, or epsilon and delta")
        yield [client, *numbers]


def _csv_rows(text: str) -> Iterator[list[str]]:
    (_, header), *records = csv_records(text) or [(1, [])]
    columns = [name.strip() for name in header]
    if sorted(columns) not in (["epsilon", "id"], ["delta", "epsilon", "id"]):
        raise ValueError(f"its columns are {', '.join(columns) or 'none'}")
    for line, record in records:
        if len(record) != len(columns):
            raise ValueError(f"line {line} has {len(record)} cells, not {len(columns)}")
        cells = dict(zip(columns, map(str.strip, record), strict=True))
        yield [cells["id"], cells["epsilon"], *filter(None, [cells.get("delta")])]


def planned_epsilon(spending: Spending, budget: Budget, terms: Terms) -> float:
    """Which epsilon a client's noise is planned for.

    Only ``largest`` may exceed what the client itself enforces.
    """
    if spending == "smallest":
        return min(budget.epsilon, terms.smallest_epsilon)
    return max(budget.epsilon, terms.largest_epsilon) if spending == "largest" else budget.epsilon
