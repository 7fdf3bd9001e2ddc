"""IMDb reviews: words to numbers by a public rule, every form the files come in, and files that are
not right.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import DataError
from dpfl.datasets.imdb import (
    ARCHIVES,
    EMPTY,
    LENGTH,
    PADDING,
    VOCABULARY,
    encode,
    read_imdb,
    word_token,
    words,
)

OFFICIAL, SUBSET = "aclImdb_v1.tar.gz", "aclImdb-20k.tar.xz"
REVIEWS = {
    "train/neg/0_3.txt": "Bad.",
    "train/neg/10_4.txt": "Worse film",
    "train/pos/0_9.txt": "Good film",
    "train/pos/2_7.txt": "Great!<br /><br />Great.",
    "test/neg/5_1.txt": "Dull",
    "test/pos/4_10.txt": "Fine " * 300 + "end",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))


def unpack(folder: Path, reviews: Mapping[str, str | bytes]) -> Path:
    for name, text in reviews.items():
        path = folder / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def pack(path: Path, reviews: Mapping[str, str | bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w") as stream:
        for name, text in reviews.items():
            content = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))
    path.write_bytes((lzma if path.suffix == ".xz" else gzip).compress(unpacked.getvalue()))
    return path


def check(four: tuple[np.ndarray, ...]) -> None:
    x, y, test_x, test_y = four
    assert y.tolist() == [0, 1, 1, 0]  # IDs 0, 0, 2, 10; negative before positive
    assert test_y.tolist() == [1, 0]
    assert x[:, -1].tolist() == [word_token(word) for word in ("bad", "film", "great", "film")]
    assert x[2, -3:].tolist() == [PADDING, word_token("great"), word_token("great")]
    assert test_x[0].tolist() == [word_token("fine")] * (LENGTH - 1) + [word_token("end")]
    assert x.dtype == test_x.dtype == np.int16
    assert y.dtype == test_y.dtype == np.int64


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's GOOD", ["it's", "good"]),
        ("'quoted' rock'n'roll dogs'", ["quoted", "rock'n'roll", "dogs"]),
        ("one<br />two", ["one", "two"]),
        ("snake_case 10/10 3d", ["snake", "case", "d"]),
        ("Am\N{LATIN SMALL LETTER E WITH ACUTE}lie", ["am\N{LATIN SMALL LETTER E WITH ACUTE}lie"]),
        ("!!! 1984 ''", []),
    ],
)
def test_words_are_runs_of_letters_with_inner_apostrophes(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(min_size=1, max_size=20))
def test_a_word_s_number_is_neither_padding_nor_empty_nor_out_of_range(word: str) -> None:
    assert 2 <= word_token(word) < VOCABULARY


def test_a_word_s_number_is_fixed_for_good_and_numbers_are_spread_out() -> None:
    assert [word_token(word) for word in ("film", "not", "caf\u00e9")] == [3383, 2577, 2189]
    tokens = {word_token(f"word{i}") for i in range(VOCABULARY)}
    assert len(tokens) == pytest.approx(
        (1 - np.exp(-1)) * VOCABULARY, rel=0.05
    )  # as balls thrown into bins
    assert (min(tokens), max(tokens)) == pytest.approx((2, VOCABULARY - 1), abs=12)


@given(st.lists(st.sampled_from(["good", "bad", "it's", "plot"]), max_size=2 * LENGTH))
def test_the_last_words_stay_and_padding_stands_before_them(text: list[str]) -> None:
    row = encode(" ".join(text))
    kept = [word_token(word) for word in text[-LENGTH:]] or [EMPTY]
    assert row.tolist() == [PADDING] * (LENGTH - len(kept)) + kept


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "imdb"])
def test_folder_and_archives_give_the_same_in_the_order_of_their_names(
    tmp_path: Path, place: str
) -> None:
    unpack(tmp_path / "a" / place, REVIEWS)
    pack(tmp_path / "b" / place / OFFICIAL, dict(reversed(REVIEWS.items())))
    pack(tmp_path / "c" / place / SUBSET, REVIEWS)
    for folder in "abc":
        for _ in range(2):  # read, then from the cache
            check(read_imdb([tmp_path / "nowhere", tmp_path / folder]))
    check(read_imdb([tmp_path / "a" / place / "aclImdb"]))


def test_the_whole_set_is_preferred_to_its_subset(tmp_path: Path) -> None:
    pack(tmp_path / SUBSET, {**REVIEWS, "train/pos/99_10.txt": "more"})
    assert len(read_imdb([tmp_path])[1]) == 5
    pack(tmp_path / OFFICIAL, REVIEWS)
    check(read_imdb([tmp_path]))


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_unlabelled_reviews_and_hidden_files_are_left_out(tmp_path: Path, form: str) -> None:
    more = {
        "train/unsup/1_0.txt": "none",
        "train/pos/._0_9.txt": "Mac",
        "README": "read",
        "train/urls_pos.txt": "url",
    }
    if form == "folder":
        unpack(tmp_path, REVIEWS | more)
    else:
        pack(tmp_path / OFFICIAL, REVIEWS | more)
    check(read_imdb([tmp_path]))


def test_the_second_load_reads_nothing_until_a_file_changes(tmp_path: Path) -> None:
    review = unpack(tmp_path, REVIEWS) / "aclImdb" / "train" / "neg" / "0_3.txt"
    check(read_imdb([tmp_path]))
    time = review.stat().st_mtime_ns
    review.write_text("Sad.")
    os.utime(review, ns=(time, time))  # as if nothing had happened
    check(read_imdb([tmp_path]))
    os.utime(review, ns=(time, time + 1))
    assert read_imdb([tmp_path])[0][0, -1] == word_token("sad")
    (review.parent / "1_1.txt").write_text("New.")
    assert len(read_imdb([tmp_path])[1]) == 5


def test_a_review_s_tokens_depend_on_no_other_review(tmp_path: Path) -> None:
    """A vocabulary counted from all reviews would be a release that nobody billed."""
    first = read_imdb([unpack(tmp_path / "a", REVIEWS)])[0][0]
    others = {name: "film film film" for name in REVIEWS if name != "train/neg/0_3.txt"}
    second = read_imdb([unpack(tmp_path / "b", {**others, "train/neg/0_3.txt": "Bad."})])[0]
    assert np.array_equal(first, second[0])
    assert not np.array_equal(first, second[1])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "archive"])
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train/pos/7.txt", b"x", r"7\.txt is not named ID_RATING\.txt with a rating from 7 to 10"),
        ("train/pos/7_.txt", b"x", r"7_\.txt is not named ID_RATING\.txt"),
        ("test/neg/notes", b"x", r"notes is not named ID_RATING\.txt with a rating from 1 to 4"),
        ("test/neg/3_9.txt", b"x", r"3_9\.txt is not named .* from 1 to 4, as neg asks"),
        ("train/pos/3_5.txt", b"x", r"3_5\.txt is not named .* from 7 to 10, as pos asks"),
        ("train/neg/3_1.txt", b"caf\xe9", r"train/neg/3_1\.txt: cannot be read as UTF-8"),
    ],
)
def test_a_file_that_is_no_labelled_review_is_refused_by_name(
    tmp_path: Path, form: str, name: str, content: bytes, problem: str
) -> None:
    reviews: dict[str, str | bytes] = {**REVIEWS, name: content}
    if form == "folder":
        unpack(tmp_path, reviews)
    else:
        pack(tmp_path / SUBSET, reviews)
    with pytest.raises(DataError, match=problem) as caught:
        read_imdb([tmp_path])
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("absent", ["train/neg", "train/pos", "test/neg", "test/pos"])
def test_an_absent_class_is_refused(tmp_path: Path, absent: str) -> None:
    left = {name: text for name, text in REVIEWS.items() if not name.startswith(absent)}
    pack(tmp_path / "a" / SUBSET, left)
    with pytest.raises(DataError, match=f"{SUBSET}: holds no review in {absent}"):
        read_imdb([tmp_path / "a"])
    folder = unpack(tmp_path / "b", {**left, f"{absent.split('/')[0]}/unsup/0_0.txt": "x"})
    with pytest.raises(DataError, match=f"{absent}: cannot be read .No such file"):
        read_imdb([folder])
    (folder / "aclImdb" / absent).mkdir()
    with pytest.raises(DataError, match=f"aclImdb: holds no review in {absent}"):
        read_imdb([folder])


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_truncated_archive_is_refused_and_not_kept(tmp_path: Path, name: str) -> None:
    path = pack(tmp_path / name, REVIEWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{name}: cannot be unpacked"):
        read_imdb([tmp_path])
    assert not list(tmp_path.glob("cache/arrays/*"))


def test_absent_data_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="its files are in none of") as caught:
        read_imdb([tmp_path / "a", tmp_path / "b"])
    message = str(caught.value)
    assert all(
        part in message
        for part in (str(tmp_path / "a" / "imdb"), str(tmp_path / "b" / "imdb"), *ARCHIVES)
    )


@pytest.mark.data
def test_the_real_reviews_are_whole_half_of_them_positive(real_data: Path) -> None:
    x, y, test_x, test_y = read_imdb([real_data])
    assert x.shape == test_x.shape == (10_000, LENGTH)
    assert np.bincount(y).tolist() == np.bincount(test_y).tolist() == [5_000, 5_000]
    assert y[:6].tolist() == [0, 1, 0, 1, 0, 1]  # IDs 0, 0, 2, 2, 5, 5
    assert bool((x[:, -1] > EMPTY).all())
    assert 0.15 < float((x == PADDING).mean()) < 0.25
    assert len(np.unique(x)) == VOCABULARY - 1  # every number but EMPTY
    # Positive reviews call a film great, negative ones bad: labels and texts belong together.
    for word, favours in (("great", 1), ("excellent", 1), ("bad", 0), ("worst", 0)):
        holds = (x == word_token(word)).any(axis=1)
        assert holds[y == favours].sum() > 1.2 * holds[y != favours].sum()
    again = read_imdb([real_data])
    assert all(np.array_equal(a, b) for a, b in zip((x, y, test_x, test_y), again, strict=True))
