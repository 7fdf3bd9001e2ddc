"""Loaders of named data sets."""
