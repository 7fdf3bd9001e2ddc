"""The user's own arrays: checked, converted, and split into a training and a test part.

Whatever cannot be used is refused with the client's name: arrays that are not numbers, targets that
the task does not take, lengths that differ, too few records.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.data.records import Parts, Records, Span, check_data
from dpfl.data.sources import dense, is_mapped, mapped_tensor
from dpfl.data.units import TEST_FRACTION, UnitKey, Units, record_units, units_to_test
from dpfl.tasks import Classification, Task

MOST_TESTED = 10_000
"""Records of a memory-mapped file that are set aside for testing at most."""
_AT_ONCE = 1 << 22  # numbers that are looked at in one piece
ENCODE = "encode texts with the vocabulary that was named"


def client_parts(
    client: Any,
    arrays: Sequence[Any] | Units,
    *,
    task: Task,
    tokens: bool,
    key: UnitKey,
    stratified: bool = False,
) -> Parts:
    """Check one client's arrays: (features, targets), with test features and targets or without.

    Or its :class:`~dpfl.data.units.Units`. Without a test part, a fifth of the units is set aside
    by their hashes under the ``key``, or with ``stratified`` a fifth of each class. ``task`` says
    what targets look like; ``tokens``, whether features are whole numbers for an embedding.
    """
    check_data(
        isinstance(client, str) and client.isprintable() and client != "",
        f"client {client!r}",
        "has no printable name",
        "name clients by text without control characters",
    )
    where = f"client '{client}'"
    remedy = "give (features, targets), test parts too if any"
    problem = f"has a {type(arrays).__name__} instead of arrays"
    torch_remedy = f"{remedy}; torch datasets go to Federation.from_torch"
    if isinstance(arrays, Units):
        features, labels = _pair(where, arrays.features, arrays.targets, task, tokens)
        return split_off(client, _marked(features, labels, arrays), key, stratified=stratified)
    check_data(isinstance(arrays, tuple | list), where, problem, torch_remedy)
    check_data(len(arrays) in (2, 4), where, f"has {len(arrays)} arrays", remedy)
    features, labels = _pair(where, arrays[0], arrays[1], task, tokens)
    if len(arrays) == 2 and is_mapped(arrays[0]):  # drawing records would copy them
        first, last = split_end(client, (0, len(labels)), MOST_TESTED)
        train, test = (Records(features[slice(*s)], labels[slice(*s)]) for s in (first, last))
        return train, test
    if len(arrays) == 4:
        test = Records(*_pair(where, arrays[2], arrays[3], task, tokens))
        return Records(features, labels), test
    units = record_units(features.numpy(), dense(where, arrays[1]), key)  # before the task's labels
    return split_off(client, _marked(features, labels, units), key, stratified=stratified)


def _marked(features: Tensor, labels: Tensor, units: Units) -> Records:
    """Records as they are trained on, with the marks of their units and what is no blank."""
    live = None if not units.blank.any() else torch.from_numpy(~units.blank)
    return Records(features, labels, live, tuple(units.marks))


def _pair(
    where: str, features: Any, targets: Any, task: Task, tokens: bool
) -> tuple[Tensor, Tensor]:
    """Convert features and targets to tensors.

    Features become float32, or int64 where they are tokens; targets become what the task takes.
    """
    try:
        mapped = is_mapped(features)
        kind = np.int64 if tokens else np.float32
        given = dense(where, features)
        check_data(
            given.dtype.kind in "iu" or not given.size or not tokens,
            where,
            f"has tokens of type {given.dtype}",
            "give whole numbers, one a token",
        )
        check_data(
            given.dtype.kind != "c", where, "has complex features", "give arrays of real numbers"
        )
        largest = int(given.max()) if tokens and given.size else 0
        check_data(largest <= np.iinfo(np.int64).max, where, f"has token {largest}", ENCODE)
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            if mapped:
                x = mapped_tensor(where, features, kind)
            else:
                x = torch.from_numpy(np.array(given, dtype=kind))
        given = dense(where, targets)
    except (ValueError, TypeError) as error:
        raise DataError(
            where,
            f"has features or labels that are not numbers ({error})",
            "give arrays of numbers",
        ) from error
    check_data(
        not x.ndim or not len(x) or x[0].numel() > 0,
        where,
        "has records without a single number",
        "give at least one feature",
    )
    rows = max(1, _AT_ONCE * len(x) // max(1, x.numel()))
    check_data(
        all(bool(torch.isfinite(part).all()) for part in torch.split(x, rows)),
        where,
        "has features that are not finite numbers",
        "fill missing values, scale huge ones",
    )
    check_data(
        given.ndim > 0 < x.ndim,
        where,
        "has a single number for all records",
        "give one row of features and one target per record",
    )
    y = task.check_targets(where, given)
    check_data(
        len(x) == len(y),
        where,
        f"has {len(x)} records and {len(y)} labels",
        "give one label per record",
    )
    return x, y


def split_off(client: str, records: Records, key: UnitKey, *, stratified: bool = False) -> Parts:
    """Set a fifth of a client's units aside for testing, by the hashes of their marks under a key.

    Both parts are in the order of the hashes. A client needs two units at least. With
    ``stratified`` the test units have the mix of classes that all units have. Their number is the
    same, but which units are trained on then depends on labels: see
    :attr:`dpfl.Federation.stratified`.
    """
    check_data(
        len(records) >= 2,
        f"client '{client}'",
        f"has {len(records)} record(s), too few for a train and a test part",
        "leave it out, or give both parts",
    )
    order = torch.tensor(key.order(records.marks or ()))
    cut = units_to_test(len(records))
    order = _by_class(records.labels, order, cut) if stratified else order
    return records.taken(order[cut:]), records.taken(order[:cut])


def _by_class(labels: Tensor, order: Tensor, cut: int) -> Tensor:
    """Put ``cut`` records first whose mix of classes is that of all records.

    The class that is furthest behind its share comes next.
    """
    waiting = [order[labels[order] == label].tolist() for label in torch.unique(labels)]
    shares = [len(members) / len(labels) for members in waiting]
    taken = [0] * len(waiting)
    tests: list[int] = []
    for count in range(1, cut + 1):
        open_ = [i for i, members in enumerate(waiting) if taken[i] < len(members)]
        most = max(open_, key=lambda i: count * shares[i] - taken[i])
        tests.append(waiting[most][taken[most]])
        taken[most] += 1
    chosen = set(tests)
    return torch.tensor([*tests, *(i for i in order.tolist() if i not in chosen)])


def split_end(client: str, span: Span, most: int | None = None) -> tuple[Span, Span]:
    """Set the last fifth of a stretch aside: for windows of a text, which overlap.

    At most ``most`` records are, if it is given.

    >>> split_end("a", (0, 10))
    ((0, 8), (8, 10))
    """
    first, last = span
    check_data(
        last - first >= 2,
        f"client '{client}'",
        "has one record, too few to set some aside",
        "leave it out",
    )
    aside = max(1, round(TEST_FRACTION * (last - first)))
    cut = last - (aside if most is None else min(aside, most))
    return (first, cut), (cut, last)


def with_classes(task: Task, classes: int | None) -> Task:
    """Give a classification its number of classes, where that is known."""
    if classes is None:
        return task
    if not isinstance(task, Classification):
        raise ConfigurationError(
            "federation", f"classes = {classes} for {task.name}", "leave it out"
        )
    return replace(task, classes=classes)


def with_declared(task: Task, classes: int | None) -> Task:
    """Fill in the number of ``classes`` that data declare, where a classification leaves it out."""
    if isinstance(task, Classification) and task.classes is None:
        return replace(task, classes=classes)
    return task
