"""Certificates and keys: an authority for each study, its server's certificate, a key a site.

Sites trust the study's own authority and nothing else, so that no certificate of the public web can
stand in for the server. Private keys are written readable by their owner only. The authority's key
is needed to make another certificate; whoever has it can pretend to be the server.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, FolderError
from dpfl.core.files import write_safely

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"
VALID_DAYS = 365
_USAGES = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment"]
_USAGES += ["key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]


def make_certificates(folder: Path, names: Sequence[str], days: int = VALID_DAYS) -> None:
    """Make an authority, and a server certificate under these names and addresses.

    ``days``: how long both are valid. Existing certificates are left alone.
    """
    check(
        not (folder / CA_CERTIFICATE).exists(),
        str(folder),
        "already has certificates",
        "remove them first, if they are to be replaced",
        FolderError,
    )
    authority, own = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    try:
        title = _title("dpfl study authority")
        subject = _title(names[0][:64])
        reached_by = x509.SubjectAlternativeName([_name(name) for name in names])
    except ValueError as error:
        raise ConfigurationError(
            "[network]", f"{names!r:.100} are not names of a server", "give names and addresses"
        ) from error
    signing = _usage("key_cert_sign", "crl_sign")
    ca = (
        _certificate(title, title, authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signing, critical=True)
        .sign(authority, hashes.SHA384())
    )
    serving = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    server = (
        _certificate(subject, title, own, days)
        .add_extension(reached_by, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature", "key_agreement"), critical=True)
        .add_extension(serving, critical=False)
        .sign(authority, hashes.SHA384())
    )
    for path, made in ((CA_CERTIFICATE, ca), (SERVER_CERTIFICATE, server)):
        write_safely(folder / path, made.public_bytes(serialization.Encoding.PEM))
    for path, key in ((CA_KEY, authority), (SERVER_KEY, own)):
        _write_secret(folder / path, key, serialization.PrivateFormat.PKCS8)


def make_site_key(path: Path) -> Path:
    """Make a site's key pair, unless there is one; return the path of the public key.

    The private key stays at the site, the public one (.pub) goes to the server.
    """
    public = path.with_name(path.name + ".pub")
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
        encoded = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_safely(public, encoded + b"\n")
    return public


def _write_secret(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    """Write a private key that only its owner can read."""
    encoded = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    write_safely(path, encoded, secret=True)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    """Begin a certificate for a key, valid from now on for some days."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(name: str) -> x509.GeneralName:
    """Tell an address from a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _title(name: str) -> x509.Name:
    """Build the name of a certificate's subject or issuer."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*allowed: str) -> x509.KeyUsage:
    """Allow a key some usages, and no others."""
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})
