"""A complete example of a real federation, and a rehearsal of it on one machine.

Three hospitals of the UCI heart-disease data, with budgets of their own, and a server. Everything
that real machines would need is written: files, records, certificates and keys.
"""

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, PeerError
from dpfl.core.files import for_owner_only, write_safely
from dpfl.core.types import Observer
from dpfl.datasets.named import load_dataset
from dpfl.deploy.credentials import CA_CERTIFICATE, make_site_key
from dpfl.deploy.enrolment import ENROLMENT
from dpfl.deploy.processes import CERTIFICATES, SITES
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.serving import make_study
from dpfl.deploy.site_folder import SiteFolder
from dpfl.methods import find
from dpfl.runs.deployment import STUDY_FILE, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.for_method import for_method
from dpfl.runs.site_file import SITE_FILE, SiteFile
from dpfl.runs.toml_file import read_toml

DATA = Path(__file__).with_name("data")
BUDGETS = {"cleveland": 1.0, "hungarian": 4.0, "va": 8.0}  # epsilons


@for_owner_only()
def write_example(
    folder: Path, *, port: int, rounds: int, method: str | None = None, secure_sum: bool = False
) -> None:
    """Write a three-site example: study, sites, records, certificates, keys, README.

    ``port``: the server's, on 127.0.0.1.
    ``rounds`` and ``method``: what the study runs, by default the method of its file. Where the
    method protects against the world only, the sites' budgets are against the world, and their
    policies trust the server.
    ``secure_sum``: uploads are masked, and the server sees their sum alone. Noise is shared then,
    which takes one local step a round.
    """
    check(
        not folder.exists() or not any(folder.iterdir()),
        str(folder),
        "is not empty",
        "name a new folder",
        FolderError,
    )
    dataset = load_dataset("heart_disease", None)
    server = folder / "server"
    assert dataset.silos is not None
    values = read_toml(DATA / "example_study.toml")
    values["study"] |= {"sites": sorted(BUDGETS), "classes": dataset.classes}
    values["study"]["feature_shape"] = list(dataset.features.shape[1:])
    if method is not None:
        values = for_method(values, method, compared=False)
    known = find(values["method"]["name"])
    if known.model is None:  # it does not plan its own
        values["run"]["rounds"] = rounds
    values["network"]["port"] = port
    if secure_sum:
        one_step = {"local_steps": 1} if "local_steps" in known.settings else {}
        values |= {"secure_sum": {}, "method": {**values["method"], **one_step}}
    study = StudyFile.from_dict(values, "example")
    make_study(server, study)
    for name, epsilon in BUDGETS.items():
        rows = slice(*dataset.silos[name])
        records = _csv(dataset.features[rows].tolist(), dataset.labels[rows].tolist())
        write_site(folder / SITES / name, study, epsilon, records, server)
    pin_identities([folder / SITES / name for name in BUDGETS])
    readme = (DATA / "example_readme.md").read_text()
    write_safely(folder / "README.md", readme.replace("{folder}", str(folder)).encode())


def write_site(home: Path, study: StudyFile, epsilon: float, records: bytes, server: Path) -> None:
    """Write a hospital's folder, and give its public key to the server."""
    write_safely(home / "records.csv", records)
    strategy = study.strategy()
    name = home.name
    trusting = strategy.observer is not Observer.SERVER
    against = "world" if trusting else "server"
    unit = str(strategy.unit)
    values = {
        "site": {"id": name},
        "data": {"file": "records.csv", "label": "ill", "classes": 2},
        "budget": {"epsilon": epsilon, "delta": 1e-4, "unit": unit, "observer": against},
        "policy": {"trust_server": trusting},
        "server": {"address": f"127.0.0.1:{study.network.port}"},
    }
    site = LoadedSite.create(home, values)
    authority = server / CERTIFICATES / CA_CERTIFICATE
    write_safely(home / CA_CERTIFICATE, authority.read_bytes())
    public = make_site_key(home / site.file.server.key)
    write_safely(server / SITES / f"{name}.pub", public.read_bytes())


def pin_identities(homes: Sequence[Path]) -> None:
    """Give every site the identity keys of the others, as their operators would by telephone."""
    sites = {home.name: SiteFolder(home) for home in homes}
    known = {name: site.identity_key for name, site in sites.items()}
    for name, site in sites.items():
        members = {other: key for other, key in known.items() if other != name}
        values = site.file.model_dump(exclude_none=True) | {"secure_sum": {"members": members}}
        file = SiteFile.from_dict(values, str(site.folder / SITE_FILE))
        write_safely(site.folder / SITE_FILE, file.to_toml().encode())


def _csv(features: list[list[float]], labels: list[int]) -> bytes:
    """Write records as a table with their label in the last column."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*(f"x{number}" for number in range(len(features[0]))), "ill"])
    for row, label in zip(features, labels, strict=True):
        writer.writerow([*row, label])
    return stream.getvalue().encode()


@for_owner_only()
def run_example(folder: Path) -> list[Path]:
    """Run the server and all sites on this machine; return the folders of the sites.

    Each is a process of its own, as it would be on its own machine. All of them are ended when the
    study ends, or when this is interrupted. An example that was cut off is resumed.
    """
    server = folder / "server"
    homes = [path.parent for path in sorted((folder / SITES).glob("*/site.toml"))]
    check(
        bool(homes) and (server / STUDY_FILE).exists(),
        str(folder),
        "holds no example",
        "write one with dpfl deploy example",
        FolderError,
    )
    check(
        not RunFolder(server).summary.exists(),
        str(folder),
        "holds an example that has ended",
        f"see: dpfl server status {server}",
        FolderError,
    )
    verb = "resume" if (server / ENROLMENT).exists() else "run"
    started = [subprocess.Popen(_command("server", verb, str(server)))]
    try:
        for home in homes:
            with (home / "run.log").open("ab") as log:
                command = _command("site", "run", str(home))
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        code = started[0].wait()
    finally:
        _end(started)
    check(
        code == 0,
        str(server),
        f"the server ended with exit code {code}",
        "see its message above",
        PeerError,
    )
    return homes


def _command(*arguments: str) -> list[str]:
    """A command of dpfl, run by this Python."""
    return [sys.executable, "-m", "dpfl.cli.main", *arguments]


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes, the sites before the server."""
    for process in reversed(started):
        if process.poll() is None:
            process.terminate()
    for process in reversed(started):
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
