"""What a server sends opens no file, names no module and calls nowhere, whatever it says.

Nor does an answer tell whether a file exists.
"""

from __future__ import annotations

import copy
import itertools
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from dpfl.core.errors import ConfigurationError, DpflError, PeerError
from dpfl.deploy.messages import LONGEST, Introduction, Message, Reply
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.receipts import Receipt
from dpfl.deploy.requests import END, HELLO, SUM, TERMS, TRAIN, Request
from dpfl.deploy.site import Site
from dpfl.deploy.site_folder import LOG
from dpfl.deploy.sum_phases import KEYS
from dpfl.runs.deployment import StudyFile
from tests.audited import closed
from tests.deploy.federation import SIGNER, Desk, make_site, study_values

KINDS = (HELLO, TERMS, TRAIN, SUM, END)
LONGEST_NAME = 200
MODULE = "offered_module"  # can be imported, and says so

FIELDS: tuple[tuple[str, ...], ...] = (
    ("model", "weights"),
    ("model", "weights_sha256"),
    ("model", "features"),
    ("model", "name"),
    ("model", "freeze"),
    ("study", "schema"),
    ("study", "name"),
    ("study", "unit"),
    ("study", "sites"),
    ("task", "name"),
    ("task", "metric"),
    ("task", "loss"),
    ("method", "name"),
    ("method", "clip"),
    ("method", "weights"),
    ("method", "sampling"),
    ("server", "aggregation"),
    ("server", "optimizer"),
    ("accounted", "metric"),
    ("run", "noise"),
    ("run", "logger"),
    ("data", "folder"),
    ("data", "schema"),
    ("budgets", "epsilon"),
    ("secure_sum", "state"),
    ("network", "host"),
    ("out",),
    ("schema",),
)
"""Where a message might name something: fields of a study, of an experiment, and of neither."""

BESIDE = (
    "run",
    "dpfl",
    "kind",
    "signer",
    "phase",
    "round",
    "terms",
    "identities",
    "receipt",
    "sum",
)
"""What a message holds beside the study."""


def honest(kind: str, desk: Desk) -> Message:
    if kind == HELLO:
        return desk.hello()
    if kind == TERMS:
        return desk.terms()
    message = desk.train(0)
    more: dict[str, Any] = {"kind": kind}
    if kind == SUM:
        more |= {"phase": KEYS, "sum": {"terms": {}}}
    payload = b"" if kind == SUM else message.payload
    if kind == END:
        payload = save(desk.study().build_model().state_dict())
    return Message(header={**message.header, **more}, payload=payload)


def with_value(message: Message, place: tuple[str, ...], value: Any) -> Message:
    """The message with something else at one place of its study."""
    header = copy.deepcopy(dict(message.header))
    section = header["study"]
    for name in place[:-1]:
        section = section.setdefault(name, {})
    section[place[-1]] = value
    return Message(header=header, payload=message.payload)


def with_header(message: Message, name: str, value: Any) -> Message:
    return Message(header={**message.header, name: value}, payload=message.payload)


def named(folder: Path) -> dict[str, str]:
    """What a server might name."""
    (folder / "there.json").write_text("{}")
    (folder / "there.csv").write_text("id,epsilon\na,1.0\n")
    (folder / "there.toml").write_text('target = "ill"\n[columns.ill]\ntype = "boolean"\n')
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    return {
        "a system's file": "/etc/passwd",
        "a missing file": str(folder / "missing"),
        "a named pipe": str(folder / "pipe"),
        "a folder": str(folder),
        "a device": "/dev/zero",
        "a table": str(folder / "there.csv"),
        "a table of budgets": str(folder / "there.json"),
        "a schema": str(folder / "there.toml"),
        "a relative path": "../secret/there.csv",
        "an address": "file:///etc/passwd",
        "a website": "http://127.0.0.1:9/x",
        "a module": MODULE,
        "something in a module": f"{MODULE}:main",
        "a function": "os.system",
        "a database": f"sqlite:///{folder}/x.db",
    }


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk(study_values())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, desk: Desk) -> Iterator[Site]:
    """A site that has agreed to an honest study; what is imported when first needed is there."""
    folder = tmp_path_factory.mktemp("home")
    (folder / f"{MODULE}.py").write_text("")
    sys.path.insert(0, str(folder))
    found = make_site(folder / "a", "a")
    for kind in KINDS:
        found.answer(honest(kind, desk))
        for place in FIELDS:  # refusals look for the nearest known name
            if "weights" not in place:
                found.answer(with_value(honest(kind, desk), place, "meen"))
    yield found
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is none of the server's business."""
    return tmp_path_factory.mktemp("secret")


