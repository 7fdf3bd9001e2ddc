"""Shakespeare by role: the alphabet, the windows, what is spoken and what is not, and the real
plays.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dpfl.core.errors import DataError
from dpfl.datasets.shakespeare import (
    ALPHABET,
    UNKNOWN,
    VOCABULARY,
    WINDOW,
    Roles,
    encode,
    read_shakespeare,
    spoken,
    windows,
)

ARCHIVE = "moby-shakespeare.tar.xz"


def decode(tokens: np.ndarray) -> str:
    """The text of tokens; what was unknown is the replacement character."""
    return "".join((ALPHABET + "\N{REPLACEMENT CHARACTER}")[token] for token in tokens.tolist())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFL_CACHE", str(tmp_path / "cache"))


# ---- characters ----------------------------------------------------------------------------------


def test_the_alphabet_has_80_characters_and_the_vocabulary_one_more() -> None:
    assert len(set(ALPHABET)) == len(ALPHABET) == 80
    assert (UNKNOWN, VOCABULARY) == (80, 81)


@given(st.text(alphabet=ALPHABET, max_size=200))
def test_text_over_the_alphabet_comes_back_as_it_was(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == np.uint8
    assert len(tokens) == len(text)
    assert decode(tokens) == text


@given(st.text(max_size=100))
def test_any_text_is_encoded_and_decoding_changes_nothing_more(text: str) -> None:
    tokens = encode(text)
    assert tokens.max(initial=0) < VOCABULARY
    assert np.array_equal(encode(decode(tokens)), tokens)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe"),
        ("cafe\N{COMBINING ACUTE ACCENT}!", "cafe!"),
        ("\N{LATIN CAPITAL LETTER C WITH CEDILLA}a", "Ca"),
        ("a\tb", "a\N{REPLACEMENT CHARACTER}b"),
        ("sha$l \N{SNOWMAN}", "sha\N{REPLACEMENT CHARACTER}l \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_accents_are_dropped_and_other_characters_become_unknown(text: str, expected: str) -> None:
    assert decode(encode(text)) == expected


# ---- windows -------------------------------------------------------------------------------------


@given(st.integers(WINDOW + 1, 300))
def test_each_window_is_followed_by_its_label(length: int) -> None:
    tokens = torch.from_numpy(
        np.random.default_rng(length).integers(0, VOCABULARY, length, dtype=np.uint8)
    )
    features, labels = windows(tokens)
    assert features.shape == (length - WINDOW, WINDOW)
    assert (features.dtype, labels.dtype) == (torch.uint8, torch.int64)
    for i in (0, len(labels) - 1):
        assert torch.equal(features[i], tokens[i : i + WINDOW])
        assert labels[i] == tokens[i + WINDOW]


def test_windows_are_views_and_no_copies() -> None:
    tokens = torch.zeros(200, dtype=torch.uint8)
    features, _ = windows(tokens)
    tokens[100] = 7
    assert features.data_ptr() == tokens.data_ptr()
    assert int((features == 7).sum()) == WINDOW


# ---- what is spoken ------------------------------------------------------------------------------

PLAY = """\tTHE PLAY


\tDRAMATIS PERSONAE


ANNA\ta queen. (QUEEN ANNA:)

BOB\t|
\t|  lords.
CARL\t|

SCENE\tNowhere.


\tTHE PLAY


ACT I



SCENE I\tA street. Enter all.


\t[Enter ANNA and
\tBOB, with others]

QUEEN ANNA\tGood    morrow,\tBob.
\tHow fares [Aside] the night?

