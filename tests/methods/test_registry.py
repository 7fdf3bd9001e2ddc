"""Methods by name."""

from __future__ import annotations

import inspect

import pytest

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.methods import METHODS, about, make_strategy, settings_of

SETTINGS = {"lr": 0.1, "clip": 1.0, "batch_size": 4, "local_steps": 2}
WHOLE_GRADIENTS = {"dprp", "airsgd"}  # of all records, unless a batch is asked for


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_builds_is_public_and_describes_itself(name: str) -> None:
    settings = {
        key: value
        for key, value in {**SETTINGS, "dimension": 3}.items()
        if key in settings_of(name)
    }
    strategy = make_strategy(name, settings)
    assert strategy.name == name
    assert getattr(dpfl, name) is METHODS[name]
    assert about(name).endswith(".")
    assert strategy.assumptions


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nothing_that_decides_privacy_has_a_default(name: str) -> None:
    for setting in ("clip", "batch_size", "lr"):
        if setting in settings_of(name) and not (
            setting == "batch_size" and name in WHOLE_GRADIENTS
        ):
            assert settings_of(name)[setting].default is inspect.Parameter.empty


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
