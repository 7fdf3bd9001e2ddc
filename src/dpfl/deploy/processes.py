"""Flower's own processes, started and watched: a SuperLink for a study, a SuperNode for a site, one
run of the app.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.errors import ConfigurationError, DpflError, PeerError
from dpfl.core.files import write_safely
from dpfl.deploy.client_app import FOLDER_KEY as SITE_KEY
from dpfl.deploy.credentials import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY
from dpfl.deploy.server_app import FOLDER_KEY as STUDY_KEY

CERTIFICATES, HOME, APP, SITES = "certificates", "flower", "app", "sites"
_READY_SECONDS = 60.0
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_UNREGISTERED = 305  # Flower's exit code, in its log


@dataclass(kw_only=True)
class Started:
    """A process of ours, and where it writes."""

    process: subprocess.Popen[bytes]
    log: Path
    began: int = 0  # where in the log this process begins

    def end(self) -> None:
        """End it, and only it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=15)

    def log_tail(self) -> str:
        """The end of its log."""
        return " ".join(self.words().split())[-400:]

    def words(self) -> str:
        """Everything it has written."""
        try:
            return self.log.read_bytes()[self.began :].decode(errors="replace")
        except OSError:
            return ""


def _tool(name: str) -> str:
    """A program that came with flwr: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigurationError(
            "Flower", f"{name} is not installed", "run: pip install 'dpfl[flower]'"
        )
    return found


def _environment(home: Path) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    return {
        **os.environ,
        **_QUIET,
        "FLWR_HOME": str(home),
        "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _start(command: Sequence[str], home: Path, log: Path) -> Started:
    home.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        began = stream.tell()
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=_environment(home)
        )
    return Started(process=process, log=log, began=began)


def check_port(host: str, port: int) -> None:
    """Refuse a port that somebody listens on."""
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
    ) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PeerError(
                f"{host}:{port}",
                f"cannot be listened on ({error.strerror})",
                "end whoever uses it, or change [network] port",
            ) from error


def free_port() -> int:
    """A port on this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- the server ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Link:
    """A SuperLink on this machine, and, once it knows the sites' keys, the gate that sites come in
    by.
    """

    inner: Started
    port: int  # of the SuperLink itself, on 127.0.0.1
    gate: Started | None = None

    def start_proxy(self, folder: Path, host: str, port: int, *, insecure: bool) -> None:
        """Let sites in."""
        scheme, own = "http" if insecure else "https", folder / CERTIFICATES
        door = [sys.executable, "-m", "dpfl.deploy.proxy", "--host", host, "--port", str(port)]
        door += ["--inner", f"{scheme}://127.0.0.1:{self.port}"]
        if not insecure:
            door += [
                "--ca",
                str(own / CA_CERTIFICATE),
                "--certificate",
                str(own / SERVER_CERTIFICATE),
            ]
            door += ["--key", str(own / SERVER_KEY)]
        self.gate = _start(door, folder / HOME, folder / "gate.log")
        _wait_until_ready(
            self.gate, _address(host, port, insecure), None if insecure else own / CA_CERTIFICATE
        )

    def end(self) -> None:
        """End both."""
        for one in (self.gate, self.inner):
            if one is not None:
                one.end()

    def dead(self) -> Started | None:
        """The one that has ended, if one has."""
        parts = (self.inner, self.gate)
        return next(
            (one for one in parts if one is not None and one.process.poll() is not None), None
        )


