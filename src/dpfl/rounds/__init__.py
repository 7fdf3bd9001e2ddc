"""A round: open (server), client, close (server). The simulator calls the three in a loop, a
deployment across a network.

Order of a round:

1.  the server asks who can afford it, and draws the cohort (:mod:`dpfl.rounds.open`);
2.  what the world will see is **charged, durably**; an amplified cost to everyone eligible, drawn
    or not (:mod:`dpfl.rounds.plans`);
3.  one message goes to each client: the model, what the plugs share, how many were drawn;
4.  a client checks and charges its own ledger, before any noise is drawn
    (:mod:`dpfl.rounds.client`);
5.  local work, then client stages; the raw update never leaves the client;
6.  the channel delivers rows or a sum (:mod:`dpfl.rounds.close`);
7.  the server halves of the stages undo what they can, and rows are re-based on the global model;
8.  clean, weigh, central noise, denoise, step (:mod:`dpfl.rounds.aggregate`);
9.  the operator's record is written (:mod:`dpfl.rounds.record`).

Releases before round one are rounds with negative numbers (:mod:`dpfl.rounds.release`), and so are
measurements of an accounted metric (:mod:`dpfl.rounds.measure`). A client that abstains, fails or
is lost is an ordinary outcome.
"""

from dpfl.rounds.arrival import Arrival
from dpfl.rounds.client import Workshop, blocks_of, client_round
from dpfl.rounds.close import close_round
from dpfl.rounds.enrol import Agreement, Run, enrol, first_state
from dpfl.rounds.exchange import Plan, Uplink
from dpfl.rounds.open import open_round
from dpfl.rounds.plans import can_go_on, charging
from dpfl.rounds.release import buffer_shapes, write_buffers
from dpfl.rounds.sums import SumOfUploads, SumPlan

__all__ = [
    "Agreement",
    "Arrival",
    "Plan",
    "Run",
    "SumOfUploads",
    "SumPlan",
    "Uplink",
    "Workshop",
    "blocks_of",
    "buffer_shapes",
    "can_go_on",
    "charging",
    "client_round",
    "close_round",
    "enrol",
    "first_state",
    "open_round",
    "write_buffers",
]
