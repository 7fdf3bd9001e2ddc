"""Archives that may be damaged, and arrays kept in a cache that may be anything."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import DataError
from dpfl.datasets.stored import Arrays, archive_members, stored_arrays


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "arrays"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(b"12345")
    return path


class Maker:
    """Makes arrays, and counts how often."""

    def __init__(self, *values: int) -> None:
        self.calls = 0
        self.values = values

    def __call__(self) -> Arrays:
        self.calls += 1
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[::-1]
        more = [np.full(1, i, np.int16) for i in range(10)]  # "10" sorts before "2"
        return [np.array(self.values, np.int64), pixels, np.zeros((0, 5), np.int16), *more]


def load(source: Path, maker: Callable[[], Arrays], version: int = 1) -> Arrays:
    return stored_arrays("made-up", [source], maker, version=version)


# ---- the cache -----------------------------------------------------------------------------------


def test_the_second_load_makes_nothing_and_returns_the_same_writable_arrays(
    cache: Path, source: Path
) -> None:
    maker = Maker(3, -4)
    first, second = load(source, maker), load(source, maker)
    assert maker.calls == 1
    for made, kept in zip(first, second, strict=True):
        assert np.array_equal(made, kept)
        assert made.dtype == kept.dtype
        assert kept.flags.writeable
    assert second[1][0, 0, 0] == 12
    assert second[2].shape == (0, 5)


def test_a_changed_source_is_read_anew_and_takes_the_place_of_the_old(
    cache: Path, source: Path
) -> None:
    assert load(source, Maker(1))[0].tolist() == [1]
    source.write_bytes(b"123456")
    assert load(source, Maker(2))[0].tolist() == [2]
    os.utime(source, ns=(1, 1))  # same size, another time
    assert load(source, Maker(3))[0].tolist() == [3]
    assert load(source, Maker(4), version=2)[0].tolist() == [4]
    assert load(source, Maker(5), version=2)[0].tolist() == [4]
    assert len(list(cache.iterdir())) == 1


def test_sources_in_different_folders_do_not_share_a_place(
    cache: Path, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / source.name
    other.parent.mkdir()
    other.write_bytes(b"54321")
    os.utime(other, ns=(5, 5))
    load(source, Maker(1))
    load(other, Maker(2))
    assert [load(path, Maker(9))[0].tolist() for path in (source, other)] == [[1], [2]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: b"rubbish\n" + content,
        lambda content: b'{"made_of": "the layout of version 0.1"}\n' + content,
        lambda content: content.replace(b"I64", b"OBJ"),
        lambda content: content.replace(b"I64", b"I32"),
        lambda content: content.replace(b"made_of", b"made_up"),
        lambda content: content.replace(b'"3":', b'"x":'),
    ],
)
def test_a_damaged_cache_is_ignored_and_rewritten(
    cache: Path, source: Path, damage: Callable[[bytes], bytes]
) -> None:
    load(source, Maker(1))
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    maker = Maker(1)
    assert load(source, maker)[0].tolist() == [1]
    assert maker.calls == 1
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, source: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    maker = Maker(7)
    assert load(source, maker)[0].tolist() == load(source, maker)[0].tolist() == [7]
    assert maker.calls == 2


def test_a_full_disk_leaves_no_draft_behind(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        assert len(list(cache.iterdir())) == 1  # there is a draft to leave behind
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert load(source, Maker(7))[0].tolist() == [7]
    assert list(cache.iterdir()) == []


def test_a_source_that_is_gone_is_the_reader_s_to_report(cache: Path, tmp_path: Path) -> None:
    def make() -> Arrays:
        raise DataError("here", "there is nothing", "put something")

    with pytest.raises(DataError, match="there is nothing"):
        load(tmp_path / "absent", make)


# ---- archives ------------------------------------------------------------------------------------


def archive(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w") as stream:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            stream.addfile(member)
    path.write_bytes((lzma if path.suffix == ".xz" else gzip).compress(unpacked.getvalue()))
    return path


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


MEMBERS = {"a/one": noise(3000), "a/two": b"", "b/three": noise(512)}


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_wanted_members_come_in_order_and_links_do_not(tmp_path: Path, suffix: str) -> None:
    path = archive(tmp_path / f"some.tar.{suffix}", MEMBERS, links={"a/link": "a/one"})
    found = list(archive_members(path, lambda name: name.startswith("a/")))
    assert found == [("a/one", MEMBERS["a/one"]), ("a/two", b"")]


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@given(share=st.floats(0, 0.999))
def test_an_archive_cut_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, share: float
) -> None:
    path = archive(tmp_path_factory.mktemp("cut") / f"some.tar.{suffix}", MEMBERS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"some\.tar.*cannot be unpacked"):
        list(archive_members(path, lambda name: True))


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_a_wrong_checksum_at_the_very_end_is_noticed(tmp_path: Path, suffix: str) -> None:
    path = archive(tmp_path / f"some.tar.{suffix}", MEMBERS)
    content = bytearray(path.read_bytes())
    content[-6 if suffix == "gz" else -10] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(archive_members(path, lambda name: False))


def test_what_is_no_archive_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.tar.xz"
    path.write_bytes(lzma.compress(noise(5000)))
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(archive_members(path, lambda name: True))
