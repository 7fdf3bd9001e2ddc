"""``dpfl plan``: everything that can be known before anything is trained, and nothing that costs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.cli.options import Asked
from dpfl.experiments import plan as library
from dpfl.privacy.ledger import Ledger

FEDERATION = ["--dataset", "digits", "--clients", "4", "--rounds", "2", "--local-steps", "2"]
UNEQUAL = ["--budgets", "0.5,1,4,8", "--delta", "1e-3", "--clip", "1"]
EQUAL = ["--budgets", "1", "--delta", "1e-3", "--clip", "1"]
FULL = [*FEDERATION, *UNEQUAL]
RECORD = ["--methods", "fedavg,fedavg_dp,minimum,weiavg,pfa_plus,robust_hdp"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPFL_DATA", raising=False)


def spoken(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    code, out, err = spoken(capsys, "plan", *arguments, "--json")
    assert code == 0, err
    document = json.loads(out, parse_constant=refuse)
    assert list(document) == ["methods", "recommended"]
    return {**document, "methods": {one["method"]: one for one in document["methods"]}}


# -- against a run ---------------------------------------------------------------------------------


def test_noise_epsilon_and_bytes_are_those_of_the_run_that_follows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(capsys, *FULL, *RECORD, "--no-timing")["methods"]
    for method in ("weiavg", "fedavg_dp", "minimum"):
        folder = f"r-{method}"
        code, out, _ = spoken(
            capsys, "run", *FULL, "--method", method, "--out", folder, "--quiet", "--json"
        )
        assert code == 0
        summary = json.loads(out)
        told = plan[method]
        assert (told["clients"], told["rounds"], told["parameters"]) == (
            4,
            2,
            summary["parameters"],
        )
        assert summary["bytes_up"] == 2 * told["bytes_up_per_round"]
        assert summary["bytes_down"] == pytest.approx(2 * told["bytes_down_per_round"], abs=8)
        assert {name: told[name] for name in ("unit", "observer", "adjacency")} == {
            name: summary[name] for name in ("unit", "observer", "adjacency")
        }
        for name in ("smallest", "median", "largest"):
            assert told["epsilon"]["server"][name] == pytest.approx(
                summary["epsilon"]["spent"][name], rel=1e-9
            )
        line = json.loads(Path(folder, "rounds.jsonl").read_text().splitlines()[0])
        for client in told["per_client"]:
            variance = line["simulated_truth"]["noise_variance"][client["client"]]
            spread = (
                math.sqrt(variance / (2 * summary["parameters"])) / 0.1 * 16
            )  # two steps, lr 0.1, batches of 16
            assert client["noise_multiplier"] == pytest.approx(spread, rel=0.02)
    granted = [client["budget"] for client in plan["weiavg"]["per_client"]]
    assert granted == [0.5, 1.0, 4.0, 8.0]
    noise = [client["noise_multiplier"] for client in plan["weiavg"]["per_client"]]
    assert noise == sorted(noise, reverse=True)
    assert {client["noise_multiplier"] for client in plan["minimum"]["per_client"]} == {noise[0]}
    assert all(client["noise_multiplier"] is None for client in plan["fedavg"]["per_client"])
    assert plan["fedavg"]["epsilon"]["world"]["largest"] == "infinite"


@pytest.mark.parametrize("k", ["1", "2"])
def test_bytes_of_projected_updates_are_those_of_a_later_round(
    capsys: pytest.CaptureFixture[str], k: str
) -> None:
    arguments = [
        *FULL,
        "--set",
        f"k={k}",
        "--set",
        "public=top_fraction",
        "--set",
        "public_fraction=0.5",
    ]
    told = planned(capsys, *arguments, "--methods", "pfa_plus", "--no-timing")["methods"][
        "pfa_plus"
    ]
    code, _, err = spoken(
        capsys, "run", *arguments, "--method", "pfa_plus", "--out", "r", "--quiet"
    )
    assert code == 0, err
    first, later = (json.loads(line) for line in Path("r/rounds.jsonl").read_text().splitlines())
    assert told["bytes_up_per_round"] == pytest.approx(later["bytes_up"], abs=4)
    assert told["bytes_down_per_round"] == pytest.approx(
        later["bytes_down"], rel=0.04
    )  # names of tensors
    assert later["bytes_up"] < 0.6 * first["bytes_up"]


def test_the_ratios_rank_as_a_comparison_finds_the_noise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["--methods", "fedavg_dp,weiavg,robust_hdp"]
    told = planned(capsys, *FULL, *methods, "--no-timing")["methods"]
    code, out, _ = spoken(
        capsys,
        "compare",
        *FULL,
        *methods,
        "--seeds",
        "2",
        "--workers",
        "1",
        "--quiet",
        "--json",
        "--out",
        "c",
    )
    assert code == 0
    found = {
        c["label"]: max(r["noise_over_least"]["mean"] for r in c["runs"])
        for c in json.loads(out)["cells"]
    }
    ratios = {method: one["noise_to_signal"] for method, one in told.items()}
    assert (
        sorted(ratios, key=ratios.__getitem__)[-1]
        == sorted(found, key=found.__getitem__)[-1]
        == "fedavg_dp"
    )
    least = ratios["robust_hdp"]  # as if its estimates were exact
    for method in ("fedavg_dp", "weiavg"):
        assert (ratios[method] / least) ** 2 == pytest.approx(found[method], rel=1e-3)


# -- nothing happens -------------------------------------------------------------------------------


def test_nothing_is_written_and_nothing_charged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[str] = []
    made: list[str] = []
    real_create = Ledger.create.__func__  # type: ignore[attr-defined]

    def create(cls: type[Ledger], path: Any, *rest: Any) -> Ledger:
        made.append(str(path))
        ledger: Ledger = real_create(cls, path, *rest)
        return ledger

    monkeypatch.setattr(Ledger, "create", classmethod(create))
    monkeypatch.setattr(
        Ledger, "charge", lambda self, *rest, **more: charged.append(str(rest)) or []
    )
    assert planned(capsys, *FULL, *RECORD, "--no-timing")["methods"]
    assert charged == []
    assert set(made) <= {":memory:"}
    assert list(Path().iterdir()) == []


def test_time_is_estimated_on_made_up_records_or_not_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(capsys, *FULL, "--methods", "fedavg,weiavg")["methods"]
    assert all(0 < one["seconds"] < 60 for one in plan.values())
    assert list(Path().iterdir()) == []
    monkeypatch.setattr(library, "seconds_in_all", lambda *rest: pytest.fail("a round was played"))
    plan = planned(capsys, *FULL, "--methods", "fedavg,weiavg", "--no-timing")["methods"]
    assert all(one["seconds"] is None for one in plan.values())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(3.21, "3.2 s"), (89.9, "90 s"), (120.0, "2 min"), (5000.0, "83 min"), (7200.0, "2.0 h")],
)
def test_time_is_told_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float, shown: str
) -> None:
    monkeypatch.setattr(library, "seconds_in_all", lambda *rest: seconds)
    code, out, _ = spoken(capsys, "plan", *FULL, "--methods", "weiavg")
    assert code == 0
    assert re.search(rf"^weiavg .* {shown}\s*$", out, re.M)


def test_a_method_that_no_few_clients_can_run_has_no_time_and_is_planned_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("e.toml").write_text(
        "[data]\nname = 'digits'\n[partition]\nclients = 9\n[budgets]\nepsilon = 1.0\ndelta = 1e-3\n"
        "[method]\nlr = 0.1\nclip = 1.0\nbatch_size = 16\nlocal_steps = 2\npublic = ['client-3']\n[run]\nrounds = 2\n"
    )
    code, out, err = spoken(capsys, "plan", "e.toml", "--methods", "pfa")
    assert code == 0
    assert "no time for pfa" in err
    assert re.search(r"^pfa .* -\s*$", out, re.M)


def test_a_plan_that_nobody_can_afford_is_still_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = spoken(
        capsys, "plan", *FULL, "--methods", "dp_fed", "--noise-multiplier", "0.3"
    )
    assert code == 0, err[-300:]
    assert "dp_fed" in out


# -- what it recommends ----------------------------------------------------------------------------


def test_the_recommendation_follows_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["--methods", "robust_hdp,weiavg,minimum,fedavg_dp,maximum,fedavg", "--no-timing"]
    (equal,) = planned(capsys, *FEDERATION, *EQUAL, *methods)["recommended"]
    assert equal["method"] == "fedavg_dp"
    assert equal["promise"] == ["record", "zero_out", "server"]
    (unequal,) = planned(capsys, *FULL, *methods)["recommended"]
    assert unequal["method"] in ("weiavg", "robust_hdp")
    _, out, _ = spoken(capsys, "plan", *FULL, *methods)
    said = " ".join(out.split())
    assert (
        f"To protect a record against the server (zero_out), try {unequal['method']} first: its aggregate"
        in said
    )
    assert "nothing was trained" in said
    assert "does not predict accuracy" in said


def test_there_is_one_recommendation_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["--methods", "fedavg_dp,dp_fed,dp_fed_ls,udp_fedavg,airsgd", "--no-timing"]
    plan = planned(capsys, *FULL, *methods)
    assert {tuple(one["promise"]): one["method"] for one in plan["recommended"]} == {
        ("client", "zero_out", "world"): "dp_fed_ls",  # udp_fedavg promises the same
        ("client", "replace_one", "server"): "airsgd",
        ("record", "zero_out", "server"): "fedavg_dp",
    }
    assert all(
        "would carry" not in one["reason"]
        for one in plan["recommended"]
        if one["method"] == "fedavg_dp"
    )
    assert "compare it with dp_fed" in next(
        o["reason"] for o in plan["recommended"] if o["method"] == "dp_fed_ls"
    )


def test_more_rounds_more_clients_and_larger_grants_move_the_ratio_the_right_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ratio(*more: str) -> float:
        arguments = [*FEDERATION, *EQUAL, "--methods", "dp_fed", "--no-timing", *more]
        return float(planned(capsys, *arguments)["methods"]["dp_fed"]["noise_to_signal"])

    plain = ratio()
    assert ratio("--clients", "8") == pytest.approx(plain / 2, rel=1e-6)
    assert ratio("--rounds", "8") == pytest.approx(2 * plain, rel=0.02)
    assert ratio("--budgets", "4") < plain / 2
    assert ratio("--clip", "7") == pytest.approx(plain, rel=1e-9)  # noise and signal grow alike


# -- what is claimed -------------------------------------------------------------------------------


def test_a_false_claim_moves_the_plan_of_those_who_believe_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["--methods", "weiavg,robust_hdp,fedavg_dp", "--no-timing"]
    honest = planned(capsys, *FULL, *methods)["methods"]
    lied = planned(capsys, *FULL, *methods, "--misreport", "0:1000")["methods"]
    for method in ("robust_hdp", "fedavg_dp"):
        assert lied[method]["noise_to_signal"] == honest[method]["noise_to_signal"]
    # Nearly all of the weight goes to the client with the most noise.
    assert lied["weiavg"]["noise_to_signal"] > 2 * honest["weiavg"]["noise_to_signal"]


def test_describe_knows_of_liars(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *FULL,
        "--method",
        "pfa_plus",
        "--set",
        "public=threshold",
        "--set",
        "public_threshold=3",
        "--json",
    ]
    _, out, _ = spoken(capsys, "describe", *arguments)
    honest = json.loads(out)
    code, out, _ = spoken(capsys, "describe", *arguments, "--misreport", "0:100")
    assert code == 0
    lied = json.loads(out)
    assert lied["bytes_up_per_client"] > honest["bytes_up_per_client"]  # one more sends everything
    assert lied["epsilon"] == honest["epsilon"]  # and pays for what it does
    code, out, err = spoken(capsys, "describe", *arguments, "--misreport", "nobody:2")
    assert (code, out) == (2, "")
    assert "is not a client with a budget" in err


# -- for people ------------------------------------------------------------------------------------


def test_tables_fit_80_columns_and_show_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        "fedavg",
        "fedavg_dp",
        "minimum",
        "maximum",
        "robust_hdp",
        "dp_fed",
        "udp_fedavg",
        "airsgd",
        "fedceo",
    ]
    code, out, _ = spoken(capsys, "plan", *FULL, "--methods", ",".join(names), "--no-timing")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    rows = [
        line.split()[0] for line in out.split("Noise multiplier")[0].splitlines() if line.strip()
    ]
    assert set(names) <= set(rows)
    by_client = out.split("Noise multiplier")[1]
    for name in set(names) - {"fedavg"}:
        assert re.search(rf"\b{name}\b", by_client.split("To protect")[0]), (
            f"the noise of {name} is not shown"
        )


def test_many_clients_are_cut_short_and_json_has_them_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--dataset",
        "digits",
        "--clients",
        "30",
        "--rounds",
        "2",
        *EQUAL,
        "--methods",
        "dp_fed",
        "--no-timing",
    ]
    _, out, _ = spoken(capsys, "plan", *arguments)
    assert "... and 6 more: use --json" in out
    assert len(re.findall(r"^client-\d", out, re.M)) == 24
    assert len(planned(capsys, *arguments)["methods"]["dp_fed"]["per_client"]) == 30


def test_without_a_method_all_that_fit_are_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def caught(self: Asked, values: Any) -> list[str]:
        asked.append((self.methods, self.family))
        return ["fedavg"]

    monkeypatch.setattr(Asked, "method_names", caught)
    for more in ([], ["--family", "wireless"], ["--methods", "weiavg"]):
        spoken(capsys, "plan", *FULL, "--no-timing", *more)
    assert asked == [("all", None), ("", "wireless"), ("weiavg", None)]


# -- bad input -------------------------------------------------------------------------------------

W = ["--methods", "weiavg"]
BAD: list[tuple[list[str], int, str]] = [
    ([*FULL, "--methods", "weiavgg"], 2, "did you mean 'weiavg'"),
    ([*FULL, "--family", "wirelss"], 2, "did you mean 'wireless'"),
    ([*FULL, *W, "--family", "client"], 2, "give one of the two"),
    ([*FULL, *W, "--dataset", "digts"], 2, "did you mean 'digits'"),
    (["--dataset", "digts"], 2, "did you mean 'digits'"),
    ([*FULL, *W, "--clients", "5000"], 3, "clients"),
    ([*FULL, *W, "--budgets", "1e-9", "--delta", "1e-12"], 4, "no finite noise"),
    ([*FULL, *W, "--budgets", "1,2"], 2, "2 values for 4 clients"),
    ([*FULL, *W, "--misreport", "7:2"], 2, "is not a client with a budget"),
    ([*FULL, *W, "--misreport", "much"], 2, "ID:FACTOR"),
    ([*FULL, *W, "--set", "kk=1"], 2, "none of the methods has 'kk'"),
    ([*FULL, "--methods", "centaur"], 2, "one layer"),
    (["--dataset", "digits", *UNEQUAL, "--methods", "dprp,fedavg_dp"], 2, "needs dimension"),
    ([*FEDERATION, *EQUAL, "--methods", "pfa"], 2, "all claimed epsilons are equal"),
    ([*FEDERATION, *W, "--clip", "1"], 2, "no budgets"),
    ([*W, *UNEQUAL], 2, "no data set"),
    (["nowhere.toml"], 2, "cannot be read"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"), BAD, ids=[" ".join(a)[-50:] for a, _, _ in BAD]
)
def test_bad_input_gets_one_sentence_and_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found, out, err = spoken(capsys, "plan", *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []
