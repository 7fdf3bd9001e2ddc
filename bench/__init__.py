"""Measures dpfl against Opacus, pfl and Flower on the same work. Start it with ``make bench``."""
