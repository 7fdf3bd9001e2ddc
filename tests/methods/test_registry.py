"""Methods by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.methods import METHODS, families, find, make_strategy
from dpfl.plugs.step import ServerSgd
from dpfl.plugs.weights import EpsilonWeights, UniformWeights, Weights
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level

SETTINGS = {"lr": 0.1, "clip": 1.0, "batch_size": 4, "local_steps": 2}
WHOLE_GRADIENTS = {"dprp", "airsgd"}  # of all records, unless a batch is asked for


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_builds_is_public_and_describes_itself(name: str) -> None:
    settings = {
        key: value
        for key, value in {**SETTINGS, "dimension": 3}.items()
        if key in METHODS[name].settings
    }
    strategy = make_strategy(name, settings)
    assert strategy.name == name
    assert getattr(dpfl, name) is METHODS[name]
    assert METHODS[name].about.endswith(".")
    assert strategy.assumptions


def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    for name, near in (("weiavgg", "weiavg"), ("trian", "train"), ("Buget", "Budget")):
        with pytest.raises(AttributeError, match=f"'{name}'; did you mean '{near}'"):
            getattr(dpfl, name)
    with pytest.raises(AttributeError, match=r"'qqqqq'$"):
        dpfl.qqqqq  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean 'write_report'"):
        dpfl.report.write_reports  # noqa: B018


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nothing_that_decides_privacy_has_a_default(name: str) -> None:
    for setting in ("clip", "batch_size", "lr"):
        if setting in METHODS[name].settings and not (
            setting == "batch_size" and name in WHOLE_GRADIENTS
        ):
            assert METHODS[name].settings[setting].default is inspect.Parameter.empty


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'clip'"):
        make_strategy("weiavg", {**SETTINGS, "clipp": 1})
    with pytest.raises(ConfigurationError, match="needs clip"):
        make_strategy("weiavg", {"lr": 0.1, "batch_size": 4, "local_steps": 2})
    with pytest.raises(ConfigurationError, match="length of local work"):
        make_strategy("weiavg", {"lr": 0.1, "clip": 1.0, "batch_size": 4})
    with pytest.raises(ConfigurationError, match="both given"):
        make_strategy("weiavg", {**SETTINGS, "local_epochs": 1})
    with pytest.raises(ConfigurationError, match="spending"):
        make_strategy("weiavg", {**SETTINGS, "spending": "lavish"})


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    assert find("weiavg") is METHODS["weiavg"]
    with pytest.raises(ConfigurationError, match="weiavg"):
        find("weiavgg")
    with pytest.raises(KeyError):
        METHODS["weiavgg"]


def test_every_method_is_in_one_family_behind_its_references_simplest_first() -> None:
    references = {name for name, one in METHODS.items() if one.reference}
    assert references == {"fedavg"}
    compared = [name for family in families().values() for name in family if name not in references]
    assert sorted(compared) == sorted(set(METHODS) - references)
    for family, names in families().items():
        ours = [METHODS[name] for name in names if name not in references]
        assert set(names) == references | {one.name for one in ours}
        assert all(one.family == family for one in ours)
        assert [one.simplicity for one in ours] == sorted(one.simplicity for one in ours)
        assert set(names[: len(references)]) == references


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_a_search_tries_can_be_built(name: str) -> None:
    settings = {**SETTINGS, "dimension": 3}
    known = METHODS[name].settings
    for setting, values in METHODS[name].search.items():
        for value in values:
            whole = isinstance(value, float) and value < 1 and known[setting].annotation is int
            tried = {setting: max(1, round(100 * value)) if whole else value}
            METHODS[name](**{k: v for k, v in (settings | tried).items() if k in known})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", "fast"), ("lr", float("nan")), ("batch_size", 2.5), ("local_steps", "two")],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        make_strategy("weiavg", {**SETTINGS, setting: value})


def test_a_search_over_a_setting_that_is_not_there_is_refused_at_declaration() -> None:
    with pytest.raises(ConfigurationError, match="powr"):

        @dpfl.method(family="heterogeneous", simplicity=1, search={"powr": (1.0,)})
        def odd(work: RecordWork, *, power: float = 1.0) -> dpfl.Strategy:
            """Do nothing new."""
            return record_level("odd", work, UniformWeights())


def test_a_setting_that_a_method_fixes_is_not_one_of_its_settings() -> None:
    @dpfl.method(family="heterogeneous", simplicity=1, fixed=("spending",))
    def fixed(work: RecordWork) -> dpfl.Strategy:
        """Spend as everyone would."""
        return record_level("fixed", work, UniformWeights())

    assert "spending" not in fixed.settings
    with pytest.raises(ConfigurationError, match="spending"):
        fixed(**SETTINGS, spending="uniform")
    assert fixed(**SETTINGS).name == "fixed"


def test_without_other_packages_there_are_only_ours() -> None:
    homes = {one.factory.__module__.rpartition(".")[0] for one in METHODS.values()}
    assert homes == {"dpfl.methods"}


@dataclass(frozen=True, kw_only=True)
class CappedWeights(UniformWeights):
    clip: float
    cap: float = 0.5


def test_a_factory_may_take_a_component_made_of_settings_like_any_others() -> None:
    @dpfl.method(family="heterogeneous", simplicity=1, search={"cap": (0.1,)}, fixed=("spending",))
    def capped(
        work: RecordWork, weights: CappedWeights, *, step: ServerSgd | None = None, tries: int = 1
    ) -> dpfl.Strategy:
        """Cap what each client counts."""
        return record_level("capped", work, weights, assumptions=(f"{tries}, {step}",))

    assert set(capped.settings) == {
        *("lr", "clip", "batch_size", "local_steps", "local_epochs", "selection"),
        *("momentum", "weight_decay", "proximal", "clipping", "cap", "step", "tries"),
    }
    built = capped(**SETTINGS, cap=0.25, step=ServerSgd(momentum=0.5))
    assert built.weights == CappedWeights(clip=SETTINGS["clip"], cap=0.25)
    assert built.local.clip == SETTINGS["clip"]  # type: ignore[attr-defined]
    assert "momentum=0.5" in built.assumptions[0]  # a keyword-only argument is passed on as it is
    assert capped(**SETTINGS).weights.cap == 0.5  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="needs clip"):
        capped(**{name: value for name, value in SETTINGS.items() if name != "clip"})
    with pytest.raises(ConfigurationError, match="cap = 'much'"):
        capped(**SETTINGS, cap="much")


def test_a_default_of_a_factory_stays_what_it_is() -> None:
    @method(family="own", simplicity=1)
    def own(
        work: RecordWork,
        weights: Weights = EpsilonWeights(),  # noqa: B008 - frozen
        step: ServerSgd = ServerSgd(momentum=0.9),  # noqa: B008 - frozen
    ) -> Strategy:
        """A method with components of its own."""
        return record_level("own", work, weights, step=step)

    strategy = own(**SETTINGS)
    assert strategy.weights == EpsilonWeights()
    assert strategy.step == ServerSgd(momentum=0.9)
    assert own(**SETTINGS, weights=UniformWeights()).weights == UniformWeights()


@dataclass(frozen=True, kw_only=True)
class OneDefault:
    clip: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AnotherDefault:
    clip: float = 2.0


def test_a_setting_with_two_defaults_is_refused_at_declaration() -> None:
    def factory(one: OneDefault, other: AnotherDefault) -> Strategy:
        """Which clip is it?"""
        raise AssertionError

    with pytest.raises(ConfigurationError, match=r"'clip'.*other defaults"):
        method(family="own", simplicity=1)(factory)
