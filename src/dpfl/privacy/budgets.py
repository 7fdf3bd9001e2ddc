"""Where budgets come from (the papers' distributions, lists, files) and the ways to spend them."""

import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, unknown_name
from dpfl.core.seeds import PublicSeed
from dpfl.core.types import Budget, Terms

Spending = Literal["heterogeneous", "uniform", "smallest", "largest"]
SPENDINGS: dict[str, str] = {
    "heterogeneous": "noise from each client's own budget; all planned to run out together",
    "uniform": "one noise level for all, that of the median client; small budgets run out first",
    "smallest": "every client plans with the smallest claimed epsilon (Minimum)",
    "largest": "every client plans with the largest claimed epsilon (Maximum)",
}


@dataclass(frozen=True)
class Part:
    """One component: a normal (mean, std), uniform (low, high) or Pareto (shape, scale) law."""

    share: float
    law: Literal["normal", "uniform", "pareto"]
    first: float
    second: float

    def draw(self, generator: np.random.Generator) -> float:
        """Draw one value."""
        if self.law == "normal":
            return float(generator.normal(self.first, self.second))
        if self.law == "uniform":
            return float(generator.uniform(self.first, self.second))
        return float(self.second * (1 + generator.pareto(self.first)))

    def __str__(self) -> str:
        letter = {"normal": "N", "uniform": "U", "pareto": "Pareto"}[self.law]
        text = f"{letter}({self.first:g}, {self.second:g})"
        return text if self.share == 1 else f"{self.share:g} {text}"


@dataclass(frozen=True)
class Distribution:
    """A mixture of laws for epsilon.

    Counts follow the shares exactly, and draws below ``floor`` are redrawn.
    """

    source: str
    parts: tuple[Part, ...]
    floor: float = 0.0

    def draw(self, clients: int, seed: PublicSeed) -> list[float]:
        """Draw one epsilon per client, in shuffled order.

        >>> values = DISTRIBUTIONS["mixgauss1"].draw(20, PublicSeed(0))
        >>> sum(value > 5 for value in values)
        2
        """
        generator = seed.numpy()
        values = []
        counts = _exact_counts([part.share for part in self.parts], clients)
        for part, count in zip(self.parts, counts, strict=True):
            for _ in range(count):
                value = part.draw(generator)
                while value <= self.floor:
                    value = part.draw(generator)
                values.append(value)
        generator.shuffle(values)
        return values

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


