"""What a federation is given: the wrong kind of thing is refused, with what to give instead."""

from collections.abc import Collection, Mapping
from typing import Any

from dpfl.core.checks import check


def check_kind(name: str, given: Any, kind: type) -> None:
    """Refuse an argument of another kind."""
    check(
        isinstance(given, kind), "federation", f"{name} = {given!r:.60}", f"give a {kind.__name__}"
    )


def per_client(name: str, given: Any, kind: type, clients: Collection[str]) -> Any:
    """Return a mapping of clients to objects of this kind; one object is for all of them."""
    if isinstance(given, kind):
        return dict.fromkeys(clients, given)
    each = f"dpfl.{kind.__name__}(...)"
    check(
        isinstance(given, Mapping),
        "federation",
        f"{name} = {given!r:.60}",
        f"give {{client: {each}}}, or one {each} for all",
    )
    for client in sorted(given, key=str):
        own = given[client]
        check(
            isinstance(own, kind),
            f"{name} of '{client}'",
            f"{own!r:.60} is not a {kind.__name__}",
            f"give {each}",
        )
        check(
            client in clients,
            "federation",
            f"{name} are given for '{client}', who is not a client",
            "check the id",
        )
    return given
