"""What happens after every round of :func:`dpfl.train`: callbacks, and early stopping.

Early stopping decides by a metric that costs no privacy: one on public records, or an accounted
one. The simulator's own scores on the clients' test records are not covered by any epsilon; they
can be used under an explicit name only, and the result is flagged. So is a run that a callback
ends, unless the callback says that its decision rests on nothing private.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core.checks import check, not_negative, whole_number
from dpfl.core.errors import DataError
from dpfl.models.checks import outputs_of
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import Statements
from dpfl.rounds import write_buffers
from dpfl.rounds.record import RoundRecord
from dpfl.sim.loop import Simulation
from dpfl.sim.summary import statements_of
from dpfl.tasks import Task
from dpfl.tasks.metrics import find_metric

Metric = Callable[[nn.Module, int], float | None]
"""Called with the model and the number of rounds done; None means that it was not measured."""


@dataclass(kw_only=True, eq=False)
class RoundEnd:
    """A round that has ended, as callbacks see it.

    ``round`` counts the rounds done, ``rounds`` those that are planned. ``record`` is the
    operator's record of the round, and ``history`` holds those of all rounds. ``task`` is what is
    learned, ``simulation`` what is played.
    """

    round: int
    rounds: int
    record: RoundRecord
    history: Sequence[RoundRecord]
    task: Task
    simulation: Simulation = field(repr=False)
    stopped: str | None = field(default=None, init=False)
    public: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._vector, self._buffers = self.simulation.published(), self.simulation.state.buffers

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model as it would be published after this round."""
        model = copy.deepcopy(self.simulation.model)
        self.simulation.layout.write(self._vector, model)
        write_buffers(model, self._buffers)
        return model.eval()

    @property
    def ledger(self) -> Ledger:
        """The ledger that the run is charged to."""
        return self.simulation.run.ledger

    @property
    def spent(self) -> Statements:
        """What each client has spent so far."""
        return Statements.of(statements_of(self.simulation))

    def evaluate(self, features: Tensor, targets: Tensor, metric: str | None = None) -> float:
        """Measure the model on records of the caller's own, by ``metric`` or the task's.

        ``features`` and ``targets`` are stored as the federation's are. Nothing accounts for this:
        give public records.
        """
        federation = self.simulation.federation
        task = self.task.of_records
        given = tuple(features.shape[1:])
        wanted = federation.record_shape
        check(
            given == wanted,
            "public records",
            f"have shape {given}, those of the federation {wanted}",
            "prepare them alike",
            DataError,
        )
        with torch.no_grad():
            run = partial(outputs_of, self.model, {})
            outputs = task.outputs(run, federation.inputs(features))
        return task.with_metric(metric).score(outputs, targets)

    def stop(self, reason: str = "stopped by a callback", *, public: bool = False) -> None:
        """End training after this round; the summary says why, by ``reason``.

        ``public`` says that the decision rests on public or accounted information and on the model
        alone, not on test scores or on who took part. Otherwise the run is flagged. Where several
        callbacks end it, all of them must say so.
        """
        self.public = public and (self.public or self.stopped is None)
        self.stopped = reason


Callback = Callable[[RoundEnd], object]
"""Called after every round. Returning True or a reason ends training, as :meth:`RoundEnd.stop`."""

_FLAGGED = RaisedFlag(Flag.UNACCOUNTED_STOP)


class PublicMetric:
    """A metric on public records: early stopping by it costs no privacy.

    ``features`` and ``targets`` are arrays as :meth:`dpfl.Federation.from_arrays` takes them;
    nothing checks that they are public. ``metric`` names one of the task's metrics, by default the
    one that ranks.
    """

    unaccounted = False

    def __init__(self, features: Any, targets: Any, metric: str | None = None) -> None:
        self.features = torch.as_tensor(np.array(features))
        self.targets = np.array(targets)
        self.metric = metric
        check(
            0 < len(self.features) == len(targets),
            "PublicMetric",
            f"has {len(self.features)} records and {len(targets)} targets",
            "give one target per record, at least one",
        )

    def of_round(self, end: RoundEnd) -> float | None:
        """Measure the model of a round."""
        stored = end.simulation.federation.shards.values()
        like = next(iter(stored)).train.features
        targets = end.task.of_records.check_targets("PublicMetric", self.targets)
        return end.evaluate(self.features.to(like.dtype), targets, self.metric)


