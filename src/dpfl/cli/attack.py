"""``dpfl attack``: inversion, membership and poisoning, played against a simulation.

An attack takes an experiment, as ``dpfl run`` does, and plays it on this machine. It never talks to
a deployment.
"""

from dpfl.cli import options as o
from dpfl.cli.attack_invert import invert
from dpfl.cli.attack_membership import membership
from dpfl.cli.attack_poison import poison

app = o.group("Attack a simulation of an experiment: invert, membership, poison.")
app.command()(invert)
app.command()(poison)
app.command()(membership)
