"""Our side of one secure sum, phase by phase, and what it is held against.

A member reads its stored state and the message, does its phase, stores its state and writes the
answer: all of that is counted, but for the disk.
"""

from __future__ import annotations

import base64
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from bench.phases import LARGEST, ONE, Meter, Task
from dpfl.secure_sum import integers, member, server
from dpfl.secure_sum.session import Announcement, MemberKeys, MemberState, Roster, Shares, SumTerms

Phase = Callable[[MemberState, Any], tuple[MemberState, Any]]


class Sum:
    """Members in this process that store their states, and the messages between them."""

    def __init__(self, task: Task) -> None:
        self.task, self.meter = task, Meter()
        self.names = [f"site-{number:03d}" for number in range(task.members)]
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.stored: dict[str, bytes] = {}
        self.terms = SumTerms(
            run="bench",
            round=1,
            attempt=1,
            model="0" * 64,
            plan="0" * 64,
            step=1 / ONE,
            numbers=task.parameters,
            largest=LARGEST,
            asked=task.members,
            least=task.survivors,
            colluders=task.colluders,
        )

    def ask(self, phase: str, name: str, down: bytes, work: Phase) -> bytes:
        """Let a member answer a message in one phase."""
        with self.meter.client(phase) as measured:
            before = MemberState.from_bytes(self.stored[name])
            state, reply = work(before, json.loads(down))
            self.stored[name] = state.to_bytes()
            up = reply if isinstance(reply, bytes) else written(reply)
        measured.update(down=len(down), up=len(up))
        return up


def written(told: Any) -> bytes:
    """A message as it travels."""
    return json.dumps(told, separators=(",", ":")).encode()


def text(content: dict[str, bytes]) -> dict[str, str]:
    """Bytes by name, as they travel."""
    return {name: base64.b64encode(one).decode() for name, one in content.items()}


def binary(content: dict[str, str]) -> dict[str, bytes]:
    """Read what :func:`text` wrote."""
    return {name: base64.b64decode(one) for name, one in content.items()}


def run(task: Task) -> dict[str, Any]:
    """Add up, and return seconds and bytes by phase, and by how much the sum is wrong."""
    sum_ = Sum(task)
    roster = exchange_keys(sum_)
    sent = exchange_shares(sum_, roster)
    announced, masked = mask(sum_, roster, sent)
    del sent
    signatures = sign(sum_, roster, tuple(masked))
    total = unmask(sum_, roster, announced, masked, signatures)
    del masked
    wrong = np.abs(total - task.survivors_integers()).max()
    return {**sum_.meter.result(), "error": int(wrong), "width": sum_.terms.width}


def exchange_keys(sum_: Sum) -> Roster:
    """First phase; the server makes the roster."""
    meter, terms = sum_.meter, sum_.terms
    with meter.server("keys"):
        down = written(asdict(terms))
    answers = {}
    for name, identity in sum_.identities.items():
        with meter.client("keys") as measured:
            state = member.make_keys(name, identity, SumTerms.read(json.loads(down)))
            sum_.stored[name] = state.to_bytes()
            answers[name] = written(asdict(state.keys))
        measured.update(down=len(down), up=len(answers[name]))
    with meter.server("keys"):
        read = {name: MemberKeys.read(json.loads(one)) for name, one in answers.items()}
        return server.make_roster(terms, read)


def exchange_shares(sum_: Sum, roster: Roster) -> dict[str, Shares]:
    """Second phase."""
    with sum_.meter.server("shares"):
        down = written(roster.to_dict())
    answers = {}
    for name, identity in sum_.identities.items():

        def work(state: MemberState, told: Any, own: Ed25519PrivateKey = identity) -> Any:
            after = member.make_shares(state, own, Roster.read(told))
            assert after.shares is not None
            return after, after.shares.to_dict()

        answers[name] = sum_.ask("shares", name, down, work)
    with sum_.meter.server("shares"):
        return {name: Shares.read(json.loads(one)) for name, one in answers.items()}


