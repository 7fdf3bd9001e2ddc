"""Loaders of named data sets: ``dpfl.datasets.named.load_dataset``.

Small sets come with the package or with scikit-learn. The others are read from files that the user
has fetched; nothing is downloaded.
"""
