"""Poisoning: an attack does to uploads what it says, has the effect that it must have, and changes
nobody else's epsilon.
"""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpfl import testing
from dpfl.attacks import poison
from dpfl.attacks.observation import Observation, observe
from dpfl.attacks.poisoning.case import Case, dishonest_client
from dpfl.attacks.poisoning.defences import DEFENCES, defended, reliance
from dpfl.attacks.poisoning.dishonest import ATTACKS, Attack, Tampered, Trigger, make_attack
from dpfl.attacks.poisoning.results import Cell, Poisoning
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.core.types import Rows
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.methods import find
from dpfl.plugs.robust import ClippedRows
from dpfl.privacy.accountant import gaussian_epsilon
from dpfl.report.poison_page import poison_page
from dpfl.report.poison_words import warnings
from dpfl.report.rendering import render
from dpfl.rounds.codec import decode_integers, decode_upload
from dpfl.rounds.release import combined
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.experiment import setup_of
from dpfl.testing.fixtures import LAYOUT, cohort

VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 6},
    "budgets": {"epsilon": [8.0, 8.0, 8.0, 8.0, 8.0, 20.0], "delta": 1e-3},
    "model": {"name": "logistic"},
    "method": {"lr": 0.5, "clip": 1.0, "batch_size": 32, "local_steps": 5},
    "run": {"rounds": 5, "seed": 0},
}
WORST = "client-5"  # the one with the largest budget


def case_of(method: str, client: str | None = None, **sections: Any) -> Case:
    values = for_method({**VALUES, **sections}, method)
    return Case.of(setup_of(Experiment.from_dict(values)), client)


@pytest.fixture(scope="module")
def found() -> Poisoning:
    """Three ways to weigh, under all attacks."""
    calls: list[tuple[int, int, str]] = []
    result = poison(
        VALUES,
        ["fedavg_dp", "weiavg", "robust_hdp"],
        defences=["none"],
        factor=30.0,
        seeds=[0],
        progress=lambda *told: calls.append(told),
    )
    runs = len(ATTACKS) * 3
    assert [done for done, _, _ in calls] == list(range(1, 5 * runs + 1))
    assert {total for _, total, _ in calls} == {5 * runs}
    return result


def cell(found: Poisoning, method: str, attack: str, defence: str = "none") -> Cell:
    wanted = (method, defence, attack)
    (one,) = [c for c in found.cells if (c.method, c.defence, c.attack) == wanted]
    return one


def score(found: Poisoning, *which: str) -> float:
    return cell(found, *which).scores[0]


# ---- uploads, bit by bit -------------------------------------------------------------------------


@cache
def seen(method: str, secure: bool = False, **settings: Any) -> Observation:
    own = {k: v for k, v in VALUES["method"].items() if k in find(method).settings}
    values = {**VALUES, "method": {**own, **settings, "name": method}, "run": {"rounds": 1}}
    values |= {"secure_sum": {}} if secure else {}
    if find(method).model is not None:
        values = for_method(values, method)
    return observe(setup_of(Experiment.from_dict(values)))


CHANNELS: dict[str, dict[str, Any]] = {
    "rows": {"method": "weiavg"},
    "rows on a grid": {"method": "udp_fedavg", "noise": "local"},
    "over the air": {"method": "dprp", "dimension": 20},
    "sum of noisy updates": {"method": "fedavg_dp", "secure": True},
    "sum of shares, and releases": {"method": "preconditioned_sum"},
    "rows, and releases": {"method": "preconditioned"},
}


