"""Which clients have large budgets: two groups of claimed epsilons, and the upper one's rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, positive
from dpfl.core.types import Claims, Rows

SPLITS = ("gmm", "kmeans", "top_fraction", "threshold")


@dataclass(frozen=True, kw_only=True)
class BudgetSplit:
    """Who counts as public: decided once over all clients, from claimed epsilons.

    ``rule`` is ``gmm`` (a mixture of two Gaussians on log epsilon), ``kmeans``, ``top_fraction``
    (the ``fraction`` with the largest claims), ``threshold`` (claims of at least ``threshold``),
    or a tuple of client ids.
    """

    rule: str | tuple[str, ...] = "gmm"
    fraction: float = 0.1
    threshold: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            one_of("public split", SPLITS, public=self.rule)
        if self.rule == "threshold":
            positive("public split", public_threshold=self.threshold)
        check(
            0 < self.fraction < 1,
            "public split",
            f"public_fraction = {self.fraction}",
            "give a share between 0 and 1",
        )

    def __call__(self, claims: Mapping[str, Claims]) -> frozenset[str]:
        """Return the public clients; at least one, and not everyone."""
        usable = {client: claim.epsilon for client, claim in claims.items() if claim.usable}
        if not isinstance(self.rule, str):
            found = set(self.rule)
            check(
                found <= claims.keys(),
                "public split",
                f"{sorted(found - claims.keys())} are not clients",
                "list ids of the federation",
            )
        elif self.rule == "top_fraction":
            count = max(1, round(self.fraction * len(claims)))
            found = set(sorted(usable, key=lambda client: (-usable[client], client))[:count])
        elif self.rule == "threshold":
            found = {client for client in usable if usable[client] >= (self.threshold or 0)}
        else:
            found = self._clustered(usable)
        check(
            0 < len(found) < len(claims),
            "public split",
            f"makes {'everybody' if found else 'nobody'} public out of {len(claims)} clients",
            "use top_fraction, a threshold between the budgets, or another method",
        )
        return frozenset(found)

    def _clustered(self, usable: Mapping[str, float]) -> set[str]:
        """Two groups on the logarithm of epsilon; one spread for both, so that more epsilon never
        makes private.
        """
        ids = sorted(usable)
        logs = np.log([[usable[client]] for client in ids])
        check(
            len(ids) >= 2 and np.ptp(logs) >= 1e-9,
            "public split",
            "all claimed epsilons are equal, nothing tells public from private",
            "use top_fraction, or another method",
        )
        # Start from the extremes: a start drawn at random can split one group in two.
        means = np.array([[logs.min()], [logs.max()]])
        if self.rule == "kmeans":
            from sklearn.cluster import KMeans

            model = KMeans(2, init=means, n_init=1).fit(logs)
            centres = model.cluster_centers_
        else:
            from sklearn.mixture import GaussianMixture

            spread = {"covariance_type": "tied", "reg_covar": 1e-4}
            model = GaussianMixture(2, means_init=means, **spread).fit(logs)
            centres = model.means_
        upper = model.predict(logs) == centres[:, 0].argmax()
        return set(itertools.compress(ids, upper))


@dataclass(frozen=True)
class PublicRows:
    """The public rows of a round and their weights, epsilon_i / sum over the public ones.

    ``named`` tells which rows they are; one that holds nothing but zeros spans nothing, and is left
    out.
    """

    named: Tensor
    rows: Tensor
    weights: Tensor

    @classmethod
    def of(cls, public: Container[str], rows: Rows) -> PublicRows:
        """Take the rows of the clients in ``public``."""
        ids = rows.cohort.ids
        matrix = rows.matrix
        named = torch.tensor([client in public for client in ids], dtype=torch.bool)
        if matrix.numel():
            named &= matrix.abs().amax(dim=1) > 0
        members = itertools.compress(ids, named.tolist())
        claimed = (rows.cohort.claims[client].epsilon for client in members)
        epsilons = [epsilon if 0 < epsilon < math.inf else 0 for epsilon in claimed]
        weights = torch.tensor(epsilons, dtype=torch.float64)
        equal = torch.full_like(weights, 1 / max(len(weights), 1))
        weights = weights / weights.sum() if float(weights.sum()) > 0 else equal
        return cls(named, matrix[named], weights)
