"""A round: open (server), client, close (server). The simulator calls the three in a loop, a
deployment across a network.

Order of a round: eligibility; draw the cohort; **charge, durably**; only then noise and local work;
deliver; undo the stages; clean, weigh, noise, denoise, step. A client that abstains, fails or is
lost is an ordinary outcome.
"""

from dpfl.rounds.client import admit, blocks_of, client_rounds, work
from dpfl.rounds.close import close_round
from dpfl.rounds.enrol import Agreement, Plan, Run, Uplink, enrol, first_state
from dpfl.rounds.open import open_round
from dpfl.rounds.plans import affords, covered

__all__ = [
    "Agreement",
    "Plan",
    "Run",
    "Uplink",
    "admit",
    "affords",
    "blocks_of",
    "client_rounds",
    "close_round",
    "covered",
    "enrol",
    "first_state",
    "open_round",
    "work",
]
