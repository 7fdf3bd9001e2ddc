"""The command line: it parses options, calls a library function and prints the result."""

import os

# typer 0.20 escapes brackets for rich even where rich draws nothing
os.environ.setdefault("TYPER_USE_RICH", "0")
