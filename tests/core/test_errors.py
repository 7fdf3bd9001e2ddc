"""Every error says where, what and what to do, and ends the command line with its own code."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re

import pytest

from dpfl.core import errors
from dpfl.core.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    DiskError,
    DpflError,
    FolderError,
    Interrupted,
    LedgerError,
    PeerError,
    PrivacyRefusal,
    StateError,
    did_you_mean,
    disk_error,
    unknown_name,
)

CODES = {
    DpflError: 1,
    ConfigurationError: 2,
    DataError: 3,
    PrivacyRefusal: 4,
    StateError: 5,
    LedgerError: 5,
    CheckpointError: 5,
    FolderError: 5,
    DiskError: 6,
    PeerError: 7,
    Interrupted: 130,
}


def every_error() -> list[type[DpflError]]:
    found, queue = [], [DpflError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue.extend(kind.__subclasses__())
    return [kind for kind in found if kind.__module__ == errors.__name__]


def test_exit_codes_are_those_of_the_design() -> None:
    assert {kind: kind.exit_code for kind in every_error()} == CODES


def test_exit_codes_are_those_of_the_module_docstring() -> None:
    documented = dict(
        re.findall(r"(\w+(?:Error|Refusal|Interrupted)|Interrupted) +(\d+) ", errors.__doc__ or "")
    )
    assert len(documented) >= 8
    assert documented == {
        kind.__name__: str(kind.exit_code) for kind in CODES if kind.__name__ in documented
    }


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_a_message_says_where_what_and_what_to_do(kind: type[DpflError]) -> None:
    error = kind("ledger.sqlite", "is 3 % damaged", "restore it")
    assert str(error) == "ledger.sqlite: is 3 % damaged; restore it"
    assert (error.where, error.problem, error.remedy) == (
        "ledger.sqlite",
        "is 3 % damaged",
        "restore it",
    )


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_trip_between_processes(kind: type[DpflError]) -> None:
    error = kind("where", "problem", "remedy")
    for back in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(back) is kind
        assert str(back) == str(error)
        assert (back.where, back.problem, back.remedy, back.exit_code) == (
            "where",
            "problem",
            "remedy",
            error.exit_code,
        )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_disk_error(number: int) -> None:
    error = disk_error("run/ledger.sqlite", OSError(number, os.strerror(number)))
    assert type(error) is DiskError
    assert error.exit_code == 6
    assert os.strerror(number) in str(error)
    assert str(error).startswith("run/ledger.sqlite: ")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_a_path_that_cannot_be_used_is_a_folder_error(number: int) -> None:
    error = disk_error("run", OSError(number, os.strerror(number)))
    assert type(error) is FolderError
    assert error.exit_code == 5
    assert os.strerror(number) in str(error)


def test_an_operating_system_error_without_a_number_still_gives_a_reason() -> None:
    assert "odd trouble" in str(disk_error("run", OSError("odd trouble")))


KNOWN = ["fedavg", "weiavg", "robust_hdp", "pfa"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("weiavgg", "weiavg"), ("FedAvg", "fedavg"), ("robust-hdp", "robust_hdp"), ("pfaa", "pfa")],
)
def test_a_misspelt_name_is_answered_with_the_nearest_one(typed: str, meant: str) -> None:
    assert did_you_mean(typed, KNOWN) == f"did you mean '{meant}'?"


def test_a_name_like_no_other_is_answered_with_all_of_them_sorted() -> None:
    assert did_you_mean("zzz", KNOWN) == "choose one of fedavg, pfa, robust_hdp, weiavg"


def test_an_unknown_name_is_a_configuration_error_that_names_it() -> None:
    error = unknown_name("--method", "method", "weiavgg", KNOWN)
    assert isinstance(error, ConfigurationError)
    assert str(error) == "--method: there is no method 'weiavgg'; did you mean 'weiavg'?"
