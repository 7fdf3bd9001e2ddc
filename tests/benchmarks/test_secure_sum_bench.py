"""The benchmark of the secure sum in miniature: both protocols add up, and are measured alike."""

import io
from pathlib import Path
from typing import Any

import pytest
from bench import ours_sum, secure_sum, superlink
from bench.peers import secagg_plus
from bench.phases import Meter, Task
from bench.table import WIDTH
from rich.console import Console

TASK = Task(members=6, parameters=300, dropouts=1)


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    found = {name: secure_sum.middle([work(TASK)]) for name, work in secure_sum.SIDES.items()}
    speed = ours_sum.masks(TASK)
    return {"members": 6, "numbers": 300, "dropouts": 1, **found, "gb_per_second": speed}


def test_both_protocols_give_the_sum_of_the_survivors(entry: dict[str, Any]) -> None:
    assert entry["ours"]["error"] == 0
    assert entry["peer"]["error"] < secure_sum.SMALL_ERROR
    assert not secure_sum.wrong(entry)
    assert secure_sum.wrong({**entry, "ours": {**entry["ours"], "error": 1}})
    assert secure_sum.wrong({**entry, "peer": {**entry["peer"], "error": float("nan")}})


def test_every_phase_has_seconds_and_bytes(entry: dict[str, Any]) -> None:
    assert tuple(entry["ours"]["phases"]) == (*secure_sum.PHASES, "all")
    assert set(entry["peer"]["phases"]) == {*secure_sum.PHASES, "all"} - {"signatures"}
    for side in ("ours", "peer"):
        for phase in entry[side]["phases"].values():
            assert min(phase[name] for name in ("client", "server", "up", "down")) > 0
    assert (6 * 2**24).bit_length() + 1 == 28  # bits: three bytes, and four that are packed
    assert entry["ours"]["phases"]["masked input"]["up"] == 3 * 300 + 4 * ((300 + 7) // 8)
    assert entry["peer"]["phases"]["masked input"]["up"] > 8 * 300  # words of 64 bits
    assert entry["plain"]["phases"]["all"]["up"] == 4 * 300


def test_both_sides_recover_secrets_from_as_many_shares() -> None:
    sum_ = ours_sum.Sum(TASK)
    roster = ours_sum.exchange_keys(sum_)
    assert roster.group.threshold == roster.group.recovering == TASK.threshold


def test_a_dropout_of_the_peer_is_really_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = Task(members=6, parameters=300, dropouts=0).survivors_sum()
    monkeypatch.setattr(Task, "survivors_sum", lambda self: everyone * 5 / 6)
    assert secagg_plus.run(TASK)["error"] > 0.1


def test_goals_that_are_missed_are_said_to_be(entry: dict[str, Any]) -> None:
    said = secure_sum.verdicts(entry)
    assert "missed" in said["bytes of all phases / float32"]  # 300 numbers hide no keys
    slow = {**entry, "gb_per_second": {"masks": 1.0, "cipher": 2.0}}
    assert "0.50 (>= 0.75, missed)" in secure_sum.verdicts(slow)["masks / AES-CTR alone"]


def test_the_tables_fit(entry: dict[str, Any]) -> None:
    values = {"client": 12_345.6, "server": 12_345.6, "up": 98_765_432.1, "down": 0.0}
    phases = dict.fromkeys((*secure_sum.PHASES, "all"), values)
    one = {"phases": phases, "error": 0, "peak_mib": 1.0}
    large = {**entry, "members": 50, "numbers": 10**7, "ours": one, "peer": one, "plain": one}
    sides = {name: dict.fromkeys((*secure_sum.PHASES, "all"), 1234.5) for name in ("ours", "peer")}
    sites = {"sites": 10, **sides, "plain": {"upload": 3.0, "all": 3.0}}
    out = io.StringIO()
    console = Console(file=out, width=WIDTH)
    console.print(secure_sum.by_phase(large))
    console.print(secure_sum.linked([sites]))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert not any("…" in line for line in lines)
    assert len(lines) == 2 + 7 + 2 + 3


def test_what_is_paused_counts_for_nobody() -> None:
    meter = Meter()
    with meter.server("keys"), meter.paused():
        with meter.client("keys") as measured, meter.paused():
            sum(range(3_000_000))
        measured.update(up=1, down=1)
    found = meter.result()["phases"]["keys"]
    assert max(found["client"], found["server"]) < 0.02


def test_rounds_over_a_superlink_are_told_apart(tmp_path: Path) -> None:
    asked = "Secure sum: 3 sites are asked for {}, and waited for up to 900 s"
    seen = [(0.0, ""), (1.0, "all sites are here")]
    for start in (10.0, 20.0):
        for number, what in enumerate(superlink.ASKED):
            seen.append((start + number, asked.format(what)))
    seen.append((30.0, ""))
    first, second = superlink.by_round(seen)
    assert first["phases"] == dict(zip(secure_sum.PHASES, (1, 1, 1, 1, 6), strict=True))
    assert first["seconds"] == second["seconds"] == 10
    (tmp_path / "timings.jsonl").write_text('{"seconds": {"a": 1.5, "b": 2.0}}\n')
    assert superlink.slowest(tmp_path) == [{"phases": {"upload": 2.0}, "seconds": 2.0}]