class UnaccountedScore:
    """The simulator's own score, measured on the clients' test records.

    No epsilon covers a decision by it: whatever it decides is flagged. It is for studying what
    early stopping would do.
    """

    unaccounted, metric = True, None

    def of_round(self, end: RoundEnd) -> float | None:
        """Look up the ranking metric of a round; None where it was not evaluated."""
        return end.record.scores.value if end.record.scores is not None else None


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End training when a metric has not improved for a while; the last model is kept.

    ``metric`` is a :class:`PublicMetric`, an accounted metric, or a function of the model and the
    number of rounds done that returns a number, or None where it did not measure. What it looks at
    must be public or accounted. ``patience`` is how many measurements in a row may bring no gain,
    ``least_gain`` what counts as one. ``higher_is_better`` is taken from the metric where it says
    so, and is True otherwise.
    """

    metric: Any = None
    patience: int = 5
    least_gain: float = 0.0
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        check(
            callable(self.metric) or hasattr(self.metric, "of_round"),
            "EarlyStopping",
            f"metric = {self.metric!r} measures nothing",
            "give dpfl.PublicMetric(features, targets), or a function of model and round",
        )
        whole_number("EarlyStopping", "patience", self.patience)
        not_negative("EarlyStopping", least_gain=self.least_gain)

    @property
    def flags(self) -> tuple[RaisedFlag, ...]:
        """What must be said of a run that stops by this metric.

        What is given whole rounds, with their test scores, must say that it is not ``unaccounted``.
        """
        unaccounted = getattr(self.metric, "unaccounted", hasattr(self.metric, "of_round"))
        return (_FLAGGED,) if unaccounted else ()

    def described(self) -> tuple[object, ...]:
        """What a result depends on, for the digest of a run."""
        return self.patience, self.least_gain, self.higher_is_better, bool(self.flags)

    def measure(self, end: RoundEnd) -> float | None:
        """Measure the model after a round."""
        if hasattr(self.metric, "of_round"):
            found = self.metric.of_round(end)
        else:
            found = self.metric(end.model, end.round)
        check(
            found is None or isinstance(found, int | float),
            "EarlyStopping",
            f"the metric returned {found!r}",
            "return a number, or None where there is none",
        )
        return None if found is None else float(found)

    def verdict(self, measured: Mapping[int, float], task: Task) -> str | None:
        """Say why training ends, given what was measured after which round; None if it goes on."""
        sign = 1.0 if self._higher(task) else -1.0
        best = -math.inf
        since = 0
        for value in measured.values():
            gained = sign * value > best + self.least_gain  # NaN is never a gain
            best, since = (sign * value, 0) if gained else (best, since + 1)
        return f"no gain in {since} measurements" if since >= self.patience else None

    def _higher(self, task: Task) -> bool:
        own = getattr(self.metric, "higher_is_better", None)
        if self.higher_is_better is not None or own is not None:
            return bool(own if self.higher_is_better is None else self.higher_is_better)
        if not hasattr(self.metric, "of_round"):
            return True
        name = self.metric.metric
        return task.higher_is_better if name is None else find_metric(name).higher_is_better


class AfterRound:
    """Calls the callbacks after every round, then asks early stopping.

    What was measured is kept in the run folder, so that a resumed run neither measures nor charges
    a round twice.
    """

    def __init__(self, callbacks: Sequence[Callback], stopping: EarlyStopping | None) -> None:
        self.callbacks = callbacks
        self.stopping = stopping
        self.measured: dict[int, float | None] | None = None
        self.stopped = False  # by a callback or by early stopping

    def __call__(self, simulation: Simulation) -> str | None:
        """Return why training ends, None if it goes on."""
        end = RoundEnd(
            round=simulation.state.round,
            rounds=simulation.planned,
            record=simulation.history[-1],
            history=tuple(simulation.history),
            task=simulation.federation.task,
            simulation=simulation,
        )
        for callback in self.callbacks:
            answer = callback(end)
            check(
                answer is None or isinstance(answer, bool | str),
                f"callback {getattr(callback, '__name__', callback)!s}",
                f"returned {answer!r}",
                "return None, True or a reason to stop",
            )
            if answer:
                end.stop(*([answer] if isinstance(answer, str) else []))
        if end.stopped and not end.public and end.round < end.rounds:
            simulation.flags = tuple({*simulation.flags, _FLAGGED})
        reason = end.stopped or (self._asked(end) if self.stopping else None)
        self.stopped = reason is not None
        return reason

    def _asked(self, end: RoundEnd) -> str | None:
        """Measure the round, unless it was measured before, and ask for a verdict."""
        assert self.stopping is not None
        folder = end.simulation.folder
        if self.measured is None:
            lines = folder.read_lines(folder.watched) if folder else []
            self.measured = {line["round"]: line["value"] for line in lines}
        if end.round not in self.measured:
            value = self.measured[end.round] = self.stopping.measure(end)
            if folder is not None:
                folder.append(folder.watched, {"round": end.round, "value": value})
        known = {round_: value for round_, value in self.measured.items() if value is not None}
        return self.stopping.verdict(known, end.task)
