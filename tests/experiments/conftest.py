"""The small experiment of the simulator's tests."""

from tests.sim.conftest import experiment as experiment, small as small