def start_superlink(folder: Path, host: str, port: int, *, insecure: bool) -> Link:
    """Start the SuperLink of a study, with TLS and node authentication unless asked otherwise. Its
    gate is still closed.
    """
    check_port(host, port)
    own, inner_port = folder / CERTIFICATES, free_port()
    command = [_tool("flower-superlink"), "--host", "127.0.0.1", "--port", str(inner_port)]
    command.append("--disable-runtime-dependency-installation")
    if insecure:
        command.append("--insecure")
    else:
        for name in (CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY):
            if not (own / name).exists():
                raise ConfigurationError(
                    str(own / name), "is missing", "make certificates with dpfl server renew"
                )
        command += [
            "--ssl-ca-certfile",
            str(own / CA_CERTIFICATE),
            "--ssl-certfile",
            str(own / SERVER_CERTIFICATE),
        ]
        command += ["--ssl-keyfile", str(own / SERVER_KEY), "--enable-supernode-auth"]
    inner = _start(command, folder / HOME, folder / "superlink.log")
    try:
        certificate = None if insecure else own / CA_CERTIFICATE
        _wait_until_ready(inner, _address("127.0.0.1", inner_port, insecure), certificate)
    except BaseException:
        inner.end()
        raise
    return Link(inner=inner, port=inner_port)


def _address(host: str, port: int, insecure: bool) -> str:
    here = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - the address is asked, not bound
    return f"{'http' if insecure else 'https'}://{here}:{port}/health"


