"""The simulator: a whole federation in one process, a few, or on a Ray cluster.

:func:`dpfl.sim.train.train` trains from Python, :func:`dpfl.sim.train.run_experiment` runs an
experiment file in a folder. Both play the rounds of :mod:`dpfl.rounds` in a loop
(:mod:`dpfl.sim.loop`). What no real server knows, such as the noise that was really added, is in
:mod:`dpfl.sim.truth`, and whatever is computed from it is marked as such.
"""
