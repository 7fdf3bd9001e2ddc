"""Training from Python: folders, resume, callbacks, early stopping, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.layout import Layout
from dpfl.engine.stacked import assumptions_of
from dpfl.models.separation import FORGETS, WATCHED
from dpfl.privacy.flags import Flag

from . import own_training as own

FILES = {
    *("training.json", "ledger.sqlite", "rounds.jsonl", "timings.jsonl", "checkpoint"),
    *("model.safetensors", "model.json", "summary.json"),
}


class Killed(BaseException):
    """What a test throws where a kill would strike."""


def test_a_folder_changes_no_bit_and_is_complete(tmp_path: Path) -> None:
    kept, plain = own.run(folder=tmp_path / "run"), own.run()
    same = own.bits(kept)[:-1], own.bits(plain)[:-1]
    assert same[0] == same[1]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= FILES
    assert {c: line.epsilon for c, line in kept.spent.items()} == {
        c: line.epsilon for c, line in plain.spent.items()
    }


def test_the_command_line_reads_a_folder_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    result = own.run(folder=folder)
    assert run_command(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "weiavg" in page
    assert "Trained from Python" in page
    assert "dpfl run experiment.toml" not in page
    assert run_command(["report", str(folder), "--public"]) == 0
    public = (folder / "public.html").read_text()
    assert "weiavg" in public
    assert json.loads((folder / "training.json").read_text())["digest"] not in public
    capsys.readouterr()
    assert run_command(["account", "--ledger", str(folder / "ledger.sqlite"), "--json"]) == 0
    told = json.dumps(json.loads(capsys.readouterr().out))
    assert str(result.spent["a"].epsilon) in told
    assert run_command(["run", "--resume", str(folder)]) == 5
    assert "resume=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("at", "kind"), [(1, Killed), (3, KeyboardInterrupt), (own.ROUNDS, ValueError)]
)
def test_what_a_callback_raises_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, at: int, kind: type[BaseException]
) -> None:
    def struck(end: dpfl.RoundEnd) -> None:
        if end.round == at:
            raise kind("here")

    with pytest.raises(kind):
        own.run(folder=tmp_path / "run", callbacks=[struck])
    rounds: list[int] = []
    result = own.run(
        folder=tmp_path / "run", resume=True, callbacks=[lambda end: rounds.append(end.round)]
    )
    assert rounds == list(range(at, own.ROUNDS + 1))  # the newest round is shown again
    assert [line["round"] for line in result.timings] == list(range(own.ROUNDS))
    assert own.bits(result) == own.bits(own.run(folder=tmp_path / "whole"))


def test_kill_9_and_resume_gives_the_same_bits(tmp_path: Path) -> None:
    expected = own.bits(own.run(rounds=12, folder=tmp_path / "whole"))
    folder, root = tmp_path / "killed", Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.own_training", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "4":
                os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    result = own.run(rounds=12, folder=folder, resume=True)
    assert result.summary.rounds.done == 12
    assert own.bits(result) == expected


def test_an_unseeded_run_goes_on_and_repeats_no_round(tmp_path: Path) -> None:
    def struck(end: dpfl.RoundEnd) -> None:
        if end.round == 2:
            raise Killed

    with pytest.raises(Killed):
        own.run(folder=tmp_path, callbacks=[struck], seed=None)
    result = own.run(folder=tmp_path, resume=True, seed=None)
    assert [line.round for line in result.history] == list(range(own.ROUNDS))
    assert Flag.SEEDED not in {raised.flag for raised in result.summary.flags}
    assert all(line.epsilon <= (line.budget or 0) for line in result.spent.values())


def test_resume_begins_what_is_not_there_and_reads_what_has_ended(tmp_path: Path) -> None:
    first = own.run(folder=tmp_path / "run", resume=True)
    files = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    again = own.run(folder=tmp_path / "run", resume=True)
    assert own.bits(again) == own.bits(first)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}


OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "other rounds": ((own.model(), own.federation(), own.strategy()), {"rounds": 6}),
    "another seed": ((own.model(), own.federation(), own.strategy()), {"seed": 4}),
    "other records": ((own.model(), own.federation(shift=0.1), own.strategy()), {}),
    "another budget": ((own.model(), own.federation(a=1.5), own.strategy()), {}),
    "another setting": ((own.model(), own.federation(), own.strategy(lr=0.4)), {}),
    "another start": ((torch.nn.Linear(3, 2), own.federation(), own.strategy()), {}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_the_folder_of_another_training_is_refused(tmp_path: Path, which: str) -> None:
    with pytest.raises(Killed):
        own.run(folder=tmp_path, callbacks=[_raise])
    arguments, changes = OTHERS[which]
    settings = {"rounds": own.ROUNDS, "seed": 3} | changes
    with pytest.raises(DpflError, match="holds another training") as caught:
        dpfl.train(*arguments, **settings, folder=tmp_path, resume=True)
    assert caught.value.exit_code == 5
    with pytest.raises(DpflError, match="already holds another experiment"):
        dpfl.train(*arguments, **settings, folder=tmp_path)


def _raise(end: dpfl.RoundEnd) -> None:
    raise Killed


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DpflError, match="is not empty and holds no run") as caught:
        own.run(folder=tmp_path)
    assert caught.value.exit_code == 5
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["notes.txt"]


def test_a_ledger_that_spans_runs_goes_with_a_folder(tmp_path: Path) -> None:
    def struck(end: dpfl.RoundEnd) -> None:
        if end.round == 2:
            raise Killed

    spanning: dict[str, Any] = {"ledger": tmp_path / "all.sqlite", "new_ledger": True}
    whole = own.run(folder=tmp_path / "whole", **spanning | {"ledger": tmp_path / "1.sqlite"})
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        own.run(folder=folder, **spanning, callbacks=[struck])
    with pytest.raises(DpflError, match="ends at round None") as caught:
        own.run(folder=folder, resume=True, ledger=tmp_path / "1.sqlite")
    assert caught.value.exit_code == 5
    result = own.run(folder=folder, **spanning, resume=True)
    assert own.bits(result)[:2] == own.bits(whole)[:2]
    assert [line.to_dict() for line in result.summary.statements] == [
        line.to_dict() for line in whole.summary.statements
    ]
    assert not (folder / "ledger.sqlite").exists()
    assert dpfl.report(folder).exists()
    with pytest.warns(RuntimeWarning, match="no client can afford"):  # the charges are there
        own.run(ledger=tmp_path / "all.sqlite")


# ---- callbacks -----------------------------------------------------------------------------------


def test_a_callback_sees_record_model_and_what_was_spent() -> None:
    seen: list[dpfl.RoundEnd] = []
    result = own.run(callbacks=[seen.append])
    assert [end.round for end in seen] == [1, 2, 3, 4, 5]
    assert [end.record for end in seen] == result.history
    first, last = seen[0].model, seen[-1].model  # asked for after the run has ended
    pairs = zip(last.parameters(), result.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not torch.equal(next(first.parameters()), next(last.parameters()))


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (lambda end: end.round == 2, "stopped by a callback"),
        (lambda end: "good enough" if end.round == 2 else None, "good enough"),
        (lambda end: end.stop("by hand") if end.round == 2 else None, "by hand"),
    ],
)
def test_a_callback_that_stops_keeps_the_model(tmp_path: Path, callback: Any, reason: str) -> None:
    models = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a wanted end is not warned of
        more = [lambda end: models.append(end.model), callback]
        result = own.run(folder=tmp_path, callbacks=more)
    assert result.summary.rounds.ended_early == f"after 2 of 5 rounds: {reason}"
    assert torch.equal(next(models[-1].parameters()), next(result.model.parameters()))
    assert len(result.history) == 2
    loaded = dpfl.Result.load(tmp_path, model=own.model())
    assert own.bits(loaded) == own.bits(result)
    charged = {line.rounds for line in result.spent.values()}
    assert charged == {2}


def test_a_stop_in_the_last_round_is_no_early_end() -> None:
    result = own.run(callbacks=[lambda end: end.round == own.ROUNDS])
    assert result.summary.rounds.ended_early is None
    assert not _flagged(result)


def _flagged(result: dpfl.Result) -> bool:
    return Flag.UNACCOUNTED_STOP in {raised.flag for raised in result.summary.flags}


def test_a_callback_that_stops_by_test_scores_cannot_do_so_silently() -> None:
    looked = own.run(callbacks=[lambda end: end.record.scores.value > 0])
    assert looked.summary.rounds.done == 1
    assert _flagged(looked)
    public = own.run(callbacks=[lambda end: end.stop("enough", public=True)])
    assert public.summary.rounds.done == 1
    assert not _flagged(public)
    assert not _flagged(own.run(callbacks=[lambda end: None]))


def test_a_public_reason_does_not_cover_another_callback_s_private_one() -> None:
    looks = [lambda end: end.record.scores.value > 0, lambda end: end.stop("enough", public=True)]
    assert _flagged(own.run(callbacks=looks))
    assert _flagged(own.run(callbacks=looks[::-1]))
    assert not _flagged(own.run(callbacks=[looks[1], looks[1]]))


class _Looks:
    """A metric of the caller's own that is given whole rounds, and looks at test scores."""

    metric = None

    def of_round(self, end: dpfl.RoundEnd) -> float:
        assert end.record.scores is not None
        return end.record.scores.value


