"""Real federations on Flower: the same three functions of a round, between sites that trust nobody but their own ledger."""
