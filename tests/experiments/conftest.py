"""The small experiment of the simulator's tests."""

from tests.sim.conftest import experiment as experiment
from tests.sim.conftest import small as small
