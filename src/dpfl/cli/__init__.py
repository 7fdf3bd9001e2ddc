"""The command line."""

import os

os.environ.setdefault(
    "TYPER_USE_RICH", "0"
)  # typer 0.20 escapes brackets for rich even where rich draws nothing