\t[Thunder

Bob\t[Kneeling]  Well, my queen.

\t[Exit CARL]

\tAnd you?


ANNA\t|
\t|  We all speak.
BOB\t|

\tNobody says this.

DUKE
OF YORK\tI am of York.
\tSONG.
\tAnd I sing.

First Clown: Ha!


\tTHE PLAY


ACT I



SCENE II\tA wood.

\tNobody says this either.

BOB\tAgain.

\tTHE PLAY

\tEPILOGUE

\tThe play is done.
"""


def test_names_directions_headings_and_shared_lines_are_told_from_speech() -> None:
    assert list(spoken(PLAY)) == [
        ("QUEEN ANNA", "Good morrow, Bob."),
        ("QUEEN ANNA", "How fares the night?"),
        ("BOB", "Well, my queen."),
        ("BOB", "And you?"),
        ("DUKE OF YORK", "I am of York."),
        ("DUKE OF YORK", "And I sing."),
        ("FIRST CLOWN", "Ha!"),
        ("BOB", "Again."),
    ]


def test_a_play_may_open_with_an_induction_or_a_prologue() -> None:
    for opening in ("INDUCTION", "PROLOGUE"):
        text = f"\tTITLE\n\nANNA\ta queen.\n\n\tTITLE\n\n\t{opening}\n\nANNA\tI speak.\n\nACT I\n\nBOB\tSo do I.\n"
        assert list(spoken(text)) == [("ANNA", "I speak."), ("BOB", "So do I.")]


# ---- the archive ---------------------------------------------------------------------------------


def speeches(role: str, *lines: str) -> str:
    return "".join(f"{role}\t{line}\n\n" for line in lines)


def pack(folder: Path, members: dict[str, str | bytes]) -> Path:
    with tarfile.open(folder / ARCHIVE, "w:xz") as stream:
        for name, text in members.items():
            content = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(f"moby-shakespeare/{name}")
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))
    return folder / ARCHIVE


def texts(roles: Roles) -> dict[str, str]:
    return {
        name: decode(np.concatenate([part.numpy() for part in roles.split(i)]))
        for i, name in enumerate(roles.names)
    }


def test_roles_of_one_name_are_apart_by_play_and_come_sorted(tmp_path: Path) -> None:
    long = ["word " * 29 + str(i) for i in range(3)]
    path = pack(
        tmp_path,
        {
            "tragedies/zorn": "ACT I\n" + speeches("Zoe", *long) + speeches("ANNA", "zorn", *long),
            "comedies/april": "ACT I\n" + speeches("ANNA", "april", *long),
            "poetry/sonnets": "ACT I\n" + speeches("POET", *long),
            "glossary": "ACT I\n" + speeches("WORDS", *long),
        },
    )
    for _ in range(2):  # unpacked, then from the cache
        roles = read_shakespeare(path)
        assert roles.names == ("april/ANNA", "zorn/ANNA", "zorn/ZOE")
        assert texts(roles) == {
            "april/ANNA": "\n".join(["april", *long]),
            "zorn/ANNA": "\n".join(["zorn", *long]),
            "zorn/ZOE": "\n".join(long),
        }
    assert len(list((tmp_path / "cache" / "arrays").iterdir())) == 1


def test_a_role_needs_three_lines_and_a_window_in_both_parts(tmp_path: Path) -> None:
    two, three = ["x" * 400] * 2, ["x" * 133] * 3
    assert len("\n".join(three)) == 401  # 320 and 81 characters: one test window
    play = (
        "ACT I\n"
        + speeches("TWO", *two)
        + speeches("THREE", *three)
        + speeches("SHORT", *three[1:], "x" * 132)
    )
    roles = read_shakespeare(pack(tmp_path, {"histories/play": play}))
    assert roles.names == ("play/THREE",)
    train, test = roles.split(0)
    assert (len(train), len(test)) == (320, 81)
    assert len(windows(test)[1]) == 1


def test_training_and_test_part_share_no_character_and_together_are_the_whole() -> None:
    tokens = (np.arange(2_000) % VOCABULARY).astype(np.uint8)
    roles = Roles(("a", "b"), tokens, np.array([0, 500, 2_000]))
    for role, (start, cut, end) in enumerate([(0, 400, 500), (500, 1_700, 2_000)]):
        train, test = roles.split(role)
        assert train.tolist() == tokens[start:cut].tolist()
        assert test.tolist() == tokens[cut:end].tolist()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"README": "nothing else"}, "holds no play"),
        (
            {"comedies/short": "ACT I\n" + speeches("ANNA", "a", "b", "c")},
            "with a role long enough",
        ),
        ({"comedies/latin": b"ACT I\nANNA\tcaf\xe9\n"}, "comedies/latin: cannot be read as UTF-8"),
    ],
)
def test_an_archive_without_usable_plays_is_refused(
    tmp_path: Path, members: dict[str, str | bytes], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read_shakespeare(pack(tmp_path, members))


def test_a_damaged_or_absent_archive_is_refused(tmp_path: Path) -> None:
    path = pack(tmp_path, {"comedies/april": "ACT I\n" + speeches("ANNA", *["long " * 60] * 3)})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"{ARCHIVE}: cannot be unpacked"):
        read_shakespeare(path)
    with pytest.raises(DataError, match=r"absent\.tar\.xz: cannot be unpacked \(.*No such file"):
        read_shakespeare(tmp_path / "absent.tar.xz")


@pytest.mark.data
def test_the_real_plays_give_their_roles(real_data: Path) -> None:
    roles = read_shakespeare(real_data / "shakespeare" / ARCHIVE)
    assert list(roles.names) == sorted(set(roles.names))
    assert len({name.split("/")[0] for name in roles.names}) == 37
    assert (len(roles.names), len(roles.tokens)) == (857, 4_227_715)
    assert int((roles.tokens == UNKNOWN).sum()) == 1  # a dollar sign: "my sea sha$l suck them dry"
    said = texts(roles)
    assert said["hamlet/HAMLET"].startswith(
        "A little more than kin, and less than kind.\nNot so, my lord;"
    )
    assert (
        "To be, or not to be: that is the question:\nWhether 'tis nobler" in said["hamlet/HAMLET"]
    )
    assert said["hamlet/HAMLET"].count("\n") == 1_494
    assert "comedyoferrors/ANTIPHOLUS OF EPHESUS" in said
    assert not any("Exeunt" in text or "SCENE" in text or "|" in text for text in said.values())
    lengths = [[len(part) for part in roles.split(i)] for i in range(len(roles.names))]
    assert min(map(min, lengths)) == WINDOW + 1
    again = read_shakespeare(real_data / "shakespeare" / ARCHIVE)
    assert again.names == roles.names
    assert np.array_equal(again.tokens, roles.tokens)
    assert np.array_equal(again.offsets, roles.offsets)
