"""``dpfl deploy``: a complete example of a real federation, and a rehearsal of it on one machine."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli.console import err, out
from dpfl.cli.site import show_spent, show_tried
from dpfl.core.errors import ConfigurationError, FolderError, Interrupted, PeerError
from dpfl.core.files import write_safely
from dpfl.core.types import Observer
from dpfl.datasets.named import load_dataset
from dpfl.runs.deployment import STUDY_FILE, SiteFile, StudyFile

app = typer.Typer(
    no_args_is_help=True,
    help="An example deployment: three hospitals, a server, certificates, keys.",
)

GRANTS = {"cleveland": 1.0, "hungarian": 4.0, "va": 8.0}
README = """# Three hospitals train one model

Everything one needs to see a federation of real sites, on one machine or four. The records are those of the UCI heart-disease
data (CC BY 4.0), one CSV file per hospital.

    server/             the study, its certificates, the public keys of the sites
    sites/NAME/         a hospital: site.toml (budget and policy), its records, its key, its ledger

On one machine, everything at once:

    dpfl deploy run {folder}

As four machines would, each in its own terminal:

    dpfl server run {folder}/server
    dpfl site run {folder}/sites/cleveland        # and the other two

Afterwards, at each hospital, the page for its ethics board:

    dpfl site spend {folder}/sites/cleveland --page board.html

To take it apart onto real machines: copy each folder in sites/ to its hospital, put the server's address into [server] of
its site.toml and the server's names into [network] of server/study.toml, make new certificates (`dpfl server renew`) and give
every site the new ca.crt. A site's folder holds its private key and its ledger: it never leaves the hospital. The server's
folder holds the authority's key: whoever has it can pretend to be the server.
"""


@app.command()
def example(
    folder: Annotated[Path, typer.Argument(help="A new folder.", show_default=False)],
    port: Annotated[
        int, typer.Option(help="Port of the server on 127.0.0.1.", min=1, max=65535)
    ] = 9092,
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    method: Annotated[str, typer.Option(help="Method.")] = "weiavg",
) -> None:
    """Write a complete three-site example: study, sites, records, certificates, keys, README."""
    try:
        from dpfl.deploy import processes
        from dpfl.deploy.credentials import CA_CERTIFICATE, make_certificates, make_site_key
        from dpfl.deploy.site import Site
    except ImportError as error:
        raise ConfigurationError(
            "Flower", "is not installed", "run: pip install 'dpfl[flower]'"
        ) from error
    if folder.exists() and any(folder.iterdir()):
        raise FolderError(str(folder), "is not empty", "name a new folder")
    dataset = load_dataset("heart_disease", None)
    assert dataset.silos is not None
    study = StudyFile.from_dict(
        {
            "study": {
                "name": "heart-disease",
                "sites": sorted(GRANTS),
                "feature_shape": list(dataset.features.shape[1:]),
                "classes": dataset.classes,
            },
            "model": {"name": "logistic"},
            "method": {"name": method, "lr": 1.0, "clip": 1.0, "batch_size": 32, "local_steps": 10},
            "run": {
                "rounds": rounds,
                "round_timeout": 180.0,
                "enrol_timeout": 180.0,
                "least_sites": 2,
            },
            "network": {"host": "127.0.0.1", "port": port},
        },
        "example",
    )
    strategy = study.strategy()
    trusting = strategy.observer is not Observer.SERVER
    server = folder / "server"
    write_safely(server / STUDY_FILE, study.to_toml().encode())
    make_certificates(server / processes.CERTIFICATES, ["127.0.0.1", "localhost"])
    processes.write_app(server)
    for name, epsilon in GRANTS.items():
        home = folder / "sites" / name
        rows = slice(*dataset.silos[name])
        write_safely(
            home / "records.csv",
            _table(dataset.features[rows].tolist(), dataset.labels[rows].tolist()),
        )
        file = SiteFile.from_dict(
            {
                "site": {"id": name},
                "data": {"file": "records.csv", "label": "ill", "classes": 2},
                "budget": {
                    "epsilon": epsilon,
                    "delta": 1e-4,
                    "unit": str(strategy.unit),
                    "observer": "world" if trusting else "server",
                },
                "policy": {"trust_server": trusting},
                "server": {"address": f"127.0.0.1:{port}"},
            }
        )
        write_safely(home / "site.toml", file.to_toml().encode())
        write_safely(
            home / CA_CERTIFICATE, (server / processes.CERTIFICATES / CA_CERTIFICATE).read_bytes()
        )
        public = make_site_key(home / file.server.key)
        write_safely(server / processes.SITES / f"{name}.pub", public.read_bytes())
        Site(home).prepare()
    write_safely(folder / "README.md", README.format(folder=folder).encode())
    out.print(f"Written: {folder} ({', '.join(sorted(GRANTS))}, and a server)")
    err.print(f"Run it on this machine: dpfl deploy run {folder}", soft_wrap=True)


def _table(features: list[list[float]], labels: list[int]) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*(f"x{number}" for number in range(len(features[0]))), "ill"])
    for row, label in zip(features, labels, strict=True):
        writer.writerow([*row, label])
    return stream.getvalue().encode()


@app.command(name="run")
def run_example(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that dpfl deploy example has written.", show_default=False),
    ],
) -> None:
    """Start the server and all sites of an example on this machine, and show what each site has
    spent.
    """
    homes = sorted((folder / "sites").glob("*/site.toml"))
    if not homes or not (folder / "server" / STUDY_FILE).exists():
        raise FolderError(str(folder), "holds no example", "write one with dpfl deploy example")
    command = [sys.executable, "-m", "dpfl.cli.main"]
    begun = "resume" if (folder / "server" / "enrolment.json").exists() else "run"
    server = subprocess.Popen([*command, "server", begun, str(folder / "server")])
    sites: list[subprocess.Popen[bytes]] = []
    try:
        _wait_for(server, folder / "server")
        for home in homes:
            with (home.parent / "run.log").open("ab") as log:
                sites.append(
                    subprocess.Popen(
                        [*command, "site", "run", str(home.parent)], stdout=log, stderr=log
                    )
                )
        code = server.wait()
    except KeyboardInterrupt:
        raise Interrupted(
            str(folder), "stopped by you", f"go on with: dpfl deploy run {folder}"
        ) from None
    finally:
        for process in (*sites, server):
            if process.poll() is None:
                process.terminate()
        for process in (*sites, server):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
    if code:
        raise PeerError(
            str(folder / "server"),
            f"the server ended with exit code {code}",
            "see its message above",
        )
    from dpfl.deploy.outcome import outcomes
    from dpfl.deploy.site import Site

    for home in homes:
        site = Site(home.parent)
        show_spent(site.spent())
        for outcome in outcomes(home.parent)[-1:]:
            show_tried(outcome.tried(site.id, site.federation()))
    err.print(
        "Accuracies are each site's own, on its test records: in earnest they stay there",
        soft_wrap=True,
    )


def _wait_for(server: subprocess.Popen[bytes], folder: Path) -> None:
    """Until the server lets sites in."""
    from dpfl.deploy.credentials import CA_CERTIFICATE
    from dpfl.deploy.processes import CERTIFICATES, check_server

    network = StudyFile.from_file(folder / STUDY_FILE).network
    while True:
        if server.poll() is not None:
            raise PeerError(
                "server", f"ended with exit code {server.returncode}", "see its message above"
            )
        try:
            check_server(
                f"127.0.0.1:{network.port}", folder / CERTIFICATES / CA_CERTIFICATE, insecure=False
            )
            return
        except PeerError:
            time.sleep(0.5)
