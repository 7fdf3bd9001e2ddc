"""The likelihood-ratio attack on planted statistics: known areas, calibration, limits with power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr

from dpfl.attacks.members import likelihood
from dpfl.attacks.members.likelihood import Floats, Marks, Trials, likelihood_scores

CONFIDENCE = 0.95


def planted(
    runs: int,
    targets: int,
    *,
    shift: float = 0.0,
    difficulty: float = 0.0,
    shared: float = 0.0,
    seed: int = 0,
) -> tuple[Floats, Marks]:
    """Normal statistics that ``shift`` where the target is present; targets differ by their
    ``difficulty``, and ``shared`` is the noise that all targets of a run have in common.
    """
    rng = np.random.default_rng(seed)
    present = rng.random((runs, targets)) < 0.5
    statistics = rng.normal(size=(runs, targets)) + shift * present
    statistics += difficulty * rng.normal(size=targets) + shared * rng.normal(size=(runs, 1))
    return statistics, present


def area(scores: Floats, present: Marks) -> likelihood.Interval:
    return Trials(scores, present).auc(CONFIDENCE)


@pytest.mark.parametrize("shift", [0.5, 1.5])
def test_planted_gaussians_have_the_area_that_theory_gives_them(shift: float) -> None:
    """AUC = Phi(shift / sqrt 2), a little less for a fitted mean; a wrong sign is seen."""
    statistics, present = planted(100, 60, shift=shift)
    found = area(likelihood_scores(statistics, present), present)
    assert found.low < ndtr(shift / math.sqrt(2)) < found.high + 0.01
    assert found.high - found.low < 0.05
    turned = area(likelihood_scores(-statistics, present), present)
    assert turned.high < 0.5
    assert turned.value == pytest.approx(1 - found.value, abs=0.01)


def test_without_a_signal_the_interval_holds_one_half_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(100):
        statistics, present = planted(16, 20, difficulty=2.0, shared=1.0, seed=seed)
        found = area(likelihood_scores(statistics, present), present)
        inside += found.low <= 0.5 <= found.high
    assert 88 <= inside <= 100


def test_a_law_for_every_target_beats_one_threshold_where_targets_differ() -> None:
    statistics, present = planted(60, 50, shift=1.0, difficulty=5.0)
    one_threshold = area(statistics, present)
    fitted = area(likelihood_scores(statistics, present), present)
    assert one_threshold.value < 0.6
    assert fitted.low < ndtr(1 / math.sqrt(2)) < fitted.high + 0.01
    assert fitted.low > one_threshold.high


def test_scores_are_those_of_the_plain_loop() -> None:
    statistics, present = planted(9, 4, shift=1.0, difficulty=3.0)
    scores = likelihood_scores(statistics, present)
    for run in range(9):
        others = np.arange(9) != run
        columns = [statistics[others & ~present[:, k], k] for k in range(4)]
        squares = sum(((x - x.mean()) ** 2).sum() for x in columns)
        std = math.sqrt(squares / sum(len(x) - 1 for x in columns))
        expected = [(statistics[run, k] - x.mean()) / std for k, x in enumerate(columns)]
        assert scores[run] == pytest.approx(expected)


def test_a_coin_never_enters_its_own_score() -> None:
    statistics, present = planted(20, 5, shift=2.0)
    turned = present.copy()
    turned[3, 2] = ~turned[3, 2]
    before, after = (likelihood_scores(statistics, own) for own in (present, turned))
    assert after[3] == pytest.approx(before[3])
    assert after[4, 2] != pytest.approx(before[4, 2])  # it is a shadow run of the others


def test_many_shadow_runs_give_every_target_a_variance_of_its_own() -> None:
    statistics, present = planted(3 * likelihood.FEW, 4)
    statistics *= [1.0, 1.0, 10.0, 10.0]
    scores = likelihood_scores(statistics, present)
    own = [scores[:, k][~present[:, k]].std() for k in range(4)]
    assert own == pytest.approx([1.0] * 4, rel=0.2)
    few = likelihood_scores(statistics[:20], present[:20])
    assert few[:, 2].std() > 5 * few[:, 0].std()


def test_a_target_that_is_never_absent_elsewhere_is_scored_by_all_others() -> None:
    statistics, present = planted(8, 3)
    present[:, 0] = True
    statistics[2] = 7.0
    assert np.isfinite(likelihood_scores(statistics, present)).all()
    constant = likelihood_scores(np.ones((8, 3)), present)
    assert (constant == 0).all()


def test_limits_of_a_false_positive_rate_hold_where_targets_of_a_run_are_dependent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rate of the threshold that was chosen is known; limits that take trials as independent
    would miss it far too often.
    """

    def covered() -> int:
        count = 0
        for seed in range(100):
            scores, present = planted(30, 40, shared=1.0, seed=seed)
            gone = np.sort(scores[~present])[::-1]
            threshold = gone[int(0.1 * len(gone))]
            true = 1 - float(ndtr(threshold / math.sqrt(2)))
            count += Trials(scores, present).hits(0.1, CONFIDENCE)[1] >= true
        return count

    assert covered() >= 90
    monkeypatch.setattr(likelihood, "_design_effect", lambda values: 1.0)
    assert covered() < 85


def test_at_most_the_stated_share_of_absent_targets_is_above_the_threshold() -> None:
    scores = np.array([[5.0, 4.0, 3.0, 3.0, 1.0], [9.0, 3.0, 2.0, 1.0, 0.0]])
    present = np.array([[False] * 5, [True] * 5])
    hits, most = Trials(scores, present).hits(0.2, CONFIDENCE)  # only scores above 4 are called
    assert hits.value == 0.2
    assert hits.low < 0.2 < hits.high
    assert most > 0.2
    hits, _ = Trials(scores, present).hits(0.5, CONFIDENCE)  # above 3: ties are not called
    assert hits.value == 0.2


def test_perfect_attacks_have_limits_too() -> None:
    _, present = planted(20, 10)
    found = area(present.astype(float), present)
    assert found.value == found.high == 1.0
    assert 0.8 < found.low < 0.9  # 20 runs, not 200 trials


def test_a_long_curve_is_thinned_and_still_rises_from_corner_to_corner() -> None:
    statistics, present = planted(100, 50, shift=0.5)
    curve = Trials(statistics, present).curve()
    assert len(curve) <= 202
    assert curve[0] == (0.0, 0.0)
    assert curve[-1] == (1.0, 1.0)
    for axis in zip(*curve, strict=True):
        assert list(axis) == sorted(axis)
