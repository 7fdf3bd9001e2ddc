"""One file a paper: its unusual piece beside its equation, and a factory that assembles the
strategy.
"""
