"""Adult and Bank Marketing: fixed encodings, whole files, and files that are not what they should
be.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from dpfl.core.errors import DataError
from dpfl.datasets.census import ADULT_NAMES, read_adult, read_bank
from dpfl.datasets.named import load_dataset

ADULT_LINE = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "Mexico, <=50K"
)
BANK_HEAD = (
    "age;job;marital;education;default;balance;housing;loan;contact;day;month;duration;campaign;pdays;previous;"
    "poutcome;y"
)
BANK_LINE = "58;management;married;tertiary;no;2143;yes;no;unknown;5;may;261;1;-1;0;unknown;no"


def _packed(path: Path, *lines: str) -> Path:
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join(lines) + "\n")
    return path


def test_adult_is_the_published_file(real_data: Path) -> None:
    data = load_dataset("adult", real_data)
    assert (len(data.labels), int(data.labels.sum())) == (32_561, 7_841)
    assert data.test is not None
    assert (len(data.test[1]), int(data.test[1].sum())) == (16_281, 3_846)
    assert data.features.shape[1] == data.test[0].shape[1] == 49
    assert float(data.features.abs().max()) <= 3.0


def test_bank_marketing_is_the_published_file(real_data: Path) -> None:
    data = load_dataset("bank_marketing", real_data)
    assert (len(data.labels), int(data.labels.sum())) == (45_211, 5_289)
    assert data.features.shape[1] == 42
    assert float(data.features.abs().max()) <= 3.0


def test_a_record_s_encoding_depends_on_no_other_record(tmp_path: Path) -> None:
    alone, _ = read_adult(_packed(tmp_path / "a.gz", ADULT_LINE))
    other = ADULT_LINE.replace("39", "90").replace("2174", "99999").replace("Male", "Female")
    together, _ = read_adult(
        _packed(tmp_path / "b.gz", "|1x3 Cross validator", ADULT_LINE + ".", other)
    )
    assert np.array_equal(alone[0], together[0])
    assert not np.array_equal(together[0], together[1])


def test_missing_words_leave_all_their_indicators_at_zero(tmp_path: Path) -> None:
    whole, _ = read_adult(_packed(tmp_path / "a.gz", ADULT_LINE))
    missing, _ = read_adult(
        _packed(
            tmp_path / "b.gz", ADULT_LINE.replace("State-gov", "?").replace("Adm-clerical", "?")
        )
    )
    assert whole.sum() - missing.sum() == pytest.approx(2.0)


def test_the_answer_is_not_among_the_features(tmp_path: Path) -> None:
    """Duration is known only after the call: changing it changes nothing."""
    first, _ = read_bank(_packed(tmp_path / "a.gz", BANK_HEAD, BANK_LINE))
    second, labels = read_bank(
        _packed(
            tmp_path / "b.gz", BANK_HEAD, BANK_LINE.replace(";261;", ";9;").replace(";no", ";yes")
        )
    )
    assert first.shape == second.shape == (1, 42)
    assert labels.tolist() == [1]
    longer, _ = read_bank(_packed(tmp_path / "c.gz", BANK_HEAD, BANK_LINE.replace(";261;", ";9;")))
    assert np.array_equal(first, longer)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([ADULT_LINE + ", more"], "cannot be read"),
        ([ADULT_LINE.replace("39", "old")], "cannot be read"),
        ([ADULT_LINE.replace("<=50K", "rich")], "label 'rich' is outside"),
        (["|only a comment"], "no record"),
    ],
)
def test_a_damaged_adult_file_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_adult(_packed(tmp_path / "a.gz", *lines))


def test_a_truncated_file_is_refused_and_an_absent_one_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPFL_DATA", raising=False)
    path = _packed(tmp_path / "bank-full.csv.gz", BANK_HEAD, *[BANK_LINE] * 500)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        load_dataset("bank_marketing", tmp_path)
    with pytest.raises(DataError, match=r"adult\.data\.gz"):
        load_dataset("adult", tmp_path)


def test_every_column_of_adult_is_named_once() -> None:
    assert len(set(ADULT_NAMES)) == 15
