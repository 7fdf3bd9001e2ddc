"""The size of the package, in tokens and names, and the measures that may only fall."""

from __future__ import annotations

import json
from pathlib import Path

from tools import house

ROOT = Path(__file__).parents[2]
LIMITS = json.loads((ROOT / "tools" / "limits.json").read_text())
ALLOWANCE = json.loads((ROOT / "tools" / "allowance.json").read_text())
NEVER_MORE = {
    "vague names given, sum",
    "tuple packs",
    "tampering",
    "private flwr imports",
    "private flwr files",
}


def test_no_measure_exceeds_its_limit() -> None:
    numbers = house.limited(house.measure(ROOT / "src" / "dpfl"))
    assert not house.excesses(numbers, LIMITS, ALLOWANCE)


def test_nothing_is_allowed_on_top_of_what_may_never_rise() -> None:
    assert set(LIMITS) >= set(ALLOWANCE) | NEVER_MORE
    assert not NEVER_MORE & set(ALLOWANCE)


LONG = """
from flwr.app import Message
from flwr.server.grid import Grid

def read(first):
    '''Not counted.'''
    given, count = first, 1  # not counted
    return given
"""
SHORT = """
from flwr.app import Message

def read(first):
    return first
"""


def measured(folder: Path, text: str) -> dict[str, float]:
    (folder / "__init__.py").write_text("")
    (folder / "rooms").mkdir(exist_ok=True)
    (folder / "rooms" / "reading.py").write_text(text)
    return house.limited(house.measure(folder))


def test_an_excess_names_measure_value_and_limit(tmp_path: Path) -> None:
    limits = measured(tmp_path, SHORT)
    numbers = measured(tmp_path, LONG)
    assert house.excesses(limits, limits, {}) == []
    assert house.excesses(numbers, limits, {"tokens": 100, "import tokens": 8}) == [
        "private flwr imports: 1 exceeds 0 recorded and 0 allowed on top",
        "private flwr files: 1 exceeds 0 recorded and 0 allowed on top",
        "vague names given, sum: 1 exceeds 0 recorded and 0 allowed on top",
        "tuple packs: 1 exceeds 0 recorded and 0 allowed on top",
    ]
    grown = numbers["tokens"] - limits["tokens"]
    sentences = house.excesses(numbers, limits, {"tokens": grown - 1})
    named = {sentence.split(":")[0] for sentence in sentences}
    assert {"tokens", "tokens of rooms", "import tokens"} <= named


def test_layout_and_comments_count_nothing(tmp_path: Path) -> None:
    plain = measured(tmp_path, "def f(a, b):\n    c = a\n    return (a + b + c)\n")
    spread = 'def f(a,b) :\n  "d"\n  c=a  # e\n\n  return (\n\n a +\n b\\\n + c)\n'
    assert measured(tmp_path, spread) == plain
    assert measured(tmp_path, spread.replace("(\n", "(-"))["tokens"] == plain["tokens"] + 1


def test_a_package_that_was_not_recorded_counts_in_the_total_only(tmp_path: Path) -> None:
    limits = measured(tmp_path, SHORT)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "writing.py").write_text("x = 1\n")
    numbers = house.limited(house.measure(tmp_path))
    sentences = house.excesses(numbers, limits, {})
    assert [sentence.split(":")[0] for sentence in sentences] == ["tokens"]
    assert not house.excesses(numbers, limits, {"tokens": 3})