def hostile(message: Message, secret: Path) -> Iterator[tuple[str, Message]]:
    """The message with each name at each place."""
    for what, name in named(secret).items():
        for place in FIELDS:
            value = [name] if place[-1] in ("freeze", "sites") else name
            yield f"{'.'.join(place)} is {what}", with_value(message, place, value)
        for place in BESIDE:
            yield f"{place} is {what}", with_header(message, place, name)


def wrapped(message: Message, secret: Path) -> Iterator[tuple[str, Message]]:
    """The message with tables and lists of names at each place."""
    for what, name in named(secret).items():
        for value in ([name], {"file": name}, {name: name}):
            for place in FIELDS:
                yield f"{'.'.join(place)} holds {what}", with_value(message, place, value)
            for place in BESIDE:
                yield f"{place} holds {what}", with_header(message, place, value)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_message_opens_nothing(kind: str, site: Site, desk: Desk, secret: Path) -> None:
    reached: dict[str, list[str]] = {}
    asked = honest(kind, desk)
    for what, message in itertools.chain(hostile(asked, secret), wrapped(asked, secret)):
        with closed() as tried, suppress(DpflError, PermissionError):
            Request.read(message)
        reached |= {what: tried} if tried else {}
    assert not reached
    assert MODULE not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_answering_a_message_opens_nothing_but_the_sites_own(
    kind: str, site: Site, desk: Desk, secret: Path
) -> None:
    cache, reached = Path(os.environ["DPFL_CACHE"]), {}
    for what, message in hostile(honest(kind, desk), secret):
        with closed(site.folder, cache) as tried:
            site.answer(message)
        reached |= {what: tried} if tried else {}
    assert not reached
    assert MODULE not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_tell_whether_a_file_exists(
    kind: str, site: Site, desk: Desk, secret: Path
) -> None:
    told = []
    for suffix in ("csv", "json", "toml", "safetensors"):
        path = secret / f"asked.{suffix}"
        for place in FIELDS:
            message = with_value(honest(kind, desk), place, str(path))
            path.write_bytes(b"content")
            present = site.answer(message)
            path.unlink()
            path.mkdir()
            folder = site.answer(message)
            path.rmdir()
            told += [] if present == folder == site.answer(message) else [(place, suffix)]
    assert not told


LONG = ("x" * (LONGEST_NAME + 1), "x" * 900_000, "a\nb", "\0", "")


@pytest.mark.parametrize("name", LONG, ids=lambda name: f"{name!r:.8}")
@pytest.mark.parametrize("kind", KINDS)
def test_names_have_a_limit(kind: str, name: str, site: Site, desk: Desk) -> None:
    message = honest(kind, desk)
    for altered in (
        with_header(message, "run", name),
        with_value(message, ("study", "name"), name),
    ):
        with pytest.raises((PeerError, ConfigurationError)) as caught:
            Request.read(altered)
        assert len(str(caught.value)) < 300
        assert not site.answer(altered).accepted


@pytest.mark.parametrize("letter", ["x", "\n", "\U000e0001"], ids=ascii)
@pytest.mark.parametrize(
    "field",
    [("model", "name"), ("task", "metric"), ("method", "name"), ("study", "unit")],
    ids=".".join,
)
def test_a_server_s_words_are_quoted_up_to_a_limit(
    field: tuple[str, ...], letter: str, site: Site, desk: Desk
) -> None:
    before = (site.folder / LOG).stat().st_size if (site.folder / LOG).exists() else 0
    hello = with_header(desk.hello(), "run", "another")
    answer = site.answer(with_value(hello, field, letter * 100_000))
    assert not answer.accepted
    assert len(str(answer.reason)) <= LONGEST
    assert not (site.folder / LOG).exists() or (
        (site.folder / LOG).stat().st_size - before < 20 * LONGEST
    )


