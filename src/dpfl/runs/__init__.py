"""Experiments as files, run folders, checkpoints."""
