"""Looking for a server: whether it is there, is the right one, and agrees on the time."""

import ssl
import urllib.error
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PeerError
from dpfl.deploy.processes import CLOCK_AHEAD, CLOCK_BEHIND, health

_OTHER_NAMES = (62, 64)  # OpenSSL: host name mismatch, IP address mismatch


def check_server(address: str, certificate: Path | None) -> str | None:
    """Ask a server whether it is there: None if it is, or why it pays to ask again later.

    ``certificate`` is the study's ``ca.crt``, which the server's own must be signed by; None means
    without TLS. What only a person can change is raised: a certificate that is missing or another
    one's (:class:`~dpfl.core.errors.ConfigurationError`, :class:`~dpfl.core.errors.PeerError`), and
    clocks that are too far apart for the server to accept this site's signatures.
    """
    if certificate is not None:
        remedy = "put the study's certificate (ca.crt) there"
        check(certificate.exists(), str(certificate), "is missing", remedy)
        try:
            ssl.create_default_context(cafile=str(certificate))
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                str(certificate), f"is not a certificate ({error})", remedy
            ) from error
    try:
        _check_clock(address, health(address, certificate, 10))
        return None
    except urllib.error.HTTPError as error:
        return f"{address} answers with status {error.code}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return _why_not(address, certificate, getattr(error, "reason", error))


def _why_not(address: str, certificate: Path | None, reason: object) -> str:
    """Explain why a server could not be asked; raise what waiting does not change."""
    if isinstance(reason, ssl.SSLCertVerificationError) and reason.verify_code in _OTHER_NAMES:
        raise PeerError(
            address,
            f"its certificate is for other names ({reason.verify_message})",
            "use a name that is in it, or ask for it in [network] names (dpfl server renew)",
        )
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise PeerError(
            address,
            f"its certificate is not signed by {certificate} ({reason.verify_message})",
            "ask the server's operator for the right ca.crt; do not connect without it",
        )
    if isinstance(reason, ssl.SSLError):
        return f"{address} does not speak TLS ({reason})"
    return f"{address} cannot be reached ({reason})"


def _check_clock(address: str, ahead: float) -> None:
    """Refuse a clock that differs from the server's by more than Flower allows."""
    far = not -CLOCK_BEHIND < ahead < CLOCK_AHEAD - 1.0
    side = "ahead of" if ahead > 0 else "behind"
    check(
        not far,
        "this machine's clock",
        f"is {abs(ahead):.1f} s {side} the server's at {address}, which rejects such a site",
        "set both clocks, for example with: timedatectl set-ntp true",
        PeerError,
    )
