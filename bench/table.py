"""Numbers into words: medians, ratios, verdicts, and the tables that are printed. Pure functions."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.table import Table

from bench.workloads import LARGEST_ERROR

WIDTH = 100


def median_after_warm_up(seconds: list[float]) -> float | None:
    """Median of all rounds but the first; nothing if there was no second round.

    >>> median_after_warm_up([9.0, 2.0, 4.0, 3.0])
    3.0
    """
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None


def ratio(slower: float | None, faster: float | None) -> float | None:
    """How many times longer ``slower`` takes; nothing if one of the two is unknown."""
    if slower is None or faster is None or faster <= 0:
        return None
    return slower / faster


def verdict(
    value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> str:
    """Compare a ratio with its goal, in words.

    >>> verdict(13.0, at_least=12.0), verdict(1.4, at_most=1.3), verdict(None, at_least=2.0)
    ('>= 12, reached', '<= 1.3, missed', '>= 2, unknown')
    """
    if at_least is None and (at_most is None or math.isinf(at_most)):
        return "-"
    goal = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    if value is None:
        return f"{goal}, unknown"
    reached = value >= at_least if at_least is not None else value <= (at_most or math.inf)
    return f"{goal}, {'reached' if reached else 'missed'}"


def relative_error(ours: Any, theirs: Any) -> float:
    """Distance of two updates over the length of the second one; infinite if they cannot be
    compared.
    """
    if ours.shape != theirs.shape:
        return math.inf
    length = float((theirs.astype("float64") ** 2).sum() ** 0.5)
    distance = float(((ours.astype("float64") - theirs) ** 2).sum() ** 0.5)
    found = distance / length if length > 0 else math.inf
    return found if math.isfinite(found) else math.inf


def agreement(entry: dict[str, Any]) -> str:
    """The numerical check of a workload, in a few characters."""
    check = entry.get("check")
    if check is None:
        return "-"
    if check.get("error") is None:
        return "FAILED"
    text = f"{check['error']:.1e}" + ("*" if "peer_error" in check else "")
    return "MISMATCH" if mismatched(entry) else text


def mismatched(entry: dict[str, Any]) -> bool:
    """Whether the check found two different results.

    Where both were held against double precision, ours may be off by twice as much as the peer's,
    and no more.
    """
    check = entry.get("check") or {}
    error = check.get("error")
    return error is not None and not error <= max(LARGEST_ERROR, 2 * check.get("peer_error", 0.0))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _memory(side: dict[str, Any] | None) -> str:
    peak = (side or {}).get("peak_mib")
    return "-" if peak is None else f"{peak:.0f}"


def comparison(entries: dict[str, dict[str, Any]]) -> Table:
    """One line for every workload that has a peer, and one for plain SGD where it was measured."""
    table = Table(
        title="Seconds of a round (median), ours against the peer's", title_justify="left", box=None
    )
    table.add_column("workload")
    table.add_column("peer")
    for name in ("ours s", "peer s", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    for name in ("ours MiB", "peer MiB", "check"):
        table.add_column(name, justify="right")
    for key, entry in entries.items():
        ours, peer = entry["ours"], entry.get("peer")
        value = entry.get("ratio")
        failed = peer is not None and peer.get("failure")
        table.add_row(
            key, entry["peer_name"], _seconds(ours.get("median")),
            "FAILED" if failed else _seconds((peer or {}).get("median")), _times(value),
            verdict(value, at_least=entry.get("goal")), _memory(ours), _memory(peer), agreement(entry),
        )  # fmt: skip
        plain = entry.get("plain")
        if plain is not None:
            value = entry.get("plain_ratio")
            table.add_row(
                f"{key} / plain", "own SGD", _seconds(ours.get("median")), _seconds(plain.get("median")), _times(value),
                verdict(value, at_most=entry.get("plain_goal")), _memory(ours), _memory(plain), "-",
            )  # fmt: skip
    return table


def growth(sizes: list[dict[str, Any]]) -> Table:
    """One line for every population."""
    table = Table(
        title="A cohort of 50 from a growing population, ours alone", title_justify="left", box=None
    )
    for name in (
        "clients",
        "build s",
        "start s",
        "first round s",
        "round s",
        "end s",
        "MiB",
        "of it data",
    ):
        table.add_column(name, justify="right")
    table.add_column("")
    for size in sizes:
        rounds = size["seconds"]
        data = f"{size['data_mib']:.0f}" if size.get("data_mib") else "-"
        table.add_row(
            f"{size['population']:,}", _seconds(size.get("build")), _seconds(size.get("start")),
            _seconds(rounds[0] if rounds else None), _seconds(median_after_warm_up(rounds)), _seconds(size.get("end")),
            _memory(size), data, "see below" if size.get("failure") else "",
        )  # fmt: skip
    return table
