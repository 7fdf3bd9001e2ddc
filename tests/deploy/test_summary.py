"""What a server writes down comes back as it was, also from version 0.1."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfl.core.errors import FolderError
from dpfl.deploy.summary import DeploymentSummary, StudyStatus
from dpfl.privacy.flags import Flag
from dpfl.runs.folder import RunFolder
from tests.deploy.federation import Federation, study_values

SEEDED = {"noise": "seeded", "seed": 1}


def played(tmp_path: Path) -> Federation:
    made = Federation.of(
        tmp_path, study_values(rounds=1, run=SEEDED), policy={"allow_seeded": True}
    )
    made.play()
    return made


def test_a_summary_comes_back_as_it_was(tmp_path: Path) -> None:
    made = played(tmp_path)
    summary = DeploymentSummary.load(RunFolder(made.server))
    assert summary is not None
    assert [raised.flag for raised in summary.flags] == [Flag.SEEDED]
    assert summary.to_dict() == made.summary()
    assert DeploymentSummary.from_dict(summary.to_dict()) == summary
    status = StudyStatus.of(made.server)
    assert (status.summary, status.took_part("a"), status.missed("a")) == (summary, 1, [])


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"run": 1}'])
def test_a_damaged_summary_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(FolderError, match="cannot be read"):
        DeploymentSummary.load(RunFolder(tmp_path))
