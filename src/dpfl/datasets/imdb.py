"""IMDb movie reviews (Maas et al., 2011): words as numbers, and whether a review is positive.

A word's number is a hash of the word, nothing else. A vocabulary of the most frequent words would
have to be counted in the private reviews, and which words made it would be a release that nobody
charges. The price: words may share a number.

A word is a run of letters (a to z, and those of Latin-1 with accents), apostrophes inside it
included, in lower case; ``<br />`` and everything else separates.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dpfl.core.errors import DataError
from dpfl.datasets import stored
from dpfl.datasets.stored import Arrays, check_file

VOCABULARY = 4096
PADDING, EMPTY = 0, 1  # EMPTY stands in a review without a word: no review is all padding
LENGTH = 200
PARTS = ("train", "test")
SENTIMENTS = ("neg", "pos")
FOLDER = "aclImdb"
ARCHIVES = ("aclImdb_v1.tar.gz", "aclImdb-20k.tar.xz")
_VERSION = 1
_LETTERS = "[a-zß-öø-ÿ]+"  # spelled out, not \w less digits: half the time
_WORD = re.compile(f"{_LETTERS}(?:'{_LETTERS})*")
# Labelled reviews, not those of ``unsup`` nor hidden files that systems add to archives.
_PLACE = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/([^./][^/]*)")
_NAME = re.compile(r"(\d{1,9})_(\d{1,2})\.txt", re.ASCII)
_RATINGS = {"neg": range(1, 5), "pos": range(7, 11)}

Review = tuple[int, int, np.ndarray, int]
"""ID and rating, which order the reviews, then tokens and label."""


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
    """Return ``LENGTH`` tokens (int16): the last words, padded on the left.

    A review ends with its verdict.
    """
    tokens = [word_token(word) for word in words(text)[-LENGTH:]] or [EMPTY]
    row = np.full(LENGTH, PADDING, np.int16)
    row[-len(tokens) :] = tokens
    return row


def read_imdb(candidates: Sequence[Path]) -> Arrays:
    """Return train tokens (int16, n x 200) and labels (int64, 1 positive), then those of the test.

    In each candidate folder, and its ``imdb`` if it has one, an unpacked ``aclImdb`` is looked for
    first, then the official archive, then the one of 20,000 reviews. Reviews are in the order of
    their IDs, negative before positive.
    """
    places = [place for base in candidates for place in (base / "imdb", base)]
    for place in places:
        for folder in (place / FOLDER, place):
            if all((folder / part).is_dir() for part in PARTS):
                files = _review_files(folder)
                named = ((file.relative_to(folder).as_posix(), file) for file in files)
                return _stored(files, folder, named)
        for archive in (place / name for name in ARCHIVES):
            if archive.is_file():
                reviews = stored.archive_members(archive, _PLACE.fullmatch)
                return _stored([archive], archive, reviews)
    raise stored.not_found(
        "imdb", places[::2], f"{' or '.join(ARCHIVES)} or the unpacked folder {FOLDER}"
    )


def _review_files(folder: Path) -> list[Path]:
    """All files of an unpacked folder that should be labelled reviews."""
    files: list[Path] = []
    for place in (folder / part / sentiment for part in PARTS for sentiment in SENTIMENTS):
        # scandir asks the disk once for a folder, not once for each of 12,500 files.
        with stored.readable(place), os.scandir(place) as entries:
            found = [entry.name for entry in entries if entry.is_file()]
        files.extend(place / name for name in sorted(found) if not name.startswith("."))
    return files


def _stored(
    sources: Sequence[Path], where: Path, reviews: Iterable[tuple[str, bytes | Path]]
) -> Arrays:
    """Arrays of reviews, which are given by name with their content or their file."""

    def make() -> Arrays:
        found: dict[str, list[Review]] = {part: [] for part in PARTS}
        for name, content in reviews:
            part, sentiment, file = name.split("/")[-3:]
            found[part].append(_review(f"{where}: {name}", sentiment, file, content))
        arrays = []
        for part, rows in found.items():
            for label, sentiment in enumerate(SENTIMENTS):
                check_file(
                    any(row[3] == label for row in rows),
                    where,
                    f"holds no review in {part}/{sentiment}",
                )
            rows.sort(key=lambda row: row[:2])
            arrays += [np.stack([row[2] for row in rows]), np.array([row[3] for row in rows])]
        return arrays

    return stored.stored_arrays("imdb", sources, make, version=_VERSION)


def _review(where: str, sentiment: str, name: str, content: bytes | Path) -> Review:
    """Encode one review; its file is named ``ID_RATING.txt``, and the rating fits its folder."""
    named = _NAME.fullmatch(name)
    allowed = _RATINGS[sentiment]
    if named is None or int(named[2]) not in allowed:
        rating = f"a rating from {allowed[0]} to {allowed[-1]}, as {sentiment} asks"
        raise DataError(
            where, f"{name} is not named ID_RATING.txt with {rating}", "rename or remove the file"
        )
    with stored.readable(where, "read as UTF-8"):
        text = (content.read_bytes() if isinstance(content, Path) else content).decode()
    return int(named[1]), int(named[2]), encode(text), SENTIMENTS.index(sentiment)
