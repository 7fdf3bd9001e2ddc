"""The server's processes: a SuperLink, the proxy that sites connect to, one run of the app.

The SuperLink listens on 127.0.0.1 only. Flower's command line, which registers keys and starts the
run, talks to it there. Sites reach it through the proxy, which is started once their keys are
registered. With TLS both present the study's certificate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import DpflError, PeerError
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.deploy import processes
from dpfl.deploy.credentials import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY
from dpfl.deploy.processes import APP, CERTIFICATES, HOME, SITES, Started, one_line
from dpfl.deploy.server_app import FOLDER_KEY
from dpfl.runs.deployment import LINK_PROCESS, NetworkSection, StudyFile

LOG, PROXY_PROCESS = "superlink.log", "proxy.pid"
_REQUEST_BYTES = 4 << 20  # what a request may hold beside the numbers of a model
_APP = "from dpfl.deploy import {name}\n\napp = {name}.app\n"


@dataclass(kw_only=True)
class SuperLink:
    """A SuperLink on this machine and, once it knows the sites' keys, the proxy before it.

    ``port`` is the SuperLink's own, on 127.0.0.1; ``certificates`` is None without TLS.
    """

    folder: Path
    process: Started
    port: int
    certificates: Path | None
    proxy: Started | None = None

    @property
    def _authority(self) -> Path | None:
        """The certificate that the others are checked against, None without TLS."""
        return self.certificates and self.certificates / CA_CERTIFICATE

    @classmethod
    def start(cls, folder: Path, network: NetworkSection, *, insecure: bool) -> SuperLink:
        """Start the SuperLink of a study; sites cannot reach it yet.

        ``network`` says where its proxy will listen: a port that is in use is refused now.
        ``insecure`` leaves out TLS and the check of sites' keys.
        """
        processes.check_port(network.host, network.port)
        own = None if insecure else folder / CERTIFICATES
        port = processes.free_port()
        command = [*processes.program("flower-superlink"), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--disable-runtime-dependency-installation"]
        if own is None:
            command.append("--insecure")
        else:
            files = {
                "--ssl-ca-certfile": CA_CERTIFICATE,
                "--ssl-certfile": SERVER_CERTIFICATE,
                "--ssl-keyfile": SERVER_KEY,
            }
            for option, name in files.items():
                check(
                    (own / name).exists(),
                    str(own / name),
                    "is missing",
                    "make certificates with dpfl server renew",
                )
                command += [option, str(own / name)]
            command.append("--enable-supernode-auth")
        link = cls(
            folder=folder,
            process=processes.start(command, folder, LOG, LINK_PROCESS),
            port=port,
            certificates=own,
        )
        try:
            processes.wait_until_ready(link.process, f"127.0.0.1:{port}", link._authority)
        except BaseException:
            link.end()
            raise
        return link

    def start_proxy(self, study: StudyFile) -> None:
        """Let sites in: start the proxy under the study's address, and wait until it is ready.

        How much a request may hold, and how many connections there may be, follows from the model
        and from the number of sites.
        """
        network = study.network
        numbers = Layout.of_module(study.build_model()).size
        command = [sys.executable, "-m", "dpfl.deploy.proxy", "--parent", str(os.getpid())]
        command += ["--host", network.host, "--port", str(network.port)]
        command += ["--largest-body", str(_REQUEST_BYTES + 8 * numbers)]
        command += ["--sites", str(len(study.study.sites))]
        own = self.certificates
        scheme = "https" if self.certificates else "http"
        command += ["--inner", f"{scheme}://127.0.0.1:{self.port}"]
        if own is not None:
            command += ["--ca", str(own / CA_CERTIFICATE), "--key", str(own / SERVER_KEY)]
            command += ["--certificate", str(own / SERVER_CERTIFICATE)]
            command += ["--keys", str(self.folder / SITES)]
        self.proxy = processes.start(command, self.folder, "proxy.log", PROXY_PROCESS)
        anywhere = network.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not listened on
        host = "127.0.0.1" if anywhere else network.host
        processes.wait_until_ready(self.proxy, f"{host}:{network.port}", self._authority)

    def end(self) -> None:
        """End the proxy and the SuperLink."""
        for one in (self.proxy, self.process):
            if one is not None:
                one.end()

    def ended(self) -> Started | None:
        """Return the process that has ended, if one has."""
        both = [one for one in (self.process, self.proxy) if one is not None]
        return next((one for one in both if one.process.poll() is not None), None)


def write_app(folder: Path) -> Path:
    """Write the bundle that Flower hands to the sites, and return its folder.

    The bundle holds no code of its own: it names the apps of the dpfl that is installed there.
    """
    app = folder / APP
    write_safely(
        app / "pyproject.toml", Path(__file__).with_name("data").joinpath("app.toml").read_bytes()
    )
    write_safely(app / "dpfl_study" / "__init__.py", b"")
    for module, name in (("server", "server_app"), ("site", "client_app")):
        write_safely(app / "dpfl_study" / f"{module}.py", _APP.format(name=name).encode())
    return app


def write_connection(folder: Path, port: int, *, insecure: bool) -> None:
    """Write how Flower's command line finds the SuperLink of this study, on this machine."""
    authority = (folder / CERTIFICATES / CA_CERTIFICATE).absolute()
    trust = "insecure = true" if insecure else f'root-certificates = "{authority}"'
    study = f'[superlink.study]\naddress = "127.0.0.1:{port}"\n{trust}\n'
    text = f'[superlink]\ndefault = "study"\n\n{study}'
    write_safely(folder / HOME / "config.toml", text.encode())


