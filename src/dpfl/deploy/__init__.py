"""Real federations on Flower: the functions of a simulated round, between sites on a network.

A site trusts only its own policy and its own ledger. ::

    server                                     site
    serving      start and follow a study      participation  connect, and stay connected
    superlink    Flower's processes            site           answer requests
    coordinator  enrol, run rounds, deliver    policy         what the site accepts
    connections  who is where, who said no     commitment     what it plans and pays for

``messages`` and ``requests`` are what travels, ``transport`` carries it, ``in_process_grid``
stands in for the network in tests.
"""

from importlib.util import find_spec

from dpfl.core.checks import check

_REMEDY = "run: pip install 'dpfl[flower]'"
check(find_spec("flwr") is not None, "Flower", "is not installed", _REMEDY)
