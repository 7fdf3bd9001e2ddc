"""What the interpreter is about to do, for tests of what code may not do.

An audit hook cannot be removed: there is one, which passes every event on while somebody listens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Listener = Callable[[str, tuple[Any, ...]], None]
_listeners: list[Listener] = []

FILES = {"open", "sqlite3.connect", "os.listdir", "os.scandir", "os.chdir", "glob.glob"}
"""Events whose first argument is a path that is read; a file's status has no event."""

_ABOUT_TO_RUN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")
_ABOUT_TO_RUN += ("os.spawn", "os.startfile", "pty.spawn", "pickle.find_class", "urllib.Request")


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass every event of this process to a function, which may raise to prevent it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def unheard() -> Iterator[None]:
    """Let nobody listen for a while."""
    before = _listeners[:]
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = before


def path_of(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The path that an event is about to read; None where it has none, or a file's number."""
    path = arguments[0] if event in FILES and arguments else None
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    name = os.fsdecode(path)
    return unquote(urlsplit(name).path) if name.startswith("file:") else name


def reaches_out(event: str, arguments: tuple[Any, ...], *, within: tuple[Path, ...] = ()) -> bool:
    """Whether an event opens something that is in none of these folders, or runs or calls out."""
    if event.startswith(_ABOUT_TO_RUN):
        return True
    path = path_of(event, arguments)
    if path is None or path == ":memory:":
        return False
    full = Path(os.path.realpath(path))
    return not any(full.is_relative_to(folder.resolve()) for folder in within)


@contextmanager
def closed(*within: Path) -> Iterator[list[str]]:
    """Refuse whatever reaches out of these folders, and every import; keep what was tried."""
    tried: list[str] = []

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" or reaches_out(event, arguments, within=within):
            tried.append(f"{event} {arguments!r:.300}")
            raise PermissionError(f"{event} is not allowed here")

    with listening(refuse):
        yield tried


def _pass_on(event: str, arguments: tuple[Any, ...]) -> None:
    for listener in tuple(_listeners):
        listener(event, arguments)


sys.addaudithook(_pass_on)
