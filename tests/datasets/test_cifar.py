"""CIFAR-10: every form its files come in, and files that are not what they should be."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from dpfl.core.errors import DataError
from dpfl.datasets.cifar import ARCHIVE, FILES, RECORD, read_cifar10

RECORDS = 4


def batch(number: int) -> bytes:
    """Return a few records whose labels tell the file, and whose pixels tell record, colour, row
    and column.
    """
    labels = np.full((RECORDS, 1), number, np.uint8)
    record, colour, row, column = np.indices((RECORDS, 3, 32, 32))
    pixels = (record * 101 + colour * 37 + row * 5 + column + number).astype(np.uint8)
    return np.concatenate([labels, pixels.reshape(RECORDS, -1)], axis=1).tobytes()


CONTENTS = {name: batch(number) for number, name in enumerate(FILES)}


def write(folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        if packed:
            (folder / f"{name}.xz").write_bytes(lzma.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def write_archive(
    folder: Path, contents: dict[str, bytes], inside: str = "cifar-10-batches-bin"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / ARCHIVE, "w:gz") as stream:
        for name, content in {"readme.html": b"<p>", **contents}.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))
    return folder


def check(four: tuple[np.ndarray, ...]) -> None:
    train, train_labels, test, test_labels = four
    assert train.shape == (5 * RECORDS, 3, 32, 32)
    assert test.shape == (RECORDS, 3, 32, 32)
    assert train.dtype == test.dtype == np.uint8
    assert train_labels.dtype == test_labels.dtype == np.int64
    assert train_labels.tolist() == [number for number in range(5) for _ in range(RECORDS)]
    assert test_labels.tolist() == [5] * RECORDS
    # third record of the second file, blue, row 7, column 30
    assert train[RECORDS + 2, 2, 7, 30] == (2 * 101 + 2 * 37 + 7 * 5 + 30 + 1) % 256
    assert test[3, 1, 31, 0] == (3 * 101 + 37 + 31 * 5 + 5) % 256
    assert train.flags.writeable


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-10-binary", "."])
def test_the_six_files_are_read_packed_or_not_from_any_usual_folder(
    tmp_path: Path, folder: str, packed: bool
) -> None:
    write(tmp_path / folder, packed=packed)
    for _ in range(2):  # unpacked, then from the cache
        check(read_cifar10([tmp_path / "nowhere", tmp_path]))


@pytest.mark.parametrize("folder", [".", "cifar-10-binary"])
def test_the_official_archive_is_read(tmp_path: Path, folder: str) -> None:
    write_archive(tmp_path / folder, CONTENTS)
    check(read_cifar10([tmp_path]))


def test_packed_and_plain_files_may_be_mixed_and_the_plain_one_counts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / FILES[1]).unlink()
    (tmp_path / f"{FILES[1]}.xz").write_bytes(lzma.compress(CONTENTS[FILES[1]]))
    (tmp_path / f"{FILES[2]}.xz").write_bytes(b"rubbish beside a good file")
    check(read_cifar10([tmp_path]))


def test_the_first_folder_that_holds_all_files_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a" / FILES[3]).unlink()
    write(tmp_path / "b")
    write_archive(tmp_path / "c", dict.fromkeys(FILES, CONTENTS[FILES[0]]))
    check(read_cifar10([tmp_path / name for name in "abc"]))
    assert set(read_cifar10([tmp_path / name for name in "acb"])[1].tolist()) == {0}


def test_the_second_load_unpacks_nothing_until_a_file_changes(tmp_path: Path) -> None:
    write(tmp_path, packed=True)
    first = read_cifar10([tmp_path])
    packed = tmp_path / f"{FILES[0]}.xz"
    status, content = packed.stat(), packed.read_bytes()
    packed.write_bytes(bytes(len(content)))
    os.utime(packed, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
    assert all(np.array_equal(a, b) for a, b in zip(first, read_cifar10([tmp_path]), strict=True))
    os.utime(packed)
    with pytest.raises(DataError, match=rf"{FILES[0]}\.xz: cannot be unpacked"):
        read_cifar10([tmp_path])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [CONTENTS[FILES[2]][:-1], CONTENTS[FILES[2]] + b"x", b"", bytes(RECORD * 10_001)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_the_wrong_size_is_refused_with_its_size(
    tmp_path: Path, content: bytes, packed: bool
) -> None:
    write(tmp_path)
    if packed:
        (tmp_path / FILES[2]).unlink()
        (tmp_path / f"{FILES[2]}.xz").write_bytes(lzma.compress(content, preset=0))
    else:
        (tmp_path / FILES[2]).write_bytes(content)
    size = "more than 30,730,000" if len(content) > 10**6 else f"{len(content):,}"
    with pytest.raises(
        DataError, match=rf"{FILES[2]}.*its {size} bytes are no whole number of records of 3,073"
    ):
        read_cifar10([tmp_path])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("archived", [False, True])
def test_a_label_outside_the_classes_is_refused_by_record(
    tmp_path: Path, place: int, archived: bool
) -> None:
    content = bytearray(CONTENTS[FILES[5]])
    record = place % RECORDS
    content[record * RECORD] = 10
    if archived:
        write_archive(tmp_path, {**CONTENTS, FILES[5]: bytes(content)})
    else:
        (write(tmp_path) / FILES[5]).write_bytes(content)
    with pytest.raises(
        DataError, match=rf"{FILES[5]}: label 10 of record {record} is outside the 10 classes"
    ) as caught:
        read_cifar10([tmp_path])
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "replaced"])
def test_damaged_compression_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write(tmp_path, packed=True)
    path = tmp_path / f"{FILES[4]}.xz"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 255
    damaged = {"cut": content[:-30], "flipped": content, "replaced": bytearray(b"not xz at all")}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=rf"{FILES[4]}\.xz: cannot be unpacked"):
        read_cifar10([tmp_path])
    assert not list(tmp_path.glob("cache/arrays/*"))


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="its files are in none of") as caught:
        read_cifar10([tmp_path / "a", tmp_path / "b"])
    assert all(str(tmp_path / name / "cifar-10-binary") in str(caught.value) for name in "ab")
    (write(tmp_path / "b" / "cifar-10-binary") / FILES[1]).unlink()
    with pytest.raises(DataError, match=rf"cifar-10-binary lacks {FILES[1]};"):
        read_cifar10([tmp_path / "a", tmp_path / "b"])


def test_an_archive_that_is_cut_or_lacks_a_member_is_refused(tmp_path: Path) -> None:
    write_archive(tmp_path / "a", {name: CONTENTS[name] for name in FILES if name != FILES[3]})
    with pytest.raises(DataError, match=rf"{ARCHIVE}: lacks {FILES[3]};"):
        read_cifar10([tmp_path / "a"])
    write_archive(tmp_path / "b", CONTENTS, inside="elsewhere")
    with pytest.raises(DataError, match=f"{ARCHIVE}: lacks {', '.join(FILES)};"):
        read_cifar10([tmp_path / "b"])
    path = write_archive(tmp_path / "c", CONTENTS) / ARCHIVE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{ARCHIVE}: cannot be unpacked"):
        read_cifar10([tmp_path / "c"])


# ---- the real files ------------------------------------------------------------------------------


@pytest.mark.data
def test_the_real_set_is_whole_and_its_second_load_takes_less_than_a_second(
    real_data: Path, tmp_path: Path
) -> None:
    """One cold load for all facts: it unpacks for some ten seconds."""
    first = read_cifar10([real_data])
    assert [array.shape for array in first] == [
        (50_000, 3, 32, 32),
        (50_000,),
        (10_000, 3, 32, 32),
        (10_000,),
    ]
    assert np.bincount(first[1]).tolist() == [5_000] * 10
    assert np.bincount(first[3]).tolist() == [1_000] * 10
    means = first[0].mean(axis=(0, 2, 3)) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    seconds = []
    for _ in range(3):  # the best of three: others may be at work on this machine
        start = time.perf_counter()
        second = read_cifar10([real_data])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for kept in (tmp_path / "cache" / "arrays").iterdir():
        kept.unlink()  # pytest keeps its folders for three sessions; 185 MB each time is too much
