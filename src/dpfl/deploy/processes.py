"""Processes of Flower that dpfl starts and watches, and the addresses they listen on.

Each program gets a home of its own inside the folder of the study or site, so that several may run
on one machine and nothing is written to the user's own. Only processes that dpfl has started are
ever ended.
"""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PeerError

CERTIFICATES, HOME, APP, SITES = "certificates", "flower", "app", "sites"
_READY_SECONDS = 60.0
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(kw_only=True)
class Started:
    """A process that dpfl has started, and the log it writes to.

    ``began``: where in the log this process begins; earlier ones wrote to the same file.
    """

    process: subprocess.Popen[bytes]
    log: Path
    began: int = 0

    def end(self) -> None:
        """End this process, and no other."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(timeout=15)

    def written(self) -> str:
        """Return everything that it has written."""
        try:
            return self.log.read_bytes()[self.began :].decode(errors="replace")
        except OSError:
            return ""

    def log_tail(self, length: int = 400) -> str:
        """Return the end of what it has written, in one line."""
        return one_line(self.written(), length)


def one_line(text: str, length: int = 300) -> str:
    """Return the end of a text, without line breaks.

    >>> one_line("the first line\\nand the second", 10)
    'the second'
    """
    return " ".join(text.split())[-length:]


def find_program(name: str) -> str:
    """Find a program that came with flwr: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        remedy = "run: pip install 'dpfl[flower]'"
        raise ConfigurationError("Flower", f"{name} is not installed", remedy)
    return found


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: a home of their own, and no telemetry."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def start(command: Sequence[str], folder: Path, log: str) -> Started:
    """Start a program for the study or site in ``folder``.

    ``command`` is the program with its arguments, ``log`` the name of a file in the folder that its
    output is added to.
    """
    home = folder / HOME
    home.mkdir(parents=True, exist_ok=True)
    with (folder / log).open("ab") as stream:
        began, error = stream.tell(), subprocess.STDOUT
        process = subprocess.Popen(command, stdout=stream, stderr=error, env=environment(home))
    return Started(process=process, log=folder / log, began=began)


def check_port(host: str, port: int) -> None:
    """Refuse a port that somebody listens on already.

    Flower itself would start, and fail later with a message that does not name the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem = f"cannot be listened on ({error.strerror})"
            remedy = "end the program that uses it, or change [network] port"
            raise PeerError(f"{host}:{port}", problem, remedy) from error


def free_port() -> int:
    """Return a port on this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(address: str, certificate: Path | None, timeout: float) -> None:
    """Ask an address whether it is ready; ``certificate`` None means without TLS.

    Raises what :func:`urllib.request.urlopen` raises.
    """
    context = ssl.create_default_context(cafile=str(certificate)) if certificate else None
    url = f"{'https' if certificate else 'http'}://{address}/health"
    with urllib.request.urlopen(url, timeout=timeout, context=context):  # noqa: S310 - our scheme
        return


def wait_until_ready(started: Started, address: str, certificate: Path | None) -> None:
    """Wait until a process that was just started answers under its address.

    Raises :class:`~dpfl.core.errors.PeerError` with the end of its log if it ends instead, or is
    not ready in time.
    """
    until, name = time.monotonic() + _READY_SECONDS, started.log.stem
    while time.monotonic() < until:
        running = started.process.poll() is None
        problem = f"ended at once ({started.log_tail()})"
        check(running, name, problem, f"see {started.log}", PeerError)
        try:
            health(address, certificate, 2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    started.end()
    problem = f"was not ready within {_READY_SECONDS:g} s"
    raise PeerError(name, problem, f"see {started.log}")
