"""Certificates that vouch for their own names and no others, and secrets that only their owner can
read.
"""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from dpfl.core.errors import FolderError
from dpfl.deploy.credentials import make_certificates, make_site_key


def handshake(server: Path, authority: Path, name: str) -> None:
    """Speak TLS over a pair of sockets; raises what the client raises."""
    theirs, ours = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.crt", server / "server.key")

    def serve() -> None:
        try:
            with context.wrap_socket(theirs, server_side=True) as stream:
                stream.recv(1)
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ssl.create_default_context(cafile=str(authority)).wrap_socket(
            ours, server_hostname=name
        ) as stream:
            stream.send(b"x")
    finally:
        ours.close()
        thread.join(timeout=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    make_certificates(made, ["study.example.org", "localhost", "127.0.0.1", "::1"])
    return made


@pytest.mark.parametrize("name", ["study.example.org", "localhost", "127.0.0.1", "::1"])
def test_the_chain_verifies_for_the_names_it_was_made_for(name: str, folder: Path) -> None:
    handshake(folder, folder / "ca.crt", name)


@pytest.mark.parametrize(
    "name", ["example.org", "other.study.example.org", "127.0.0.2", "dpfl study authority"]
)
def test_and_for_no_other(name: str, folder: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, folder / "ca.crt", name)


def test_another_authority_does_not_vouch(folder: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, tmp_path / "other" / "ca.crt", "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "other", folder / "ca.crt", "localhost")


def test_a_server_s_certificate_signs_nothing(folder: Path) -> None:
    server = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    assert server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert server.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign is False
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 365


def test_secrets_are_the_owner_s_alone_and_what_is_public_holds_none(
    folder: Path, tmp_path: Path
) -> None:
    public = make_site_key(tmp_path / "site.key")
    for secret in (folder / "ca.key", folder / "server.key", tmp_path / "site.key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    for open_ in (folder / "ca.crt", folder / "server.crt", public):
        assert b"PRIVATE" not in open_.read_bytes()
    private = serialization.load_ssh_private_key((tmp_path / "site.key").read_bytes(), None)
    assert isinstance(
        private.public_key(), type(serialization.load_ssh_public_key(public.read_bytes()))
    )
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


def test_secrets_are_never_readable_by_others_not_even_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Path, "chmod", lambda *rest, **more: None
    )  # whoever looks before it was called
    make_certificates(tmp_path, ["localhost"])
    make_site_key(tmp_path / "site.key")
    for name in ("ca.key", "server.key", "site.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0, name


def test_existing_certificates_and_keys_are_left_alone(folder: Path, tmp_path: Path) -> None:
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(FolderError, match="already has certificates"):
        make_certificates(folder, ["localhost"])
    assert (folder / "ca.key").read_bytes() == before
    make_site_key(tmp_path / "site.key")
    kept = (tmp_path / "site.key").read_bytes()
    make_site_key(tmp_path / "site.key")
    assert (tmp_path / "site.key").read_bytes() == kept