def _wait_until_ready(started: Started, address: str, certificate: Path | None) -> None:
    context = ssl.create_default_context(cafile=str(certificate)) if certificate else None
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until:
        if started.process.poll() is not None:
            raise PeerError(
                started.log.stem, f"ended at once ({started.log_tail()})", f"see {started.log}"
            )
        try:
            _knock(address, context, 2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    started.end()
    raise PeerError(
        started.log.stem, f"was not ready within {_READY_SECONDS:g} s", f"see {started.log}"
    )


def _knock(address: str, context: ssl.SSLContext | None, timeout: float) -> None:
    """Ask an address of a SuperLink; the scheme is always ours."""
    with urllib.request.urlopen(address, timeout=timeout, context=context):  # noqa: S310
        return


def write_app(folder: Path) -> Path:
    """The bundle that Flower hands to the sites: two lines that name what dpfl has installed there
    already.
    """
    app = folder / APP
    write_safely(
        app / "pyproject.toml",
        b'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        b'[project]\nname = "dpfl-study"\nversion = "1.0.0"\ndependencies = []\n\n'
        b'[tool.hatch.build.targets.wheel]\npackages = ["dpfl_study"]\n\n'
        b'[tool.flwr.app]\npublisher = "dpfl"\n\n'
        b'[tool.flwr.app.components]\nserverapp = "dpfl_study.server:app"\nclientapp = "dpfl_study.site:app"\n\n'
        b"[tool.flwr.app.config]\n" + STUDY_KEY.encode() + b' = ""\n',
    )
    write_safely(app / "dpfl_study" / "__init__.py", b"")
    write_safely(
        app / "dpfl_study" / "server.py",
        b"from dpfl.deploy import server_app\n\napp = server_app.app\n",
    )
    write_safely(
        app / "dpfl_study" / "site.py",
        b"from dpfl.deploy import client_app\n\napp = client_app.app\n",
    )
    return app


def write_connection(folder: Path, port: int, *, insecure: bool) -> None:
    """How Flower's command line finds the SuperLink of this study, on this machine."""
    trust = (
        "insecure = true"
        if insecure
        else f'root-certificates = "{(folder / CERTIFICATES / CA_CERTIFICATE).absolute()}"'
    )
    text = f'[superlink]\ndefault = "study"\n\n[superlink.study]\naddress = "127.0.0.1:{port}"\n{trust}\n'
    write_safely(folder / HOME / "config.toml", text.encode())


def _flwr(folder: Path, *arguments: str) -> dict[str, object]:
    command = [_tool("flwr"), *arguments, "--format", "json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=_environment(folder / HOME),
        timeout=180,
        check=False,
    )
    try:
        answer: dict[str, object] = json.loads(done.stdout)
    except ValueError:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise PeerError(
            "Flower", f"flwr {arguments[0]} failed ({said})", f"see {folder / 'superlink.log'}"
        ) from None
    return answer


def register_sites(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Let the sites in whose public keys lie in ``sites/``; returns which node each key is, and
    what was refused.
    """
    nodes, refused = {}, {}
    for key in sorted((folder / SITES).glob("*.pub")):
        answer = _flwr(folder, "supernode", "register", str(key.absolute()), "study")
        if answer.get("success"):
            nodes[key.stem] = int(str(answer["node-id"]))
        else:
            refused[key.stem] = " ".join(str(answer.get("error-message", "no reason")).split())
    return nodes, refused


def start_run(folder: Path) -> str:
    """Start the app; returns Flower's name for the run."""
    configuration = f'{STUDY_KEY}="{folder.absolute()}"'
    answer = _flwr(
        folder, "run", str((folder / APP).absolute()), "study", "--run-config", configuration
    )
    if not answer.get("success"):
        said = " ".join(str(answer.get("error-message", "no reason")).split())[-300:]
        raise PeerError(
            "Flower", f"did not start the study ({said})", f"see {folder / 'superlink.log'}"
        )
    return str(answer["run-id"])


def run_status(folder: Path, run_id: str) -> str:
    """What Flower says of a run, in a word."""
    try:
        answer = _flwr(folder, "list", "--run-id", run_id)
    except (DpflError, subprocess.TimeoutExpired):
        return "unknown"
    runs = answer.get("runs") or [answer]
    first = runs[0] if isinstance(runs, list) and runs else {}
    return str(first.get("status", "unknown")) if isinstance(first, Mapping) else "unknown"


# -- a site ----------------------------------------------------------------------------------------


def start_supernode(
    folder: Path, address: str, certificate: Path, key: Path, *, insecure: bool
) -> Started:
    """Start the SuperNode of a site. It keeps trying to reach the server, and ends if it is not let
    in.
    """
    command = [sys.executable, "-m", "dpfl.deploy.supernode", "--superlink", address]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--node-config", f'{SITE_KEY}="{folder.absolute()}"']
    if insecure:
        command.append("--insecure")
    else:
        for path, what in (
            (certificate, "the study's certificate (ca.crt)"),
            (key, "the site's key"),
        ):
            if not path.exists():
                raise ConfigurationError(str(path), "is missing", f"put {what} there")
        command += [
            "--root-certificates",
            str(certificate.absolute()),
            "--auth-supernode-private-key",
            str(key.absolute()),
        ]
    return _start(command, folder / HOME, folder / "supernode.log")


def check_server(address: str, certificate: Path, *, insecure: bool) -> None:
    """Ask the server once, to say in a sentence what is wrong: no answer, or a certificate that is
    not the study's.
    """
    if not insecure and not certificate.exists():
        raise ConfigurationError(
            str(certificate), "is missing", "put the study's certificate (ca.crt) there"
        )
    try:
        context = None if insecure else ssl.create_default_context(cafile=str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            str(certificate), f"is no certificate ({error})", "put the study's ca.crt there"
        ) from error
    try:
        _knock(f"{'http' if insecure else 'https'}://{address}/health", context, 10)
        return
    except urllib.error.HTTPError:
        return  # somebody is there
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise PeerError(
                address,
                f"shows a certificate that {certificate} does not vouch for ({reason.verify_message})",
                "ask the server's operator for the right ca.crt; do not go on without it",
            ) from error
        if isinstance(reason, ssl.SSLError):
            raise PeerError(
                address, f"does not speak TLS ({reason})", "check address and port"
            ) from error
        raise PeerError(
            address,
            f"cannot be reached ({reason})",
            "check the address, the network, and that it runs",
        ) from error


def was_rejected(started: Started) -> bool:
    """Whether a SuperNode ended because the server does not know its key."""
    return (
        f"Exit Code: {_UNREGISTERED}" in started.words()
        or "not registered" in started.words().lower()
    )


def ended_why(started: Started) -> PeerError:
    """Why a SuperNode ended: in words, by its log."""
    if was_rejected(started):
        return PeerError(
            "server",
            "does not know this site's key, and did not let it in",
            "send it the .pub file; keys are registered when dpfl server run starts",
        )
    said = " ".join(started.words().split())[-200:]
    return PeerError(
        "SuperNode", f"ended with exit code {started.process.poll()} ({said})", f"see {started.log}"
    )
