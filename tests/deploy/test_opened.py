"""The round that was opened last: what a server that comes back needs to ask the same again."""

from pathlib import Path

import pytest

from dpfl.core.errors import CheckpointError
from dpfl.deploy.opened import OPENED, OpenedRound


def test_an_opened_round_is_read_back_and_equal_downloads_are_written_once(tmp_path: Path) -> None:
    assert OpenedRound.read(tmp_path) is None
    downloads = {"a": b"x" * 1000, "b": b"x" * 1000, "c": b"\n{}\n"}
    opened = OpenedRound(round=3, unwilling=("d",), downloads=downloads)
    opened.write(tmp_path)
    assert OpenedRound.read(tmp_path) == opened
    assert (tmp_path / OPENED).stat().st_size < 1500
    assert (tmp_path / OPENED).stat().st_mode & 0o077 == 0  # it names who was drawn
    empty = OpenedRound(round=-1, unwilling=(), downloads={})
    empty.write(tmp_path)
    assert OpenedRound.read(tmp_path) == empty


@pytest.mark.parametrize("content", [b"", b"{}\n", b"no json\n", b'{"round": 1}\n', b"\xff\n"])
def test_a_damaged_file_is_refused_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    (tmp_path / OPENED).write_bytes(content)
    with pytest.raises(CheckpointError, match=OPENED) as caught:
        OpenedRound.read(tmp_path)
    assert "remove it" in caught.value.remedy


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    OpenedRound(round=1, unwilling=(), downloads={"a": b"x" * 100}).write(tmp_path)
    whole = (tmp_path / OPENED).read_bytes()
    for size in (len(whole) - 1, len(whole) - 100):
        (tmp_path / OPENED).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="bytes instead of"):
            OpenedRound.read(tmp_path)