@pytest.mark.parametrize("factor", [-3.0, 1e7])
@pytest.mark.parametrize("channel", list(CHANNELS))
def test_every_upload_of_one_client_is_multiplied_and_no_other(channel: str, factor: float) -> None:
    observed = seen(**CHANNELS[channel])
    agreement, run = observed.simulation.agreement, observed.simulation.run.name
    tampered = Tampered(agreement=agreement, run=run, client="client-2", factor=factor)
    assert bool(observed.releases) == ("releases" in channel)
    for one in observed.rounds:
        about = (run, one.plan.round, "client-2")
        after = tampered(one.state, one.plan, one.uplinks)
        assert [u.client for u in after] == [u.client for u in one.uplinks]
        for old, new in zip(one.uplinks, after, strict=True):
            assert (new is old) == (old.client != "client-2")
        (old,), (new,) = (
            [u.payload for u in own if u.client == "client-2"] for own in (one.uplinks, after)
        )
        assert old is not None
        assert new is not None
        assert len(old) == len(new)
        if agreement.upload_grid(one.plan.round, 6) is None:
            wanted = decode_upload(old, None, *about) * factor
            assert torch.equal(decode_upload(new, None, *about), wanted)
            continue
        before, sent = (decode_integers(payload, None, *about) for payload in (old, new))
        largest = 2**31 - 1
        if agreement.strategy.secure:
            plan = agreement.sum_plan(one.plan.round, 6)
            plan.check_upload(sent, "client-2")
            largest = plan.largest
        assert np.array_equal(sent, np.clip(before * factor, -largest, largest))
    cut = factor == 1e7 and agreement.upload_grid(0, 6) is not None
    assert (tampered.cut > 0) == cut
    assert tampered.sent > 0


def test_a_client_that_is_silent_stays_silent_and_one_that_is_honest_is_not_touched() -> None:
    observed = seen("weiavg")
    (one,) = observed.rounds
    own = {"agreement": observed.simulation.agreement, "run": observed.simulation.run.name}
    assert Tampered(**own, client="client-2", factor=1.0)(one.state, one.plan, one.uplinks) is (
        one.uplinks
    )
    silent = [replace(uplink, payload=None, reason="asleep") for uplink in one.uplinks]
    tampered = Tampered(**own, client="client-2", factor=5.0)
    assert list(tampered(one.state, one.plan, silent)) == silent


def test_an_answer_to_a_release_counts_for_what_it_claims_to_add_up_at_most() -> None:
    """Honest answers stay as they are, bit for bit."""
    observed = seen("preconditioned")
    (one, *_), cohort = observed.releases, observed.training[0].plan.cohort
    answers = observed.released_view(one)
    assert isinstance(answers, dict)

    def buffer(**changed: torch.Tensor) -> torch.Tensor:
        state, _ = combined(observed.agreement, one.state, cohort, {**answers, **changed})
        (value,) = state.buffers.values()
        return value

    honest = observed.training[0].state.buffers
    assert torch.equal(buffer(), honest[next(iter(honest))])
    ten, thousand = (buffer(**{WORST: times * answers[WORST]}) for times in (10.0, 1000.0))
    assert torch.allclose(ten, thousand, rtol=1e-4)
    assert not torch.allclose(ten, buffer())
    assert torch.linalg.vector_norm(thousand) < 20  # a mean of records whose norm is 1, and noise


# ---- records and claims --------------------------------------------------------------------------


def test_records_are_changed_as_the_attack_says_and_nobody_elses() -> None:
    federation = case_of("weiavg").setup.federation
    trigger, own = Trigger.of(federation, WORST), federation.shards[WORST]
    assert trigger.places == (54, 55, 62, 63)  # the lower right corner of 8 x 8
    flipped = make_attack("label_flip", 1).on_records(federation, WORST, trigger).shards[WORST]
    assert torch.equal(flipped.labels, 9 - own.labels)
    assert torch.equal(flipped.features, own.features)
    marked = make_attack("backdoor", 1).on_records(federation, WORST, trigger)
    after = marked.shards[WORST]
    assert torch.equal(after.features[1::2], own.features[1::2])
    assert torch.equal(after.labels[1::2], own.labels[1::2])
    assert bool((after.features[::2][:, trigger.places] == trigger.value).all())
    assert bool((after.labels[::2] == trigger.target).all())
    kept = [number for number in range(64) if number not in trigger.places]
    assert torch.equal(after.features[::2][:, kept], own.features[::2][:, kept])
    assert torch.equal(after.test_features, own.test_features)
    assert all(marked.shards[c] is federation.shards[c] for c in federation.ids if c != WORST)
    assert make_attack("scale", 5).on_records(federation, WORST, trigger) is federation


