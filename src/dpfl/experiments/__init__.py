"""Comparisons, sweeps, tuning, studies, plans and descriptions."""
