"""The game of an audit: canaries that are there or not, and what an adversary sees of each.

Canaries are units whose contribution is as large as it can be, in directions of their own
(:mod:`dpfl.attacks.auditing.probes`). A fair coin decides for each whether it is there (zero-out),
or whether it is e_j or -e_j (replace-one). What is seen of it are *sources*: one number in every
round and release, its coordinate of the victim's row, of the sum, or of the published model. The
score is the likelihood ratio of Gaussian sources: each is weighted by its signal over its variance.
Both are learned by playing the game twice on paper, under the same made-up noise, with one half of
the canaries and with the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfl.attacks.auditing.claims import Claim
from dpfl.attacks.auditing.lower_bounds import Trials
from dpfl.attacks.auditing.probes import (
    PARTS,
    Floats,
    Probe,
    build_probe,
    canary_federation,
    coordinates,
)
from dpfl.attacks.observation import Transcript, observe
from dpfl.core.random import PublicSeed
from dpfl.core.types import Adjacency, Budget, Observer, Rows, State
from dpfl.sim.opening import Setup
from dpfl.strategy import Strategy

Bools = NDArray[np.bool_]
FILLERS = 3
"""Clients without a canary, whose budget is larger."""

_MOST_RUNS, _MOST_HEAD_RUNS = 300, 60  # of a game, and of one whose method plans many rounds


@dataclass(frozen=True, kw_only=True)
class Game:
    """A federation of canaries, and the strategy that is audited.

    ``adjacency`` is the reading: what a coin decides. ``observer`` is the adversary whose view is
    scored. With ``apart`` every one of the ``canaries`` is at a client of its own; otherwise all
    are records of one client. ``budget`` is that of their clients, and ``fillers`` is how many
    clients have none of them.
    """

    strategy: Strategy
    probe: Probe
    adjacency: Adjacency
    observer: Observer
    budget: Budget
    rounds: int | None
    canaries: int
    apart: bool
    fillers: int = FILLERS
    engine: str = "stacked"

    @property
    def own_rows(self) -> bool:
        """Whether the adversary sees a row of each canary's own: they may share a direction."""
        rows = self.strategy.channel.sees_rows and not self.strategy.local.pooled
        return self.observer is Observer.SERVER and rows and self.apart

    @property
    def most_runs(self) -> int:
        """How often the game can be played in reasonable time."""
        return _MOST_HEAD_RUNS if self.probe == "head" else _MOST_RUNS

    @property
    def directions(self) -> NDArray[np.int64]:
        """The coordinate of each canary."""
        return np.zeros(self.canaries, np.int64) if self.own_rows else np.arange(self.canaries)

    @property
    def size(self) -> int:
        """How many coordinates a record has; a multiple of the parts of a split model."""
        return -(-max(int(self.directions.max()) + 1, PARTS) // PARTS) * PARTS

    @property
    def clients(self) -> list[str]:
        """The names of the clients that hold canaries: one for each canary, or one for all."""
        return [f"c{number:05}" for number in range(self.canaries if self.apart else 1)]

    def play(self, present: Bools, seed: int | None) -> Transcript:
        """Play all rounds with the canaries that are ``present``.

        Without a ``seed`` noise is drawn from the operating system.
        """
        absent = -1.0 if self.adjacency is Adjacency.REPLACE_ONE else 0.0
        marks = np.where(present, 1.0, absent).reshape(len(self.clients), -1)
        own = self.directions, self.size, self.budget
        return observe(
            Setup(
                model=build_probe(self.probe, self.size),
                federation=canary_federation(self.probe, marks, *own, fillers=self.fillers),
                strategy=self.strategy,
                rounds=self.rounds,
                seed=PublicSeed(seed or 0),
                seeded=seed is not None,
                digest="audit",
                description="",
                settings={"evaluate_every": 10**6, "engine": self.engine},
            )
        )

    def claim(self, transcript: Transcript, observer: Observer | None = None) -> Claim:
        """What a client with a canary is charged against the game's adversary, or another one.

        It is read under the game's adjacency; where samples of a fixed size have a bound under
        replace-one only, under that.
        """
        seen_by = observer or self.observer
        promise = transcript.agreement.strategy.promise
        history = transcript.history(self.clients[0], seen_by)
        reading = self.adjacency
        if any(event.sampling == "uniform" for event in history):
            reading = Adjacency.REPLACE_ONE
        promise = replace(promise, observer=seen_by, adjacency=reading)
        return Claim(history=history, adjacency=reading, delta=self.budget.delta, promise=promise)

    # -- what is seen ------------------------------------------------------------------------------

    def sources(self, transcript: Transcript) -> Floats:
        """What the adversary sees of each canary: a row a round or release, a column a canary."""
        if self.observer is Observer.WORLD:
            steps = [after - before for before, after in pairwise(transcript.world_view())]
            return np.stack([self._shown([step], transcript.final) for step in steps])
        released = [self._release(transcript.released_view(one)) for one in transcript.releases]
        found = [one for one in released if one is not None]
        for seen in transcript.training:
            view = transcript.server_view(seen)
            if not isinstance(view, Rows):
                found.append(self._shown([view.vector], seen.state))
                continue
            rows = dict(zip(view.cohort.ids, view.matrix, strict=True))
            none = torch.zeros(view.layout.size)  # who was not drawn sends nothing
            found.append(self._shown([rows.get(c, none) for c in self.clients], seen.state))
        return np.stack(found)

    def _shown(self, vectors: list[Tensor], state: State) -> Floats:
        """What one vector shows of all canaries, or a vector a canary of its own."""
        return self._picked([self.coordinates(vector, state) for vector in vectors])

    def coordinates(self, vector: Tensor, state: State) -> Floats:
        """One number a direction, from a flat vector of the model's parameters; ``state`` is the
        server's, which everybody knows.
        """
        return coordinates(self.probe, vector, state.buffers)

    def _picked(self, read: list[Floats]) -> Floats:
        if len(read) == 1:
            return np.asarray(read[0][self.directions])
        pairs = zip(read, self.directions, strict=True)
        return np.array([one[direction] for one, direction in pairs])

    def _release(self, answers: Mapping[str, Tensor] | Tensor) -> Floats | None:
        """What a mean, or the diagonal of a Gram matrix, shows of canaries; None where a release
        has another form.
        """
        size = self.size
        diagonal = [row * size - row * (row - 1) // 2 for row in range(size)]
        own = [answers] if isinstance(answers, Tensor) else [answers[c] for c in self.clients]
        read = [one.double().numpy() for one in own]
        if len(read[0]) == size * (size + 1) // 2:
            read = [one[diagonal] for one in read]
        return self._picked(read) if len(read[0]) == size else None


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How sources become scores: one weight each."""

    weights: Floats

    @classmethod
    def learn(cls, game: Game, seed: int) -> Scorer:
        """Learn signal and spread of every source on paper, under made-up noise."""
        there = np.arange(game.canaries) % 2 == 0
        seen, swapped = (game.sources(game.play(own, seed)) for own in (there, ~there))
        signal = ((seen - swapped) * np.where(there, 1, -1)).mean(axis=1)
        absent = swapped[:, there]
        spread = np.maximum(absent.var(axis=1), 1e-12 * signal**2 + 1e-300)  # never without noise
        return cls(weights=signal / spread)

    def trials(self, game: Game, transcript: Transcript, present: Bools) -> Trials:
        """Score what was seen of every canary."""
        return Trials(scores=self.weights @ game.sources(transcript), present=present)