@pytest.mark.parametrize("hidden", [10_000_000, 1 << 40])
def test_a_model_that_would_fill_the_memory_is_refused_before_it_is_built(
    hidden: int, site: Site, desk: Desk
) -> None:
    message = with_header(desk.hello(), "run", "another")
    message = with_value(message, ("model", "name"), "mlp")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = site.answer(with_value(message, ("model", "hidden"), hidden))
    assert "at most 67108864" in str(answer.reason)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("name", LONG, ids=lambda name: f"{name!r:.8}")
def test_names_of_sites_have_a_limit(name: str, desk: Desk) -> None:
    for place, value in (("public", [name]), ("weights", [(name, 1.0)])):
        with pytest.raises(PeerError, match="name of"):
            Request.read(desk.terms(**{place: value}))
    with pytest.raises(PeerError, match="name of"):
        Request.read(with_header(desk.terms(), "identities", {name: "00" * 32}))
    claims = {"epsilon": 1.0, "delta": 1e-3, "examples": 10}
    said = {"site": name, "claims": claims, "token": "t", "dpfl": "0.1.0"}
    with pytest.raises(PeerError, match="name of"):
        Introduction.from_header(said)


def test_a_study_s_name_has_a_limit_where_the_operator_writes_it(tmp_path: Path) -> None:
    values = study_values()
    values["study"]["name"] = "x" * LONGEST_NAME
    path = tmp_path / "study.toml"
    path.write_text(StudyFile.from_dict(values).to_toml())
    path.write_text(path.read_text().replace("x" * LONGEST_NAME, "x" * (LONGEST_NAME + 1)))
    with pytest.raises(ConfigurationError, match=r"study\.toml, \[study\] name: .* of 201 char"):
        StudyFile.from_file(path)


def test_a_study_that_was_agreed_on_opens_no_file_when_it_is_read_back(
    tmp_path: Path, desk: Desk, secret: Path
) -> None:
    site = make_site(tmp_path / "a", "a")
    assert site.answer(desk.terms()).accepted
    assert site.answer(honest(END, desk)).accepted
    (model,) = (site.folder / "models").iterdir()
    whole = (model / "study.toml").read_text()
    assert "network" not in whole
    assert outcomes(site.folder)
    schema = named(secret)["a schema"]
    lines = {"schema": whole.replace('name = "demo"', f'name = "demo"\nschema = "{schema}"')}
    lines["weights"] = whole.replace("[model]", f'[model]\nweights = "{schema}"')
    for changed in lines.values():
        assert changed != whole
        (model / "study.toml").write_text(changed)
        with closed(site.folder) as tried, pytest.raises(ConfigurationError):
            outcomes(site.folder)
        assert not tried


def test_answers_of_sites_open_nothing_at_the_server(secret: Path) -> None:
    """Introductions, replies and receipts name no file either."""
    claims = {"epsilon": 1.0, "delta": 1e-3, "examples": 10}
    said = {"ok": True, "site": "a", "claims": claims, "token": "t", "dpfl": "0.1.0"}
    receipt = {"run": "r", "site": "a", "round": 0, "head": "00", "signature": "00"}
    Introduction.from_header(said)
    reached = []
    for name in named(secret).values():
        for place in (*said, "identity", "reason", "head", "more", "code", "round"):
            for value in (name, [name], {name: name}):
                header = {**said, place: value}
                with closed() as tried:
                    with suppress(DpflError):
                        Introduction.from_header(header)
                    assert Reply.of(Message(header=header)).problem is not None
                reached += tried
        for place in receipt:
            with closed() as tried, suppress(DpflError, ValueError):
                Receipt.read({**receipt, place: name}).check(SIGNER)
            reached += tried
    assert not reached