def _exact_counts(shares: Sequence[float], total: int) -> list[int]:
    """Share out ``total`` by largest remainder."""
    exact = [share * total for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _normal(*parts: tuple[float, float, float]) -> tuple[Part, ...]:
    return tuple(Part(share, "normal", mean, std) for share, mean, std in parts)


_PFA, _HDP = "PFA, Table 1", "Robust-HDP, Table 7"
DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution(_PFA, (Part(1, "uniform", 1, 10),)),
    "gauss": Distribution(_PFA, _normal((1, 3, 1))),
    "pareto": Distribution(f"{_PFA} (no shape there: 2, scale 1)", (Part(1, "pareto", 2, 1),)),
    "mixgauss1": Distribution(_PFA, _normal((0.9, 0.1, 0.01), (0.1, 10, 0.1))),
    "mixgauss2": Distribution(_PFA, _normal((0.9, 0.5, 0.01), (0.1, 10, 0.1))),
    "mixgauss3": Distribution(_PFA, _normal((0.9, 1, 0.1), (0.1, 10, 0.1))),
    "mixgauss4": Distribution(_PFA, _normal((0.5, 0.1, 0.01), (0.4, 1, 0.1), (0.1, 10, 1))),
    "dist1": Distribution(_HDP, _normal((1, 2, 1)), 0.05),
    "dist2": Distribution(_HDP, _normal((0.2, 0.2, 0.01), (0.6, 1, 0.1), (0.2, 5, 1)), 0.05),
    "dist3": Distribution(_HDP, (Part(1, "uniform", 0.2, 5),), 0.05),
    "dist4": Distribution(_HDP, _normal((0.2, 0.2, 0.01), (0.6, 0.5, 0.1), (0.2, 2, 1)), 0.05),
    "dist5": Distribution(_HDP, (Part(1, "uniform", 0.2, 2),), 0.05),
    "dist6": Distribution(_HDP, _normal((0.3, 0.2, 0.01), (0.5, 0.5, 0.1), (0.2, 1, 0.1)), 0.05),
    "dist7": Distribution(_HDP, (Part(1, "uniform", 0.2, 1),), 0.05),
    "dist8": Distribution(_HDP, _normal((0.6, 0.2, 0.01), (0.4, 0.5, 0.1)), 0.05),
    "dist9": Distribution(_HDP, (Part(1, "uniform", 0.2, 0.5),), 0.05),
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
    epsilons, own_deltas = _epsilons(source, ids, seed)
    deltas = {**_per_client("delta", delta, ids), **own_deltas}
    budgets = {}
    for client in ids:
        try:
            budgets[client] = Budget(epsilon=epsilons[client], delta=deltas[client])
        except ConfigurationError as error:
            where = f"budget of '{client}'"
            raise ConfigurationError(where, error.problem, error.remedy) from error
    return budgets


def _epsilons(
    source: str | PerClient, ids: Sequence[str], seed: PublicSeed
) -> tuple[dict[str, float], dict[str, float]]:
    """Epsilons of all clients, and the deltas that a file states."""
    if not isinstance(source, str):
        return _per_client("epsilon", source, ids), {}
    text = source.strip()
    if text.lower() in DISTRIBUTIONS:
        return dict(zip(ids, DISTRIBUTIONS[text.lower()].draw(len(ids), seed), strict=True)), {}
    if is_budget_file(text):
        epsilons, deltas = read_budget_file(Path(text))
        return _per_client("epsilon", epsilons, ids), deltas
    try:
        numbers = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        problem = f"'{text}' is neither .csv nor .json"
        check(not Path(text).exists(), "budgets", problem, "name the file so")
        raise unknown_name("budgets", "distribution", text, DISTRIBUTIONS) from None
    return _per_client("epsilon", numbers[0] if len(numbers) == 1 else numbers, ids), {}


def _per_client(what: str, value: PerClient, ids: Sequence[str]) -> dict[str, float]:
    where = f"budgets ({what})"
    if isinstance(value, int | float):
        return dict.fromkeys(ids, float(value))
    if not isinstance(value, Mapping):
        problem = f"{len(value)} values for {len(ids)} clients"
        check(len(value) == len(ids), where, problem, "give one value, or one for each client")
        value = dict(zip(ids, value, strict=True))
    missing, unknown = sorted(set(ids) - set(value)), sorted(set(value) - set(ids))
    problem = f"no value for client '{missing[0] if missing else ''}'"
    check(not missing, where, problem, "give one for every client")
    if unknown:
        raise unknown_name(where, "client", unknown[0], ids)
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
    remedy = "use the columns id,epsilon[,delta], or JSON {id: epsilon} or {id: [epsilon, delta]}"
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = _json_rows(text) if path.suffix.lower() == ".json" else _csv_rows(text)
        epsilons = {client: float(values[0]) for client, values in rows}
        deltas = {client: float(values[1]) for client, values in rows if len(values) > 1}
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigurationError(where, problem, "check the path") from error
    except (ValueError, TypeError, csv.Error) as error:
        raise ConfigurationError(where, f"is not as expected ({error})", remedy) from error
    twice, times = Counter(client for client, _ in rows).most_common(1)[0] if rows else ("", 1)
    check(times == 1, where, f"names client '{twice}' twice", "keep one line per client")
    return epsilons, deltas


def _json_rows(text: str) -> list[tuple[str, list[Any]]]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    rows = [
        (str(key), value if isinstance(value, list) else [value]) for key, value in content.items()
    ]
    for client, values in rows:
        if len(values) not in (1, 2) or any(isinstance(number, bool) for number in values):
            raise ValueError(f"'{client}' has something else than epsilon, or epsilon and delta")
    return rows


def _csv_rows(text: str) -> list[tuple[str, list[Any]]]:
    lines = [line for line in csv.reader(text.splitlines()) if line]
    header = [name.strip() for name in lines[0]] if lines else []
    if sorted(header) not in (["epsilon", "id"], ["delta", "epsilon", "id"]):
        raise ValueError(f"its columns are {', '.join(header) or 'none'}")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise ValueError(f"line {number} has {len(line)} cells, not {len(header)}")
        cells = dict(zip(header, line, strict=True))
        given = [cells["epsilon"], *filter(str.strip, [cells.get("delta", "")])]
        rows.append((cells["id"].strip(), given))
    return rows


def planned_epsilon(spending: Spending, budget: Budget, terms: Terms) -> float:
    """Which epsilon a client's noise is planned for.

    Only ``largest`` may exceed what the client itself enforces.
    """
    if spending == "smallest":
        return min(budget.epsilon, terms.smallest_epsilon)
    if spending == "largest":
        return max(budget.epsilon, terms.largest_epsilon)
    return budget.epsilon