def test_triggers_fit_pictures_tables_and_texts() -> None:
    labels = [0, 1] * 5
    table = Federation.from_arrays({"a": (np.full((10, 32), -1.0), labels)})
    assert Trigger.of(table, "a").places == (30, 31)
    text = Federation.from_arrays({"a": (np.ones((10, 5), dtype=int), labels)}, tokens=9)
    assert Trigger.of(text, "a") == Trigger(places=(3, 4), value=8)
    pictures = Federation.from_arrays({"a": (np.ones((10, 2, 16, 16)), labels)})
    places = torch.zeros(2, 16, 16).flatten()
    places[list(Trigger.of(pictures, "a").places)] = 1
    assert bool((places.reshape(2, 16, 16)[:, -2:, -2:] == 1).all())
    assert int(places.sum()) == 8


def test_the_dishonest_client_is_the_one_with_the_largest_budget_or_the_one_named() -> None:
    federation = case_of("weiavg").setup.federation
    assert dishonest_client(federation, None) == WORST
    assert dishonest_client(federation, "client-1") == dishonest_client(federation, "1")
    with pytest.raises(ConfigurationError, match="did you mean 'client-5'"):
        dishonest_client(federation, "clientt-5")
    shards = {
        "a": Shard.of(torch.zeros(2, 1), torch.zeros(2).long(), torch.zeros(1, 1), torch.zeros(1)),
        "b": Shard.of(torch.zeros(3, 1), torch.zeros(3).long(), torch.zeros(1, 1), torch.zeros(1)),
    }
    unbudgeted = Federation(shards=shards, task=federation.task)
    assert dishonest_client(unbudgeted, None) == "b"


# ---- what it does to the model -------------------------------------------------------------------


def test_a_sign_flip_breaks_the_mean_and_not_the_median(found: Poisoning) -> None:
    assert score(found, "fedavg_dp", "none") > 0.6
    assert score(found, "fedavg_dp", "sign_flip") < 0.2
    median = poison(
        VALUES, ["fedavg_dp"], attacks=["sign_flip"], defences=["median"], factor=30, seeds=[0]
    )
    assert score(median, "fedavg_dp", "none", "median") > 0.6
    assert score(median, "fedavg_dp", "sign_flip", "median") > 0.5
    assert not cell(median, "fedavg_dp", "none", "median").weights  # coordinates are mixed
    assert cell(found, "fedavg_dp", "sign_flip").diverged == 1
    assert cell(found, "fedavg_dp", "none").diverged == 0
    flipped = cell(found, "fedavg_dp", "sign_flip")
    assert found.drops(flipped) == [
        score(found, "fedavg_dp", "none") - score(found, "fedavg_dp", "sign_flip")
    ]


def test_scaling_is_no_longer_an_attack_where_rows_are_clipped() -> None:
    result = poison(
        VALUES, ["weiavg"], attacks=["scale"], defences=["none", "clip=0.5"], factor=100, seeds=[0]
    )
    harm = found_drop(result, "none"), found_drop(result, "clip=0.5")
    assert harm[0] > 0.1
    assert abs(harm[1]) < 0.05


def found_drop(found: Poisoning, defence: str) -> float:
    return found.drops(cell(found, "weiavg", "scale", defence))[0]


def test_flipped_labels_and_backdoors_show(found: Poisoning) -> None:
    assert found.drops(cell(found, "weiavg", "label_flip"))[0] > 0.05
    assert cell(found, "weiavg", "none").backdoors[0] < 0.3
    assert cell(found, "weiavg", "backdoor").backdoors[0] > 0.9


def test_a_false_claim_gains_weight_by_budget_and_none_by_noise(found: Poisoning) -> None:
    honest, false = (cell(found, "weiavg", name).weights[0] for name in ("none", "misreport"))
    assert honest == pytest.approx(20 / 60)
    assert false == pytest.approx(600 / 640)
    honest, false = (cell(found, "robust_hdp", name).weights[0] for name in ("none", "misreport"))
    assert false == honest
    assert score(found, "robust_hdp", "none") == score(found, "robust_hdp", "misreport")
    assert cell(found, "robust_hdp", "sign_flip").weights[0] < honest / 10


def test_a_run_is_not_disturbed_by_the_one_before_it() -> None:
    """A false claim plans other releases, whose buffers must not be there in the next run."""
    budgets = {"epsilon": [0.1, 0.1, 0.1, 0.1, 0.1, 3.0], "delta": 1e-3}
    case = case_of("preconditioned", budgets=budgets)
    scores, releases = [], []
    for attack in ("none", "misreport_sign_flip", "none"):
        played = case.play(case.setup.strategy, make_attack(attack, 10))
        scores.append(case.measured(played, played.epsilons, 0).score)
        releases.append(len(played.simulation.state.buffers))
    assert releases == [1, 2, 1]
    assert scores[0] == scores[2] != scores[1]


