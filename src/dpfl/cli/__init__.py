"""The command line: it parses options, calls a library function and prints the result."""

from typing import Any

import typer.core
import typer.main

typer.core.HAS_RICH = False  # help is plain text, without brackets escaped for rich


class _Argument(typer.core.TyperArgument):
    """An argument that keeps its help, which click 8.5 takes away from typer 0.20."""

    def __init__(self, *, help: str | None = None, **settings: Any) -> None:  # noqa: A002
        super().__init__(**settings)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]
