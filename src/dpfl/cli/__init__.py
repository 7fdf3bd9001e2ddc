"""The command line: it parses options, calls a library function and prints the result."""

import typer.core

typer.core.HAS_RICH = False  # help is plain text, without brackets escaped for rich
