"""``dpfl deploy``: a complete example of a real federation, and a rehearsal on one machine.

The example is three hospitals and a server with certificates and keys, in one folder. The
rehearsal starts all of them on this machine, over the same TLS connections that real sites use.
"""

from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli.console import out
from dpfl.cli.site import interruptible, say, show_spent, show_tried

app = typer.Typer(
    no_args_is_help=True,
    help="An example deployment: three hospitals, a server, certificates, keys.",
)
New = Annotated[Path, typer.Argument(help="A new folder.", show_default=False)]
Written = Annotated[
    Path, typer.Argument(help="A folder that dpfl deploy example wrote.", show_default=False)
]
Port = Annotated[int, typer.Option(help="Port of the server on 127.0.0.1.", min=1, max=65535)]


@app.command()
def example(
    folder: New,
    port: Port = 9092,
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    method: Annotated[str | None, typer.Option(help="Method.", show_default=False)] = None,
) -> None:
    """Write a complete three-site example: study, sites, records, certificates, keys, README."""
    from dpfl.deploy.example import BUDGETS, write_example

    write_example(folder, port=port, rounds=rounds, method=method)
    out.print(f"Written: {folder} ({', '.join(sorted(BUDGETS))}, and a server)")
    say(f"Run it on this machine: dpfl deploy run {folder}")


@app.command(name="run")
def run(folder: Written) -> None:
    """Start the server and all sites of an example on this machine; show what each has spent."""
    from dpfl.deploy.example import run_example
    from dpfl.deploy.outcome import outcomes
    from dpfl.deploy.records import LoadedSite

    with interruptible(folder, lambda: f"dpfl deploy run {folder}"):
        homes = run_example(folder)
    for home in homes:
        site = LoadedSite(home)
        show_spent(site.spent())
        for outcome in outcomes(home)[-1:]:
            show_tried(outcome.tried(site.id, site.federation()))
    say("Accuracies are each site's own, on its test records: in a real study they stay there")