def _flwr(folder: Path, *arguments: str) -> dict[str, object]:
    """Run Flower's command line, and return its JSON answer."""
    command = [*processes.program("flwr"), *arguments, "--format", "json"]
    own = processes.environment(folder / HOME)
    limit = processes.READY_SECONDS
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=own, timeout=limit, check=False
        )
        return dict(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        problem = f"flwr {arguments[0]} did not end within {limit:g} s"
    except ValueError:
        problem = f"flwr {arguments[0]} failed ({one_line(done.stderr or done.stdout)})"
    raise PeerError("Flower", problem, f"see {folder / LOG}")


def _reason(answer: Mapping[str, object]) -> str:
    """Read why Flower refused something."""
    return one_line(str(answer.get("error-message", "no reason")))


def register_sites(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Register the public keys in ``sites/``, each under the name of its file.

    Returns the node of each key, and why others were refused.
    """
    nodes = {}
    refused = {}
    for key in sorted((folder / SITES).glob("*.pub")):
        answer = _flwr(folder, "supernode", "register", str(key.absolute()), "study")
        if answer.get("success"):
            nodes[key.stem] = int(str(answer["node-id"]))
        else:
            refused[key.stem] = _reason(answer)
    return nodes, refused


def start_run(folder: Path) -> str:
    """Start the app; return Flower's name for the run."""
    app = str((folder / APP).absolute())
    configuration = f'{FOLDER_KEY}="{folder.absolute()}"'
    answer = _flwr(folder, "run", app, "study", "--run-config", configuration)
    check(
        bool(answer.get("success")),
        "Flower",
        f"did not start the study ({_reason(answer)})",
        f"see {folder / LOG}",
        PeerError,
    )
    return str(answer["run-id"])


def run_status(folder: Path, run_id: str) -> str:
    """Return what Flower says of a run, in a word."""
    try:
        answer = _flwr(folder, "list", "--run-id", run_id)
    except DpflError:
        return "unknown"
    runs = answer.get("runs") or [answer]
    first = runs[0] if isinstance(runs, list) and runs else {}
    return str(first.get("status", "unknown")) if isinstance(first, Mapping) else "unknown"
