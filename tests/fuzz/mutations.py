"""Valid examples, changed: bytes that are damaged, and plain values that are altered."""

from __future__ import annotations

import copy
import csv
import datetime
import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import tomli_w
from hypothesis import strategies as st

from tests.fuzz.doors import OUTSIDE

Draw = Any


def _deep(kind: str, depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "list" else {"x": value}
    return value


PATHS = ["../x", "../../x", f"{OUTSIDE}/x", f"{OUTSIDE}/canary.txt", "~/x", ".", "..", "/dev/full"]
NUMBERS = [0, 1, -1, 2, 3, 1.5, -0.0, 5e-324, 1e-30, 0.999999, 1e38, 1e308, math.nan, math.inf]
NUMBERS += [-math.inf, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**40, 10**400]
TEXTS = ["", " ", "x", "\0", "a\0b", "a\nb", "é", "\u202ex", "\N{SLIGHTLY SMILING FACE}", "\ud800"]
TEXTS += ["a" * 100_000, "%s{0}", "nan", "1e999", "-1", "[red]x[/red]", "<script>", "true"]
OTHERS = [None, True, False, [], {}, [[]], [None], {"": 0}, {"x": None}, _deep("list", 80)]
OTHERS += [_deep("table", 80), [0] * 10_000, datetime.date(2024, 2, 29)]
WORDS = [b"nan", b"inf", b"-1", b"1e999", b"9" * 5000, b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b"'"]
WORDS += [b"[", b"]", b"{", b"}", b",", b"=", b"\n", b"\r", b"\xe2\x80\xa8", b"#", b".", b"null"]
WORDS += [b"[" * 1000, b"{" * 1000, b'{"a":' * 1000, b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7]
WORDS += [path.encode() for path in PATHS]

odd = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(PATHS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
).map(copy.deepcopy)
"""Values that hardly any field can take."""


@st.composite
def damaged(draw: Draw, *wholes: bytes) -> bytes:
    """Bytes with a few flipped, deleted, doubled, inserted or cut off; sometimes any bytes."""
    if draw(st.integers(0, 9)) == 9:
        return draw(st.binary(max_size=300))
    content = bytearray(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        size = len(content)
        # structure is dense at the beginning of most files
        at = draw(st.one_of(st.integers(0, size), st.integers(0, min(size, 200))))
        end = min(size, at + draw(st.one_of(st.integers(0, 16), st.integers(0, size))))
        match draw(st.sampled_from(["flip", "delete", "double", "insert", "replace", "cut"])):
            case "flip" if at < size:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "delete":
                del content[at:end]
            case "double":
                content[at:at] = content[at:end]
            case "insert":
                content[at:at] = draw(st.sampled_from(WORDS))
            case "replace":
                word = draw(st.sampled_from(WORDS))
                content[at : at + len(word)] = word
            case "cut" if draw(st.booleans()):
                del content[at:]
    return bytes(content)


@st.composite
def altered(draw: Draw, *wholes: Any) -> Any:
    """Plain values with a few replaced, removed, renamed, wrapped, doubled or swapped."""
    value = [copy.deepcopy(draw(st.sampled_from(wholes)))]
    for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 3]))):
        places = [*_places(value)]
        # the whole value is one place among many
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        other, place = places[draw(st.integers(0, len(places) - 1))]
        match draw(
            st.sampled_from(["replace", "replace", "replace", "remove", "rename", *_OTHERS])
        ):
            case "replace":
                holder[key] = draw(odd)
            case "remove" if holder is not value:
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from([*TEXTS[:-8], *PATHS]))] = holder.pop(key)
            case "wrap":
                holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}]))
            case "double" if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case "number" if isinstance(holder[key], int | float) and abs(holder[key]) < 1e99:
                factor = draw(st.sampled_from([-1, 0, 2, 10, 1000, 1e-3, 1e9, 1e-9]))
                holder[key] = holder[key] * factor
            case "swap":
                holder[key] = copy.deepcopy(other[place])
    return value[0]


_OTHERS = ["wrap", "double", "number", "number", "swap"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that can be changed in nested tables and lists: its holder, and its key there."""
    keys = [*value] if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def as_toml(value: Any) -> bytes:
    """A table as TOML; what TOML cannot hold is left out."""
    kept = _writable(value if isinstance(value, dict) else {"x": value})
    return tomli_w.dumps(kept).encode("utf-8", "surrogatepass")


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _writable(own) for k, own in value.items() if own is not None}
    if isinstance(value, list | tuple):
        return [_writable(own) for own in value if own is not None]
    return value


def as_json(value: Any) -> bytes:
    """A value as JSON, with all that Python's reader takes."""
    return json.dumps(value, default=str).encode()


def as_csv(rows: Any) -> bytes:
    """A list of rows as CSV."""
    stream = io.StringIO()
    lines = csv.writer(stream, lineterminator="\n")
    for row in rows if isinstance(rows, list) else [rows]:
        lines.writerow(row if isinstance(row, list) else [row])
    return stream.getvalue().encode("utf-8", "surrogatepass")


def as_lines(value: Any) -> bytes:
    """The values of a list as lines of JSON."""
    return b"".join(
        as_json(line) + b"\n" for line in (value if isinstance(value, list) else [value])
    )


def files(valid: Any, write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """A file of plain values: altered and then written, or written and then damaged."""
    return st.one_of(altered(valid).map(write), altered(valid).map(write), damaged(write(valid)))