class _Promises(_Looks):
    unaccounted = False


def test_a_metric_of_whole_rounds_is_flagged_unless_it_says_that_it_looks_at_nothing_private() -> (
    None
):
    stop = {"patience": 1, "least_gain": 1.0}
    assert _flagged(own.run(early_stopping=dpfl.EarlyStopping(metric=_Looks(), **stop)))
    assert not _flagged(own.run(early_stopping=dpfl.EarlyStopping(metric=_Promises(), **stop)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"callbacks": [3]}, "callbacks = [3]"),
        ({"callbacks": print}, "callbacks = "),
        ({"callbacks": [lambda end: 3.5]}, "returned 3.5"),
        ({"early_stopping": 3}, "early_stopping is int"),
        ({"resume": True}, "resume=True without a folder"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        own.run(**changes)
    assert named in str(caught.value)


# ---- early stopping ------------------------------------------------------------------------------


def _public() -> dpfl.PublicMetric:
    x = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    return dpfl.PublicMetric(x, (x @ np.array([1.0, -2.0, 0.5]) > 0).astype(np.int64))


def test_early_stopping_by_a_function_counts_measurements() -> None:
    values = {1: 0.5, 2: None, 3: 0.6, 4: 0.65, 5: 0.7}
    stop = dpfl.EarlyStopping(metric=lambda model, round_: values[round_], patience=2)
    assert own.run(early_stopping=stop).summary.rounds.ended_early is None
    stop = dpfl.EarlyStopping(
        metric=lambda model, round_: values[round_], patience=2, least_gain=0.2
    )
    ended = own.run(early_stopping=stop).summary.rounds.ended_early
    assert ended == "after 4 of 5 rounds: no gain in 2 measurements"
    stop = dpfl.EarlyStopping(metric=lambda m, r: values[r], patience=2, higher_is_better=False)
    assert own.run(early_stopping=stop).summary.rounds.done == 4


def test_a_public_metric_is_the_tasks_own() -> None:
    metric, seen = _public(), {}
    stop = dpfl.EarlyStopping(metric=metric, patience=1, least_gain=2.0)

    def look(end: dpfl.RoundEnd) -> None:
        guesses = end.model(metric.features).argmax(1).numpy()
        seen[end.round] = (guesses == metric.targets).mean(), metric.of_round(end)

    result = own.run(early_stopping=stop, callbacks=[look])
    assert result.summary.rounds.done == 2  # the first measurement is a gain, the second is not
    assert all(mine == pytest.approx(theirs) for mine, theirs in seen.values())
    flags = {raised.flag for raised in result.summary.flags}
    assert Flag.UNACCOUNTED_STOP not in flags


def test_unaccounted_scores_need_their_name_and_raise_a_flag(tmp_path: Path) -> None:
    stop = dpfl.EarlyStopping(metric=dpfl.UnaccountedScore(), patience=1, least_gain=1.0)
    result = own.run(folder=tmp_path, early_stopping=stop)
    assert result.summary.rounds.done == 2
    assert Flag.UNACCOUNTED_STOP in {raised.flag for raised in result.summary.flags}
    assert "UNACCOUNTED STOP" in json.loads((tmp_path / "model.json").read_text())["note"]


def test_an_accounted_metric_may_stop_a_run() -> None:
    metric = dpfl.AccountedMetric(metric="accuracy", share=0.2)
    stop = dpfl.EarlyStopping(metric=metric, patience=1, least_gain=10.0)
    result = own.run(accounted=metric, early_stopping=stop)
    assert result.summary.rounds.done == 2
    assert result.history[-1].measured is not None
    assert not _flagged(result)


@pytest.mark.parametrize("metric", [None, "accuracy", 0.5])
def test_early_stopping_without_a_metric_is_refused(metric: Any) -> None:
    with pytest.raises(ConfigurationError, match="measures nothing"):
        dpfl.EarlyStopping(metric=metric)


@pytest.mark.parametrize(
    ("settings", "named"), [({"patience": 0}, "patience = 0"), ({"least_gain": -1}, "least_gain")]
)
def test_early_stopping_names_bad_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        dpfl.EarlyStopping(metric=lambda model, round_: 1.0, **settings)


def test_a_metric_that_gives_no_number_is_named() -> None:
    stop = dpfl.EarlyStopping(metric=lambda model, round_: "good")
    with pytest.raises(ConfigurationError, match="returned 'good'"):
        own.run(early_stopping=stop)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_early_stopping_survives_a_kill_and_measures_no_round_twice(
    tmp_path: Path, at: int
) -> None:
    measured: list[int] = []

    def metric(model: torch.nn.Module, round_: int) -> float:
        measured.append(round_)
        return {1: 0.5, 2: 0.6}.get(round_, 0.1)

    def struck(end: dpfl.RoundEnd) -> None:
        if end.round == at:
            raise Killed

    stop = dpfl.EarlyStopping(metric=metric, patience=2)
    with pytest.raises(Killed):
        own.run(folder=tmp_path, early_stopping=stop, callbacks=[struck])
    result = own.run(folder=tmp_path, early_stopping=stop, resume=True)
    assert measured == [1, 2, 3, 4]
    assert result.summary.rounds.ended_early == "after 4 of 5 rounds: no gain in 2 measurements"


# ---- warnings ------------------------------------------------------------------------------------


def test_a_seeded_training_warns_once_that_it_is_not_private() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.run(rounds=1)
    (one,) = caught
    assert one.category is dpfl.NotPrivateWarning
    assert "seed=None" in str(one.message)
    assert one.filename.endswith("own_training.py")  # whoever called train


def test_an_unseeded_training_and_one_that_protects_nobody_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.run(rounds=1, seed=None)
        plain = dpfl.fedavg(lr=0.5, batch_size=16, local_steps=1)
        dpfl.train(own.model(), own.federation(), plain, rounds=1)


def test_progress_may_be_a_function_of_ones_own() -> None:
    seen: list[tuple[int, int]] = []
    own.run(progress=lambda done, total, record: seen.append((done, total)))
    assert seen == [(done, 5) for done in (1, 2, 3, 4, 5)]


class Keeps(nn.Module):
    """Keeps the largest number that it was given, and turns its scores round where one is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.largest = nn.Linear(4, 2), [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.largest[0] = max(self.largest[0], float(x.abs().max()))
        return self.linear(x) * (1.0 if self.largest[0] < 50 else -1.0)


def trained_on(test_number: float) -> dpfl.Result:
    generator = np.random.default_rng(0)
    x, y = generator.uniform(size=(80, 4)).astype("float32"), generator.integers(0, 2, 80)
    tests = np.full((4, 4), test_number, "float32"), np.arange(4) % 2
    federation = dpfl.Federation.from_arrays(
        {"a": (x, y, *tests)}, budgets={"a": dpfl.Budget(epsilon=8.0, delta=1e-3)}
    )
    torch.manual_seed(0)
    method = dpfl.weiavg(lr=0.5, clip=1.0, batch_size=16, local_steps=4)
    return dpfl.train(Keeps(), federation, method, rounds=3, seed=1)


def test_what_a_model_sees_in_evaluation_does_not_reach_training() -> None:
    one, other = (trained_on(number).model.state_dict() for number in (0.5, 99.0))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_assumed_of_a_model_of_the_user_s_own_is_said() -> None:
    mine = nn.Sequential(nn.Flatten(), Keeps())
    record = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=8, local_steps=1)
    client = dpfl.dp_fed(lr=0.1, clip=1.0, batch_size=8, local_steps=1, noise_multiplier=1.0)
    layout = Layout.of_module(mine)
    assert WATCHED in assumptions_of(record, mine, layout)
    assert FORGETS in assumptions_of(client, mine, layout)
    assert FORGETS not in assumptions_of(client, nn.Linear(4, 2), layout)
