"""What a federation is given: the wrong kind of thing is refused, with what to give instead."""

from collections.abc import Collection, Mapping
from typing import Any

from dpfl.core.checks import check


def check_kind(name: str, given: Any, kind: type) -> None:
    """Refuse an argument of another kind."""
    problem, remedy = f"{name} = {given!r:.60}", f"give a {kind.__name__}"
    check(isinstance(given, kind), "federation", problem, remedy)


def per_client(name: str, given: Any, kind: type, clients: Collection[str]) -> Any:
    """Return a mapping of clients to objects of this kind; one object is for all of them."""
    if isinstance(given, kind):
        return dict.fromkeys(clients, given)
    each = f"dpfl.{kind.__name__}(...)"
    problem, remedy = f"{name} = {given!r:.60}", f"give {{client: {each}}}, or one {each} for all"
    check(isinstance(given, Mapping), "federation", problem, remedy)
    for client in sorted(given, key=str):
        where, own = f"{name} of '{client}'", given[client]
        check(isinstance(own, kind), where, f"{own!r:.60} is not a {kind.__name__}", f"give {each}")
        problem = f"{name} are given for '{client}', who is not a client"
        check(client in clients, "federation", problem, "check the id")
    return given
