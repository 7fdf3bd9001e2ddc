"""Certificates and keys: a small authority of the study's own, a certificate for its server, a key
for each site.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpfl.core.errors import FolderError
from dpfl.core.files import write_safely

CA_CERTIFICATE, CA_KEY, SERVER_CERTIFICATE, SERVER_KEY = (
    "ca.crt",
    "ca.key",
    "server.crt",
    "server.key",
)
VALID_DAYS = 365


def make_certificates(folder: Path, names: Sequence[str], days: int = VALID_DAYS) -> None:
    """Make an authority and a server certificate under these names and addresses; existing ones are
    left alone.
    """
    if (folder / CA_CERTIFICATE).exists():
        raise FolderError(
            str(folder), "already has certificates", "remove them first, if they are to be replaced"
        )
    folder.mkdir(parents=True, exist_ok=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    title = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dpfl study authority")])
    ca = (
        _certificate(title, title, authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA384())
    )
    own = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    server = (
        _certificate(subject, title, own, days)
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .sign(authority, hashes.SHA384())
    )
    write_safely(folder / CA_CERTIFICATE, ca.public_bytes(serialization.Encoding.PEM))
    write_safely(folder / SERVER_CERTIFICATE, server.public_bytes(serialization.Encoding.PEM))
    for path, key in ((folder / CA_KEY, authority), (folder / SERVER_KEY, own)):
        _write_secret(path, key, serialization.PrivateFormat.PKCS8)


def make_site_key(path: Path) -> Path:
    """Make a site's key pair: the private one stays, the public one (.pub) goes to the server.
    Returns the public one.
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
    encoded = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    write_safely(path, encoded, secret=True)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
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
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=not signs, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip
