"""Real federations on Flower: the same three functions of a round, between sites that trust only
their own ledger.
"""
