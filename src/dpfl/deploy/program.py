"""Run one of Flower's programs, and end when the process that started it has ended.

A process that is killed cannot end what it has started. Each program that a study's server starts
therefore follows its parent, and leaves no orphan behind.
"""

import sys
from importlib.metadata import entry_points

from dpfl.runs.processes import end_with

if __name__ == "__main__":
    _, parent, name, *arguments = sys.argv
    end_with(int(parent))
    (found,) = entry_points(group="console_scripts", name=name)
    sys.argv = [name, *arguments]
    sys.exit(found.load()())
