"""Strangers at the open port: what the proxy takes, and whether sites are still heard.

A proxy runs before a stand-in for Flower's server. Strangers open many connections and send a
header a byte at a time, or post bodies of 100 MiB without a key. Meanwhile a site makes signed
requests. Reported are the memory of the proxy, and how the site's requests fare.

    python -m bench.port --slow 500 --bodies 20 --seconds 30
"""

import argparse
import asyncio
import base64
import datetime
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpfl.deploy.credentials import make_certificates, make_site_key
from dpfl.deploy.processes import free_port

BODY = 100 << 20


def memory(process: int) -> float:
    """Return the resident memory of a process, in MiB."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4 / 1024


def signed(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """Return the headers with which a site proves who it is."""
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(encoding, form)
    stamp = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


async def stand_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every request as Flower's server would, with nothing."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"chunked" in head.lower():
                await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()


async def slow(port: int, tls: ssl.SSLContext, until: float) -> None:
    """Send a header a byte at a time, and connect again when cut off."""
    while time.monotonic() < until:
        with suppress(OSError):
            _, writer = await asyncio.wait_for(
                asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="127.0.0.1"), 5
            )
            for byte in b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n" * 20:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


async def large(port: int, tls: ssl.SSLContext, until: float) -> None:
    """Post a large body without a key, again and again."""

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(BODY >> 16):
            yield bytes(1 << 16)

    async with httpx.AsyncClient(verify=tls, timeout=10) as client:
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                await client.post(
                    f"https://127.0.0.1:{port}/v1/fleet/push-object", content=pieces()
                )
            await asyncio.sleep(0.1)


async def site(
    port: int,
    tls: ssl.SSLContext,
    key: ec.EllipticCurvePrivateKey,
    until: float,
    *,
    anew: bool,
    address: str = "127.0.0.1",
) -> tuple[Counter[str], float]:
    """Make signed requests, each on a new connection or all on one; count what came of them."""
    found, slowest = Counter[str](), 0.0
    url, client = f"https://127.0.0.1:{port}/v1/fleet/pull-messages", None
    while time.monotonic() < until:
        began = time.monotonic()
        if anew or client is None:
            way = httpx.AsyncHTTPTransport(verify=tls, local_address=address)
            client = httpx.AsyncClient(transport=way, timeout=10)
        try:
            answer = await client.post(url, content=b"", headers=signed(key))
            found[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            found[type(error).__name__] += 1
        slowest = max(slowest, time.monotonic() - began)
        if anew:
            await client.aclose()
        await asyncio.sleep(0.3)
    return found, slowest


async def measure(folder: Path, connections: int, bodies: int, seconds: float) -> None:
    """Run the proxy among strangers, and print what was measured."""
    make_certificates(folder / "certificates", ["127.0.0.1"])
    (folder / "sites").mkdir()
    public = make_site_key(folder / "site.key")
    (folder / "sites" / "a.pub").write_bytes(public.read_bytes())
    key = serialization.load_ssh_private_key((folder / "site.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    inner = await asyncio.start_server(stand_in, "127.0.0.1", 0)
    port, own = free_port(), folder / "certificates"
    command = [sys.executable, "-m", "dpfl.deploy.proxy", "--parent", str(os.getpid())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--sites", "3"]
    command += ["--inner", f"http://127.0.0.1:{inner.sockets[0].getsockname()[1]}"]
    command += ["--largest-body", str(4 << 20), "--keys", str(folder / "sites")]
    command += ["--certificate", str(own / "server.crt"), "--key", str(own / "server.key")]
    proxy = subprocess.Popen(command)
    tls = ssl.create_default_context(cafile=str(own / "ca.crt"))
    try:
        await asyncio.sleep(4)
        await site(port, tls, key, time.monotonic() + 2, anew=True)
        idle, most = memory(proxy.pid), 0.0
        until = time.monotonic() + seconds
        strangers = [slow(port, tls, until) for _ in range(connections)]
        strangers += [large(port, tls, until) for _ in range(bodies)]
        sites = [site(port, tls, key, until, anew=anew) for anew in (False, True)]
        sites.append(site(port, tls, key, until, anew=True, address="127.0.0.2"))
        running = [asyncio.ensure_future(one) for one in (*strangers, *sites)]
        while not all(one.done() for one in running):
            await asyncio.sleep(0.2)
            most = max(most, memory(proxy.pid))
        results = [one.result() for one in running[-3:]]
    finally:
        proxy.terminate()
        proxy.wait()
    inner.close()
    print(f"{connections} slow connections, {bodies} posting {BODY >> 20} MiB, {seconds:g} s")
    print(f"MiB of the proxy: idle {idle:.0f}, most {most:.0f}, {most - idle:+.0f}")
    names = ("that stays connected", "that connects anew", "that does so from another address")
    for what, (found, slowest) in zip(names, results, strict=True):
        print(f"a site {what}: {dict(found)}, slowest {slowest:.1f} s")


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("slow", 500), ("bodies", 20), ("seconds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), given.slow, given.bodies, given.seconds))


if __name__ == "__main__":
    main()