# ---- what it does to the others' privacy ---------------------------------------------------------


def test_nobody_else_is_charged_otherwise_under_any_attack(found: Poisoning) -> None:
    assert len(found.cells) == 3 * len(ATTACKS)
    assert found.epsilon_change == 0
    assert not found.changed()
    assert warnings(found)[1:] == []
    assert all(run.within_budgets and run.epsilon for one in found.cells for run in one.runs)


def test_a_plan_that_a_claim_changes_is_flagged() -> None:
    """Noise of whole clients follows from the smallest claim: the others spend more without it."""
    values = {**VALUES, "budgets": {"epsilon": [1.0, 4.0, 4.0, 4.0, 4.0, 4.0], "delta": 1e-3}}
    attacks = ["scale", "misreport"]
    result = poison(
        values, ["udp_fedavg"], attacks=attacks, defences=["none"], client="0", seeds=[0]
    )
    assert [one.attack for one in result.changed()] == ["misreport"]
    assert result.epsilon_change > 1
    assert all(run.within_budgets for one in result.cells for run in one.runs)
    (_, flag) = warnings(result)
    assert "nobody is above its own budget" in flag
    assert "nobody is above its own budget" in render(poison_page(result))


def test_the_others_rest_on_shares_of_noise_as_the_accounting_says() -> None:
    case = case_of("udp_fedavg", client="0")
    played = case.play(case.setup.strategy, make_attack("none", 1))
    rests = reliance(played.simulation, "client-0")
    assert rests.epsilon is not None
    assert rests.without is not None
    assert rests.epsilon <= 8
    assert "6 of 6 shares" in rests.words
    assert "not allowed for" in rests.words
    (event,) = Observation.of(played.simulation).history(
        "client-1", played.simulation.strategy.observer
    )
    mu = math.sqrt(event.steps) / event.noise_multiplier
    assert rests.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-3), rel=1e-5)
    assert rests.without == pytest.approx(gaussian_epsilon(mu * math.sqrt(6 / 5), 1e-3), rel=1e-5)


def test_a_secure_sum_allows_for_colluders_and_own_noise_for_everybody() -> None:
    shared = case_of("preconditioned_sum")
    with_sum = reliance(shared.play(shared.setup.strategy, Attack(name="none")).simulation, WORST)
    assert "count on 5 of 6 shares; 1 may work with the server" in with_sum.words
    assert with_sum.without is not None
    assert with_sum.epsilon is not None
    assert with_sum.without > with_sum.epsilon
    own = case_of("weiavg")
    alone = reliance(own.play(own.setup.strategy, Attack(name="none")).simulation, WORST)
    assert alone.epsilon is None
    assert "itself" in alone.words


# ---- defences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [ClippedRows(), ClippedRows(bound=0.5)], ids=repr)
def test_clipped_rows_keep_the_laws(clean: ClippedRows) -> None:
    testing.check_row_denoiser(clean)


def test_rows_are_clipped_at_the_bound_or_at_the_median() -> None:
    rows = torch.zeros(3, LAYOUT.size)
    rows[:, 0] = torch.tensor([1.0, 2.0, 300.0])
    origin = torch.zeros(LAYOUT.size)
    received = Rows(matrix=rows, origin=origin, cohort=cohort(3), layout=LAYOUT)
    clipped, _, told = ClippedRows()({}, received, 0)
    assert torch.allclose(clipped[:, 0], torch.tensor([1.0, 2.0, 2.0]), rtol=1e-4)
    assert told == {"bound": 2.0, "clipped": pytest.approx(1 / 3)}
    clipped, _, told = ClippedRows(bound=0.5)({}, received, 0)
    assert torch.allclose(clipped[:, 0], torch.tensor([0.5, 0.5, 0.5]), rtol=1e-4)
    with pytest.raises(ConfigurationError, match="bound"):
        ClippedRows(bound=-1.0)