def mask(
    sum_: Sum, roster: Roster, sent: dict[str, Shares]
) -> tuple[dict[str, Announcement], dict[str, bytes]]:
    """Third phase; the first members fall silent."""
    announced = {name: one.announcement for name, one in sent.items()}
    with sum_.meter.server("masked input"):
        common = {name: asdict(one) for name, one in announced.items()}
    masked = {}
    for number, name in list(enumerate(sum_.names))[sum_.task.dropouts :]:
        with sum_.meter.server("masked input"):
            mail = text(server.mail_for(roster, sent, name))
            down = written({"announced": common, "mail": mail})

        def work(state: MemberState, told: Any, number: int = number) -> Any:
            read = {one: Announcement.read(what) for one, what in told["announced"].items()}
            with sum_.meter.paused():
                own = sum_.task.integers(number)
            return member.make_masked(state, read, binary(told["mail"]), own)

        masked[name] = sum_.ask("masked input", name, down, work)
    return announced, masked


def sign(sum_: Sum, roster: Roster, survivors: tuple[str, ...]) -> dict[str, str]:
    """Fourth phase."""
    with sum_.meter.server("signatures"):
        down = written(survivors)
    signatures = {}
    for name in survivors:

        def work(state: MemberState, told: Any, name: str = name) -> Any:
            return member.sign_survivors(state, sum_.identities[name], tuple(told))

        signatures[name] = json.loads(sum_.ask("signatures", name, down, work))
    with sum_.meter.server("signatures"):
        for name, signature in signatures.items():
            server.check_survivor_signature(roster, survivors, name, signature)
    return signatures


def unmask(
    sum_: Sum,
    roster: Roster,
    announced: dict[str, Announcement],
    masked: dict[str, bytes],
    signatures: dict[str, str],
) -> np.ndarray:
    """Last phase; the server takes the masks off."""
    with sum_.meter.server("unmasking"):
        down = written(dict(sorted(signatures.items())[: roster.group.threshold]))
    answers = {}
    for name in masked:

        def work(state: MemberState, told: Any) -> Any:
            after, revealed = member.reveal(state, told)
            return after, text(revealed)

        answers[name] = sum_.ask("unmasking", name, down, work)
    with sum_.meter.server("unmasking"):
        revealed = {name: binary(json.loads(one)) for name, one in answers.items()}
        return server.unmasked_sum(roster, announced, masked, revealed)


def plain(task: Task) -> dict[str, Any]:
    """Upload and add up float32 without any protection."""
    meter, sent = Meter(), []
    for number in range(task.dropouts, task.members):
        with meter.client("upload") as measured:
            with meter.paused():
                vector = task.vector(number)
            sent.append(vector.tobytes())
        measured.update(down=0, up=len(sent[-1]))
    with meter.server("upload"):
        total = np.zeros(task.parameters)
        for payload in sent:
            total += np.frombuffer(payload, np.float32)
    del sent
    return {**meter.result(), "error": float(np.abs(total - task.survivors_sum()).max())}


def masks(task: Task) -> dict[str, float]:
    """How many GB of masks a member adds in a second, and how many the cipher alone makes."""
    width = integers.width_for(LARGEST, task.members)
    numbers, repeats = np.zeros(task.parameters, integers.word(width)), 5
    keys = [number.to_bytes(32) for number in range(task.members)]
    size = 1 << 17
    zeros, buffer = bytes(size), bytearray(size + 15)

    def cipher() -> None:
        for key in keys:
            stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
            for start in range(0, numbers.nbytes, size):
                stream.update_into(zeros[: min(size, numbers.nbytes - start)], buffer)

    def add() -> None:
        integers.add_masks(numbers, [(key, 1) for key in keys])

    seconds: dict[str, list[float]] = {"masks": [], "cipher": []}
    for _ in range(repeats):
        for name, work in (("masks", add), ("cipher", cipher)):
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    size = numbers.nbytes * task.members
    return {name: size / 1e9 / statistics.median(values) for name, values in seconds.items()}
