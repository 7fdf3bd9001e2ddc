"""``dpfl deploy``: a complete example of a real federation, and a rehearsal on one machine.

The example is three hospitals and a server with certificates and keys, in one folder. The
rehearsal starts all of them on this machine, over the same TLS connections that real sites use.
"""

from pathlib import Path

from dpfl.cli import options as o
from dpfl.cli.console import note, out
from dpfl.cli.site import show_spent, show_tried, until_stopped

app = o.group("An example deployment: three hospitals, a server, certificates, keys.")


@app.command()
def example(
    folder: Path = o.arg("A new folder."),
    port: int = o.opt("Port of the server on 127.0.0.1.", 9092, min=1, max=65535),
    rounds: int = o.opt("Rounds.", 3, min=1),
    method: str | None = o.opt("Method."),
    secure_sum: bool = o.flag("--secure-sum", "The server sees sums of masked uploads alone."),
) -> None:
    """Write a complete three-site example: study, sites, records, certificates, keys, README."""
    from dpfl.deploy.example import BUDGETS, write_example

    write_example(folder, port=port, rounds=rounds, method=method, secure_sum=secure_sum)
    out.print(f"Written: {folder} ({', '.join(sorted(BUDGETS))}, and a server)")
    note(f"Run it on this machine: dpfl deploy run {folder}")


@app.command()
def run(folder: Path = o.arg("A folder that dpfl deploy example wrote.")) -> None:
    """Start the server and all sites of an example on this machine; show what each has spent."""
    note(f"Starting a server and the sites of {folder} on this machine")
    from dpfl.deploy.example import run_example
    from dpfl.deploy.finish import finish_of
    from dpfl.deploy.outcome import outcomes
    from dpfl.deploy.records import LoadedSite

    with until_stopped(folder, lambda: f"dpfl deploy run {folder}"):
        homes = run_example(folder)
    for home in homes:
        site = LoadedSite(home)
        show_spent(site.spent(), site.summed())
        for outcome in outcomes(home)[-1:]:
            finish = finish_of(outcome, site)
            show_tried(outcome.tried(site.id, site.federation()), finish)
    note("Scores are each site's own, on its test records: in a real study they stay there")