def test_a_server_clips_any_rows_that_are_private_and_no_others() -> None:
    def strategy(method: str, clip: Any, **settings: Any) -> Any:
        values = for_method({**VALUES, "server": {"clip": clip}}, method)
        values["method"] |= settings
        return Experiment.from_dict(values).strategy(6)

    assert strategy("weiavg", "median").clean == ClippedRows()
    assert strategy("udp_fedavg", 0.5, noise="local").clean == ClippedRows(bound=0.5)
    for refused in ("dp_fed", "udp_fedavg"):
        with pytest.raises(PrivacyRefusal, match="noise in a sum"):
            strategy(refused, "median")
    with pytest.raises(ConfigurationError, match="in its own way"):
        strategy("pfa", 1.0)
    with pytest.raises(DpflError, match="clip"):
        strategy("weiavg", "mean")


@pytest.mark.parametrize("name", DEFENCES)
def test_a_method_that_is_robust_itself_gets_no_other_defence(name: str) -> None:
    strategy = case_of("krum").setup.strategy
    if name == "none":
        assert defended(strategy, name) is strategy
        return
    with pytest.raises(ConfigurationError, match="aggregates robustly already"):
        defended(strategy, name)


# ---- tasks without classes, the command line -----------------------------------------------------


def test_a_task_without_classes_leaves_out_what_changes_labels() -> None:
    values = {**VALUES, "data": {"name": "diabetes"}, "model": {"name": "logistic"}}
    values["budgets"] = {"epsilon": 2.0, "delta": 1e-3}
    result = poison(values, ["weiavg", "local_only"], defences=["none"], factor=2, seeds=[0])
    assert {one.attack for one in result.cells} == set(ATTACKS) - {"label_flip", "backdoor"}
    assert not result.higher_is_better
    assert result.drops(cell(result, "weiavg", "sign_flip"))[0] > 0  # a larger error is a drop
    assert any("local_only: its clients train alone" in one for one in result.left_out)
    assert any("label_flip: regression has no classes" in one for one in result.left_out)
    assert not result.trigger


def spoken(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(["attack", "poison", *arguments])
    return code, out.getvalue(), err.getvalue()


TINY = [
    *[
        "--dataset",
        "digits",
        "--clients",
        "4",
        "--rounds",
        "1",
        "--local-steps",
        "2",
        "--budgets",
        "1,1,2,8",
    ]
]
TINY += [*["--delta", "1e-3", "--clip", "1", "--seeds", "2", "--quiet"]]


def test_one_command_compares_and_writes_results_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    some = ["--attacks", "sign_flip,backdoor", "--defences", "none,median", "--out", "found"]
    code, out, err = spoken(*TINY, "--methods", "weiavg,udp_fedavg", *some, "--json")
    assert code == 0, err
    told = json.loads(out)
    kept = json.loads((tmp_path / "found" / "results.json").read_text())
    assert {**kept, "folder": "found"} == told
    result = Poisoning.from_dict(told)
    assert Poisoning.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert [one.client for one in result.clients] == ["client-3", "client-3"]
    assert {one.attack for one in result.cells} == {"none", "sign_flip", "backdoor"}
    assert any("udp_fedavg with median: " in one for one in result.left_out)
    page = (tmp_path / "found" / "report.html").read_text()
    for words in ("client-3", "largest budget", "exactly the same epsilon", "zero_out", "backdoor"):
        assert words in page
    code, out, err = spoken(*TINY, "--methods", "weiavg", *some, "--client", "0", "--factor", "2")
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert "uploads -2 times its update" in out
    assert "client-0" in out
    assert "NOT PRIVATE" in err
    assert err.count("left, at the pace of the first run") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--attacks", "signflip"], "did you mean 'sign_flip'"),
        (["--defences", "medain"], "did you mean 'median'"),
        (["--defences", "clip=-1"], "clip=0.5"),
        (["--defences", "median=2"], "say median"),
        (["--client", "client-33"], "did you mean 'client-3'"),
        (["--factor", "0"], "give a finite number above 0"),
        (["--seeds", "none"], "is not a number"),
        (["--methods", "local_only"], "upload nothing"),
        (["--methods", "weiavgg"], "did you mean 'weiavg'"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    methods = [] if "--methods" in options else ["--methods", "weiavg"]
    code, out, err = spoken(*TINY, *methods, *options)
    assert code == 2
    assert not out
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
