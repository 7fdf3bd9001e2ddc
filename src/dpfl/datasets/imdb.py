"""IMDb movie reviews (Maas et al., 2011): the words of a review as numbers, and whether it is
positive.

A word's number is a hash of the word, nothing else. A vocabulary of the most frequent words would
have to be counted in the private reviews, and which words made it would be a release that nobody
billed. The price: words may share a number.

A word is a run of letters (a to z, and those of Latin-1 with accents), apostrophes inside it
included, in lower case; ``<br />`` and everything else separates.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError
from dpfl.datasets.stored import archive_members, stored_arrays

VOCABULARY = 4096
PADDING, EMPTY = (
    0,
    1,
)  # the second stands in a review without a word, so that no review is all padding
LENGTH = 200
PARTS = ("train", "test")
SENTIMENTS = ("neg", "pos")
FOLDER = "aclImdb"
ARCHIVES = ("aclImdb_v1.tar.gz", "aclImdb-20k.tar.xz")
_VERSION = 1
_LETTERS = "[a-zß-öø-ÿ]+"  # spelled out, not \w less digits: half the time
_WORD = re.compile(f"{_LETTERS}(?:'{_LETTERS})*")
_PLACE = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/([^./][^/]*)")
_NAME = re.compile(r"(\d{1,9})_(\d{1,2})\.txt", re.ASCII)
_RATINGS = {"neg": range(1, 5), "pos": range(7, 11)}

Four = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
# Of one part: ID and rating, which order the reviews, then tokens and label.
Review = tuple[int, int, np.ndarray, int]


@functools.lru_cache(maxsize=1 << 18)
def word_token(word: str) -> int:
    """Return a word's number, the same in every process and on every machine.

    >>> word_token("film")
    3383
    """
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "big") % (VOCABULARY - 2)


def words(text: str) -> list[str]:
    """Split a review into words.

    >>> words("Don't miss it!<br />10/10, a 'must-see'.")
    ["don't", 'miss', 'it', 'a', 'must', 'see']
    """
    return _WORD.findall(text.lower().replace("<br />", " "))


def encode(text: str) -> np.ndarray:
    """Return ``LENGTH`` tokens (int16): the last words, for a review ends with its verdict, padded
    on the left.
    """
    tokens = [word_token(word) for word in words(text)[-LENGTH:]] or [EMPTY]
    row = np.full(LENGTH, PADDING, np.int16)
    row[-len(tokens) :] = tokens
    return row


def read_imdb(candidates: Sequence[Path]) -> Four:
    """Return train features (int16, n x 200) and labels (int64, 1 positive), then test features and
    labels.

    In each candidate folder, and its ``imdb`` if it has one, an unpacked ``aclImdb`` is looked for
    first, then the official archive, then the one of 20,000 reviews. Reviews are in the order of
    their IDs, negative before positive.
    """
    for place in (place for base in candidates for place in (base / "imdb", base)):
        for folder in (place / FOLDER, place):
            if all((folder / part).is_dir() for part in PARTS):
                files = _review_files(folder)
                return _stored(
                    files,
                    str(folder),
                    ((file.relative_to(folder).as_posix(), file) for file in files),
                )
        for archive in (place / name for name in ARCHIVES):
            if archive.is_file():
                return _stored([archive], str(archive), archive_members(archive, _is_review))
    places = ", ".join(str(base / "imdb") for base in candidates)
    raise DataError(
        "data set 'imdb'",
        f"it is in none of {places}",
        f"put {ARCHIVES[0]}, {ARCHIVES[1]} or the unpacked folder {FOLDER} there",
    )


def _review_files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for place in (folder / part / sentiment for part in PARTS for sentiment in SENTIMENTS):
        try:
            # scandir asks the disk once for a folder, not once for each of 12,500 files
            with os.scandir(place) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if entry.is_file() and not entry.name.startswith(".")
                )
        except OSError as error:
            raise DataError(
                str(place), f"cannot be read ({error.strerror})", "unpack the archive again"
            ) from error
        files.extend(place / name for name in names)
    return files


def _is_review(member: str) -> bool:
    """Tell labelled reviews from ``unsup`` and from the hidden files some systems add to
    archives.
    """
    return _PLACE.fullmatch(member) is not None


def _stored(
    sources: Sequence[Path], where: str, reviews: Iterable[tuple[str, bytes | Path]]
) -> Four:
    arrays = stored_arrays("imdb", sources, lambda: _make(where, reviews), version=_VERSION)
    return arrays["train_x"], arrays["train_y"], arrays["test_x"], arrays["test_y"]


def _make(where: str, reviews: Iterable[tuple[str, bytes | Path]]) -> dict[str, np.ndarray]:
    found: dict[str, list[Review]] = {part: [] for part in PARTS}
    for name, content in reviews:
        part, sentiment, file = name.split("/")[-3:]
        found[part].append(_review(f"{where}: {name}", sentiment, file, content))
    arrays = {}
    for part, rows in found.items():
        for label, sentiment in enumerate(SENTIMENTS):
            if not any(row[3] == label for row in rows):
                raise DataError(
                    where, f"holds no review in {part}/{sentiment}", "fetch or unpack it again"
                )
        rows.sort(key=lambda row: row[:2])
        arrays[f"{part}_x"] = np.stack([row[2] for row in rows])
        arrays[f"{part}_y"] = np.array([row[3] for row in rows], np.int64)
    return arrays


def _review(where: str, sentiment: str, name: str, content: bytes | Path) -> Review:
    named, allowed = _NAME.fullmatch(name), _RATINGS[sentiment]
    if named is None or int(named[2]) not in allowed:
        raise DataError(
            where,
            f"{name} is not named ID_RATING.txt with a rating from {allowed[0]} to {allowed[-1]}, as {sentiment} asks",
            "rename or remove the file",
        )
    try:
        text = (content.read_bytes() if isinstance(content, Path) else content).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            where, f"cannot be read as UTF-8 ({error})", "fetch the file again"
        ) from error
    return int(named[1]), int(named[2]), encode(text), SENTIMENTS.index(sentiment)
