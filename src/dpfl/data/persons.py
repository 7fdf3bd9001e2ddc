"""Persons: all records of one person become one unit, of a bounded number of records.

*Formal guarantees.* A unit is a function of its person's records and of public constants alone:
which records are kept follows from a public seed, the person's id and how many records the person
has. Whatever one person's records are, exactly one unit depends on them; only where a schema drops
all of them is there none, and the number of units is public. A unit is sampled, clipped and split
into training and test part as a whole, so every epsilon is about persons.
"""

import numpy as np

from dpfl.core.random import PublicSeed


def by_person(
    features: np.ndarray, targets: np.ndarray, persons: np.ndarray, most: int, seed: PublicSeed
) -> tuple[np.ndarray, np.ndarray]:
    """Put the records of each person together, at most so many of each.

    Returns features and targets of one unit a person, in the order of the persons' ids. With
    ``most`` = 1 a unit is a record. Else it has ``most`` places: features (persons, most, ...) and
    targets (persons, most, ...) as float64, where NaN marks a place without a record; its features
    repeat the person's first record.

    >>> x, y, who = np.array([[1.0], [2.0], [3.0]]), np.array([0, 1, 1]), np.array(["b", "a", "b"])
    >>> features, targets = by_person(x, y, who, 2, PublicSeed(0))
    >>> features[..., 0].tolist(), targets.tolist()
    ([[2.0, 2.0], [1.0, 3.0]], [[1.0, nan], [0.0, 1.0]])
    """
    _, who = np.unique(persons.astype(str), return_inverse=True)
    order = np.argsort(who, kind="stable")
    edges = np.flatnonzero(np.diff(who[order])) + 1
    places, real = [], []
    for rows in np.split(order, edges) if len(order) else []:
        if len(rows) > most:
            own = seed.child("person", str(persons[rows[0]])).numpy()
            rows = rows[np.sort(own.permutation(len(rows))[:most])]
        real.append(np.arange(most) < len(rows))
        places.append(np.concatenate([rows, np.repeat(rows[:1], most - len(rows))]))
    chosen = np.array(places, dtype=np.int64).reshape(-1, most)
    if most == 1:
        return features[chosen[:, 0]], targets[chosen[:, 0]]
    found = targets[chosen].astype(np.float64)
    found[~np.array(real, dtype=bool).reshape(-1, most)] = np.nan
    return features[chosen], found
