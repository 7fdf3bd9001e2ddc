"""Processes of Flower that dpfl starts and watches, and the addresses they listen on.

Each program gets a home of its own inside the folder of the study or site, so that several may run
on one machine and nothing is written to the user's own. Only processes that dpfl has started are
ever ended.
"""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.files import write_safely
from dpfl.runs.processes import alive

CERTIFICATES, HOME, APP, SITES = "certificates", "flower", "app", "sites"
FAILED, FINISHED = "failed.txt", "finished.txt"  # what the server app leaves
READY_SECONDS = 240.0  # a busy machine may need minutes to import Flower
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 305.0  # seconds that Flower allows a site's clock to be off
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
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

    @property
    def see(self) -> str:
        """Where to look: the log, unless it is empty."""
        return f"see {self.log}" if self.written().strip() else "it has written nothing; try again"

    def how_it_ended(self) -> str:
        """Say how the process ended: by which signal, or with which last words."""
        code = self.process.wait()
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        words = one_line(self.written(), 200)
        return f"ended ({words})" if words else f"ended without any output (exit code {code})"


def one_line(text: str, length: int = 300) -> str:
    """Return the end of a text, without line breaks.

    >>> one_line("the first line\\nand the second", 10)
    'the second'
    """
    return " ".join(_COLOURS.sub("", text).split())[-length:]


def program(name: str) -> list[str]:
    """Return the command that runs one of Flower's programs, and ends it with this process."""
    if not entry_points(group="console_scripts", name=name):
        raise ConfigurationError(
            "Flower", f"{name} is not installed", "run: pip install 'dpfl[flower]'"
        )
    return [sys.executable, "-m", "dpfl.deploy.program", str(os.getpid()), name]


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: a home of their own, and no telemetry."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


def start(command: Sequence[str], folder: Path, log: str, note: str) -> Started:
    """Start a program for the study in ``folder``.

    ``command`` is the program with its arguments, ``log`` the name of a file in the folder that its
    output is added to, ``note`` of one that says which process it is.
    """
    home = folder / HOME
    home.mkdir(parents=True, exist_ok=True)
    with (folder / log).open("ab") as stream:
        began = stream.tell()
        error = subprocess.STDOUT
        process = subprocess.Popen(command, stdout=stream, stderr=error, env=environment(home))
    note_process(folder / note, process.pid)
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
            raise PeerError(
                f"{host}:{port}",
                f"cannot be listened on ({error.strerror})",
                "end the program that uses it, or change [network] port",
            ) from error


def free_port() -> int:
    """Return a port on this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(address: str, certificate: Path | None, timeout: float) -> float:
    """Ask an address whether it is ready; return by how much its clock is surely behind this one's.

    What the way there and back may explain is not counted. ``certificate`` None means without TLS.
    Raises what :meth:`urllib.request.OpenerDirector.open` raises.
    """
    context = ssl.create_default_context(cafile=str(certificate)) if certificate else None
    url = f"{'https' if certificate else 'http'}://{address}/health"
    began = time.time()
    here = address.startswith(("127.0.0.1:", "localhost:", "[::1]:"))
    # The network's own proxy, where there is one, leads to other machines only.
    ways: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})] if here else []
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), *ways)
    with opener.open(url, timeout=timeout) as answer:
        told = answer.read(1000)
        now = time.time()
    try:
        there = float(json.loads(told)["time"])
    except (ValueError, KeyError, TypeError):  # a SuperLink itself tells no time
        return 0.0
    return max(began - there, 0.0) or min(now - there, 0.0)


def wait_until_ready(started: Started, address: str, certificate: Path | None) -> None:
    """Wait until a process that was just started answers under its address.

    Raises :class:`~dpfl.core.errors.PeerError` with the end of its log if it ends instead, or is
    not ready in time.
    """
    until = time.monotonic() + READY_SECONDS
    name = started.log.stem
    while time.monotonic() < until:
        running = started.process.poll() is None
        check(
            running,
            name,
            "" if running else f"{started.how_it_ended()} when it was started",
            started.see,
            PeerError,
        )
        try:
            health(address, certificate, 10)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    started.end()
    raise PeerError(
        name, f"did not answer on {address} within {READY_SECONDS:g} s of its start", started.see
    )


# -- what an earlier process has left --------------------------------------------------------------


def note_process(path: Path, process: int) -> None:
    """Write down a process: its id, and when it began, so that no other is taken for it."""
    write_safely(path, f"{process} {_began(process)}\n".encode())


def noted_process(path: Path) -> int | None:
    """Return the process that was written down, None unless that very one is still running."""
    try:
        process, began = path.read_text().split()
        return int(process) if alive(int(process)) and _began(int(process)) == began else None
    except (OSError, ValueError):
        return None


def _began(process: int) -> str:
    """Return when a process began, in ticks since the machine's start; "0" where nobody knows."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return "0"


def end_leftovers(notes: Mapping[str, Path], tell: Callable[[str], None]) -> None:
    """End processes that an earlier start has left, by the files that note them.

    ``notes`` are these files by what the process is called. Raises
    :class:`~dpfl.core.errors.PeerError` with the name of one that cannot be ended.
    """
    for name, path in notes.items():
        process = noted_process(path)
        if process is not None:
            tell(f"Ending {name} (process {process}), which an earlier start has left")
            for sign, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
                _signal(name, process, sign)
                until = time.monotonic() + seconds
                while alive(process) and time.monotonic() < until:
                    time.sleep(0.1)
            check(
                not alive(process),
                name,
                f"process {process} of an earlier start is still running",
                f"end it: kill -9 {process}",
                PeerError,
            )
        path.unlink(missing_ok=True)


def _signal(name: str, process: int, sign: signal.Signals) -> None:
    try:
        os.kill(process, sign)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise PeerError(
            name,
            f"process {process} of an earlier start belongs to another user",
            f"let that user end it: kill {process}",
        ) from error
