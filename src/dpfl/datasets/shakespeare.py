"""Shakespeare's plays by speaking role: 80 characters predict the next one.

A role is a natural client. Read from ``moby-shakespeare.tar.xz``, whose texts are in the public
domain. The alphabet is LEAF's (Caldas et al., 2018, arXiv:1812.01097), fixed and public: one
counted from the roles' own words would be a release that nobody charges.
"""

import functools
import re
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from dpfl.datasets.stored import Arrays, archive_members, check_file, readable, stored_arrays

_LETTERS = f"{string.ascii_uppercase}[]{string.ascii_lowercase}}}"
ALPHABET = f"\n !\"&'(),-.{string.digits}:;>?{_LETTERS}"
UNKNOWN = len(ALPHABET)
VOCABULARY = len(ALPHABET) + 1  # 80 characters and one token for all others
WINDOW = 80
FEWEST_LINES = 3  # LEAF's rule: more than two
_VERSION = 1


def encode(text: str) -> np.ndarray:
    """Return one token per character (uint8).

    Accents are dropped, and what is not in the alphabet then becomes ``UNKNOWN``.

    >>> encode("A rose").tolist()
    [25, 1, 70, 67, 71, 57]
    """
    # A letter and its accent are one character, and one token.
    composed = unicodedata.normalize("NFC", text)
    return np.fromiter(map(_token, composed), np.uint8, len(composed))


@functools.cache
def _token(character: str) -> int:
    plain = character if character in ALPHABET else unicodedata.normalize("NFD", character)[0]
    return ALPHABET.find(plain) if plain in ALPHABET else UNKNOWN


def windows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return every window of ``WINDOW`` tokens, and the token that follows each (int64).

    Windows (n x 80) are a view of the tokens, of which there are more than ``WINDOW``.
    """
    return tokens[:-1].unfold(0, WINDOW, 1), tokens[WINDOW:].long()


@dataclass(frozen=True, eq=False)
class Roles:
    """All roles' tokens end to end.

    Role ``i`` holds ``tokens[offsets[i]:offsets[i + 1]]``, in the order spoken.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    offsets: np.ndarray

    def split(self, role: int) -> tuple[Tensor, Tensor]:
        """Return a role's training tokens, the first 80 %, and its test tokens, the rest.

        No window spans the two.
        """
        start = int(self.offsets[role])
        end = int(self.offsets[role + 1])
        cut = start + (end - start) * 4 // 5
        whole = torch.from_numpy(self.tokens)
        return whole[start:cut], whole[cut:end]


def read_shakespeare(path: Path) -> Roles:
    """Read every role of three lines or more, sorted by name.

    Left out are roles whose training or test part is too short for a window.
    """
    arrays = stored_arrays("shakespeare", [path], lambda: _make(path), version=_VERSION)
    names, tokens, offsets = arrays
    return Roles(tuple(names.tobytes().decode().split("\n")), tokens, offsets)


def _make(path: Path) -> Arrays:
    """Collect every role's lines from all plays, and encode those that are long enough."""
    lines: dict[str, list[str]] = {}
    for member, content in archive_members(path, _is_play):
        play = PurePosixPath(member).name
        with readable(f"{path}: {member}", "read as UTF-8"):
            text = content.decode()
        for role, line in spoken(text):
            lines.setdefault(f"{play}/{role}", []).append(line)
    long = {name: said for name, said in sorted(lines.items()) if len(said) >= FEWEST_LINES}
    roles = {name: encode("\n".join(said)) for name, said in long.items()}
    # The test part, a fifth, holds a window and the character behind it: so does the rest.
    roles = {name: tokens for name, tokens in roles.items() if len(tokens) > 5 * WINDOW}
    check_file(
        bool(roles),
        path,
        "holds no play under comedies, histories or tragedies with a role long enough",
    )
    names = np.frombuffer("\n".join(roles).encode(), np.uint8)
    tokens = np.concatenate(list(roles.values()))
    return names, tokens, np.cumsum([0, *map(len, roles.values())], dtype=np.int64)


def _is_play(member: str) -> bool:
    place = PurePosixPath(member)
    kinds = ("comedies", "histories", "tragedies")
    return place.parent.name in kinds and not place.name.startswith(".")


# What is not spoken. A direction ends at its bracket, or, where that was forgotten, with the
# paragraph.
_DIRECTION = re.compile(r"\[[^\[\]]*?(?:\]|(?=\n[ \t]*\n)|\Z)")
_START = re.compile(r"^(?:ACT I\b|\t(?:PROLOGUE|INDUCTION)\b)", re.MULTILINE)
_TITLE = re.compile(
    r"^\t[^a-z\n]+\n\s*(?=ACT [IVX]|\t(?:PROLOGUE|EPILOGUE|INDUCTION)\b)", re.MULTILINE
)
_HEADING = re.compile(r"(?:ACT [IVX]+|SCENE\b.*|\t(?:PROLOGUE|EPILOGUE|INDUCTION)\b.*)")
_CAPTION = re.compile(r"\t(?:THE )?(?:SONG|DUMB SHOW)\.?")
_NAMED = re.compile(
    r"(?P<role>[^\t:]*[A-Za-z][^\t:]*):?\t(?P<line>.*)|(?P<other>[A-Z][^\t:]*): (?P<rest>.*)"
)


def spoken(play: str) -> Iterator[tuple[str, str]]:
    """Yield role and line as spoken.

    A line that several roles speak at once (marked ``|``) is left out, as are headings, stage
    directions and captions of songs.

    >>> list(spoken("ACT I\\nANNA\\tGood morrow. [Exit]\\n\\tFarewell."))
    [('ANNA', 'Good morrow.'), ('ANNA', 'Farewell.')]
    """
    start = _START.search(play)
    text = _DIRECTION.sub("", play[start.start() if start else 0 :])
    role = ""
    above = ""
    for line in _TITLE.sub("", text).split("\n"):
        heading = _HEADING.fullmatch(line.rstrip())
        named = _NAMED.fullmatch(line)
        if heading:
            role = ""
            words = ""
        elif named:
            role = " ".join(f"{above} {named['role'] or named['other']}".upper().split())
            words = named["line"] or named["rest"] or ""
        else:
            words = line if line.startswith("\t") and not _CAPTION.fullmatch(line.rstrip()) else ""
        # A long name takes two lines, the upper one without a tab.
        above = "" if heading or named or "\t" in line else line
        words = " ".join(words.split())
        if words.startswith("|"):
            role = ""
        elif role and words:
            yield role, words
