"""Taking part: connect a site to its server, and stay connected while the server comes and goes.

Before anything is started the server is asked once, so that a wrong address or certificate is named
in one sentence. A SuperNode ends when its server restarts: then the site waits for the server and
starts another one. A server that does not know the site's key is not asked again.
"""

import ssl
import sys
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.core.files import write_safely
from dpfl.deploy.client_app import FOLDER_KEY
from dpfl.deploy.processes import Started, free_port, health, start
from dpfl.deploy.site import Site
from dpfl.deploy.site_folder import NODE_PROCESS
from dpfl.runs.folder import RunFolder

RETRY_SECONDS = 3.0  # between looks for a server that went away
_UNREGISTERED = 305  # Flower's exit code, in its log


def take_part(folder: Path, tell: Callable[[str], None], *, insecure: bool) -> None:
    """Connect the site in ``folder`` and answer its server, until interrupted or rejected.

    ``tell`` is given each sentence for the people who watch. ``insecure`` leaves out TLS and keys.
    The folder is held: a site cannot run twice. Raises :class:`~dpfl.core.errors.PeerError` where
    the server rejects the site's key.
    """
    site = Site(folder)
    site.ledger().close()  # a missing or damaged ledger is refused before anything else
    site.member()
    server = site.file.server
    certificate = folder / server.certificate
    check_server(server.address, certificate, insecure=insecure)
    with RunFolder(folder).locked():
        while True:
            tell(f"Site '{site.id}' is connecting to {server.address}; Ctrl-C stops it safely")
            _serve_once(site, insecure=insecure)
            tell("The server went away; waiting for it to come back (Ctrl-C stops)")
            _wait_for_server(server.address, certificate, tell, insecure=insecure)


def _serve_once(site: Site, *, insecure: bool) -> None:
    """Run a SuperNode until the server goes away; any other end is an error."""
    node, noted = start_supernode(site, insecure=insecure), site.folder / NODE_PROCESS
    try:
        write_safely(noted, str(node.process.pid).encode())
        while node.process.poll() is None:
            time.sleep(0.5)
        if was_rejected(node) or node.process.returncode not in (0, 1):
            raise why_ended(node)
    finally:
        node.end()
        noted.unlink(missing_ok=True)


def _wait_for_server(
    address: str, certificate: Path, tell: Callable[[str], None], *, insecure: bool
) -> None:
    """Ask for the server until it is back; tell once if somebody else answers there."""
    told = ""
    while True:
        time.sleep(RETRY_SECONDS)
        try:
            check_server(address, certificate, insecure=insecure)
            return
        except PeerError as error:
            if "cannot be reached" not in str(error) and str(error) != told:
                told = str(error)  # somebody else answers there
                tell(told)


def start_supernode(site: Site, *, insecure: bool) -> Started:
    """Start the SuperNode of a site, which keeps trying to reach the server."""
    folder, server = site.folder.absolute(), site.file.server
    command = [sys.executable, "-m", "dpfl.deploy.supernode", "--superlink", server.address]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--node-config", f'{FOLDER_KEY}="{folder}"']
    if insecure:
        command.append("--insecure")
    else:
        certificate, key = folder / server.certificate, folder / server.key
        check(key.exists(), str(key), "is missing", "put the site's key there")
        command += ["--root-certificates", str(certificate)]
        command += ["--auth-supernode-private-key", str(key)]
    return start(command, site.folder, "supernode.log")


def check_server(address: str, certificate: Path, *, insecure: bool) -> None:
    """Ask the server once, and say what is wrong.

    ``certificate`` is the study's ``ca.crt``, which the server's own must be signed by. Raises
    :class:`~dpfl.core.errors.ConfigurationError` where that file is wrong, and
    :class:`~dpfl.core.errors.PeerError` where the server cannot be reached or is another one.
    """
    remedy = "put the study's certificate (ca.crt) there"
    check(insecure or certificate.exists(), str(certificate), "is missing", remedy)
    try:
        if not insecure:
            ssl.create_default_context(cafile=str(certificate))
    except (OSError, ssl.SSLError) as error:
        problem = f"is not a certificate ({error})"
        raise ConfigurationError(str(certificate), problem, remedy) from error
    try:
        health(address, None if insecure else certificate, 10)
    except urllib.error.HTTPError:
        return  # somebody is there
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise _unreachable(address, certificate, getattr(error, "reason", error)) from error


def _unreachable(address: str, certificate: Path, reason: object) -> PeerError:
    """Explain why a server could not be asked."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        problem = f"its certificate is not signed by {certificate} ({reason.verify_message})"
        remedy = "ask the server's operator for the right ca.crt; do not connect without it"
        return PeerError(address, problem, remedy)
    if isinstance(reason, ssl.SSLError):
        return PeerError(address, f"does not speak TLS ({reason})", "check address and port")
    remedy = "check the address, the network, and that the server runs"
    return PeerError(address, f"cannot be reached ({reason})", remedy)


def was_rejected(node: Started) -> bool:
    """Whether a SuperNode ended because the server does not know its key."""
    written = node.written()
    return f"Exit Code: {_UNREGISTERED}" in written or "not registered" in written.lower()


def why_ended(node: Started) -> PeerError:
    """Explain why a SuperNode ended, by its log."""
    if was_rejected(node):
        problem = "does not know this site's key, and rejected it"
        remedy = "send it the .pub file; keys are registered when dpfl server run starts"
        return PeerError("server", problem, remedy)
    problem = f"ended with exit code {node.process.poll()} ({node.log_tail(200)})"
    return PeerError("SuperNode", problem, f"see {node.log}")
