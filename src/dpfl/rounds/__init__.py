"""A round: open (server), client, close (server). The simulator calls the three in a loop, a
deployment across a network.

Order of a round: eligibility; draw the cohort; **charge, durably**; only then noise and local work;
deliver; undo the stages; clean, weigh, noise, denoise, step. A client that abstains, fails or is
lost is an ordinary outcome.
"""

from dpfl.rounds.client import Workshop, blocks_of, charging, client_round
from dpfl.rounds.close import close_round
from dpfl.rounds.enrol import Agreement, Plan, Run, Uplink, enrol, first_state
from dpfl.rounds.open import open_round
from dpfl.rounds.plans import can_go_on
from dpfl.rounds.release import buffer_shapes, write_buffers

__all__ = [
    "Agreement",
    "Plan",
    "Run",
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
